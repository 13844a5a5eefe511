"""The results of a training as the pages `result.json` and `splits.json`."""

import sys
from pathlib import Path

from dphybrid.data import num_batches
from dphybrid.run.folder import Run
from dphybrid.run.pages import ResultPage, SplitsPage
from dphybrid.training.checkpoint import complete_checkpoints, step_of
from dphybrid.training.engine import Session
from dphybrid.training.observing import Meter
from dphybrid.training.retention import best_checkpoint
from dphybrid.util.errors import UserError
from dphybrid.util.files import write_text


def result_of(session: Session, meter: Meter, system: dict[str, float]) -> ResultPage:
    """Return the results of a training, up to now when it was interrupted. system: means of the machine's
    figures."""
    progress, folder = session.trained.progress, session.checkpoints
    done = complete_checkpoints(folder)
    best = best_checkpoint(done, progress, session.task)
    if best is not None and progress.best_step not in (None, step_of(best)):
        print(
            f"Note: the best checkpoint, of step {progress.best_step}, is gone from {folder}; "
            f"{best.name} takes its place",
            file=sys.stderr,
            flush=True,
        )
    stages = sorted(session.clock.totals.items(), key=lambda item: -item[1])
    return ResultPage(
        checkpoint=str(done[-1]) if done else "",
        best_checkpoint=str(best or ""),
        steps=progress.step,
        epochs=progress.epoch,
        devices=session.facts["devices"],
        system=system,
        history=progress.history,
        best_value=progress.best_value,
        step_ms=meter.times.summary() or _step_ms_before(folder.parent / "result.json", progress.step),
        steps_timed=meter.times.count,
        stages={name: round(seconds, 6) for name, seconds in stages},
        saving=session.saver.costs,
        steps_per_epoch=num_batches(session.train_data, session.config.train.batch_size),
        steps_skipped=progress.skipped,
    )


def _step_ms_before(page: Path, step: int) -> dict[str, float]:
    """Return how long steps took in the process before, where that one took the last step: it may have been
    killed before its report."""
    try:
        before = ResultPage.read(page)
    except UserError:  # there is none, or a damaged one
        return {}
    return before.step_ms if before.steps == step else {}


def keep_outcome(run: Run, session: Session, result: ResultPage) -> None:
    """Write the results, and what each replica got of a batch, as it was printed and as a table; record the
    latter."""
    splits, rows = session.splits, session.splits.rows()
    text = "\n".join(splits.lines) + "\n"
    write_text(run.folder / "splits.txt", text)
    SplitsPage(rows=rows, lines=splits.lines).write(run.folder / "splits.json")
    result.write(run.folder / "result.json")
    session.tracker.log_text("splits.txt", text)
    session.tracker.log_table("split_shapes.json", [row.table_row() for row in rows])
