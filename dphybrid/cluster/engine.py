"""The engine of several ranks, in the process that starts them."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from torch import nn

from dphybrid.cluster.launch import OUTCOME, Meeting, train_in_ranks
from dphybrid.cluster.refusals import (
    refuse_label_for_ranks,
    refuse_model_for_ranks,
    refuse_ranks,
    refuse_small_batch,
)
from dphybrid.config.settings import Settings
from dphybrid.data import Prepared
from dphybrid.embedding.storage import deferred_rows
from dphybrid.training.callbacks import Callback
from dphybrid.training.engine import Engine
from dphybrid.util.errors import UserError
from dphybrid.util.stop import Interrupted, StopRequest

NODES = "dphybrid.nodes"
"""Tag of a run: its machines."""


class ClusterEngine(Engine):
    """Training by `cluster.ranks` processes, which share the rows of the model's one table."""

    mapped = True

    def check(
        self, one_process: bool, settings: Settings, devices: str, callbacks: Sequence[Callback], here: int
    ) -> None:
        refuse_ranks(self.config, one_process, settings, devices, callbacks, here)

    def check_data(self, data: Prepared, tabular: bool) -> None:
        refuse_small_batch(self.config)
        if tabular:
            refuse_label_for_ranks(self.config, data)

    def check_model(self, model: nn.Module) -> None:
        refuse_model_for_ranks(self.config, model)

    def launch(
        self, folder: Path, devices: str, settings: Settings, stop: StopRequest, meeting: Meeting | None
    ) -> bool:
        """Train a built run; a rank that dies is started again with all others, from the newest checkpoint,
        `cluster_restarts` times.

        meeting: with other machines, each of which starts as many ranks; None: all are here. Raises UserError
        for what the ranks refuse, Interrupted when they were stopped.
        """
        (folder / OUTCOME).unlink(missing_ok=True)
        outcome = train_in_ranks(folder, self.config.cluster.ranks, settings, stop, meeting)
        if outcome.state == "refused":
            raise UserError(outcome.words)
        if outcome.state == "stopped":
            if not stop.pending:  # a signal to the ranks themselves; or another machine is wanted for others
                stop.ask("a request to a rank", requeue=meeting is not None)
            interruption = stop.interruption()
            raise Interrupted(outcome.words, interruption.signal_number, interruption.requeue)
        return True

    def tags(self, tags: Mapping[str, str]) -> dict[str, str]:
        # one machine, unless the tags say more: a resumed run may have had others
        return {NODES: "1", **tags, "dphybrid.ranks": str(self.config.cluster.ranks)}

    def shown_devices(self, devices: str, tags: Mapping[str, str]) -> str:
        nodes = int(tags.get(NODES, "1"))
        return f"{nodes} x {self.config.cluster.ranks // nodes} ranks on {devices}"

    def num_parts(self, devices: str, in_first_split: int = 0) -> int:
        return in_first_split or self.config.cluster.ranks  # a resume may have changed their number

    def new_tables(self, filled: bool) -> AbstractContextManager[None]:
        return deferred_rows()
