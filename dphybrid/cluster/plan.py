"""The cost of a run on several machines, before they are bought: rows a rank, memory, bytes and time of a
step.

Arithmetic on paper, not a measurement: the network at nine tenths of its rate, nothing overlapped.
"""

import math
from dataclasses import dataclass

from dphybrid.cluster.refusals import refuse_label_for_ranks, refuse_model_for_ranks
from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.data.batches import batches
from dphybrid.embedding import DeclaresIds, dense_parameters, find_tables
from dphybrid.embedding.lookup import each_lookup
from dphybrid.embedding.storage import available_memory_bytes, deferred_rows
from dphybrid.parallel import resolve_devices
from dphybrid.recipes.context import build_from_config
from dphybrid.recipes.recipe import Recipe
from dphybrid.util.errors import UserError, counted

_LINK_USED = 0.9
_UNIQUE_SHARE = 0.5
"""Of the ids of a rank's part of a batch; skewed columns have fewer."""

_HOST_NS_PER_ID = (15.0, 24.0)
"""What a host table costs one machine for each id of a batch: sorting, reading, updating."""

_PAPER_COLUMNS, _PAPER_DENSE = 26, 5_000_000
"""Of a model whose data is not there yet: id columns, and parameters of its blocks."""

_ID_BYTES, _NUMBER_BYTES = 8, 4
_SLOW_LINK_GBIT = 25.0


@dataclass(frozen=True)
class Workload:
    """What is trained. ids: looked up by a whole batch. dense: parameters of the blocks. states: numbers that
    the row optimizer keeps for a row."""

    num_rows: int
    dim: int
    ids: int
    dense: int
    states: int = 1

    @property
    def table_bytes(self) -> int:
        """Rows with their optimizer's states."""
        return self.num_rows * (self.dim + self.states) * _NUMBER_BYTES


@dataclass(frozen=True)
class ClusterPlan:
    """The paper's answer for so many ranks on so many machines. sent_bytes: by each machine in a step."""

    work: Workload
    ranks: int
    nodes: int
    link_gbit: float

    @property
    def rows_a_rank(self) -> int:
        return math.ceil(self.work.num_rows / self.ranks)

    @property
    def rank_bytes(self) -> int:
        """Rows and states of a rank, and its blocks with the two moments of Adam and a gradient."""
        rows = self.rows_a_rank * (self.work.dim + self.work.states) * _NUMBER_BYTES
        return rows + 4 * self.work.dense * _NUMBER_BYTES

    @property
    def sent_bytes(self) -> float:
        """An id out, its row back, its gradient out again, of all but the ids that stay; blocks twice."""
        if self.nodes == 1:
            return 0.0
        unique = self.work.ids * _UNIQUE_SHARE
        of_id = _ID_BYTES + 2 * self.work.dim * _NUMBER_BYTES
        away = unique * of_id * (self.nodes - 1) / self.nodes / self.nodes
        return away + 2 * self.work.dense * _NUMBER_BYTES

    @property
    def network_ms(self) -> float:
        return 1e3 * self.sent_bytes * 8 / (_LINK_USED * self.link_gbit * 1e9)

    @property
    def _host_ms(self) -> tuple[float, float]:
        """What one machine with a host table spends on the same ids, from and to."""
        low, high = (self.work.ids * cost / 1e6 for cost in _HOST_NS_PER_ID)
        return low, high

    def text(self, memory_bytes: int) -> str:
        """Return the plan in lines. memory_bytes: of this machine, for the comparison with it."""
        gib, work = 2**30, self.work
        low, high = self._host_ms
        machines = counted(self.nodes, "machine")
        lines = [
            f"Table: {work.num_rows:,} rows x {work.dim}, with states {work.table_bytes / gib:.4g} GiB, "
            f"row-wise over {self.ranks} ranks on {machines}",
            f"Rank:  {self.rows_a_rank:,} rows, {self.rank_bytes / gib:.4g} GiB with blocks and optimizers",
            f"Node:  {self.rank_bytes * math.ceil(self.ranks / self.nodes) / gib:.4g} GiB",
            f"Step:  {work.ids:,} ids, {_UNIQUE_SHARE:.0%} of them unique; a machine sends "
            f"{self.sent_bytes / 1e6:.4g} MB, {self.network_ms:.3g} ms at {self.link_gbit:g} Gbit/s",
            f"       one machine with a host table: {low:.3g} to {high:.3g} ms of host work for the same ids",
            f"       (on paper: {_LINK_USED:.0%} of the link, nothing overlapped; the blocks' time on top)",
            f"So:    {self._advice(memory_bytes)}",
        ]
        return "\n".join(lines)

    def _advice(self, memory_bytes: int) -> str:
        fits = self.work.table_bytes < memory_bytes
        here = f"this machine has {memory_bytes / 2**30:.4g} GiB free"
        if not fits:
            return f"use the ranks: the table does not fit into one machine ({here})"
        if self.nodes == 1:
            return f"stay with one process (cluster.ranks=0): {here}, and ranks on one machine only cost"
        if self.link_gbit <= _SLOW_LINK_GBIT or self.network_ms >= self._host_ms[1]:
            return (
                f"stay with one machine: the table fits ({here}), and the network takes longer than the host"
            )
        return f"the ranks may pay with more than 8 GPUs; the table fits into one machine, too ({here})"


def plan_text(
    recipe: Recipe,
    config: ExperimentConfig,
    settings: Settings,
    batch_size: int,
    nodes: int,
    link_gbit: float,
    table_rows: int | None = None,
) -> str:
    """Return what `dphybrid plan --cluster.ranks W` prints.

    table_rows: of a table that is not there yet; None: the data is prepared and the model built from it.
    Raises UserError for numbers that make no plan.
    """
    ranks = config.cluster.ranks
    if not 1 <= nodes <= ranks or link_gbit <= 0 or batch_size < 1 or (table_rows or 1) < 1:
        raise UserError(
            f"--nodes {nodes} --link-gbit {link_gbit:g} --batch-size {batch_size} --table-rows {table_rows}: "
            f"use 1 to {ranks} machines (there are {ranks} ranks), and numbers above 0"
        )
    states = 0 if config.table.optimizer == "sgd" else 1
    if table_rows is not None:
        dim = int(config.model.model_dump().get("dim", 64))
        work = Workload(table_rows, dim, batch_size * _PAPER_COLUMNS, _PAPER_DENSE, states)
    else:
        data = recipe.prepare(config.data, settings.prepared_dir, config.train.seed)
        if recipe.tabular:
            refuse_label_for_ranks(config, data)
        with deferred_rows():
            model = build_from_config(config, data.info, resolve_devices("cpu"))
        refuse_model_for_ranks(config, model)
        (table,) = find_tables(model).values()
        if not isinstance(model, DeclaresIds):
            raise UserError("the model declares no table_ids(batch); give --table-rows N")
        sample = next(batches(data.dataset("train"), batch_size, seed=0, epoch=0, shuffle=False))
        ids = sum(ids.numel() for wanted in model.table_ids(sample).values() for ids in each_lookup(wanted))
        dense = sum(parameter.numel() for parameter in dense_parameters(model))
        work = Workload(table.num_rows, table.dim, ids, dense, states)
    return ClusterPlan(work, ranks, nodes, link_gbit).text(available_memory_bytes())
