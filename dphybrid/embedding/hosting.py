"""Moves the large embeddings of any model to host memory, in place, or maps them from a published checkpoint:
`host_tables`. Rows may be trained over a mapped table, saved and loaded: `save_rows`, `load_rows`.

Letters: N ids of a lookup, U unique ids, K trained rows, D width of a row.
"""

import inspect
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from dphybrid.embedding import native
from dphybrid.embedding.ahead import Lookup
from dphybrid.embedding.lookup import row_numbers
from dphybrid.embedding.published import Checkpoint, PublishedRows, key_in, read_rows
from dphybrid.embedding.storage import StartValues, open_rows, unfilled_rows
from dphybrid.embedding.table import HostEmbedding
from dphybrid.util.compiling import outside_of_graphs
from dphybrid.util.errors import UserError
from dphybrid.util.files import write_json


class HostedEmbedding(HostEmbedding, nn.Embedding):  # type: ignore[misc] # typed as HostEmbedding
    """An nn.Embedding whose weight stays in host memory; `host_tables` makes it of an existing one.

    A subclass of nn.Embedding keeps its own forward: its `super().forward(ids)` looks up here.
    """

    _made_of: tuple[Any, Any]

    def _host(self, name: str, dtype: torch.dtype) -> None:
        """Become a host table with the present weight. dtype: of looked-up rows, as the model expects."""
        self.name, self._path, self.out_dtype = name, None, dtype
        # As nn.Embedding draws them; `reset_parameters` uses them.
        self.start = StartValues(1.0, int(torch.randint(2**63 - 1, (), device="cpu")))
        self._start_alone(None if self.padding_idx is None else self._row_of(self.padding_idx))
        self._own(self.weight)

    def _row_of(self, number: int) -> int:
        """Return the row of the weight that has this number in the table."""
        return number

    def __reduce_ex__(self, protocol: object) -> Any:
        # The class of a table is made at run time; a pickle names those it was made from.
        return _empty, self._made_of, self.__getstate__()

    # A resized table keeps its weight object, and transformers then sets these.
    @property
    def num_embeddings(self) -> int:
        """Number of rows of the present weight."""
        return self.num_rows

    @num_embeddings.setter
    def num_embeddings(self, value: int) -> None:
        assert value == self.num_rows, (value, self.num_rows)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # What a subclass has beside the weight, such as a scale, goes where the model goes.
        with self._without_weight():
            nn.Module._apply(self, fn, recurse)
        return super()._apply(fn, recurse)

    @contextmanager
    def _without_weight(self) -> Iterator[None]:
        weight = self._parameters.pop("weight")
        try:
            yield
        finally:
            self._parameters["weight"] = weight


class MappedEmbedding(HostedEmbedding):
    """A frozen table whose rows stay in the files of a checkpoint. Its weight has their shape and no values;
    it is in no state dict."""

    stored: PublishedRows

    def _own(self, weight: nn.Parameter, *others: Any, **options: Any) -> None:
        super()._own(weight, *others, **options)
        self.info.stored = self.stored

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        with self._without_weight():
            nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        if f"{prefix}weight" in state_dict:
            others[-1].append(
                f"the rows of {self.name} are those of {self.stored.checkpoint}; leave them out"
            )
        with self._without_weight():
            nn.Module._load_from_state_dict(self, state_dict, prefix, *others)

    def __getstate__(self) -> dict[str, object]:
        others = {key: value for key, value in self._parameters.items() if key != "weight"}
        return {**super().__getstate__(), "_parameters": others}

    def _restored_weight(self) -> nn.Parameter:
        return _no_values(self.stored, self.out_dtype)

    @property
    def num_rows(self) -> int:
        """Number of rows in the checkpoint."""
        return len(self.stored)


def _no_values(stored: PublishedRows, dtype: torch.dtype) -> nn.Parameter:
    """Return a weight of the rows' shape that takes no memory. NaN: whoever reads it sees that."""
    nothing = torch.full((), float("nan"), dtype=dtype, device="cpu")
    return nn.Parameter(nothing.expand(stored.shape), requires_grad=False)


class TrainedRows:
    """Rows of a published table that are trained: each has a slot in `weight`, filled from the file when
    training first looks it up. `weight` has room for `most_rows`; a page takes memory once it is used."""

    def __init__(self, stored: PublishedRows, most_rows: int, name: str) -> None:
        self.stored, self.name = stored, name
        shape = min(most_rows, len(stored)), stored.shape[1]
        with unfilled_rows():
            rows_VD = open_rows(shape, torch.float32, "memory", None, f"{name}, most_rows", StartValues(0, 0))
        self.weight = nn.Parameter(rows_VD)
        nothing = np.empty(0, np.int64)
        self._index = nothing, nothing  # ids, ascending, and their slots; replaced as one
        self._lock = threading.Lock()  # a worker and replicas look up in threads

    def __reduce__(self) -> Any:
        return _filled, (self.stored, len(self.weight), self.name, self.ids_K, self.rows_KD.clone())

    @property
    def ids_K(self) -> Tensor:
        """The trained rows' numbers, in the order of their slots."""
        ids_K, slots_K = self._index
        return torch.from_numpy(ids_K[np.argsort(slots_K)])

    @property
    def rows_KD(self) -> Tensor:
        """The trained rows, in the order of their slots, not copied."""
        return self.weight.detach()[: len(self._index[0])]

    def find(self, ids_N: Tensor) -> Tensor:
        """Return each id's slot, -1 if it has none."""
        (ids_K, slots_K), ids = self._index, ids_N.numpy()
        if not len(ids_K):
            return torch.full_like(ids_N, -1)
        position = np.searchsorted(ids_K, ids)
        position[position == len(ids_K)] = 0
        return torch.from_numpy(np.where(ids_K[position] == ids, slots_K[position], -1))

    def slots(self, ids: Tensor) -> Tensor:
        """Return each id's slot, which new ids get here. Raises UserError past `most_rows`."""
        unique_U, inverse_N, *_ = native.occurrences(ids.reshape(-1), len(self.stored))
        with self._lock:
            slots_U = self.find(unique_U)
            is_new = slots_U < 0
            new_U, first = unique_U[is_new], len(self._index[0])
            self._check_room(last := first + len(new_U))
            if len(new_U):
                # By the kernel, which does not raise the weight's version: nobody has read these slots yet.
                native.look_up(self.stored, new_U, self.weight.detach()[first:last])
                slots_U[is_new] = torch.arange(first, last)
                ids_K, slots_K = self._index
                at = np.searchsorted(ids_K, new_U.numpy())
                self._index = np.insert(ids_K, at, new_U), np.insert(slots_K, at, slots_U[is_new])
        return slots_U[inverse_N.long()].view(ids.shape)

    def _check_room(self, count: int) -> None:
        if count > len(self.weight):
            raise UserError(
                f"table {self.name!r}: {count:,} rows would be trained, but most_rows is "
                f"{len(self.weight):,}; give host_tables a larger one"
            )

    @torch.no_grad()
    def fill(self, ids_K: Tensor, rows_KD: Tensor) -> None:
        """Replace the trained rows by these, in their order. Raises UserError for ids and rows of another
        table, and past `most_rows`."""
        ids_K, wanted = row_numbers(ids_K, len(self.stored), self.name), (len(ids_K), self.stored.shape[1])
        if rows_KD.shape != wanted or len(ids_K.unique()) < len(ids_K):
            raise UserError(
                f"table {self.name!r}: rows of shape {tuple(rows_KD.shape)} with {len(ids_K.unique()):,} "
                f"numbers of rows; give as many different ones, of {wanted[1]} values"
            )
        self._check_room(len(ids_K))
        self.weight[: len(ids_K)] = rows_KD.to(self.weight)
        order_K = np.argsort(ids_K.numpy())
        self._index = ids_K.numpy()[order_K], order_K


def _filled(stored: PublishedRows, most_rows: int, name: str, ids_K: Tensor, rows_KD: Tensor) -> TrainedRows:
    trained = TrainedRows(stored, most_rows, name)
    trained.fill(ids_K, rows_KD)
    return trained


class AdaptedEmbedding(MappedEmbedding):
    """A table of a checkpoint of which some rows are trained: those are the rows of `weight`, all others stay
    in the checkpoint's files. A state dict has `trained_ids` and `trained_rows`."""

    trained: TrainedRows

    def _own(self, weight: nn.Parameter, *others: Any, **options: Any) -> None:
        HostedEmbedding._own(self, weight, *others, **options)
        self.info.numbers_of = lambda slots_U: self.trained.ids_K[slots_U]

    def _restored_weight(self) -> nn.Parameter:
        return self.trained.weight

    def _row_of(self, number: int) -> int:
        return int(self.trained.slots(torch.tensor([number])))

    def prepared(self, ids: Tensor) -> Lookup | None:
        """Prepare a lookup of these ids; see `HostEmbedding.prepared`."""
        if not self.ahead.is_placed or not self._trains():
            return None
        return self.ahead.prepare(self.weight, self._slots(ids))

    def _trains(self) -> bool:
        return torch.is_grad_enabled() and self.weight.requires_grad

    def _slots(self, ids: Tensor) -> Tensor:
        return self.trained.slots(row_numbers(ids, self.num_rows, self.name))

    @outside_of_graphs
    def forward(  # type: ignore[override]
        self, ids: Tensor, *, by_replica: bool = False, to: torch.device | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the rows of `ids`; see `HostEmbedding.forward`. A lookup that records a gradient makes their
        rows trained ones; raises UserError past `most_rows`, before anything is changed."""
        to = ids.device if to is None else to
        if self._trains():
            return super().forward(self._slots(ids), by_replica=by_replica, to=to)
        numbers = row_numbers(ids, self.num_rows, self.name)
        rows = native.look_up(self.stored, numbers)[0]
        slots_N = self.trained.find(numbers.reshape(-1))
        is_trained = slots_N >= 0
        rows.view(-1, self.dim)[is_trained] = self.trained.weight.detach()[slots_N[is_trained]]
        rows = self.as_model(rows)
        return tuple(self.in_shares(rows)) if by_replica and self.is_placed else rows.to(to)

    def freeze_rows(self, rows: Sequence[int]) -> None:
        """Give these rows no gradient; see `HostEmbedding.freeze_rows`."""
        super().freeze_rows(self._slots(torch.as_tensor(rows, dtype=torch.int64)).tolist())

    @property
    def frozen_rows(self) -> Sequence[int]:
        """Rows, ascending, that get no gradient."""
        return sorted(self.trained.ids_K[list(super().frozen_rows)].tolist())

    def fill(self, ids_K: Tensor, rows_KD: Tensor) -> None:
        """Replace the trained rows; see `TrainedRows.fill`. The same rows stay frozen."""
        frozen = self.frozen_rows
        self.trained.fill(ids_K, rows_KD)
        if self.padding_idx is not None:
            self._padding = self.info.padding = [self._row_of(self.padding_idx)]
        self.freeze_rows(frozen)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}trained_ids"] = self.trained.ids_K
        destination[f"{prefix}trained_rows"] = self.trained.rows_KD.clone()  # not all of the room for them

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        missing, unexpected, _ = others[-3:]
        keys = f"{prefix}trained_ids", f"{prefix}trained_rows"
        if all(key in state_dict for key in keys):
            self.fill(*(state_dict[key] for key in keys))
        else:
            missing += [key for key in keys if key not in state_dict]
        super()._load_from_state_dict(state_dict, prefix, *others)
        unexpected[:] = [key for key in unexpected if key not in keys]


def host_tables(
    model: nn.Module,
    larger_than: str | int = "256 MB",
    *,
    mapped: Path | str | None = None,
    train: str | None = None,
    most_rows: int = 1_000_000,
) -> list[str]:
    """Move every nn.Embedding whose weight is larger than `larger_than` to host memory, in place; return
    their names.

    The weights remain the same parameters, without a copy if they are on the CPU: names in `state_dict`,
    `save_pretrained` and `generate` go on working, and a subclass keeps its forward (such as a scale).
    `model.cuda()` and `.to(dtype)` leave the weights where they are and as they are. Their gradients are
    sparse: train them with `row_optimizer(rule, model)`, and all else with any optimizer of
    `dense_parameters(model)`. Call it before the model is wrapped in `DataParallel`. Embeddings that share
    one weight, such as those of an encoder and a decoder, go on sharing it. Warns of large tables that stay
    where they are, because another operation than nn.Embedding's looks them up.

    Args:
        larger_than: Bytes, or a text with a unit, such as "256 MB" or "2 GiB".
        mapped: A safetensors file, or a folder with one or with several and their index: the rows stay there,
            as `published` describes, and come in the type of the module's weight. They take page cache only;
            the model may have been built with `torch.device("meta")`. State dicts do not have them.
        train: "rows": a row that training looks up is copied, in float32, into a table of trained rows, which
            row optimizers train; lookups take it there from then on. None: mapped tables are frozen.
        most_rows: The most rows of a table that may be trained.

    Raises UserError, before anything is changed, for a table whose weight another layer has, too (a tied
    output layer reads all rows at each step), that normalises its rows (`max_norm`, `scale_grad_by_freq`), or
    whose type is not float32, float64 or bfloat16; for a weight on "meta" that is not mapped; and for a
    checkpoint that lacks a table, has another shape, or holds it in a way that cannot be mapped.
    """
    limit = _bytes(larger_than)
    if train not in (None, "rows") or (train and mapped is None) or most_rows < 1:
        raise UserError(
            f"host_tables: mapped={mapped!r}, train={train!r}, most_rows={most_rows!r}; train is None, or "
            '"rows" with a checkpoint to map, and most_rows at least 1'
        )
    large = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and not isinstance(module, HostEmbedding)
        and module.weight.nbytes > limit
    }
    tables = {name: module for name, module in large.items() if not _reads_its_weight(type(module))}
    owners: dict[int, dict[str, nn.Module]] = {}
    for path, owner in model.named_modules():
        for key, parameter in owner.named_parameters(path, recurse=False):
            owners.setdefault(_identity(parameter), {})[key] = owner
    checkpoint = None if mapped is None else Checkpoint(mapped)
    stored: dict[int, PublishedRows] = {}
    for name, module in tables.items():
        weight = module.weight
        sharers = {key: owner for key, owner in owners[_identity(weight)].items() if owner is not module}
        _check(name, module, [key for key, owner in sharers.items() if owner not in tables.values()], mapped)
        if checkpoint is not None and id(weight) not in stored:
            names = [name, *(key.removesuffix("weight").removesuffix(".") for key in sharers)]
            shape = cast(tuple[int, int], tuple(weight.shape))
            buffers = [key for key, _ in module.named_buffers(recurse=False)]
            rows = checkpoint.table(next(filter(checkpoint.has, names), name), shape, buffers)
            stored[id(weight)] = rows
    _say_what_stays(model, [name for name in large if name not in tables], limit, mapped)
    dtypes = {id(module.weight): module.weight.dtype for module in tables.values()}
    trained = {key: TrainedRows(rows, most_rows, rows.name) for key, rows in stored.items() if train}
    frozen = {key: _no_values(rows, dtypes[key]) for key, rows in stored.items() if not train}
    for name, module in tables.items():
        base, weight, key = HostedEmbedding, module.weight, id(module.weight)
        if key in trained:
            base, module.weight = AdaptedEmbedding, trained[key].weight
            vars(module).update(stored=stored[key], trained=trained[key])
        elif key in stored:
            base, module.weight = MappedEmbedding, frozen[key]
            vars(module).update(stored=stored[key])
        else:
            if not weight.is_cpu or not weight.is_contiguous():
                weight.data = weight.detach().cpu().contiguous()
            if weight.requires_grad:
                _warn_if_dense(name, weight)
        cast(Any, module).__class__ = _hosted(*cast(Any, (type(module), base)))
        cast(HostedEmbedding, module)._host(name, weight.dtype)
    return list(tables)


def _identity(weight: Tensor) -> int:
    # Two parameters may have one memory; on "meta" there is none.
    return id(weight) if weight.is_meta else weight.data_ptr()


def _reads_its_weight(kind: type[nn.Embedding]) -> bool:
    """Return whether a subclass's forward does not call that of its base class."""
    for base in kind.__mro__[: kind.__mro__.index(nn.Embedding)]:
        if "forward" in vars(base):
            names = inspect.unwrap(vars(base)["forward"]).__code__.co_names
            if "super" not in names and "forward" not in names:
                return True
    return False


def _say_what_stays(model: nn.Module, own: list[str], limit: int, mapped: Path | str | None) -> None:
    """Warn of large tables that are not moved. own: embeddings whose forward reads the weight itself. Raises
    UserError for one that should be mapped."""
    if own and mapped is not None:
        raise UserError(
            f"host_tables: the forward of {own[0]} reads its weight itself; a mapped table is looked up by "
            "super().forward(ids)"
        )
    # And matrices that may be tables: of nn.EmbeddingBag, and parameters of modules of other packages.
    staying = own + [
        name
        for path, module in model.named_modules()
        if not isinstance(module, nn.Embedding | HostEmbedding)
        and (isinstance(module, nn.EmbeddingBag) or not type(module).__module__.startswith("torch."))
        for name, weight in module.named_parameters(path, recurse=False)
        if weight.dim() == 2 and weight.nbytes > limit
    ]
    if staying:
        warnings.warn(
            f"host_tables: stays where it is: {', '.join(staying)}. Only tables that nn.Embedding.forward "
            "looks up are moved",
            stacklevel=3,
        )


def _warn_if_dense(name: str, weight: Tensor) -> None:
    """Warn once when the table's gradient has all rows, as something multiplies by it."""

    def look(weight: Tensor) -> None:
        if weight.grad is not None and not weight.grad.is_sparse:
            hook.remove()
            warnings.warn(
                f"host_tables: {name} gets a dense gradient, as something else than its lookup reads it (an "
                "output layer by F.linear?); each step then costs all rows",
                stacklevel=2,
            )

    hook = weight.register_post_accumulate_grad_hook(look)


def save_rows(model: nn.Module, file: Path | str) -> dict[str, int]:
    """Write the rows that were trained over a checkpoint (`host_tables(..., train="rows")`) and differ from
    it to a safetensors file, as row numbers and float32 rows by table, and a page about it beside it, in
    JSON. Return their number by table."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    page: dict[str, dict[str, Any]] = {}
    for name, table in _trained_tables(model).items():
        ids_K, order_K = table.trained.ids_K.sort()
        rows_KD = table.trained.rows_KD[order_K]
        differs_K = (native.look_up(table.stored, ids_K)[0] != rows_KD).any(1)
        ids_K, rows_KD = ids_K[differs_K], rows_KD[differs_K]
        tensors |= {key_in(name, "ids"): ids_K, key_in(name, "rows"): rows_KD}
        page[name] = {"rows": len(ids_K), "of": table.num_rows, "width": table.dim}
    file = Path(file)
    save_file(tensors, file)
    write_json(file.with_suffix(".json"), {"tables": page, "bytes": file.stat().st_size})
    return {name: about["rows"] for name, about in page.items()}


def load_rows(model: nn.Module, file: Path | str) -> None:
    """Replace the trained rows of a model's tables by those of a file of `save_rows`. Raises UserError for
    other tables, for numbers that are not rows, and for more rows than `most_rows`."""
    tables, saved = _trained_tables(model), read_rows(file)
    if tables.keys() != saved.keys():
        raise UserError(
            f"{file}: has rows of {', '.join(saved)}, the model trains those of {', '.join(tables)}; load it "
            "into a model with the same tables"
        )
    for module in model.modules():
        if isinstance(module, AdaptedEmbedding):
            module.fill(*saved[module.stored.name])


def _trained_tables(model: nn.Module) -> dict[str, AdaptedEmbedding]:
    tables = {part.stored.name: part for part in model.modules() if isinstance(part, AdaptedEmbedding)}
    if not tables:
        raise UserError(
            'there are no trained rows over a checkpoint; call host_tables(model, mapped=..., train="rows") '
            "before"
        )
    return tables


@cache
def _hosted(kind: Any, base: type[HostedEmbedding]) -> type[HostedEmbedding]:
    """Return the class of a hosted table that was of class `kind`."""
    # Below `kind` and above nn.Embedding in the method resolution order.
    bases = (base,) if kind is nn.Embedding else (kind, base)
    return type(kind.__name__, bases, {"__module__": kind.__module__, "_made_of": (kind, base)})


def _empty(kind: Any, base: Any) -> HostedEmbedding:
    hosted = _hosted(kind, base)
    return hosted.__new__(hosted)


def _check(name: str, module: nn.Embedding, sharers: list[str], mapped: object) -> None:
    weight = module.weight
    if sharers:
        raise UserError(
            f"host_tables: {name} ({weight.nbytes:,} B) shares its weight with {sharers[0]} (a tied output "
            f"layer reads all rows at each step); untie them, or use larger_than={weight.nbytes}"
        )
    if module.max_norm is not None or module.scale_grad_by_freq:
        option = "scale_grad_by_freq" if module.max_norm is None else "max_norm"
        raise UserError(f"host_tables: {name} has {option}, which host tables do not support; remove it")
    if mapped is None and weight.is_meta:
        raise UserError(
            f'host_tables: {name} is on "meta" and has no values; load it first, or map it with '
            "mapped=CHECKPOINT"
        )
    if (mapped is None and weight.dtype not in native.STORED) or weight.shape[1] > native.MAX_DIM:
        raise UserError(
            f"host_tables: {name} is {tuple(weight.shape)} of {weight.dtype}; host tables are float32, "
            f"float64 or bfloat16, with rows of at most {native.MAX_DIM} values"
        )


def _bytes(size: str | int) -> int:
    """Return a size in bytes. Raises UserError for other texts."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B\s*", size) if isinstance(size, str) else None
    if match is None:
        raise UserError(
            f'host_tables: larger_than={size!r}; give bytes, or a text such as "256 MB" or "2 GiB"'
        )
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))
