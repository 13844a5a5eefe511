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

from dphybrid.tracking.outbox import Outbox, Record, outboxes
from dphybrid.tracking.sender import Sender
from dphybrid.tracking.tracker import HEARTBEAT_TAG, PID_TAG, writer_of
from dphybrid.util.text import masked

_SILENT_S = 600.0
"""A run of another machine without a sign of life for so long counts as dead."""

_MAY_COME_LATE = ("metrics", "params", "file", "table", "dataset", "register")
"""Kinds of records that say nothing which a later one has changed."""

_Writing = Callable[[list[Record]], None]


@dataclass
class _Synced:
    """The results of `sync`, as run ids. waiting: run id -> why its records are still here; lost: run id ->
    what never arrived of it; unread: files of a version that kept records otherwise."""

    completed: list[str] = field(default_factory=list)
    busy: list[str] = field(default_factory=list)
    waiting: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    unread: list[Path] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether nothing waits and nothing is lost."""
        return not self.waiting and not self.lost

    def text(self) -> str:
        """Return it for people."""
        lines = [f"{run_id}: everything sent" for run_id in self.completed if run_id not in self.lost]
        lines += [f"{run_id}: still running, and sending by itself" for run_id in self.busy]
        lines += [f"{run_id}: kept ({why})" for run_id, why in self.waiting.items()]
        lines += [f"{run_id}: not everything was recorded: {what}" for run_id, what in self.lost.items()]
        lines += [f"{run_id}: its process is gone; ended as KILLED" for run_id in self.ended]
        lines += [f"{path}: not read, an earlier version wrote it; remove it" for path in self.unread]
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
    done = _Synced(unread=sorted(spool.glob("*.jsonl")))
    for outbox in outboxes(spool):
        pending, refused = outbox.counts()
        if not (pending or refused):
            continue
        try:
            if not outbox.hold():
                done.busy.append(outbox.run_id)
                continue
            try:
                uri = outbox.destination().get("tracking_uri", tracking_uri)
                write, _ = writer_of(outbox, uri, upload_limit)
                if pending:
                    on_run(outbox.run_id, pending)
                    _send(outbox, write, done, wait_s)
                if refused and outbox.run_id not in done.waiting:
                    _try_again(outbox, write, done)
            finally:
                outbox.release()
        except (OSError, ValueError) as error:  # one that cannot be read holds up none of the others
            done.waiting[outbox.run_id] = f"{type(error).__name__}: {error}"
    try:
        _end_orphans(spool, tracking_uri, experiment, silent_s, done)
    except (MlflowException, OSError) as error:
        done.waiting.setdefault("orphaned runs", str(error).splitlines()[0][:200])
    return done


def _send(outbox: Outbox, write: _Writing, done: _Synced, wait_s: float) -> None:
    sender = Sender(outbox, write)
    arrived, losses = sender.deliver(wait_s)
    if not arrived:
        done.waiting[outbox.run_id] = sender.trouble or f"not finished within {wait_s:.0f} s"
        return
    done.completed.append(outbox.run_id)
    if losses:
        done.lost[outbox.run_id] = losses.text()


def _try_again(outbox: Outbox, write: _Writing, done: _Synced) -> None:
    """Offer the server once more what it refused, where that may come late: a permission was given, or a name
    freed."""
    taken = []
    for record in outbox.refused():
        if record["op"] in _MAY_COME_LATE:
            try:
                write([record])
            except Exception as error:  # noqa: BLE001 - whatever the server or its client raises: the record stays where it is
                done.lost[outbox.run_id] = f"still refused: {str(error).splitlines()[0][:200]}"
            else:
                taken.append(record)
    if taken:
        outbox.take_back(taken)
        losses = outbox.losses()
        write([{"op": "losses", "text": masked(losses.text())}])
        done.completed.append(outbox.run_id)
        if losses:
            done.lost[outbox.run_id] = losses.text()
        else:
            done.lost.pop(outbox.run_id, None)


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
        client.set_tag(
            run_id, "dphybrid.ended_by", f"dphybrid sync: no sign of life since {tags[HEARTBEAT_TAG]}"
        )
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
