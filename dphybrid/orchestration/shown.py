"""What Prefect's pages show of a training: name, tags, the link to its MLflow run, and its progress."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, Thread
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

from dphybrid.orchestration.queueing import UNREACHABLE, client_for_threads
from dphybrid.training.callbacks import EpochEnd
from dphybrid.util.stop import watching
from dphybrid.util.text import as_markdown, masked

_TELL_EVERY_S = 2.0


@contextmanager
def not_needed(what: str) -> Iterator[None]:
    """Tell that the server did not take what the block gives it, and go on: `what` is lost then, and where it
    is to be found."""
    try:
        yield
    except UNREACHABLE as error:
        print(masked(f"Note: {what} ({error})"), flush=True)


@not_needed("Prefect does not show the run's name and link")
def show_run(flow_run_id: str, name: str, tags: Sequence[str], address: str) -> None:
    """Give a flow run the name of its run, more tags, and a link to `address`, where MLflow shows it ("": not
    recorded by a server). A server that does not answer is reported and does not stop the training."""
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(UUID(flow_run_id))
        # what is left out is overwritten
        client.update_flow_run(run.id, name=name, tags=sorted({*run.tags, *tags}))
        if address:
            text = f"[MLflow run {as_markdown(name)}]({address})"
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
    """Yield what shows each epoch as the flow run's progress: one artifact, which a thread brings up to date,
    for training waits for no server."""
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
            except UNREACHABLE:
                return False  # the next look tries again
            shown = now
            return False

    def tell(seen: EpochEnd) -> None:
        nonlocal latest
        latest = 100 * seen.epoch / seen.epochs, _epoch_text(seen)

    with watching(show, _TELL_EVERY_S, "dphybrid-progress", end_s=1.0):
        yield tell
    if latest is not None:  # and nobody has interrupted it
        latest = 100.0, f"{latest[1]}; trained"  # early stopping ends before the last epoch
        # A thread, for this one's client is the flow's: it asks for minutes when the server is away.
        last = Thread(target=show, daemon=True)
        last.start()
        last.join(_TELL_EVERY_S)


def _epoch_text(seen: EpochEnd) -> str:
    """Return an epoch's end in a line."""
    metrics = ", ".join(f"{name} {value:.5g}" for name, value in seen.metrics.items())
    best = ", the best so far" if seen.best else ""
    return (
        f"epoch {seen.epoch} of {seen.epochs}, step {seen.step:,}: train loss {seen.train_loss:.5g}, "
        f"validation {metrics}{best}"
    )
