"""Retraining: one at a time for each model; find out whether there is new data, and make the config that
continues from the champion."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.data import open_prepared, source_digest
from dphybrid.lifecycle.champion import (
    NOT_COMPARED,
    Decision,
    decide_waiting,
    kept_checkpoint,
    open_registry,
)
from dphybrid.recipes.configs import apply_overrides, stored_config
from dphybrid.recipes.registry import OF_TABLES, find_recipe
from dphybrid.run.experiment import Experiment
from dphybrid.run.folder import Run, changed_values, retrainings
from dphybrid.tracking.models import Registry, Version
from dphybrid.tracking.record import last_status
from dphybrid.training.checkpoint import read_state
from dphybrid.util.errors import UserError
from dphybrid.util.files import make_folder
from dphybrid.util.locks import take
from dphybrid.util.stop import StopRequest

_LOOK_EVERY_S = 0.5
"""How often a retraining that waits for another one looks whether that has ended."""


@dataclass(frozen=True)
class Plan:
    """What a retraining will do.

    Attributes:
        config: The experiment, with the champion's data and weights filled in.
        champion: Its version, "" for the first model of its name.
        stop: Why there is nothing to do.
    """

    config: ExperimentConfig
    champion: str = ""
    stop: str = ""


@contextmanager
def retraining(model: str, settings: Settings, stop: StopRequest) -> Iterator[None]:
    """Hold the lock of a model's retraining during the block, whoever starts it: a schedule, another
    deployment or the command line. While another process holds it, wait. Raises Interrupted when `stop` was
    asked meanwhile."""
    told = False
    while (held := take(lock_file(model, settings))) is None:
        stop.obey("while it waited for another retraining")
        if not told:
            print(f"Waiting: another process retrains {model}", flush=True)
            told = True
        time.sleep(_LOOK_EVERY_S)
    try:
        yield
    finally:
        os.close(held)


def lock_file(model: str, settings: Settings) -> Path:
    """Return the file whose lock keeps retrainings of a model apart."""
    make_folder(settings.data_dir)
    return settings.data_dir / f".{re.sub(r'[^A-Za-z0-9_-]', '_', model)[:200]}.retraining"


def decide_all_waiting(settings: Settings) -> Iterator[tuple[Run, Decision | UserError]]:
    """Decide about the waiting challengers of all models, as `decide_waiting` does. Leaves out models that
    are being retrained: the retraining decides about them."""
    for model in sorted({run.page.register_as for run in retrainings(settings)}):
        if (held := take(lock_file(model, settings))) is not None:
            try:
                yield from decide_waiting(settings, model)
            finally:
                os.close(held)


def retrained_model(config: ExperimentConfig) -> str:
    """Return the name of the registered model that a config retrains. Raises UserError if there is none."""
    if config.checkpoint.register_as is None:
        raise UserError("checkpoint.register_as is not set; name the model in MLflow's registry")
    return config.checkpoint.register_as


def plan_retraining(config: ExperimentConfig, settings: Settings) -> Plan:
    """Find out whether data has arrived since the newest version was trained, and which weights to start
    from. Raises UserError for a config that cannot be retrained."""
    model = retrained_model(config)
    recipe = find_recipe(config.recipe)
    if not recipe.tabular:
        raise UserError(
            f"recipe={config.recipe}: only tables ({OF_TABLES}) can be retrained; train this one from scratch"
        )
    registry = open_registry(settings)
    newest, champion = registry.newest(model), registry.champion(model)
    plan = Plan(config, champion.number if champion is not None else "")
    if newest is None:
        return plan
    digest = source_digest(recipe.source(config.data, config.train.seed))
    nothing_new = newest.run_tags.get("dphybrid.source_digest") == digest
    # The data of a challenger that was not compared has not been used yet.
    nothing_new &= not newest.decision.startswith(f"kept: {NOT_COMPARED}")
    if champion is None:
        stop = f"no new data since version {newest.number}, which was not promoted ({newest.decision})"
        return replace(plan, stop=stop if nothing_new and newest.decision else "")
    if nothing_new:
        return replace(plan, stop=f"no new data since version {newest.number} was made")
    return replace(plan, config=_from_champion(config, champion, registry, settings))


def _from_champion(
    config: ExperimentConfig, champion: Version, registry: Registry, settings: Settings
) -> ExperimentConfig:
    checkpoint = kept_checkpoint(champion, registry, settings)
    state = read_state(checkpoint)
    # By its name alone: the data folder may have been moved or copied.
    prepared = settings.prepared_dir / Path(state.prepared).name
    if not (prepared / "manifest.json").is_file() or open_prepared(prepared).digest != state.data_digest:
        raise UserError(
            f"champion {champion.uri}: its prepared data {state.prepared or None} is not on this machine; "
            "share DPHYBRID_DATA_DIR between workstations, or register a new model under another name"
        )
    os.utime(prepared)  # the time of its last use, by which `dphybrid runs remove` keeps it
    old = stored_config(state.config, checkpoint / "state.json", settings, config)
    before, now = (one.model.model_dump(mode="json") for one in (old, config))
    # auto: as the champion has it, see `Recipe.sized`.
    changed = [
        f"{name}: {before.get(name)} -> {value}"
        for name, value in now.items()
        if value not in (before.get(name), "auto") and name not in config.model.of_training
    ]
    if changed:
        raise UserError(
            f"champion {champion.uri} has a different network from the config's "
            f"({'; '.join(f'model.{text}' for text in changed)}); "
            "give the champion's values, or another checkpoint.register_as"
        )
    return apply_overrides(config, [f"data.base={prepared}", f"train.warm_start={checkpoint}"])


def stopped_retraining(config: ExperimentConfig, settings: Settings) -> Run | None:
    """Return a retraining with these values that gave way, was interrupted or killed before its end, or None.
    One that failed is not continued: it would fail again, and new data would never be trained."""
    for run in reversed(retrainings(settings, retrained_model(config))):
        with suppress(UserError):  # its prepared data was removed, say
            if run.status == "stopped" and last_status(run.folder) != "FAILED":
                now = Experiment.open(config, settings, run.page.prepared).config
                if not changed_values(run.config.model_dump(mode="json"), now):
                    return run
    return None


def has_new_rows(prepared: str) -> bool:
    """Return whether prepared data has rows that its base lacks; data without a base is new."""
    new_rows = open_prepared(Path(prepared)).arrays.get("new_rows")
    return new_rows is None or len(new_rows) > 0
