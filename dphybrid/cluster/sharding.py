"""The part that uses TorchRec: one table whose rows are spread over all ranks, with a row-wise optimizer that
is fused into the backward."""

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
    """One table, of which each rank holds a contiguous range of rows.

    rows_VD: this rank's rows; the kernels use the same memory, so write in place. first: number of the first
    one. sum_V: Adagrad's state of these rows, or None. Raises UserError if TorchRec's planner finds no room.
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
        # TorchRec keeps the lookups in a plain list, so modules() does not find them.
        for lookup in self._model.module.rows._lookups:
            lookup.register_forward_hook(self._watch)

    def look_up(self, ids_U: Tensor, lr: float) -> Tensor:
        """Return rows_UD of unique ids. All ranks must look up at the same time. lr: learning rate of the
        update that the backward of this lookup makes."""
        from torchrec import KeyedJaggedTensor

        for group in self._model.fused_optimizer.param_groups:
            group["lr"] = lr
        # zero_grad passes the learning rate to the kernel, which reads it in the forward.
        self._model.fused_optimizer.zero_grad()
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
        """Update the rows of a lookup, which this and other ranks hold.

        on_gradient: from the sum of squares of the gradients of this rank's rows to a factor on them, for
        clipping. Called once on every rank, as it exchanges the sums.
        """
        self._on_gradient = on_gradient
        rows_UD.backward(grads_UD * self._ranks.size)  # TorchRec divides by the number of ranks
        # Not called in the backward if no rank looked up rows of this one; the others still wait for its sum.
        if self._on_gradient is not None:
            self._on_gradient(0.0)
            self._on_gradient = None

    def _watch(self, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        """Forward hook of TorchRec's lookup: lets `on_gradient` scale gradients before the fused update."""
        if not output.requires_grad:
            return
        ids_N = args[0].values()

        def scaled(grads_ND: Tensor) -> Tensor:
            on_gradient, self._on_gradient = self._on_gradient, None
            if on_gradient is None:
                return grads_ND
            # The lookup returns its rows flat, and reshape cannot infer the width of no rows.
            squares = _square_of_sums(ids_N, grads_ND.reshape(len(ids_N), -1)) if len(ids_N) else 0.0
            return grads_ND * on_gradient(squares)

        output.register_hook(scaled)


def _square_of_sums(ids_N: Tensor, grads_ND: Tensor) -> float:
    """Return the sum of squares of the gradients by row. A row that several ranks looked up occurs several
    times; its gradients are added first."""
    ids = ids_N.cpu()
    where = sort_ids(ids, int(ids.max()) + 1)
    device = grads_ND.device
    sums_UD = sum_by_row(grads_ND.contiguous(), *(each.to(device) for each in where.indices()[1:]))
    return float(sums_UD.double().square().sum())


def _fused_params(config: TableConfig) -> dict[str, object]:
    """Return TorchRec's parameters for the exact counterpart of a row optimizer. `ClusterEngine.check` has
    refused optimizers without one."""
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

    # Imported here, because it takes 18 s of CPU time.
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
            # Not EmbeddingBagCollection, which has no row-wise sharding on the CPU.
            self.rows = EmbeddingCollection(tables=[table], device=torch.device("meta"))

        def forward(self, ids: object) -> object:
            return self.rows(ids)

    device = ranks.device
    sharder, model = EmbeddingCollectionSharder(fused_params=_fused_params(config)), Rows()
    # Pass the free memory: the planner otherwise assumes 128 GB of memory and 32 GB on a GPU.
    free = available_memory_bytes() // ranks.local_size
    on_gpu = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    # The smallest over all ranks, because the planner assumes equal machines.
    free, on_gpu = (min(each) for each in zip(*ranks.all_gather((free, on_gpu)), strict=True))
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
            f"table {name!r}: {num_rows:,} rows x {dim} take {gib:.3g} GiB, {gib / ranks.size:.3g} GiB on "
            f"each of {ranks.size} ranks, but a rank has {(on_gpu or free) / 2**30:.3g} GiB free; use more "
            "ranks, or fewer or narrower rows"
        ) from error
    distributed = DistributedModelParallel(
        model, device=device, plan=plan, sharders=[sharder], init_parameters=False, init_data_parallel=False
    )
    return distributed, config.optimizer == "adagrad"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence TorchRec's log and warnings, which are meant for its own developers."""
    log = logging.getLogger("torchrec")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
