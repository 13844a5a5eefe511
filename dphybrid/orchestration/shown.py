"""Shows a training on Prefect's pages: its name, tags, and a link to its MLflow run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate

from dphybrid.orchestration.queueing import REFUSED
from dphybrid.util.text import as_markdown, masked


@contextmanager
def tolerating_outage(note: str) -> Iterator[None]:
    """If the server does not accept what the block sends, print `note` and continue. The note says what is
    missing in Prefect, and where it can be found instead."""
    try:
        yield
    except REFUSED as error:
        print(masked(f"Note: {note} ({error})"), flush=True)


@tolerating_outage("Prefect does not show the run's name and link")
def show_run(flow_run_id: str, name: str, tags: Sequence[str], address: str) -> None:
    """Give a flow run the name of its run or sweep, more tags, and a link to its page in MLflow
    (address, or the command that opens it; "" for none). If Prefect's server does not answer, print a note
    and continue."""
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(UUID(flow_run_id))
        # An update replaces the whole list of tags, so keep the present ones.
        client.update_flow_run(run.id, name=name, tags=sorted({*run.tags, *tags}))
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
