"""Completes records afterwards: sends the outboxes of ended runs, and ends runs in MLflow whose process
died."""

import platform
import time
from collections.abc import Container, Generator, Iterator
from datetime import UTC, datetime
from pathlib import Path

import psutil
from mlflow.entities import ViewType
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from dphybrid.tracking.opening import embedded_uri, recorded_in
from dphybrid.tracking.outbox import Outbox, outboxes
from dphybrid.tracking.sender import Sender
from dphybrid.tracking.writer import HEARTBEAT_TAG, PID_TAG, MlflowWriter
from dphybrid.util.locks import is_held

_SILENT_S = 600.0
"""A run of another machine counts as dead after so long without a heartbeat."""

_MAY_COME_LATE = ("metrics", "params", "file", "table", "dataset", "register")
"""Kinds of records that can be sent late: no later record replaces them, as one does a status or a tag."""


def sync(
    store: Path, tracking_uri: str | None, experiment: str, upload_limit: int, *, wait_s: float = 60.0
) -> Iterator[tuple[str, bool]]:
    """Send the outboxes in `store` and end orphaned runs of `experiment`; yield lines to print, each with
    whether all records of that run have arrived.

    tracking_uri: as `open_tracker` takes it. wait_s: how long each outbox may take. Raises UserError if runs
    are not recorded in MLflow.
    """
    uri = recorded_in(tracking_uri, store)
    spool, waiting = store / "spool", set[str]()
    for outbox in outboxes(spool):
        if not any(outbox.counts()):
            continue
        try:
            arrived = yield from _send(outbox, uri or embedded_uri(store), upload_limit, wait_s)
        except OSError as error:  # an unreadable outbox must not hold up the others
            arrived = False
            yield f"{outbox.run_id}: records kept ({type(error).__name__}: {error})", False
        if not arrived:
            waiting.add(outbox.run_id)
    if uri is None:  # there is no database yet, and MLflow's client would make one
        return
    try:
        for run_id in _end_orphans(spool, uri, experiment, waiting):
            yield f"{run_id}: its process no longer exists; ended as KILLED", True
    except (MlflowException, OSError) as error:
        yield f"orphaned runs: not ended ({str(error).splitlines()[0][:200]})", False


def num_waiting(store: Path, run_id: str) -> int:
    """Return how many records of a run wait to be sent; 0 if it has no outbox."""
    outbox = Outbox(store / "spool", run_id)
    return outbox.counts()[0] if outbox.path.exists() else 0


def forget_records(store: Path, run_id: str) -> None:
    """Remove a run's outbox, with records that have arrived or were refused."""
    for file in (store / "spool").glob(f"{run_id}.*"):
        file.unlink(missing_ok=True)


def _send(
    outbox: Outbox, tracking_uri: str, upload_limit: int, wait_s: float
) -> Generator[tuple[str, bool], None, bool]:
    """Send an outbox; yield as `sync` does, and return whether no record of it waits any more."""
    run_id = outbox.run_id
    if not outbox.hold():
        yield f"{run_id}: still running; it sends its records itself", True
        return True
    try:
        outbox.offer_again(_MAY_COME_LATE)
        if not (pending := outbox.counts()[0]):
            return True
        yield f"{run_id}: sending {pending:,} records", True
        uri = outbox.destination().get("tracking_uri", tracking_uri)
        sender = Sender(outbox, MlflowWriter(uri, run_id, upload_limit).write)
        arrived, losses = sender.deliver(wait_s)
    finally:
        outbox.release()
    if not arrived:
        yield f"{run_id}: records kept ({sender.trouble or f'not finished within {wait_s:.0f} s'})", False
    elif losses:
        what = "; ".join([losses.text(), *sender.refused.values()])
        yield f"{run_id}: not everything was recorded: {what}", False
    else:
        yield f"{run_id}: everything sent", True
    return arrived


def _end_orphans(spool: Path, tracking_uri: str, experiment: str, waiting: Container[str]) -> Iterator[str]:
    """End the runs whose process no longer exists; yield their ids. waiting: runs to leave alone, as their
    outbox may hold their real end."""
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
        if run_id in waiting or HEARTBEAT_TAG not in tags or _lives(spool, run_id, tags):
            continue
        why = f"dphybrid sync: no heartbeat since {tags[HEARTBEAT_TAG]}"
        client.set_tag(run_id, "dphybrid.ended_by", why)
        beat_ms = int(1000 * datetime.fromisoformat(tags[HEARTBEAT_TAG]).timestamp())
        client.set_terminated(run_id, "KILLED", end_time=max(beat_ms, run.info.start_time))
        yield run_id


def _lives(spool: Path, run_id: str, tags: dict[str, str]) -> bool:
    """Return whether a run's process is alive: by its lock and process id on this machine; on another, also
    by the time of its folder's lock, or of its last heartbeat in MLflow."""
    here = tags.get("host.name") == platform.node()
    if here and (spool / f"{run_id}.lock").exists():
        outbox = Outbox(spool, run_id)
        if not outbox.hold():
            return True
        outbox.release()
        # Between two parts of a run its process does not hold the lock.
        pid = tags.get(PID_TAG, "")
        return pid.isdigit() and psutil.pid_exists(int(pid))
    # Not the heartbeats in MLflow alone: during an outage none arrive, and the host's name may have changed.
    lock = spool.parent.parent / "runs" / Path(tags.get("dphybrid.run_folder", "none")).name / ".lock"
    if lock.is_file() and (is_held(lock) or time.time() - lock.stat().st_mtime < _SILENT_S):
        return True
    silent = (datetime.now(UTC) - datetime.fromisoformat(tags[HEARTBEAT_TAG])).total_seconds()
    return silent < _SILENT_S
