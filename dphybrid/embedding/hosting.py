"""Moves the large embeddings of any model to host memory, in place: `host_tables`. Their weights stay the
same parameters, under the same names, so saving, loading and generating go on as before."""

import json
import mmap
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from dphybrid.embedding import native
from dphybrid.embedding.storage import StartValues, mapped_rows
from dphybrid.embedding.table import HostEmbedding
from dphybrid.util.errors import UserError, suggestion

_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class HostedEmbedding(HostEmbedding, nn.Embedding):  # type: ignore[misc, override] # typed as HostEmbedding
    """An nn.Embedding whose weight stays in host memory; `host_tables` makes it of an existing one.

    A subclass of nn.Embedding keeps its own forward: its `super().forward(ids)` looks up here.
    """

    def _host(self, name: str) -> None:
        """Become a host table with the weight that is there."""
        weight, padding_idx = self.weight, self.padding_idx
        if not weight.is_cpu or not weight.is_contiguous():
            weight.data = weight.detach().cpu().contiguous()
        self.name, self._path = name, None
        # As nn.Embedding draws them; `reset_parameters` uses them.
        self.start = StartValues(1.0, int(torch.randint(2**63 - 1, (), device="cpu")))
        self.out_dtype = weight.dtype  # bfloat16 models expect bfloat16 rows
        self._start_alone(padding_idx)
        self._own(weight)

    def __reduce_ex__(self, protocol: object) -> Any:
        # The class of a subclass's table is made at run time; a pickle names the one it was made from.
        bases = type(self).__bases__
        return _empty, (nn.Embedding if bases[-1] is nn.Embedding else bases[0],), self.__getstate__()

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
        weight = self._parameters.pop("weight")
        try:
            nn.Module._apply(self, fn, recurse)
        finally:
            self._parameters["weight"] = weight
        return super()._apply(fn, recurse)


def host_tables(
    model: nn.Module, larger_than: str | int = "256 MB", *, mapped: Path | str | None = None
) -> list[str]:
    """Move every nn.Embedding whose weight is larger than `larger_than` to host memory, in place; return
    their names.

    The weights remain the same parameters, without a copy if they are on the CPU: names in `state_dict`,
    `save_pretrained` and `generate` go on working, and a subclass keeps its forward (such as a scale).
    `model.cuda()` and `.to(dtype)` leave the weights where they are and as they are. Their gradients are
    sparse: train them with `row_optimizer(rule, model)`, and all else with any optimizer of
    `dense_parameters(model)`. Call it before the model is wrapped in `DataParallel`.

    larger_than: bytes, or a text with a unit, such as "256 MB" or "2 GiB". mapped: a safetensors file, or a
    folder with one or with several and their index: the tables' rows are mapped from there, read-only, and
    frozen. They take page cache only; the model may have been built with `torch.device("meta")`.

    Raises UserError, before anything is changed, for a table that another layer shares (a tied output layer
    reads all rows at each step), that normalises its rows (`max_norm`, `scale_grad_by_freq`), or whose type
    is not float32, float64 or bfloat16; for a weight on "meta" that is not mapped; and for a checkpoint that
    lacks a table, has another shape or is damaged.
    """
    limit = _bytes(larger_than)
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and not isinstance(module, HostEmbedding)
        and module.weight.nbytes > limit
    }
    owners: dict[int, dict[str, nn.Module]] = {}
    for path, owner in model.named_modules():
        for key, parameter in owner.named_parameters(path, recurse=False):
            owners.setdefault(id(parameter), {})[key] = owner
    rows: dict[str, Tensor] = {}
    for name, module in found.items():
        _check(name, module, [key for key, owner in owners[id(module.weight)].items() if owner is not module])
        if mapped is not None:
            key = f"{name}.weight".removeprefix(".")  # the model itself may be the embedding
            rows[name] = mapped_tensor(mapped, key, tuple(module.weight.shape))
        elif module.weight.is_meta:
            raise UserError(
                f'host_tables: {name} is on "meta" and has no values; load it first, or map it with '
                "mapped=CHECKPOINT"
            )
    for name, module in found.items():
        if name in rows:
            module.weight = nn.Parameter(rows[name], requires_grad=False)
        cast(Any, module).__class__ = _hosted(type(module))
        cast(HostedEmbedding, module)._host(name)
    return list(found)


_classes: dict[Any, type[HostedEmbedding]] = {nn.Embedding: HostedEmbedding}


def _hosted(kind: type[nn.Embedding]) -> type[HostedEmbedding]:
    """Return the class of a hosted table that was of class `kind`."""
    if kind not in _classes:
        # Below `kind` and above nn.Embedding in the method resolution order.
        _classes[kind] = type(kind.__name__, (kind, HostedEmbedding), {"__module__": kind.__module__})
    return _classes[kind]


def _empty(kind: type[nn.Embedding]) -> HostedEmbedding:
    hosted = _hosted(kind)
    return hosted.__new__(hosted)


def _check(name: str, module: nn.Embedding, sharers: list[str]) -> None:
    weight = module.weight
    size = f"{weight.nbytes / 1e6:,.0f} MB" if weight.nbytes > 1e6 else f"{weight.nbytes:,} B"
    if sharers:
        raise UserError(
            f"host_tables: {name} ({size}) shares its weight with {sharers[0]} (a tied output layer reads "
            "all of its rows at each step); untie them, or leave it where it is with "
            f"larger_than={weight.nbytes}"
        )
    if module.max_norm is not None or module.scale_grad_by_freq:
        option = "scale_grad_by_freq" if module.max_norm is None else "max_norm"
        raise UserError(f"host_tables: {name} has {option}, which host tables do not support; remove it")
    if weight.dtype not in native.STORED or weight.shape[1] > native.MAX_DIM:
        raise UserError(
            f"host_tables: {name} is {tuple(weight.shape)} of {weight.dtype}; host tables are float32, "
            f"float64 or bfloat16, with rows of at most {native.MAX_DIM} values"
        )


_NORESERVE = 0x4000
"""Linux's MAP_NORESERVE, which Python's mmap names from 3.13 on."""
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F64": torch.float64, "F16": torch.float16}
"""Number formats of tables by their names in safetensors files."""


def mapped_tensor(checkpoint: Path | str, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return a tensor of a safetensors checkpoint, mapped into memory: pages are read when they are used, and
    writing does not reach the file.

    checkpoint: a file, or a folder with one file or with several and their index. shape: that it must have.
    Raises UserError if it is not there, has another shape or number format, or if the file is damaged or
    shorter than its header says.
    """
    from safetensors import SafetensorError, safe_open  # `dphybrid.embedding` needs only torch and numpy

    file = _file_with(Path(checkpoint), name)
    try:
        with safe_open(file, framework="numpy") as opened:  # checks the header and the file's size
            names = list(opened.keys())
            if name not in names:
                raise UserError(f"{file}: has no tensor {name!r}{_pieces(name, names)}")
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            entry = json.loads(stream.read(length))[name]
            found, dtype = tuple(entry["shape"]), _DTYPES.get(entry["dtype"])
            if shape is not None and found != shape:
                raise UserError(
                    f"{file}: {name} has shape {found}, but the model's is {shape}; use the config of this "
                    "checkpoint"
                )
            if dtype is None:
                raise UserError(
                    f"{file}: {name} is of {entry['dtype']}; a table has one of {', '.join(_DTYPES)}"
                )
            # Without NORESERVE, as torch and safetensors map it, the system refuses files larger than memory.
            flags = mmap.MAP_PRIVATE | _NORESERVE
            return mapped_rows(stream.fileno(), flags, found, dtype, 8 + length + entry["data_offsets"][0])
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: cannot be read as safetensors ({error}); fetch it again") from error


def _file_with(checkpoint: Path, name: str) -> Path:
    """Return the file of a checkpoint that should hold a tensor."""
    if not checkpoint.is_dir():
        if checkpoint.exists():
            return checkpoint
        raise UserError(f"{checkpoint}: does not exist; give a safetensors file, or a folder of them")
    indices = sorted(checkpoint.glob("*.safetensors.index.json"))
    if len(indices) == 1:
        try:
            file_of = json.loads(indices[0].read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{indices[0]}: is not an index of safetensors files ({error})") from error
        if name not in file_of:
            raise UserError(f"{indices[0]}: has no tensor {name!r}{_pieces(name, list(file_of))}")
        return checkpoint / Path(file_of[name]).name
    files = sorted(checkpoint.glob("*.safetensors"))
    if len(files) != 1:
        raise UserError(
            f"{checkpoint}: has {len(files)} safetensors files and {len(indices)} indices; give a folder "
            "with one file, or with several and one index, or the file itself"
        )
    return files[0]


def _pieces(name: str, names: list[str]) -> str:
    """Return a hint for a tensor that a checkpoint lacks."""
    stem = name.removesuffix(".weight")
    if pieces := [each for each in names if re.fullmatch(rf"{re.escape(stem)}\.shard_\d+\.weight", each)]:
        return (
            f"; it is stored in {len(pieces)} pieces ({pieces[0]}, ...), which cannot be mapped as one "
            "table: save it once as one tensor"
        )
    # A text model inside a larger one has other prefixes.
    same = [each for each in names if each.endswith("." + ".".join(name.split(".")[-2:]))]
    if same:
        return (
            f"; it has {same[0]!r}. If that is the one, set the module's weight to "
            "nn.Parameter(mapped_tensor(CHECKPOINT, NAME), requires_grad=False) and call host_tables without "
            "mapped"
        )
    return suggestion(name, names)


def _bytes(size: str | int) -> int:
    """Return a size in bytes. Raises UserError for other texts."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|kB|B)\s*", size) if isinstance(size, str) else None
    if found is None:
        raise UserError(
            f'host_tables: larger_than={size!r}; give bytes, or a text such as "256 MB" or "2 GiB"'
        )
    return int(float(found[1]) * _UNITS[found[2]])
