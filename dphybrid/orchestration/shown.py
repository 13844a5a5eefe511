"""Shows a training on Prefect's pages: its name, tags, a link to its MLflow run, and its progress."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

from dphybrid.orchestration.queueing import BEGAN_LABEL, FOLDER_LABEL, REFUSED, WORKER, client_for_threads
from dphybrid.training.callbacks import EpochEnd
from dphybrid.util.stop import watching
from dphybrid.util.text import as_markdown, masked

_SEND_EVERY_S = 2.0


@contextmanager
def tolerating_outage(note: str) -> Iterator[None]:
    """If the server does not accept what the block sends, print `note` and continue. The note says what is
    missing in Prefect, and where it can be found instead."""
    try:
        yield
    except REFUSED as error:
        print(masked(f"Note: {note} ({error})"), flush=True)


@tolerating_outage("Prefect does not show the run's name and link")
def show_run(flow_run_id: str, folder: Path, tags: Sequence[str], address: str) -> None:
    """Give a flow run the name of its run's or sweep's folder, more tags, and a link to its page in MLflow
    (address, or the command that opens it; "" for none). If Prefect's server does not answer, print a note
    and continue."""
    name = folder.name
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(UUID(flow_run_id))
        # An update replaces the whole list of tags, so keep the present ones.
        client.update_flow_run(run.id, name=name, tags=sorted({*run.tags, *tags}))
        if worker := os.environ.get(WORKER):
            labels: Any = {FOLDER_LABEL: f"{folder.parent.name}/{name}", BEGAN_LABEL: worker}
            client.update_flow_run_labels(run.id, labels)
        if address:
            text = f"[MLflow run {as_markdown(name)}]({address})" if "://" in address else f"`{address}`"
            link = ArtifactCreate(
                key="mlflow-run",
                type="markdown",
                data=text,
                description="Report, curves, splits and checkpoints in MLflow",
                flow_run_id=run.id,
            )
            client.create_artifact(link)


@contextmanager
def shown_progress(flow_run_id: str) -> Iterator[Callable[[EpochEnd], None]]:
    """Yield a function that takes each epoch's end, to show it as the flow run's progress. A thread updates
    one artifact, so that training never waits for the server."""
    latest: tuple[float, str] | None = None
    shown: tuple[float, str] | None = None
    artifact: UUID | None = None
    showing, opened = Lock(), client_for_threads()

    def show() -> bool:
        nonlocal shown, artifact
        with showing:
            now = latest
            if now is None or now == shown:
                return False
            (percent, text), run = now, UUID(flow_run_id)
            try:
                with opened() as client:
                    if artifact is None:
                        page = ArtifactCreate(
                            key="progress", type="progress", data=percent, description=text, flow_run_id=run
                        )
                        artifact = client.create_artifact(page).id
                    else:
                        client.update_artifact(artifact, ArtifactUpdate(data=percent, description=text))
            except REFUSED:
                return False  # the next look tries again
            shown = now
            return False

    def report(seen: EpochEnd) -> None:
        nonlocal latest
        latest = 100 * seen.epoch / seen.epochs, _epoch_text(seen)

    with watching(show, _SEND_EVERY_S, "dphybrid-progress", end_s=1.0):
        yield report
    # Not reached when training is interrupted or fails, because `yield` raises then.
    if latest is not None:
        latest = 100.0, f"{latest[1]}; trained"  # early stopping ends before the last epoch
        # In a thread that is not waited for long: this thread's client is the flow's, which retries for
        # minutes when the server is unreachable.
        last = Thread(target=show, daemon=True)
        last.start()
        last.join(_SEND_EVERY_S)


def _epoch_text(seen: EpochEnd) -> str:
    """Return one line about an epoch's end."""
    metrics = ", ".join(f"{name} {value:.5g}" for name, value in seen.metrics.items())
    best = ", the best so far" if seen.best else ""
    return (
        f"epoch {seen.epoch} of {seen.epochs}, step {seen.step:,}: train loss {seen.train_loss:.5g}, "
        f"validation {metrics}{best}"
    )
