"""Champion and challenger: compare them on rows that neither was trained on, and move the alias `champion`
in the same step.

MLflow's registry alone says which versions are undecided, and what was decided before the alias moves, so
that the next retraining, or `dphybrid sync`, completes what a process that died began.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.data import Prepared, open_prepared, verify_prepared
from dphybrid.data.foreign import check_memory
from dphybrid.data.table.encoder import Encoder, open_base
from dphybrid.data.table.splits import unseen_rows
from dphybrid.recipes.configs import stored_config
from dphybrid.run.experiment import Experiment
from dphybrid.run.folder import Run, read_run, retrainings
from dphybrid.run.pages import ResultPage
from dphybrid.run.trainer import fill_from
from dphybrid.tracking.loader import checkpoint_folder
from dphybrid.tracking.models import Registry, Version
from dphybrid.tracking.opening import noted_store, store_to_write
from dphybrid.tracking.record import RecordFile
from dphybrid.tracking.tracker import CHAMPION_TAG, FOLDER_TAG
from dphybrid.training.checkpoint import CheckpointState, load_weights, read_state, verify_checkpoint
from dphybrid.training.loop import validation_outputs
from dphybrid.training.metrics import Task
from dphybrid.util.digests import file_digest
from dphybrid.util.errors import UserError, counted
from dphybrid.util.files import making_once

MIN_GAIN_TAG = "dphybrid.min_gain"
"""Tag of a retraining's run: the gain that it must have."""
NOT_COMPARED = "not compared"
"""First words of the decision about a challenger that could not be compared with the champion."""
_NUM_RESAMPLES = 300


class Decision(BaseModel):
    """The comparison of champion and challenger on the same rows.

    Attributes:
        against: The champion's version, "" if there was none.
        data: Digest of the validation split that the rows are from.
        gain: Positive if the challenger is better.
        low, high: The ends of its 95 % interval. Of an earlier decision, which the registry has as `text`,
            only the first three are known.
    """

    model_config = ConfigDict(frozen=True)

    promoted: bool
    why: str
    against: str = ""
    metric: str = ""
    num_rows: int = 0
    data: str = ""
    champion: dict[str, float] = Field(default_factory=dict)
    challenger: dict[str, float] = Field(default_factory=dict)
    gain: float = 0.0
    low: float = 0.0
    high: float = 0.0

    @property
    def text(self) -> str:
        """The decision as the registry has it: `promoted: REASON` or `kept: REASON`."""
        return f"{'promoted' if self.promoted else 'kept'}: {self.why}"

    @classmethod
    def of(cls, text: str, against: str = "") -> "Decision":
        """Return the decision that the registry has."""
        return cls(promoted=text.startswith("promoted: "), why=text.partition(": ")[2], against=against)


def open_registry(settings: Settings) -> Registry:
    """Return the model registry that the settings name. Raises UserError if they do not record in MLflow."""
    if settings.mlflow_uri in ("none", "files"):
        raise UserError(
            f"retraining needs MLflow's model registry, and the tracking URI is {settings.mlflow_uri}; name "
            "a server"
        )
    return Registry(store_to_write(settings.mlflow_uri, settings.mlflow_dir), settings.champions_dir)


def judge(run_folder: str | Path, settings: Settings, min_gain: float = 0.0) -> Decision:
    """Compare the trained challenger of a run folder with the present champion (without one, with the
    recipe's floor); promote it or keep the champion; record why.

    It is promoted if the whole 95 % interval of the gain is above `min_gain`. Comparison and promotion are
    one step: if the champion changes meanwhile, the challenger is compared with the new one. Raises UserError
    when MLflow does not answer, or does not have the challenger yet.
    """
    run = read_run(run_folder, settings)
    registry, model = _registry_of(run), retrained_model(run.config)
    decision: Decision | None = None
    while True:
        challenger = registry.newest(model, run.page.run_id)
        if challenger is None:
            raise UserError(
                f"the model of run {run.folder.name} is not registered as {model!r} yet; `dphybrid sync` "
                "registers it and compares it with the champion when MLflow answers"
            )
        begun = registry.begun(challenger)
        if challenger.decision and begun is None:  # by another process, perhaps meanwhile
            return Decision.of(challenger.decision)
        if begun is not None and decision is None:
            decision = Decision.of(begun[1], begun[0])
        else:
            decision = _compare(run, challenger, registry.champion(model), registry, min_gain)
        if registry.decide(challenger, decision.against, decision.text):
            return decision
        print(f"The champion of {model} has changed meanwhile; comparing again", flush=True)


def _registry_of(run: Run) -> Registry:
    """Return the model registry where a run's record says that the run is. Raises UserError if it is nowhere,
    or cannot be asked."""
    uri = noted_store(run.folder, run.settings.mlflow_uri, run.settings.mlflow_dir)
    if uri is None:
        raise UserError(f"run {run.folder.name} is not recorded in MLflow, so its model is in no registry")
    return Registry(uri, run.settings.champions_dir)


def retrained_model(config: ExperimentConfig) -> str:
    """Return the name of the registered model that a config retrains. Raises UserError if there is none."""
    if config.checkpoint.register_as is None:
        raise UserError("checkpoint.register_as is not set; name the model in MLflow's registry")
    return config.checkpoint.register_as


def decide_waiting(
    settings: Settings, model: str | None = None
) -> Iterator[tuple[Run, Decision | UserError]]:
    """Decide about the challengers of this data folder whose process died before it had decided; yield each
    with its decision, or with the reason why there is still none. model: only those of this registered
    model."""
    asked = dict[tuple[str, str], set[str] | UserError]()
    for run in retrainings(settings, model):
        name = retrained_model(run.config)
        if run.status == "running":  # it will decide itself
            continue
        try:
            # Each registry once: one that does not answer takes its time.
            where = RecordFile(run.folder).destination().get("tracking_uri", ""), name
            if where not in asked:
                asked[where] = _undecided(run, name)
            found = asked[where]
            if isinstance(found, UserError):
                yield run, found
            elif run.page.run_id in found:
                yield run, judge(run.folder, settings, float(run.page.tags.get(MIN_GAIN_TAG, 0.0)))
        except UserError as error:
            yield run, error


def _undecided(run: Run, model: str) -> set[str] | UserError:
    """Return the ids of the runs whose versions of a model are undecided, in the registry of a run; or why
    that cannot be asked."""
    try:
        return {version.run_id for version in _registry_of(run).undecided(model)}
    except UserError as error:
        return error


@dataclass(frozen=True)
class _Contender:
    """A trained model: its checkpoint and its config."""

    checkpoint: Path
    config: ExperimentConfig
    state: CheckpointState

    @classmethod
    def of(cls, checkpoint: Path, settings: Settings, like: ExperimentConfig) -> "_Contender":
        state = verify_checkpoint(checkpoint)  # a damaged challenger must not take the champion's place
        check_memory(checkpoint)
        return cls(checkpoint, stored_config(state.config, checkpoint / "state.json", settings, like), state)

    @cached_property
    def encoder(self) -> Encoder:
        return Encoder.load(self.checkpoint / "encoder")

    def outputs(self, run: Run, data: Prepared, task: Task) -> dict[str, Tensor]:
        """Return the outputs for the validation rows of `data`, which may be encoded in another way than this
        model's own. The model is freed on return, so that two never share the memory."""
        experiment = Experiment.open(self.config, run.settings, data.path)
        network = experiment.unfilled(run.page.devices)
        if data.digest == self.state.data_digest:
            load_weights(self.checkpoint, network)
        else:
            fill_from(self.checkpoint, self.encoder, network, Encoder.load(data.path / "encoder"))
        rows = experiment.data.dataset("valid")
        return validation_outputs(network, rows, experiment.config.train.batch_size, task)


def _common_rows(
    data: Prepared, champion: CheckpointState, settings: Settings
) -> tuple[Prepared, np.ndarray | None] | str:
    """Return data whose validation rows both models can read, and the mask (B,) of those that neither was
    trained on (None: all); or the reason why there are none. data: the challenger's."""
    base, before = data.manifest.base or "", champion.data_digest
    # The split of extended data holds out no row that its base trained on. By the base's name, which ends
    # with its digest: the base itself may have been removed since.
    if before and (before == data.digest or base.endswith(f"-{before[:12]}")):
        return data, None
    folder = prepared_folder(champion, settings)
    if folder is None:
        return f"its data {champion.prepared or None} is not on this machine"
    ours, theirs = open_base(data.path), open_base(folder)
    # Each row is read as the encoder with more values reads it, so that neither model is given fewer.
    if ours.encoder.covers(theirs.encoder):
        held, trained = ours, theirs
    elif theirs.encoder.covers(ours.encoder):
        held, trained = theirs, ours
    else:
        return "the two were trained on data with other columns, scales or values, and read no row alike"
    mask_B = unseen_rows(held, trained)
    return (held.prepared, mask_B) if mask_B.any() else "one was trained on all rows that the other held out"


def _compare(
    run: Run, version: Version, against: Version | None, registry: Registry, min_gain: float
) -> Decision:
    """Compare a run's best checkpoint with the champion, or without one with the recipe's floor, a constant
    prediction."""
    experiment, settings = Experiment.of(run), run.settings
    task, data, kept = experiment.task, experiment.data, None
    verify_prepared(data.path)  # damaged rows must not decide
    best = Path(ResultPage.read(run.folder / "result.json").best_checkpoint)
    challenger = _Contender.of(best, settings, experiment.config)
    if against is not None and against.number == version.number:
        if run.page.tags.get(CHAMPION_TAG, "none") != "none":
            why = "was made the champion by hand before it was compared"
            return Decision(promoted=True, why=why, against=version.number)
        against = None  # a first version is the champion from its registration
    if against is None:
        # Against a constant prediction, any significant gain is enough, whatever min_gain says.
        name, min_gain, before = "a constant prediction's", 0.0, experiment.recipe.floor(data)
        if before is None:
            return Decision(promoted=True, why="new: there is no champion to compare with")
    else:
        name = f"champion version {against.number}'s"
        champion = _Contender.of(kept_checkpoint(against, registry, settings), settings, experiment.config)
        rows = _common_rows(data, champion.state, settings)
        if isinstance(rows, str):
            why = f"{NOT_COMPARED}: the champion is version {against.number} now, and {rows}"
            return Decision(promoted=False, why=why, against=against.number)
        data, kept = rows
        before = champion.outputs(run, data, task)
    after = challenger.outputs(run, data, task)
    if kept is not None:
        before, after = (
            {name: out[torch.from_numpy(kept)] for name, out in o.items()} for o in (before, after)
        )
    found, metric = _gain(before, after, task, experiment.config.train.seed), task.metric
    low, high, gain = found["low"], found["high"], found["gain"]
    old, new, num_rows = task.compute(before), task.compute(after), len(next(iter(after.values())))
    verdict = "better" if low > min_gain else "not significantly better" if high > min_gain else "not better"
    why = (
        f"{verdict}: validation {metric} {new[metric]:.5f} against {name} {old[metric]:.5f} on "
        f"the same {counted(num_rows, 'row')} of the validation split {data.held_out[:12]}; gain "
        f"{gain:+.5f}, 95 % interval {low:+.5f} to {high:+.5f}"
        + (f", wanted {min_gain:+g}" if min_gain else "")
    )
    return Decision(
        promoted=low > min_gain,
        why=why,
        against=against.number if against else "",
        metric=metric,
        num_rows=num_rows,
        data=data.held_out,
        champion=old,
        challenger=new,
        gain=gain,
        low=low,
        high=high,
    )


def prepared_folder(state: CheckpointState, settings: Settings) -> Path | None:
    """Return the prepared data that a checkpoint was trained on; None if it is not on this machine."""
    # First that of this data folder, which may have been moved, or copied from where the other one still is.
    for folder in (settings.prepared_dir / Path(state.prepared).name, settings.data_dir / state.prepared):
        if (folder / "manifest.json").is_file() and open_prepared(folder).digest == state.data_digest:
            return folder
    return None


def kept_checkpoint(version: Version, registry: Registry, settings: Settings) -> Path:
    """Return a version's checkpoint in a folder that will stay: in its run's folder, or else a copy of
    MLflow's artifact."""
    # With the run's id: another registry may have a version of the same name and number.
    copy = settings.champions_dir / f"{version.name}-{version.number}-{version.run_id[:8]}"
    if (copy / "state.json").is_file():
        os.utime(copy)  # the time of its last use, by which `dphybrid runs remove` keeps it
        return copy
    found = checkpoint_folder(version.uri, registry.uri)
    step = f"step-{read_state(found).progress.step:06d}"
    run = Path(version.run_tags.get(FOLDER_TAG, "none"))
    for kept in (settings.runs_dir / run.name / "checkpoints" / step, run / "checkpoints" / step):
        # Same page, same checkpoint: it holds a checksum of each of the checkpoint's files.
        page = kept / "state.json"
        if page.is_file() and file_digest(page) == file_digest(found / "state.json"):
            return kept
    with making_once(copy) as partial:
        if partial is not None:
            shutil.copytree(found, partial, dirs_exist_ok=True)
    return copy


def _gain(
    champion: dict[str, Tensor], challenger: dict[str, Tensor], task: Task, seed: int
) -> dict[str, float]:
    """Return the challenger's gain in the task's metric, and the ends of its 95 % interval."""
    old, new = (task.compute(outputs)[task.metric] for outputs in (champion, challenger))
    gains = bootstrap_gains(champion, challenger, task, seed)
    low, high = np.quantile(gains, [0.025, 0.975]).tolist()
    return {"gain": (1 if task.higher_is_better else -1) * (new - old), "low": low, "high": high}


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
