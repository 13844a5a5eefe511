"""Champion and challenger: compare them on rows that neither was trained on, and move the alias `champion`.

One process at a time decides about a model: the one that holds its retraining lock. A challenger whose
process died before its decision is compared by the next retraining, or by `dphybrid sync`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from dphybrid.config.settings import Settings
from dphybrid.data import Prepared, verify_prepared
from dphybrid.data.table.encoder import Encoder
from dphybrid.recipes.configs import stored_config
from dphybrid.run.experiment import Experiment
from dphybrid.run.folder import Run, read_run, retrainings
from dphybrid.run.pages import ResultPage
from dphybrid.run.trainer import fill_from
from dphybrid.serving.load import check_memory
from dphybrid.tracking.loader import checkpoint_folder
from dphybrid.tracking.models import Registry, Version
from dphybrid.tracking.opening import noted_store, store_to_write
from dphybrid.tracking.tracker import CHAMPION_TAG, FOLDER_TAG
from dphybrid.training.bootstrap import interval, resampled
from dphybrid.training.checkpoint import load_weights, read_state, verify_checkpoint
from dphybrid.training.loop import validation_outputs
from dphybrid.training.metrics import Task
from dphybrid.util.digests import file_digest
from dphybrid.util.errors import UserError, counted
from dphybrid.util.text import metric_text

NOT_COMPARED = "not compared"
"""First words of the decision about a challenger that could not be compared with the champion."""
_NUM_RESAMPLES = 300


@dataclass(frozen=True)
class Decision:
    """The comparison of champion and challenger on the same rows. against: the champion's version, "" if
    there was none."""

    promoted: bool
    why: str
    against: str = ""

    @property
    def text(self) -> str:
        """The decision as the registry has it: `promoted: REASON` or `kept: REASON`."""
        return f"{'promoted' if self.promoted else 'kept'}: {self.why}"


def open_registry(settings: Settings) -> Registry:
    """Return the model registry that the settings name. Raises UserError if they do not record in MLflow."""
    if settings.mlflow_uri in ("none", "files"):
        raise UserError(
            f"retraining needs MLflow's model registry, and the tracking URI is {settings.mlflow_uri}; name "
            "a server"
        )
    return Registry(store_to_write(settings.mlflow_uri, settings.mlflow_dir))


def judge(run_folder: str | Path, settings: Settings) -> Decision:
    """Compare the trained challenger of a run folder with the champion, without one with the task's floor;
    promote it or keep the champion; record why. The caller holds the model's retraining lock.

    It is promoted if the whole 95 % interval of the gain is above zero. Raises UserError when MLflow does not
    answer, or does not have the challenger yet.
    """
    run = read_run(run_folder, settings)
    registry, model = _registry_of(run), run.page.register_as
    challenger = registry.newest(model, run.page.run_id)
    if challenger is None:
        raise UserError(
            f"the model of run {run.folder.name} is not registered as {model!r} yet; `dphybrid sync` "
            "registers it and compares it with the champion when MLflow answers"
        )
    if challenger.decision:
        promoted, _, why = challenger.decision.partition(": ")
        return Decision(promoted=promoted == "promoted", why=why)
    experiment, champion = Experiment.of(run), registry.champion(model)
    verify_prepared(experiment.data.path)  # damaged rows must not decide
    is_first = run.page.tags.get(CHAMPION_TAG, "none") == "none"
    if champion is None or (champion.number == challenger.number and is_first):
        decision = against_floor(experiment)
    elif champion.number == challenger.number:
        why = "was made the champion already, by hand or before a crash"
        decision = Decision(promoted=True, why=why, against=champion.number)
    else:
        decision = against_champion(experiment, champion, registry)
    registry.decide(challenger, decision.text)
    return decision


def _registry_of(run: Run) -> Registry:
    """Return the model registry where a run's record says that the run is. Raises UserError if it is nowhere,
    or cannot be asked."""
    uri = noted_store(run.folder, run.settings.mlflow_uri, run.settings.mlflow_dir)
    if uri is None:
        raise UserError(f"run {run.folder.name} is not recorded in MLflow, so its model is in no registry")
    return Registry(uri)


def decide_waiting(settings: Settings, model: str) -> Iterator[tuple[Run, Decision | UserError]]:
    """Decide about the challengers of a registered model whose process died before it had decided; yield each
    with its decision, or with the reason why there is still none. The caller holds the model's retraining
    lock."""
    undecided = dict[str, set[str]]()
    for run in retrainings(settings, model):
        if run.status == "running":  # it will decide itself
            continue
        try:
            registry = _registry_of(run)
            if registry.uri not in undecided:
                undecided[registry.uri] = registry.undecided(model)
            if run.page.run_id in undecided[registry.uri]:
                yield run, judge(run.folder, settings)
        except UserError as error:
            yield run, error


def against_floor(experiment: Experiment) -> Decision:
    """Compare a run's best checkpoint with a constant prediction. Any significant gain is enough."""
    task = experiment.task
    if task.floor is None:
        return Decision(promoted=True, why="new: there is no champion to compare with")
    after = _outputs(experiment, _best_checkpoint(experiment), experiment.data)
    return compared(task.floor(after), after, task, experiment.config.train.seed, f"a {task.floor_name}'s")


def against_champion(experiment: Experiment, champion: Version, registry: Registry) -> Decision:
    """Compare a run's best checkpoint with the champion, on the validation rows of the run's data."""
    data, checkpoint = experiment.data, kept_checkpoint(champion, registry, experiment.settings)
    before, base = read_state(checkpoint).data_digest, data.manifest.base or ""
    # The split of extended data holds out no row that its base trained on. By the base's name, which ends
    # with its digest: the base itself may have been removed since.
    if before != data.digest and not base.endswith(f"-{before[:12]}"):
        why = (
            f"{NOT_COMPARED}: the champion is version {champion.number} now, which was trained on other data"
        )
        return Decision(promoted=False, why=why, against=champion.number)
    champions = _outputs(experiment, checkpoint, data)
    challengers = _outputs(experiment, _best_checkpoint(experiment), data)
    name = f"champion version {champion.number}'s"
    decision = compared(champions, challengers, experiment.task, experiment.config.train.seed, name)
    return replace(decision, against=champion.number)


def compared(
    before: dict[str, Tensor], after: dict[str, Tensor], task: Task, seed: int, name: str
) -> Decision:
    """Return the decision about two models' outputs for the same rows. name: of the first, in a sentence."""
    metric, sign = task.metric, 1 if task.higher_is_better else -1
    old, new = task.compute(before), task.compute(after)
    pairs = resampled(task, [before, after], _NUM_RESAMPLES, seed)
    low, high = interval([sign * (second[metric] - first[metric]) for first, second in pairs])
    gain, num_rows = sign * (new[metric] - old[metric]), len(next(iter(after.values())))
    verdict = "better" if low > 0 else "not significantly better" if high > 0 else "not better"
    why = (
        f"{verdict}: validation {metric} {metric_text(new[metric])} against {name} "
        f"{metric_text(old[metric])} on the same {counted(num_rows, 'row')}; gain {metric_text(gain)}, 95 % "
        f"interval {metric_text(low)} to {metric_text(high)}"
    )
    return Decision(promoted=low > 0, why=why)


def _best_checkpoint(experiment: Experiment) -> Path:
    return Path(ResultPage.read(experiment.run.folder / "result.json").best_checkpoint)


def _outputs(experiment: Experiment, checkpoint: Path, data: Prepared) -> dict[str, Tensor]:
    """Return a checkpoint's outputs for the validation rows of `data`, of which it may know only a part of
    the values. The model is freed on return, so that two never share the memory."""
    state = verify_checkpoint(checkpoint)  # a damaged challenger must not take the champion's place
    check_memory(checkpoint)
    run, settings = experiment.run, experiment.settings
    config = stored_config(state.config, checkpoint / "state.json", settings, experiment.config)
    own = Experiment.open(config, settings, data.path)
    network = own.unfilled(run.page.devices)
    if data.digest == state.data_digest:
        load_weights(checkpoint, network)
    else:
        known = Encoder.load(checkpoint / "encoder")
        fill_from(checkpoint, known, network, Encoder.load(data.path / "encoder"))
    return validation_outputs(network, own.data.dataset("valid"), config.train.batch_size, experiment.task)


def kept_checkpoint(version: Version, registry: Registry, settings: Settings) -> Path:
    """Return a version's checkpoint: that in its run's folder, or else MLflow's artifact."""
    artifact = checkpoint_folder(version.uri, registry.uri)
    step = f"step-{read_state(artifact).progress.step:06d}"
    run = Path(version.run_tags.get(FOLDER_TAG, "none"))
    for kept in (settings.runs_dir / run.name / "checkpoints" / step, run / "checkpoints" / step):
        # Same page, same checkpoint: it holds a checksum of each of the checkpoint's files.
        page = kept / "state.json"
        if page.is_file() and file_digest(page) == file_digest(artifact / "state.json"):
            return kept
    return artifact
