"""An embedding table in host memory, of which each training step touches only its batch's rows.

Letters: N ids of a lookup, U unique rows of it, B samples, D width of a row.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from dphybrid.embedding import native
from dphybrid.embedding.ahead import Lookup, LookupsAhead
from dphybrid.embedding.gradients import Gates
from dphybrid.embedding.lookup import (
    Counters,
    is_integer,
    not_a_row,
    not_differentiable,
    whole_numbers,
)
from dphybrid.embedding.replicas import DeviceRows, Share, SizesOf
from dphybrid.embedding.storage import StartValues, open_rows, open_states
from dphybrid.embedding.weights import RowsInfo, all_rows, info_of
from dphybrid.kernels import may_read
from dphybrid.util.compiling import is_transformed, outside_of_graphs
from dphybrid.util.errors import UserError
from dphybrid.util.stages import stage


class HostEmbedding(nn.Module):
    """An embedding table (num_rows, dim) that stays on the CPU; `.to()` and `.cuda()` do not move it.

    `weight` is a parameter with a sparse gradient, which holds only the looked-up rows. The row optimizers of
    `dphybrid.embedding` read and write only those rows. torch's dense optimizers refuse a sparse gradient, so
    give them `dense_parameters(model)`.

    Args:
        num_embeddings, embedding_dim: Shape of the table, also its `num_rows` and `dim`.
        padding_idx: A row that starts as zeros and gets no gradient; a negative value counts from the end.
        std: Standard deviation of the normal initial values.
        seed: Of the initial values; None: drawn from torch's generator, which torch.manual_seed sets.
        name: For messages.
        dtype: float32, float64, or bfloat16 (looked-up rows and gradients are float32 then, and updates are
            rounded stochastically); None: float64 if that is torch's default type, else float32.
        path: A folder for unnamed files of rows and states, which end with the process; None: memory.
        freeze: True for a table that is not trained.

    Raises UserError, with the numbers, if the table does not fit. Other options of nn.Embedding (max_norm,
    ...) are not supported, nor is a weight that is computed from others (weight_norm, pruning, ...).
    """

    weight: nn.Parameter
    _padding: int | None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        std: float = 0.1,
        dtype: torch.dtype | None = None,
        seed: int | None = None,
        name: str = "table",
        path: Path | str | None = None,
        freeze: bool = False,
    ) -> None:
        super().__init__()
        num_rows, dim = num_embeddings, embedding_dim
        if any(not is_integer(n) or n < 1 for n in (num_rows, dim)) or dim > native.MAX_DIM:
            raise UserError(
                f"table {name!r}: {num_rows!r} rows of {dim!r} values; both must be integers of at least 1, "
                f"and a row has at most {native.MAX_DIM} values"
            )
        if padding_idx is not None and (
            not is_integer(padding_idx) or not -num_rows <= padding_idx < num_rows
        ):
            raise UserError(f"table {name!r}: padding_idx={padding_idx}; rows are 0 to {num_rows - 1}")
        if not 0 <= std < math.inf or not (seed is None or is_integer(seed)):
            raise UserError(f"table {name!r}: seed={seed!r}, std={std!r}; give an integer, a std from 0 on")
        if dtype is None:  # as nn.Embedding, but a default of half precision would round the updates
            dtype = torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
        if seed is None:
            seed = int(torch.randint(2**63 - 1, (), device="cpu"))
        if dtype not in native.STORED:
            raise UserError(f"table {name!r}: dtype={dtype}; use float32, float64 or bfloat16")
        # Absolute: the states' files are opened later, perhaps in another working directory.
        path = None if path is None else Path(path).absolute()
        self._set_up(name, native.real_dtype(dtype), path)
        self._padding = self.padding_idx = None if padding_idx is None else padding_idx % num_rows
        self.start = StartValues(std, seed, self._padding)
        rows_VD = open_rows((num_rows, dim), dtype, path, name, self.start)
        self.weight = nn.Parameter(rows_VD, requires_grad=not freeze)

    def _set_up(self, name: str, out_dtype: torch.dtype, path: Path | None = None) -> None:
        """Set what a new table has beside its weight."""
        self.name, self.out_dtype, self._path = name, out_dtype, path
        self._padding = None
        self._placed: tuple[Sequence[torch.device], SizesOf] | None = None
        self._replica: int | None = None
        self._start_lookups()

    def _start_lookups(self) -> None:
        self._gates, self.counters = Gates(), Counters()
        self.ahead = LookupsAhead(self.name, self.counters)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        # torch calls this for every new weight.
        super().register_parameter(name, param)
        if name == "weight" and param is not None:
            self._own(param)

    def _own(self, weight: Tensor) -> RowsInfo:
        """Note on a weight that it is a table's; return its info. A weight that another table has, too, keeps
        that one's."""
        if weight.dtype == torch.bfloat16:  # a bfloat16 sum of many small gradients stops growing
            weight.grad_dtype = torch.float32
        if (info := info_of(weight)) is None:
            make_states = partial(open_states, folder=self._path, name=self.name)
            padding = None if self._padding is None or self._padding >= len(weight) else self._padding
            info = RowsInfo(self.name, self.counters, make_states, padding)
            weight.rows_info = info  # type: ignore[attr-defined]
        return info

    def __copy__(self) -> Self:
        """Return a shallow copy, which shares weight and settings, as of any module."""
        new = self.__new__(type(self))
        vars(new).update(vars(self))
        return new

    def shared_copy(self) -> Self:
        """Return a copy that shares the weight, and has a placement, lookups and counters of its own."""
        new = copy(self)
        new._placed = None
        new._start_lookups()
        return new

    def __getstate__(self) -> dict[str, object]:
        """Return the state of a deep copy or pickle, which has its rows in memory."""
        if get_spawning_popen() is not None:
            raise _not_shared(self.name)
        # Without the path: two tables that write to the same file would overwrite each other.
        others = {"_path": None, "_gates": None, "counters": None, "ahead": None}
        return self.__dict__ | others | {"_padding": self._info.padding}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._start_lookups()
        self._parameters["weight"] = weight = self._restored_weight()
        self._own(weight)
        if self._placed is not None:
            self.place_on(*self._placed)

    def _restored_weight(self) -> nn.Parameter:
        """Return the weight of a deep copy or pickle."""
        return self.weight

    @property
    def num_rows(self) -> int:
        """Number of rows of the present weight."""
        return len(self.weight)

    @property
    def dim(self) -> int:
        """Number of values of a row."""
        return self.weight.shape[1]

    num_embeddings, embedding_dim = num_rows, dim
    """nn.Embedding's names."""

    @property
    def _info(self) -> RowsInfo:
        """The info of the present weight, such as one that functional_call gives."""
        return info_of(self.weight) or self._own(self.weight)

    def _prepared(self, ids: Tensor) -> Lookup | None:
        """Prepare a lookup of these ids; see `LookupsAhead.prepare`."""
        return self.ahead.prepare(self.weight, ids)

    @contextmanager
    def _without_weight(self) -> Iterator[None]:
        kept = self._parameters.pop("weight", None)
        try:
            yield
        finally:
            if kept is not None:
                self._parameters["weight"] = kept

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # nn.Module calls this for .to(), .half(), .share_memory() and the like. The weight stays as it is;
        # what a subclass has beside it, such as a scale, goes where the model goes, and the type of looked-up
        # rows follows. `fn` is tried on an empty tensor to learn what it does.
        with self._without_weight():
            super()._apply(fn, recurse)
        tried = torch.empty(0, dtype=self.out_dtype, device="cpu")
        self.out_dtype = fn(tried).dtype
        if tried.is_shared():
            raise _not_shared(self.name)
        return self

    def _replicate_for_data_parallel(self) -> Self:
        # torch's hook for a module that is being replicated: every device would get a copy of the table.
        raise UserError(
            f"table {self.name!r} is inside torch's DataParallel; use dphybrid.parallel.DataParallel, whose "
            "replicas share it"
        )

    @outside_of_graphs
    def forward(
        self, ids: Tensor, *, by_replica: bool = False, to: torch.device | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the rows of `ids` (any shape, any integer type) as (*ids.shape, dim) on the device of the
        ids, or on the device `to`.

        by_replica: see `replica_rows`. Raises UserError for ids of another type or out of range, naming
        table, value and position.
        """
        with stage("lookup"):
            if (weight := self._parameters.get("weight")) is None:
                raise UserError(
                    f"table {self.name!r}: its weight is computed from other parameters, in every step "
                    "for all rows (weight_norm, pruning, ...), or was removed; use nn.Embedding for that"
                )
            trains = self._trains(weight)
            ids, wanted = whole_numbers(ids, self.name), ids.device if to is None else to
            if is_transformed():
                raise not_differentiable()
            if not may_read(weight, ids):
                return self._by_torch(weight, ids).to(wanted)
            if by_replica and self.ahead.is_placed:
                shares = self.ahead.lookup_of(weight, ids).shares
                # Not a list, for whose tensors torch calls no backward hooks.
                return tuple(self._rows_on_device(weight, share) for share in shares)
            replica = self._replica if self.ahead.is_placed else None
            if replica is None and wanted.type == "cuda":
                replica = self.ahead.channel_to(wanted)
            if replica is not None and not by_replica:
                return self._rows_on_device(weight, self.ahead.share_of(weight, ids, replica))
            # The kernel checks the ids while it reads them; the wrong one is looked for only after a failure.
            try:
                rows, flat_N = native.look_up(all_rows(weight), ids)
            except IndexError:
                raise not_a_row(ids, len(weight), self.name) from None
            if trains:
                rows = self._gates.rows(weight, rows, flat_N, self._info.padding)
            return self._as_model(rows)

    def _trains(self, weight: Tensor) -> bool:
        """Return whether a lookup records a gradient. Raises UserError for one of several processes that
        would train copies."""
        trains = torch.is_grad_enabled() and weight.requires_grad
        processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if trains and processes > 1:
            raise UserError(
                f"table {self.name!r}: each of {processes} processes would train its own copy, because "
                "DistributedDataParallel, FSDP and the like do not exchange gradients of rows. Train in one "
                "process with dphybrid.parallel.DataParallel over the GPUs, or as docs/cluster.md says"
            )
        return trains

    def _by_torch(self, weight: Tensor, ids: Tensor) -> Tensor:
        """Look up by torch's operations, where torch records or watches them (export, trace, a dispatch
        mode)."""
        if self._info.stored is not None:
            raise UserError(f"table {self.name!r}: its rows are in files, which a graph cannot hold")
        return self._as_model(F.embedding(ids, weight, self._info.padding, sparse=True))

    def _as_model(self, rows: Tensor) -> Tensor:
        """Return rows in the type that the model was cast to."""
        return rows if rows.dtype == self.out_dtype else rows.to(self.out_dtype)

    def place_on(self, devices: Sequence[torch.device], sizes_of: SizesOf) -> None:
        """Set the devices that `replica_rows` sends rows to. devices: one per replica. sizes_of: function
        from the rows of a batch to the rows of each replica's share, in order.

        For a region: `table.place_on(region.devices.replicas, region.sizes)`.
        """
        self.ahead.place_on(devices, sizes_of)
        self._placed = (list(devices), sizes_of)

    def for_replica(self, index: int) -> Self:
        """Return this table as a replica of a region sees it: the same weight, whose rows come to the
        replica's device. For a table inside a region."""
        proxy = copy(self)
        proxy._replica = index
        return proxy

    def replica_rows(self, ids: Tensor) -> list[Tensor]:
        """Return, for each used replica, the rows (b, ..., dim) of its share of `ids` (B, ...), on its
        device.

        Only the unique rows of a share are sent to the device, and only their summed gradients come back. A
        region takes the result as `parts(...)` of `dphybrid.parallel`. Before `place_on`, and for hooks on
        the rows, which get one tensor: all rows, on the device of the ids. Raises UserError like `forward`.
        """
        # Through __call__, so that hooks before the lookup see every one.
        is_split = not (self._forward_hooks or self._backward_hooks)
        rows: Tensor | tuple[Tensor, ...] = self(ids, by_replica=is_split)
        return [rows] if isinstance(rows, Tensor) else list(rows)

    def _rows_on_device(self, weight: Tensor, share: Share) -> Tensor:
        counted = torch.is_grad_enabled()
        share.channel.wait_for(share, counted=counted)
        rows_UD, ids_U = share.rows_UD, share.where.unique_U
        if counted and weight.requires_grad:
            rows_UD = self._gates.rows(
                weight, rows_UD, ids_U, self._info.padding, share.channel, self._replica
            )
        rows_ND = DeviceRows.apply(rows_UD, *share.indices)
        return self._as_model(rows_ND.view(*share.shape, self.dim))

    def extra_repr(self) -> str:
        return f"{self.num_rows}, {self.dim}, dtype={self.weight.dtype}, in host memory"


def _not_shared(name: str) -> UserError:
    return UserError(
        f"table {name!r}: processes cannot share it by share_memory() or spawn; train in one process with "
        "dphybrid.parallel.DataParallel, and send workers the data alone"
    )


def find_tables(model: nn.Module) -> dict[str, HostEmbedding]:
    """Return the host tables of a model by dotted name, each once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, HostEmbedding)}


def is_dense(model: nn.Module) -> Callable[[Tensor], bool]:
    """Return a function that tells the other parameters of a model from its tables' weights."""
    # By identity: a weight of two modules has two names.
    weights = {id(table.weight) for table in find_tables(model).values()}
    return lambda parameter: id(parameter) not in weights


def dense_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a model, except its tables' weights."""
    return filter(is_dense(model), model.parameters())
