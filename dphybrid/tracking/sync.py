"""Completes the copies of records in MLflow afterwards, and ends runs whose process died."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from dphybrid.tracking.opening import noted_uri, recorded_in
from dphybrid.tracking.record import RECORD, RecordFile, destination, last_status, waits
from dphybrid.tracking.tracker import copier_of
from dphybrid.util.alive import alive
from dphybrid.util.errors import UserError
from dphybrid.util.locks import is_held


def sync(
    folders: Iterable[Path], store: Path, tracking_uri: str | None, wait_s: float = 60.0
) -> Iterator[tuple[str, bool]]:
    """Copy what MLflow lacks of the runs in `folders` to the addresses that their records note, after ending
    runs whose process died; yield lines to print, each with whether MLflow has all of that run.

    tracking_uri, store: as `open_tracker` takes them. wait_s: how long each run may take. A server that did
    not answer for one run is not asked for the next ones. Raises UserError if runs are not recorded in
    MLflow."""
    recorded_in(tracking_uri, store)
    silent = dict[str, str]()
    for folder in sorted(folders):
        there, name = destination(folder), folder.name
        if not there:
            continue
        try:
            if is_held(folder / RECORD) or alive(folder):
                if waits(folder):
                    yield f"{name}: still running; it copies its record itself", True
                continue
            if last_status(folder) in ("", "RUNNING"):
                record = RecordFile(folder)
                record.append({"op": "status", "status": "KILLED"}, sync=True)
                record.close()
                yield f"{name}: its process no longer exists; ended as KILLED", True
            if not waits(folder):
                continue
            uri = noted_uri(there["tracking_uri"], tracking_uri, store)
            if uri not in silent:
                copier = copier_of(folder, uri)
                lacks = copier.finish(wait_s)
                if copier.trouble:
                    silent[uri] = copier.trouble
                yield f"{name}: {lacks or 'everything copied'}", not lacks
            else:
                yield f"{name}: not copied ({silent[uri]})", False
        except (UserError, OSError) as error:  # one record must not hold up the others
            yield f"{name}: not copied ({error})", False
