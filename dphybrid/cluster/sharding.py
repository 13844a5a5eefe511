"""TorchRec's side: a table in rows over all ranks, with its row-wise optimizer fused into the backward."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dphybrid.cluster.ranks import Ranks
from dphybrid.config import TableConfig
from dphybrid.embedding.lookup import sort_ids, sum_by_row
from dphybrid.embedding.storage import available_memory_bytes
from dphybrid.util.errors import UserError


class RowShards:
    """One table in contiguous rows over all ranks.

    rows_VD: this rank's part; writing in place reaches the kernels. sum_V: Adagrad's state of these rows, or
    None. first: the first of them. Raises UserError when the planner finds no place for them.
    """

    def __init__(
        self, ranks: Ranks, num_rows: int, dim: int, name: str, config: TableConfig, batch_rows: int
    ) -> None:
        with _quiet():
            self._model, has_sum = _distributed(ranks, num_rows, dim, name, config, batch_rows)
        (shard,) = next(iter(self._model.module.state_dict().values())).local_shards() or [None]
        self.rows_VD: Tensor = shard.tensor if shard else torch.zeros(0, dim)
        self.first: int = shard.metadata.shard_offsets[0] if shard else num_rows
        self.sum_V: Tensor | None = None
        if has_sum:
            (states,) = self._model.fused_optimizer.state_dict()["state"].values()
            (parts,) = (state.local_shards() for state in states.values())
            self.sum_V = parts[0].tensor if parts else torch.zeros(0)
        self._ranks, self._name = ranks, name
        self._on_gradient: Callable[[float], float] | None = None
        # The lookups are in a plain list: modules() does not come by them.
        for lookup in self._model.module.rows._lookups:
            lookup.register_forward_hook(self._watch)

    def look_up(self, ids_U: Tensor, lr: float) -> Tensor:
        """Return rows_UD of unique ids; all ranks look up at once. lr: of the update that their backward
        does."""
        from torchrec import KeyedJaggedTensor

        for group in self._model.fused_optimizer.param_groups:
            group["lr"] = lr
        self._model.fused_optimizer.zero_grad()  # hands the rate on to the kernel, which takes it in forward
        ids = KeyedJaggedTensor(
            keys=[self._name],
            values=ids_U.to(self._ranks.device),
            lengths=torch.tensor([len(ids_U)], device=self._ranks.device),
        )
        rows_UD: Tensor = self._model(ids)[self._name].values()
        return rows_UD

    def update(
        self, rows_UD: Tensor, grads_UD: Tensor, on_gradient: Callable[[float], float] | None = None
    ) -> None:
        """Have the optimizer change the rows of a lookup, here and with the other ranks.

        on_gradient: from the sum of squares of all rows' gradients on this rank to a factor on them.
        """
        self._on_gradient = on_gradient
        rows_UD.backward(grads_UD * self._ranks.size)  # TorchRec divides by the number of ranks
        if self._on_gradient is not None:  # not asked, as nobody looked up its rows; the others wait for it
            self._on_gradient(0.0)
            self._on_gradient = None

    def _watch(self, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if not output.requires_grad:
            return
        ids_N = args[0].values()

        def scaled(grads_ND: Tensor) -> Tensor:
            on_gradient, self._on_gradient = self._on_gradient, None
            if on_gradient is None:
                return grads_ND
            # The lookup gives its rows flat; of none the width is unknown.
            squares = _square_of_sums(ids_N, grads_ND.reshape(len(ids_N), -1)) if len(ids_N) else 0.0
            return grads_ND * on_gradient(squares)

        output.register_hook(scaled)


def _square_of_sums(ids_N: Tensor, grads_ND: Tensor) -> float:
    """Return the sum of squares of the gradients by row: rows that several ranks looked up come several
    times."""
    ids = ids_N.cpu()
    where = sort_ids(ids, int(ids.max()) + 1)
    device = grads_ND.device
    sums_UD = sum_by_row(grads_ND.contiguous(), *(each.to(device) for each in where.indices()[1:]))
    return float(sums_UD.double().square().sum())


def _fused_params(config: TableConfig) -> dict[str, object]:
    """Return the sharder's parameters for the exact counterpart of a row optimizer; `ClusterEngine.check` has
    refused those without one."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

    common = {"learning_rate": config.lr}
    if config.optimizer == "sgd":
        return {"optimizer": EmbOptimType.EXACT_SGD, **common}
    assert config.optimizer == "adagrad"
    decay = {"weight_decay": config.weight_decay, "weight_decay_mode": WeightDecayMode.L2}
    adagrad = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, **common, "eps": 1e-10}
    return adagrad | (decay if config.weight_decay else {})


def _distributed(
    ranks: Ranks, num_rows: int, dim: int, name: str, config: TableConfig, batch_rows: int
) -> tuple[Any, bool]:
    """Return the sharded model, and whether its optimizer keeps a sum for each row."""
    import torch.distributed as dist

    # here, as this import takes 18 s of CPU time
    from torchrec import EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints, PlannerError

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = EmbeddingConfig(
                num_embeddings=num_rows, embedding_dim=dim, name=name, feature_names=[name]
            )
            # Not the collection of bags: that one has no row-wise sharding on the CPU.
            self.rows = EmbeddingCollection(tables=[table], device=torch.device("meta"))

        def forward(self, ids: object) -> object:
            return self.rows(ids)

    device = ranks.device
    sharder, model = EmbeddingCollectionSharder(fused_params=_fused_params(config)), Rows()
    # the planner's defaults are 128 and 32 GB, whatever the machine has
    free = available_memory_bytes() // ranks.local_size
    on_gpu = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    # What a rank may count on everywhere is what the poorest one has.
    free, on_gpu = (min(each) for each in zip(*ranks.all_told((free, on_gpu)), strict=True))
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=ranks.size,
            local_world_size=ranks.local_size,
            compute_device=device.type,
            ddr_cap=free,
            hbm_cap=on_gpu,
        ),
        constraints={name: ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])},
        batch_size=max(1, batch_rows // ranks.size),
    )
    try:
        plan = planner.collective_plan(model, [sharder], dist.GroupMember.WORLD)
    except PlannerError as error:
        gib = num_rows * dim * 4 / 2**30
        raise UserError(
            f"table {name!r}: {num_rows:,} rows x {dim} are {gib:.3g} GiB, in {ranks.size} parts of "
            f"{gib / ranks.size:.3g}, and a rank has {(on_gpu or free) / 2**30:.3g} GiB free; use more "
            "ranks, or fewer or narrower rows"
        ) from error
    distributed = DistributedModelParallel(
        model, device=device, plan=plan, sharders=[sharder], init_parameters=False, init_data_parallel=False
    )
    return distributed, config.optimizer == "adagrad"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence TorchRec's log and warnings, which advise its own developers."""
    log = logging.getLogger("torchrec")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
