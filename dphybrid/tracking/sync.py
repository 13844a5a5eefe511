"""Completes records afterwards: sends those of ended runs, and ends runs in MLflow whose process died."""

from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path

from mlflow.entities import ViewType
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from dphybrid.tracking.opening import noted_uri, recorded_in
from dphybrid.tracking.record import RecordFile, records
from dphybrid.tracking.sender import Sender
from dphybrid.tracking.writer import HEARTBEAT_TAG, PROCESS_TAG, MlflowWriter, experiments_named
from dphybrid.util.alive import alive, lives
from dphybrid.util.errors import UserError

_MAY_COME_LATE = ("metrics", "summary", "params", "file", "table", "dataset", "register")
"""Kinds of records that can be sent late: no later record replaces them, as one does a status or a tag."""


def sync(
    folders: Iterable[Path],
    store: Path,
    tracking_uri: str | None,
    experiment: str,
    upload_limit: int,
    *,
    wait_s: float = 60.0,
) -> Iterator[tuple[str, bool]]:
    """Send the records of the runs in `folders` to the addresses that they note; end orphaned runs of their
    experiments and of `experiment`; yield lines to print, each with whether all records of that run have
    arrived.

    tracking_uri, store: as `open_tracker` takes them. wait_s: how long each run may take. Raises UserError if
    runs are not recorded in MLflow."""
    uri = recorded_in(tracking_uri, store)
    known = dict[str, RecordFile]()
    waiting, experiments = set[str](), defaultdict[str, set[str]](set)
    if uri is not None:
        experiments[uri] = set()
    for record in records(folders):
        name = record.folder.name
        try:
            there = record.destination()
            if not there:
                continue
            known[there["run_id"]] = record
            where = noted_uri(there["tracking_uri"], tracking_uri, store)
            experiments[where].add(there["experiment_id"])
            if record.sent().refused or record.waits():
                arrived = yield from _send(record, there["run_id"], where, upload_limit, wait_s)
                if not arrived:
                    waiting.add(there["run_id"])
        except (UserError, OSError) as error:  # one record must not hold up the others
            yield f"{name}: records kept ({error})", False
    for where, noted in experiments.items():
        try:
            for run_id in _end_orphans(known, waiting, where, experiment, noted):
                yield f"{run_id}: its process no longer exists; ended as KILLED", True
        except (MlflowException, OSError) as error:
            yield f"orphaned runs: not ended ({str(error).splitlines()[0][:200]})", False


def _send(
    record: RecordFile, run_id: str, tracking_uri: str, upload_limit: int, wait_s: float
) -> Generator[tuple[str, bool], None, bool]:
    """Send a record; yield as `sync` does, and return whether none of it waits any more."""
    name = record.folder.name
    if not record.hold():
        yield f"{name}: still running; it sends its records itself", True
        return True
    try:
        record.mend()
        yield f"{name}: sending its records", True
        writer = MlflowWriter(tracking_uri, run_id, record.folder, upload_limit)
        sender = Sender(record, writer.write, again=_MAY_COME_LATE)
        arrived, losses = sender.deliver(wait_s)
    finally:
        record.release()
    if not arrived:
        yield f"{name}: records kept ({sender.trouble or f'not finished within {wait_s:.0f} s'})", False
    elif losses:
        what = "; ".join([losses.text(), *sender.sent.refused.values()])
        yield f"{name}: not everything was recorded: {what}", False
    else:
        yield f"{name}: everything sent", True
    return arrived


def _end_orphans(
    known: Mapping[str, RecordFile], waiting: set[str], tracking_uri: str, experiment: str, noted: set[str]
) -> Iterator[str]:
    """End the runs whose process no longer exists; yield their ids.

    Args:
        known: MLflow's id -> record of the runs here.
        waiting: Runs to leave alone, as their record may hold their real end.
        noted: Ids of the experiments of the runs here, besides those of `experiment`.
    """
    client = MlflowClient(tracking_uri=tracking_uri)
    found = sorted(noted | {str(each.experiment_id) for each in experiments_named(client, experiment)})
    if not found:
        return
    running = client.search_runs(
        found,
        filter_string="attributes.status = 'RUNNING'",
        run_view_type=ViewType.ACTIVE_ONLY,
    )
    for run in running:
        run_id, tags = run.info.run_id, run.data.tags
        record, process = known.get(run_id), tags.get(PROCESS_TAG, "")
        folder = record.folder if record is not None else None
        if run_id in waiting or HEARTBEAT_TAG not in tags or alive(folder, process):
            continue
        # Only its own machine can say whether a process exists; no other one judges it by a clock.
        if record is None and lives(process) is None:
            continue
        why = f"dphybrid sync: no heartbeat since {tags[HEARTBEAT_TAG]}"
        client.set_tag(run_id, "dphybrid.ended_by", why)
        beat_ms = int(1000 * datetime.fromisoformat(tags[HEARTBEAT_TAG]).timestamp())
        client.set_terminated(run_id, "KILLED", end_time=max(beat_ms, run.info.start_time))
        yield run_id
