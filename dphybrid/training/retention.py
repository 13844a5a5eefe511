"""Which checkpoints a run keeps: the newest, the best, and each n-th step; on disk and in its record
alike."""

import math
from collections.abc import Sequence
from pathlib import Path

from dphybrid.config import CheckpointConfig
from dphybrid.tracking import CheckpointCard
from dphybrid.training.checkpoint import VALIDATION, Progress, complete_checkpoints, read_state, step_of
from dphybrid.training.metrics import Task
from dphybrid.util.digests import file_digest
from dphybrid.util.files import remove_folder


def best_steps(progress: Progress, task: Task, count: int) -> list[int]:
    """Return the steps of the `count` best evaluations, best first, of equal ones the earliest."""
    metric = f"{VALIDATION}{task.chosen_by or task.metric}"
    rows = [row for row in progress.history if not math.isnan(row[metric])]
    rows.sort(key=lambda row: row[metric], reverse=task.higher_is_better and not task.chosen_by)
    return [int(row["step"]) for row in rows[:count]]


def best_checkpoint(there: Sequence[Path], progress: Progress, task: Task) -> Path | None:
    """Return the checkpoint with the best evaluation among those that are there (oldest first), else the
    newest."""
    by_step = {step_of(path): path for path in there}
    found = (by_step[step] for step in best_steps(progress, task, len(progress.history)) if step in by_step)
    return next(found, there[-1] if there else None)


def prune_checkpoints(folder: Path, config: CheckpointConfig, best: Sequence[int]) -> list[Path]:
    """Remove the checkpoints that are neither new, nor of the steps `best`, nor of each n-th step; return
    what is left, oldest first.

    Where several are kept and all share the file of one full checkpoint, the newest one with another file
    stays, too: damage to a file never takes them all.
    """
    there = complete_checkpoints(folder)
    wanted = {
        path
        for place, path in enumerate(there)
        if place >= len(there) - config.keep_last
        or step_of(path) in best
        or (config.keep_every > 0 and step_of(path) % config.keep_every == 0)
    }
    files = {}  # the same for checkpoints that share a full one's files
    for path in there:
        tables = sorted((path / "tables").glob("*.safetensors"))
        files[path] = tables[0].stat().st_ino if tables else path
    if len(wanted) > 1 and len({files[path] for path in wanted}) == 1:
        wanted |= set([path for path in there if files[path] != files[there[-1]]][-1:])
    for aside in folder.glob("step-*.damaged"):
        if there and step_of(aside.with_suffix("")) <= step_of(there[-1]):
            remove_folder(aside)
    for path in there:
        if path not in wanted:
            remove_folder(path)
    return [path for path in there if path in wanted]


def checkpoint_cards(kept: Sequence[Path], recipe: str, best_step: int | None) -> list[CheckpointCard]:
    """Return what the record should say of the kept checkpoints (oldest first)."""
    cards = []
    for path in kept:
        progress = read_state(path).progress
        roles = [
            role
            for role, match in (("best", step_of(path) == best_step), ("latest", path == kept[-1]))
            if match
        ]
        cards.append(
            CheckpointCard(
                uid=checkpoint_uid(path),
                name=f"{recipe}-{path.name}",
                step=progress.step,
                folder=path,
                role="+".join(roles) or "kept",
                metrics={f"valid/{name}": value for name, value in progress.metrics.items()},
            )
        )
    return cards


def checkpoint_uid(path: Path) -> str:
    """Return a name that differs when the checkpoint's content does."""
    return f"{path.name}-{file_digest(path / 'state.json')[:12]}"
