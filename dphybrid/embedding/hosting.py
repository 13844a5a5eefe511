"""Moves the large embeddings of any model to host memory, in place, or maps them from a published checkpoint:
`host_tables`. Rows may be trained over a mapped table, saved and loaded: `save_rows`, `load_rows`.

Letters: N ids of a lookup, U unique ids, K trained rows, D width of a row.
"""

from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from dphybrid.embedding import native
from dphybrid.embedding.ahead import Lookup
from dphybrid.embedding.lookup import row_numbers
from dphybrid.embedding.published import Checkpoint, PublishedRows, TrainedRows, read_rows
from dphybrid.embedding.table import HostEmbedding
from dphybrid.embedding.weights import RowsInfo
from dphybrid.util.compiling import outside_of_graphs
from dphybrid.util.errors import UserError


class HostedEmbedding(HostEmbedding, nn.Embedding):  # type: ignore[misc] # typed as HostEmbedding
    """An nn.Embedding whose weight is in host memory.

    A subclass of nn.Embedding keeps its own forward: its `super().forward(ids)` looks up here.
    """

    @classmethod
    def made_of(cls, embedding: nn.Embedding, name: str, weight: nn.Parameter, **attributes: Any) -> None:
        """Make an embedding a table of this class, in place. attributes: those of the class."""
        dtype, embedding.weight = embedding.weight.dtype, weight
        vars(embedding).update(attributes)
        cast(Any, embedding).__class__ = _hosted(*cast(Any, (type(embedding), cls)))
        table = cast(HostedEmbedding, embedding)
        table._set_up(name, dtype)
        if table.padding_idx is not None:
            table._padding = table._row_of(table.padding_idx)
        table._own(weight)

    def _row_of(self, number: int) -> int:
        """Return the row of the weight that has this number in the table."""
        return number


@cache
def _hosted(kind: Any, base: type[HostedEmbedding]) -> type[HostedEmbedding]:
    """Return the class of a hosted table that was of class `kind`."""
    # Below `kind` and above nn.Embedding in the method resolution order.
    bases = (base,) if kind is nn.Embedding else (kind, base)
    return type(kind.__name__, bases, {"__module__": kind.__module__})


class MappedEmbedding(HostedEmbedding):
    """A frozen table whose rows stay in the files of a checkpoint. Its weight has their shape and no values;
    it is in no state dict."""

    stored: PublishedRows

    def _own(self, weight: Tensor) -> RowsInfo:
        info = super()._own(weight)
        info.stored = self.stored
        return info

    def __getstate__(self) -> dict[str, object]:
        others = {key: value for key, value in self._parameters.items() if key != "weight"}
        return {**super().__getstate__(), "_parameters": others}

    def _restored_weight(self) -> nn.Parameter:
        return _no_values(self.stored, self.out_dtype)

    @property
    def num_rows(self) -> int:
        """Number of rows in the checkpoint."""
        return len(self.stored)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        with self._without_weight():
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        with self._without_weight():
            super()._load_from_state_dict(state_dict, prefix, *others)


def _no_values(stored: PublishedRows, dtype: torch.dtype) -> nn.Parameter:
    """Return a weight of the rows' shape that takes no memory. NaN: whoever reads it sees that."""
    nothing = torch.full((), float("nan"), dtype=dtype, device="cpu")
    return nn.Parameter(nothing.expand(stored.shape), requires_grad=False)


class AdaptedEmbedding(MappedEmbedding):
    """A table of a checkpoint of which some rows are trained: those are the rows of `weight`, all others stay
    in the checkpoint's files. A state dict has `trained_ids` and `trained_rows`."""

    trained: TrainedRows

    def _own(self, weight: Tensor) -> RowsInfo:
        info = HostedEmbedding._own(self, weight)
        info.numbers_of = lambda slots_U: self.trained.ids_K[slots_U]
        return info

    def _restored_weight(self) -> nn.Parameter:
        return self.trained.weight

    def _slots(self, ids: Tensor) -> Tensor:
        return self.trained.slots(row_numbers(ids, self.num_rows, self.name))

    def _row_of(self, number: int) -> int:
        return int(self._slots(torch.tensor([number])))

    def _prepared(self, ids: Tensor) -> Lookup | None:
        # A lookup that does not train reads the checkpoint, too: in the step.
        trains = self.ahead.is_placed and self._trains(self.weight)
        return super()._prepared(self._slots(ids)) if trains else None

    @outside_of_graphs
    def forward(  # type: ignore[override]
        self, ids: Tensor, *, by_replica: bool = False, to: torch.device | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the rows of `ids`; see `HostEmbedding.forward`. A lookup that records a gradient makes their
        rows trained ones; raises UserError past `most_rows`, before anything is changed."""
        to = ids.device if to is None else to
        if self._trains(self.weight):
            return super().forward(self._slots(ids), by_replica=by_replica, to=to)
        numbers = row_numbers(ids, self.num_rows, self.name)
        rows = native.look_up(self.stored, numbers)[0]
        slots_N = self.trained.find(numbers.reshape(-1))
        is_trained = slots_N >= 0
        rows.view(-1, self.dim)[is_trained] = self.trained.weight.detach()[slots_N[is_trained]]
        rows = self._as_model(rows)
        return rows.to(to)

    def fill(self, ids_K: Tensor, rows_KD: Tensor) -> None:
        """Replace the trained rows; see `TrainedRows.fill`."""
        self.trained.fill(ids_K, rows_KD)
        if self.padding_idx is not None:
            self._padding = self._info.padding = self._row_of(self.padding_idx)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}trained_ids"] = self.trained.ids_K
        destination[f"{prefix}trained_rows"] = self.trained.rows_KD.clone()  # not all of the room for them

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        missing, unexpected, _ = others[-3:]
        keys = f"{prefix}trained_ids", f"{prefix}trained_rows"
        missing += (lacking := [key for key in keys if key not in state_dict])
        if not lacking:
            self.fill(*(state_dict[key] for key in keys))
        super()._load_from_state_dict(state_dict, prefix, *others)
        unexpected[:] = [key for key in unexpected if key not in keys]


def host_tables(
    model: nn.Module,
    larger_than: float = 256e6,
    *,
    mapped: Path | str | None = None,
    train: str | None = None,
    most_rows: int = 1_000_000,
) -> list[str]:
    """Move every nn.Embedding whose weight has more than `larger_than` bytes to host memory, in place; return
    their names.

    The weights remain the same parameters, without a copy if they are on the CPU: names in `state_dict`,
    `save_pretrained` and `generate` go on working, and a subclass keeps its forward (such as a scale), which
    must look rows up by `super().forward(ids)`. `model.cuda()` and `.to(dtype)` leave the weights where they
    are and as they are. Their gradients are sparse: train them with `row_optimizer(rule, model)`, and all
    else with any optimizer of `dense_parameters(model)`. Call it before the model is wrapped in
    `DataParallel`. Embeddings that share one weight, such as those of an encoder and a decoder, go on sharing
    it.

    Args:
        mapped: A folder with safetensors files: the rows stay there, as `published` describes, and come in
            the type of the module's weight. They take page cache only; the model may have been built with
            `torch.device("meta")`. State dicts do not have them.
        train: "rows": a row that training looks up is copied, in float32, into a table of trained rows, which
            row optimizers train; lookups take it there from then on. None: mapped tables are frozen.
        most_rows: The most rows of a table that may be trained.

    Raises UserError, before anything is changed, for a table whose weight another layer has, too (a tied
    output layer reads all rows at each step), that normalises its rows (`max_norm`, `scale_grad_by_freq`), or
    whose type is not float32, float64 or bfloat16; for a weight on "meta" that is not mapped; and for a
    checkpoint that lacks a table, has another shape, or holds it in a way that cannot be mapped.
    """
    if train not in (None, "rows") or (train and mapped is None) or most_rows < 1:
        raise UserError(
            f"host_tables: mapped={mapped!r}, train={train!r}, most_rows={most_rows!r}; train is None, or "
            '"rows" with a checkpoint to map, and most_rows at least 1'
        )
    checkpoint = None if mapped is None else Checkpoint(mapped)
    tables = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and not isinstance(module, HostEmbedding)
        and module.weight.nbytes > larger_than
    }
    others = {
        id(weight): key
        for name, module in model.named_modules()
        for key, weight in module.named_parameters(name, recurse=False)
        if module not in tables.values()
    }
    kinds: dict[int, tuple[type[HostedEmbedding], nn.Parameter, dict[str, object]]] = {}
    for name, module in tables.items():
        weight = module.weight
        _check(name, module, others.get(id(weight)), mapped)
        if checkpoint is not None and id(weight) not in kinds:
            stored = checkpoint.table(name, cast(tuple[int, int], tuple(weight.shape)))
            if train:
                trained = TrainedRows(stored, most_rows)
                kinds[id(weight)] = AdaptedEmbedding, trained.weight, {"stored": stored, "trained": trained}
            else:
                kinds[id(weight)] = MappedEmbedding, _no_values(stored, weight.dtype), {"stored": stored}
    for name, module in tables.items():
        weight = cast(nn.Parameter, module.weight)
        kind, held, attributes = kinds.get(id(weight), (HostedEmbedding, weight, {}))
        if held is weight and not (weight.is_cpu and weight.is_contiguous()):
            weight.data = weight.detach().cpu().contiguous()
        kind.made_of(module, name, held, **attributes)
    return list(tables)


def save_rows(model: nn.Module, file: Path | str) -> None:
    """Write the rows that were trained over a checkpoint (`host_tables(..., train="rows")`) to a safetensors
    file, as row numbers and float32 rows by table."""
    from safetensors.torch import save_file

    tensors = dict[str, Tensor]()
    for name, table in _trained_tables(model).items():
        tensors |= {f"{name}.ids": table.trained.ids_K, f"{name}.rows": table.trained.rows_KD.clone()}
    save_file(tensors, file)


def load_rows(model: nn.Module, file: Path | str) -> None:
    """Replace the trained rows of a model's tables by those of a file of `save_rows`. Raises UserError for
    other tables, for numbers that are not rows, and for more rows than `most_rows`."""
    tables, saved = _trained_tables(model), read_rows(file)
    if tables.keys() != saved.keys():
        raise UserError(
            f"{file}: has rows of {', '.join(saved)}, the model trains those of {', '.join(tables)}; load it "
            "into a model with the same tables"
        )
    for name, table in tables.items():
        table.fill(*saved[name])


def _trained_tables(model: nn.Module) -> dict[str, AdaptedEmbedding]:
    tables = {part.stored.name: part for part in model.modules() if isinstance(part, AdaptedEmbedding)}
    if not tables:
        raise UserError(
            'there are no trained rows over a checkpoint; call host_tables(model, mapped=..., train="rows") '
            "before"
        )
    return tables


def _check(name: str, module: nn.Embedding, sharer: str | None, mapped: object) -> None:
    weight = module.weight
    if sharer is not None:
        raise UserError(
            f"host_tables: {name} ({weight.nbytes:,} B) shares its weight with {sharer} (a tied output "
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
