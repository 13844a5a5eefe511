"""Retraining: is there something new, the config that goes on from the champion, and whether the challenger
takes its place."""

import shutil
from pathlib import Path

import numpy as np
from pydantic import BaseModel, SerializeAsAny

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.data import Prepared, open_prepared, source_digest
from dphybrid.data.table.encoder import old_ids, open_base
from dphybrid.lifecycle.comparing import Decision, compare_on_validation_rows
from dphybrid.recipes.configs import AnyExperiment, apply_overrides, stored_config
from dphybrid.recipes.registry import find_recipe, tabular_names
from dphybrid.run.folder import read_run
from dphybrid.tracking.loader import checkpoint_folder
from dphybrid.tracking.models import Registry, Version
from dphybrid.tracking.opening import store_to_write
from dphybrid.training.checkpoint import read_state
from dphybrid.util.digests import file_digest
from dphybrid.util.errors import UserError, counted
from dphybrid.util.files import clear_leftovers, making
from dphybrid.util.locks import locked

CHAMPION_TAG = "dphybrid.champion"
_TOP_VALUES = 20
"""Most frequent values of a column whose shares count for drift; the others count together."""


class Plan(BaseModel):
    """What a retraining will do. stop: why there is nothing to do; undecided: run folder of a challenger that
    was trained and not yet judged.

    config: the experiment with the champion's data and weights filled in. champion: its version, "" for the
    first model of its name.
    """

    config: SerializeAsAny[AnyExperiment]
    model: str
    champion: str = ""
    stop: str = ""
    undecided: str = ""


def open_registry(settings: Settings) -> Registry:
    """Return the model registry in force. Raises UserError where nothing is recorded."""
    if settings.mlflow_uri == "none":
        raise UserError(
            "retraining needs MLflow's model registry, and tracking is none; unset it, or name a server"
        )
    return Registry(store_to_write(settings.mlflow_uri, settings.mlflow_dir))


def plan_retraining(config: ExperimentConfig, settings: Settings, event: str = "") -> Plan:
    """Look whether data has arrived since the newest version was made, and from where to go on.

    event: why to retrain even when none has. Raises UserError for a config that cannot be retrained.
    """
    model = config.checkpoint.register_as
    if model is None:
        raise UserError(
            "checkpoint.register_as is not set; retraining needs the name of the model in MLflow's registry"
        )
    recipe = find_recipe(config.recipe)
    if not recipe.tabular:
        raise UserError(
            f"recipe={config.recipe}: only tables (recipe {', '.join(tabular_names())}) can grow and be "
            "retrained; train others anew"
        )
    registry = open_registry(settings)
    newest, champion = registry.newest(model), registry.champion(model)
    plan = Plan(config=config, model=model, champion=champion.number if champion is not None else "")
    if newest is None:
        return plan
    digest = source_digest(recipe.source(config.data, config.train.seed))
    nothing_new = not event and newest.run_tags.get("dphybrid.source_digest") == digest
    if champion is None:
        stop = f"no new data since version {newest.number}, which was not promoted: {newest.decision}"
        return plan.model_copy(update={"stop": stop if nothing_new and newest.decision else ""})
    if (
        not newest.decision
        and newest.number != champion.number
        and newest.run_tags.get(CHAMPION_TAG) == champion.number
    ):
        return plan.model_copy(update={"undecided": newest.run_tags["dphybrid.run_folder"]})
    if nothing_new:
        return plan.model_copy(update={"stop": f"no new data since version {newest.number} was made"})
    return plan.model_copy(update={"config": _from_champion(config, champion, registry, settings)})


def _kept_checkpoint(champion: Version, registry: Registry, settings: Settings) -> Path:
    """Return the champion's checkpoint in a folder that lasts: its run's, else a copy of what MLflow has."""
    copy = settings.data_dir / "champions" / f"{champion.name}-{champion.number}"
    if (copy / "state.json").is_file():
        return copy
    found = checkpoint_folder(champion.uri, registry.uri)
    step = f"step-{read_state(found).progress.step:06d}"
    kept = Path(champion.run_tags.get("dphybrid.run_folder", "")) / "checkpoints" / step
    if (kept / "state.json").is_file() and file_digest(kept / "state.json") == file_digest(
        found / "state.json"
    ):
        return kept
    copy.parent.mkdir(parents=True, exist_ok=True)
    with locked(copy.with_name(f".{copy.name}.lock")):
        if not (copy / "state.json").is_file():  # else another process was faster
            clear_leftovers(copy.parent, copy.name)
            with making(copy) as partial:
                shutil.copytree(found, partial, dirs_exist_ok=True)
    return copy


def _from_champion(
    config: ExperimentConfig, champion: Version, registry: Registry, settings: Settings
) -> ExperimentConfig:
    checkpoint = _kept_checkpoint(champion, registry, settings)
    state = read_state(checkpoint)
    if not state.prepared or not Path(state.prepared).is_dir():
        raise UserError(
            f"champion {champion.uri}: its prepared data {state.prepared or None} is not on this machine; "
            "share DPHYBRID_DATA_DIR between workstations, or register a new model under another name"
        )
    before, now = (
        c.model.model_dump(mode="json")
        for c in (stored_config(state.config, checkpoint / "state.json", settings, config), config)
    )
    changed = [
        f"{name}: {before.get(name)} -> {value}"
        for name, value in now.items()
        if before.get(name) != value and name not in config.model.of_training
    ]
    if changed:
        raise UserError(
            f"champion {champion.uri} has another network than the config "
            f"({'; '.join(f'model.{text}' for text in changed)}); "
            "give the same one, or another checkpoint.register_as"
        )
    return apply_overrides(config, [f"data.base={state.prepared}", f"train.warm_start={checkpoint}"])


def reason_to_wait(prepared: str, min_new_rows: int, drift_above: float, event: str = "") -> str | None:
    """Return why the data that has arrived is not worth a training yet, or None.

    min_new_rows: so many rows are. drift_above: so is a drift of a column beyond it, with fewer rows (0:
    never). event: so is one.
    """
    data = open_prepared(Path(prepared))
    if event or "new_rows" not in data.arrays:
        return None
    num_new = len(data.arrays["new_rows"])
    if num_new >= max(1, min_new_rows):
        return None
    text = f"{counted(num_new, 'new row')}, min_new_rows is {max(1, min_new_rows)}"
    if drift_above <= 0 or not num_new:
        return text
    column, value = largest_drift(prepared)
    if value > drift_above:
        return None
    return f"{text}; the largest drift is {value:.3f} in column {column}, drift_above is {drift_above:g}"


def largest_drift(prepared: str) -> tuple[str, float]:
    """Return the column whose values are distributed most differently in the new rows, and its population
    stability index.

    The index sums (p - q) ln(p / q) over a column's most frequent values; above 0.1 is usually called a
    shift, above 0.25 a large one.
    """
    data = open_prepared(Path(prepared))
    assert data.manifest.base is not None  # only extended data has new rows
    base = open_base(Path(data.manifest.base))
    to_old = old_ids(base.encoder, open_base(data.path).encoder)
    before_rows, new_rows = base.prepared.arrays["train_rows"], data.arrays["new_rows"]
    found = [("", 0.0)]
    for place, column in enumerate(base.encoder.id_columns):
        before = np.bincount(_ids_of(base.prepared, place, before_rows), minlength=column["num_ids"])
        now = np.bincount(to_old[place][_ids_of(data, place, new_rows)], minlength=column["num_ids"])
        order = np.argsort(-before, kind="stable")
        p, q = (_shares(counts[order]) for counts in (before, now))
        found.append((column["name"], float(((q - p) * np.log(q / p)).sum())))
    return max(found, key=lambda pair: pair[1])


def _ids_of(data: Prepared, place: int, rows: np.ndarray) -> np.ndarray:
    """Return all ids that some rows have in an id column: one a row, or those of their bags."""
    ids_BF = data.arrays["ids_BF"]
    if place < ids_BF.shape[1]:
        return np.asarray(ids_BF[:, place][rows])
    bags_BL = data.arrays["bags_BFL"][:, place - ids_BF.shape[1]][rows]
    return np.asarray(bags_BL[bags_BL >= 0])


def _shares(counts: np.ndarray) -> np.ndarray:
    grouped = np.append(counts[:_TOP_VALUES], counts[_TOP_VALUES:].sum()) + 0.5  # no share is 0
    return np.asarray(grouped / grouped.sum())


def judge(run_folder: str, settings: Settings, min_gain: float = 0.0) -> Decision:
    """Compare the trained challenger of a run folder with the champion it started from, a first model with
    the recipe's floor; promote it, or keep the champion; write down why.

    Promoted when the whole 95 % interval of the gain lies above `min_gain`. Raises UserError when MLflow does
    not answer.
    """
    run = read_run(run_folder, settings)
    # made before this process, which goes on where another one died
    if (run.folder / "decision.json").is_file():
        return Decision.read(run.folder / "decision.json")
    registry = open_registry(settings)
    model = run.config.checkpoint.register_as
    assert model is not None  # plan_retraining has looked
    challenger = registry.newest(model)
    if challenger is None or challenger.run_id != run.page.run_id:
        raise UserError(
            f"the model of run {run.folder.name} is not registered as {model!r} yet; run `dphybrid sync`, "
            "then start the retraining again"
        )
    decision = compare_on_validation_rows(run, min_gain)
    registry.decide(challenger, decision.promoted, decision.why)
    decision.write(run.folder / "decision.json")
    return decision
