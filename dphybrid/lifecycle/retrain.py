"""Retraining: find out whether there is new data, make the config that continues from the champion, and
decide whether the challenger replaces it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel, Field, SerializeAsAny
from torch import Tensor, nn

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.data import open_prepared, source_digest
from dphybrid.recipes.configs import AnyExperiment, apply_overrides, stored_config
from dphybrid.recipes.registry import OF_TABLES, find_recipe
from dphybrid.run.experiment import Experiment
from dphybrid.run.folder import Run, read_run
from dphybrid.run.pages import ResultPage
from dphybrid.run.start import warm_start
from dphybrid.tracking.loader import checkpoint_folder
from dphybrid.tracking.models import Registry, Version
from dphybrid.tracking.opening import store_to_write
from dphybrid.training.checkpoint import load_weights, read_state, verify_checkpoint
from dphybrid.training.loop import validation_outputs
from dphybrid.training.metrics import Task
from dphybrid.util.digests import file_digest
from dphybrid.util.errors import UserError, counted
from dphybrid.util.files import clear_leftovers, making
from dphybrid.util.locks import locked
from dphybrid.util.pages import Page

CHAMPION_TAG = "dphybrid.champion"
_NUM_RESAMPLES = 300


class Decision(Page):
    """The comparison of champion and challenger on the same validation rows. gain: positive if the challenger
    is better; low, high: the ends of its 95 % interval."""

    promoted: bool
    why: str
    metric: str = ""
    num_rows: int = 0
    champion: dict[str, float] = Field(default_factory=dict)
    challenger: dict[str, float] = Field(default_factory=dict)
    gain: float = 0.0
    low: float = 0.0
    high: float = 0.0


class Plan(BaseModel):
    """What a retraining will do.

    config: the experiment, with the champion's data and weights filled in. champion: its version, "" for the
    first model of its name. stop: why there is nothing to do. undecided: the run folder of a challenger that
    was trained and not yet compared.
    """

    config: SerializeAsAny[AnyExperiment]
    model: str
    champion: str = ""
    stop: str = ""
    undecided: str = ""


def open_registry(settings: Settings) -> Registry:
    """Return the model registry that the settings name. Raises UserError if they do not record in MLflow."""
    if settings.mlflow_uri in ("none", "files"):
        raise UserError(
            f"retraining needs MLflow's model registry, and the tracking URI is {settings.mlflow_uri}; name "
            "a server"
        )
    return Registry(store_to_write(settings.mlflow_uri, settings.mlflow_dir))


def plan_retraining(config: ExperimentConfig, settings: Settings, event: str = "") -> Plan:
    """Find out whether data has arrived since the newest version was trained, and which weights to start
    from.

    event: a reason to retrain even without new data. Raises UserError for a config that cannot be retrained.
    """
    model = config.checkpoint.register_as
    if model is None:
        raise UserError("checkpoint.register_as is not set; name the model in MLflow's registry")
    recipe = find_recipe(config.recipe)
    if not recipe.tabular:
        raise UserError(
            f"recipe={config.recipe}: only tables ({OF_TABLES}) can be retrained; train this one from scratch"
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
    # A challenger without a decision: the process that trained it ended before the comparison.
    its_challenger = newest.number != champion.number and newest.run_tags.get(CHAMPION_TAG) == champion.number
    if its_challenger and not newest.decision:
        return plan.model_copy(update={"undecided": newest.run_tags["dphybrid.run_folder"]})
    if nothing_new:
        return plan.model_copy(update={"stop": f"no new data since version {newest.number} was made"})
    return plan.model_copy(update={"config": _from_champion(config, champion, registry, settings)})


def _kept_checkpoint(champion: Version, registry: Registry, settings: Settings) -> Path:
    """Return the champion's checkpoint in a folder that will stay: in its run's folder, or else a copy of
    MLflow's artifact."""
    # With the run's id: another registry may have a version of the same name and number.
    copy = settings.data_dir / "champions" / f"{champion.name}-{champion.number}-{champion.run_id[:8]}"
    if (copy / "state.json").is_file():
        return copy
    found = checkpoint_folder(champion.uri, registry.uri)
    step = f"step-{read_state(found).progress.step:06d}"
    kept = Path(champion.run_tags.get("dphybrid.run_folder", "")) / "checkpoints" / step
    # Same page, same checkpoint: it holds a checksum of each of the checkpoint's files.
    page = kept / "state.json"
    if page.is_file() and file_digest(page) == file_digest(found / "state.json"):
        return kept
    copy.parent.mkdir(parents=True, exist_ok=True)
    with locked(copy.with_name(f".{copy.name}.lock")):
        if not (copy / "state.json").is_file():  # otherwise another process has just made the copy
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
    old = stored_config(state.config, checkpoint / "state.json", settings, config)
    before, now = (one.model.model_dump(mode="json") for one in (old, config))
    changed = [
        f"{name}: {before.get(name)} -> {value}"
        for name, value in now.items()
        if before.get(name) != value and name not in config.model.of_training
    ]
    if changed:
        raise UserError(
            f"champion {champion.uri} has a different network from the config's "
            f"({'; '.join(f'model.{text}' for text in changed)}); "
            "give the champion's values, or another checkpoint.register_as"
        )
    return apply_overrides(config, [f"data.base={state.prepared}", f"train.warm_start={checkpoint}"])


def reason_to_wait(prepared: str, min_new_rows: int, event: str = "") -> str | None:
    """Return why there are too few new rows to retrain, or None. min_new_rows: how many are needed. event: a
    reason to retrain with fewer."""
    arrays = open_prepared(Path(prepared)).arrays
    if event or "new_rows" not in arrays or len(arrays["new_rows"]) >= max(1, min_new_rows):
        return None
    return f"{counted(len(arrays['new_rows']), 'new row')}, min_new_rows is {max(1, min_new_rows)}"


def _compare(run: Run, min_gain: float) -> Decision:
    """Compare a run's best checkpoint with the checkpoint it started from, on the run's validation rows. A
    first model is compared with the recipe's floor, a constant prediction."""
    experiment = run.experiment()
    config, task = experiment.config, experiment.task
    best = Path(ResultPage.read(run.folder / "result.json").best_checkpoint)
    if config.train.warm_start is None:
        # Against a constant prediction, any significant gain is enough, whatever min_gain says.
        name, min_gain, before = "a constant prediction's", 0.0, experiment.recipe.floor(experiment.data)
        if before is None:
            return Decision(promoted=True, why="new: there is no champion to compare with")
    else:
        warm = Path(config.train.warm_start)
        name = "the champion's"
        # Not plain weights: the run's data may have grown, and `warm_start` fits the champion's tables to it.
        before = _outputs_of(run, experiment, lambda network: warm_start(warm, network, experiment.data))
    verify_checkpoint(best)  # a damaged challenger must not take the champion's place
    after = _outputs_of(run, experiment, lambda network: load_weights(best, network))
    champion, challenger, metric = task.compute(before), task.compute(after), task.metric
    gains = bootstrap_gains(before, after, task, config.train.seed)
    low, high = np.quantile(gains, [0.025, 0.975]).tolist()
    gain = (1 if task.higher_is_better else -1) * (challenger[metric] - champion[metric])
    num_rows = len(next(iter(after.values())))
    verdict = "better" if low > min_gain else "not significantly better" if high > min_gain else "not better"
    why = (
        f"{verdict}: validation {metric} {challenger[metric]:.5f} against {name} {champion[metric]:.5f} on "
        f"the same {counted(num_rows, 'row')}; gain {gain:+.5f}, 95 % interval {low:+.5f} to {high:+.5f}"
        + (f", wanted {min_gain:+g}" if min_gain else "")
    )
    return Decision(
        promoted=low > min_gain,
        why=why,
        metric=metric,
        num_rows=num_rows,
        champion=champion,
        challenger=challenger,
        gain=gain,
        low=low,
        high=high,
    )


def _outputs_of(run: Run, experiment: Experiment, fill: Callable[[nn.Module], None]) -> dict[str, Tensor]:
    """Return the validation outputs of a model that `fill` gives its weights. The model is freed on return,
    so that two never share the memory."""
    network = experiment.unfilled(run.page.devices)
    fill(network)
    batch_size = experiment.config.train.batch_size
    return validation_outputs(network, experiment.data.dataset("valid"), batch_size, experiment.task)


def bootstrap_gains(
    champion: dict[str, Tensor], challenger: dict[str, Tensor], task: Task, seed: int
) -> np.ndarray:
    """Return the challenger's gains in the task's metric on `_NUM_RESAMPLES` resamples of the rows: the
    paired bootstrap (Efron 1979)."""
    num_rows = len(next(iter(champion.values())))
    random = np.random.default_rng(seed)
    gains: list[float] = []
    while len(gains) < _NUM_RESAMPLES:
        # The same rows for both models, so that how difficult the drawn rows are cancels out.
        rows = torch.from_numpy(random.integers(0, num_rows, num_rows))
        try:
            drawn = ({name: values[rows] for name, values in out.items()} for out in (champion, challenger))
            before, after = (task.compute(outputs)[task.metric] for outputs in drawn)
        except UserError:  # all drawn rows have the same label, which happens with few rows: draw again
            if len(set(champion["labels_B"].tolist())) < 2:
                raise
            continue
        gains.append(after - before)
    return np.array(gains) * (1 if task.higher_is_better else -1)


def judge(run_folder: str, settings: Settings, min_gain: float = 0.0) -> Decision:
    """Compare the trained challenger of a run folder with its champion (a first model with the recipe's
    floor); promote it or keep the champion; record why.

    It is promoted if the whole 95 % interval of the gain is above `min_gain`. Raises UserError when MLflow
    does not answer.
    """
    run = read_run(run_folder, settings)
    # An earlier process decided and died afterwards: keep to its decision.
    if (run.folder / "decision.json").is_file():
        return Decision.read(run.folder / "decision.json")
    registry = open_registry(settings)
    model = run.config.checkpoint.register_as
    assert model is not None  # plan_retraining has checked
    challenger = registry.newest(model)
    if challenger is None or challenger.run_id != run.page.run_id:
        raise UserError(
            f"the model of run {run.folder.name} is not registered as {model!r} yet; run `dphybrid sync`, "
            "then start the retraining again"
        )
    decision = _compare(run, min_gain)
    registry.decide(challenger, decision.promoted, decision.why)
    decision.write(run.folder / "decision.json")
    return decision
