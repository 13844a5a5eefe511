"""Completes the record afterwards: sends what was left when a server was away, and ends runs whose process died."""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from mlflow.entities import ViewType
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from dphybrid.tracking.journal import Journal, journals
from dphybrid.tracking.mlflow_tracker import HEARTBEAT_TAG, PID_TAG, writer_of
from dphybrid.tracking.sender import Sender

SILENT_S = 600.0
"""A run of another machine without a sign of life for so long counts as dead."""


@dataclass
class Synced:
    """What `sync` came to, as run ids. waiting: run id -> why its records are still here."""

    completed: list[str] = field(default_factory=list)
    busy: list[str] = field(default_factory=list)
    waiting: dict[str, str] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return it for people."""
        lines = [f"{run_id}: everything sent" for run_id in self.completed]
        lines += [f"{run_id}: still running, and sending by itself" for run_id in self.busy]
        lines += [f"{run_id}: kept ({why})" for run_id, why in self.waiting.items()]
        lines += [f"{run_id}: its process is gone; ended as KILLED" for run_id in self.ended]
        return "\n".join(lines) or "Nothing to do: every record has arrived, and no run is left open."


def sync(
    store: Path,
    tracking_uri: str,
    experiment: str,
    upload_limit: int,
    *,
    wait_s: float = 60.0,
    silent_s: float = SILENT_S,
    on_run: Callable[[str, int], None] = lambda run_id, records: None,
) -> Synced:
    """Send the journals in `store` and end orphaned runs of `experiment`.

    wait_s: how long each journal may take. silent_s: see `SILENT_S`. on_run: told of each journal before it is sent.
    """
    done = Synced()
    for journal in journals(store / "spool"):
        _send(journal, tracking_uri, upload_limit, wait_s, done, on_run)
    try:
        _end_orphans(store / "spool", tracking_uri, experiment, silent_s, done)
    except (MlflowException, OSError) as error:
        done.waiting.setdefault("orphaned runs", str(error).splitlines()[0][:200])
    return done


def _send(
    journal: Journal, tracking_uri: str, upload_limit: int, wait_s: float, done: Synced, on_run: Callable[[str, int], None]
) -> None:
    if not journal.hold():
        done.busy.append(journal.run_id)
        return
    found = journal.pending(1_000_000)
    on_run(journal.run_id, len(found))
    uri = journal.destination().get("tracking_uri", tracking_uri)
    write, _ = writer_of(journal, uri, upload_limit)
    sender = Sender(journal, write, beat=lambda: None)
    if sender.close(wait_s):
        journal.clear()
        done.completed.append(journal.run_id)
    else:
        done.waiting[journal.run_id] = sender.trouble or f"not finished within {wait_s:.0f} s"


def _end_orphans(spool: Path, tracking_uri: str, experiment: str, silent_s: float, done: Synced) -> None:
    client = MlflowClient(tracking_uri=tracking_uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        return
    running = client.search_runs(
        [found.experiment_id], filter_string="attributes.status = 'RUNNING'", run_view_type=ViewType.ACTIVE_ONLY
    )
    for run in running:
        run_id, tags = run.info.run_id, run.data.tags
        if run_id in done.waiting or HEARTBEAT_TAG not in tags or _lives(spool, run_id, tags, silent_s):
            continue
        client.set_tag(run_id, "dphybrid.ended_by", f"dphybrid sync: no sign of life since {tags[HEARTBEAT_TAG]}")
        beat = datetime.fromisoformat(tags[HEARTBEAT_TAG])
        client.set_terminated(run_id, "KILLED", end_time=int(beat.timestamp() * 1000))
        done.ended.append(run_id)


def _lives(spool: Path, run_id: str, tags: dict[str, str], silent_s: float) -> bool:
    """Tell whether a run's process is there: by its lock and number on this machine, by its heartbeat on another."""
    if tags.get("host.name") == platform.node() and (spool / f"{run_id}.lock").exists():
        journal = Journal(spool, run_id)
        if not journal.hold():
            return True
        journal.release()
        return _process_lives(tags.get(PID_TAG, ""))  # between two parts of a run nobody holds the lock
    silent = (datetime.now(UTC) - datetime.fromisoformat(tags[HEARTBEAT_TAG])).total_seconds()
    return silent < silent_s


def _process_lives(number: str) -> bool:
    if not number.isdigit():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
