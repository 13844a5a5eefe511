"""Completes the record afterwards: sends what was left when a server was away, and ends runs whose process
died."""

import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil
from mlflow.entities import ViewType
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from dphybrid.tracking.outbox import Outbox, outboxes
from dphybrid.tracking.sender import Sender
from dphybrid.tracking.writer import HEARTBEAT_TAG, PID_TAG, MlflowWriter
from dphybrid.util.text import masked

_SILENT_S = 600.0
"""A run of another machine without a sign of life for so long counts as dead."""

_MAY_COME_LATE = ("metrics", "params", "file", "table", "dataset", "register")
"""Kinds of records that say nothing which a later one has changed."""


@dataclass
class _Synced:
    """The results of `sync`, as run ids. waiting: run id -> why its records are still here; lost: run id ->
    what never arrived of it."""

    completed: list[str] = field(default_factory=list)
    busy: list[str] = field(default_factory=list)
    waiting: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return it for people."""
        lines = [f"{run_id}: everything sent" for run_id in self.completed if run_id not in self.lost]
        lines += [f"{run_id}: still running, and sending by itself" for run_id in self.busy]
        lines += [f"{run_id}: kept ({why})" for run_id, why in self.waiting.items()]
        lines += [f"{run_id}: not everything was recorded: {what}" for run_id, what in self.lost.items()]
        lines += [f"{run_id}: its process is gone; ended as KILLED" for run_id in self.ended]
        return masked("\n".join(lines)) or "Nothing to do: every record has arrived, and no run is left open."


def sync(
    store: Path,
    tracking_uri: str,
    experiment: str,
    upload_limit: int,
    *,
    wait_s: float = 60.0,
    silent_s: float = _SILENT_S,
    on_run: Callable[[str, int], None] = lambda run_id, records: None,
) -> _Synced:
    """Send the outboxes in `store` and end orphaned runs of `experiment`.

    wait_s: how long each outbox may take. silent_s: see `_SILENT_S`. on_run: called before an outbox is sent,
    with its number of records.
    """
    spool = store / "spool"
    done = _Synced()
    for outbox in outboxes(spool):
        if not any(outbox.counts()):
            continue
        try:
            if not outbox.hold():
                done.busy.append(outbox.run_id)
                continue
            try:
                outbox.offer_again(_MAY_COME_LATE)
                if pending := outbox.counts()[0]:
                    on_run(outbox.run_id, pending)
                    uri = outbox.destination().get("tracking_uri", tracking_uri)
                    _send(outbox, uri, upload_limit, done, wait_s)
            finally:
                outbox.release()
        except OSError as error:  # one that cannot be read holds up none of the others
            done.waiting[outbox.run_id] = f"{type(error).__name__}: {error}"
    try:
        _end_orphans(spool, tracking_uri, experiment, silent_s, done)
    except (MlflowException, OSError) as error:
        done.waiting.setdefault("orphaned runs", str(error).splitlines()[0][:200])
    return done


def _send(outbox: Outbox, uri: str, upload_limit: int, done: _Synced, wait_s: float) -> None:
    sender = Sender(outbox, MlflowWriter(uri, outbox.run_id, upload_limit).write)
    arrived, losses = sender.deliver(wait_s)
    if not arrived:
        done.waiting[outbox.run_id] = sender.trouble or f"not finished within {wait_s:.0f} s"
        return
    done.completed.append(outbox.run_id)
    if losses:
        done.lost[outbox.run_id] = "; ".join([losses.text(), *sender.refused.values()])


def _end_orphans(spool: Path, tracking_uri: str, experiment: str, silent_s: float, done: _Synced) -> None:
    client = MlflowClient(tracking_uri=tracking_uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        return
    running = client.search_runs(
        [found.experiment_id],
        filter_string="attributes.status = 'RUNNING'",
        run_view_type=ViewType.ACTIVE_ONLY,
    )
    for run in running:
        run_id, tags = run.info.run_id, run.data.tags
        if run_id in done.waiting or HEARTBEAT_TAG not in tags or _lives(spool, run_id, tags, silent_s):
            continue
        why = f"dphybrid sync: no sign of life since {tags[HEARTBEAT_TAG]}"
        client.set_tag(run_id, "dphybrid.ended_by", why)
        beat_ms = int(1000 * datetime.fromisoformat(tags[HEARTBEAT_TAG]).timestamp())
        client.set_terminated(run_id, "KILLED", end_time=max(beat_ms, run.info.start_time))
        done.ended.append(run_id)


def _lives(spool: Path, run_id: str, tags: dict[str, str], silent_s: float) -> bool:
    """Tell whether a run's process is there: by its lock and number on this machine, by its heartbeat on
    another."""
    if tags.get("host.name") == platform.node() and (spool / f"{run_id}.lock").exists():
        outbox = Outbox(spool, run_id)
        if not outbox.hold():
            return True
        outbox.release()
        number = tags.get(PID_TAG, "")  # between two parts of a run nobody holds the lock
        return number.isdigit() and psutil.pid_exists(int(number))
    silent = (datetime.now(UTC) - datetime.fromisoformat(tags[HEARTBEAT_TAG])).total_seconds()
    return silent < silent_s
