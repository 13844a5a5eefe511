"""A trained model as a folder that predicts without dphybrid: tables to map, the rest as programs of
`torch.export`, the encoder's page, and the Python that joins them.

A model is cut at its lookups: `lookups.pt2` gives the ids of each, whose rows are gathered outside, and
`dense.pt2` goes on from the rows. Nothing here depends on the recipe. Letters: B samples.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dphybrid.data.table import cells
from dphybrid.data.table.column import Column
from dphybrid.data.table.kinds import Bag, Category, Ignore, Numeric, Text, Time
from dphybrid.embedding import find_tables
from dphybrid.parallel import find_data_parallel
from dphybrid.serving.predict import Predictor, open_predictor
from dphybrid.training.tensor_file import write_tensors
from dphybrid.util.digests import file_digest
from dphybrid.util.errors import UserError
from dphybrid.util.files import check_target, making, read_json, write_json, write_text

_EXAMPLES = 11
"""Samples of the batch that programs are traced with: unlike other sizes of a model."""
_KINDS = (Bag, Category, Ignore, Numeric, Text, Time)
"""Columns that exported/encode.py reads."""
PROGRAMS = Path(__file__).parent / "exported"
_README = """# Predictions of {predicts}

    python predict.py example.json

needs torch, safetensors, numpy and polars (exported with torch {torch}, polars {polars}). In Python:

    import sys; sys.path.append("this/folder")
    from predict import Model
    model = Model()
    model.predict({{"column": [value, ...], ...}})   # or a polars frame, or a list of records

| file | what it holds |
| --- | --- |
| predict.py, encode.py, cells.py | the program; from cells to arrays |
| tables/*.safetensors | the embedding tables, mapped into memory: only looked-up rows take memory |
| programs.py, programs.safetensors | the model, traced: the ids of each lookup; from rows to predictions |
| lookups.pt2, dense.pt2 | the same for torch.export.load (AOTInductor, C++) |
| encoder/ | columns, their statistics and values |
| signature.json, example.json | columns and answers by name; a request and its answer |
| SHA256SUMS | `sha256sum --check --quiet SHA256SUMS` names a file that is damaged |
"""

_PROGRAMS = '''"""The model, traced by torch.export: from inputs to ids, and from rows to predictions."""

import operator
from math import inf, nan

import torch
from torch import device
'''

_Batch = dict[str, Tensor]
_Answer = Callable[[str, Tensor], Tensor]


@contextmanager
def _looked_up(model: nn.Module, answer: _Answer) -> Iterator[None]:
    """While the block runs, `answer` gives the rows of a table's ids, by its name, and regions are their
    modules: the record of splits would make the batch's size a constant."""
    tables, regions = find_tables(model), find_data_parallel(model).values()

    def forward(name: str, ids: Tensor, *, by_replica: bool = False) -> Tensor | list[Tensor]:
        rows = answer(name, ids)
        return [rows] if by_replica else rows

    try:
        for name, table in tables.items():
            table.forward = partial(forward, name)  # type: ignore[method-assign]
        for region in regions:
            region.forward = region.module.__call__  # type: ignore[method-assign]
        yield
    finally:
        for changed in (*tables.values(), *regions):
            del changed.forward


class _Part(nn.Module):
    """A model's part before its rows, or after them. Inputs that it does not use are zeros."""

    def __init__(self, model: nn.Module, example: _Batch, used: list[str]) -> None:
        super().__init__()
        self.model, self._example, self._used = model, example, used

    def _whole(self, batch: _Batch) -> _Batch:
        num_samples = batch[self._used[0]].shape[0]
        return {
            name: batch[name]
            if name in self._used
            else torch.zeros((num_samples, *value.shape[1:]), dtype=value.dtype)
            for name, value in self._example.items()
        }


class _Lookups(_Part):
    """batch -> the ids of each lookup."""

    def __init__(self, model: nn.Module, example: _Batch, used: list[str], dims: list[int]) -> None:
        super().__init__(model, example, used)
        self._dims = dims

    def forward(self, batch: _Batch) -> list[Tensor]:
        asked: list[Tensor] = []

        def note(_: str, ids: Tensor) -> Tensor:
            asked.append(ids)
            return torch.zeros(*ids.shape, self._dims[len(asked) - 1])

        with _looked_up(self.model, note):
            self.model(self._whole(batch))
        return asked


class _Dense(_Part):
    """(batch, rows of each lookup) -> what the model gives."""

    def forward(self, batch: _Batch, rows: list[Tensor]) -> _Batch:
        left = iter(rows)
        with _looked_up(self.model, lambda *_: next(left)):
            found: _Batch = self.model(self._whole(batch))
        return found


class _Predicting(nn.Module):
    """batch -> predictions. link: from logits to predictions, of a label."""

    def __init__(self, model: nn.Module, link: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self._link = model, link

    def forward(self, batch: _Batch) -> _Batch:
        return {"prediction": self._link(self.model(batch)["logits"])}


class _Programs:
    """A model's two programs, and what they need. tables: rows and their type in the model, by name.
    lookups: the table of each. used: the inputs that are read."""

    def __init__(self, model: nn.Module, example: _Batch) -> None:
        """Raises whatever torch.export does for a model that it cannot trace."""
        tables = find_tables(model)
        self.tables = {name: (table.settled(), table.out_dtype) for name, table in tables.items()}
        self.lookups: list[str] = []
        self._rows: list[Tensor] = []

        def note(name: str, ids: Tensor) -> Tensor:
            self.lookups.append(name)
            self._rows.append(self._gathered(name, ids))
            return self._rows[-1]

        with torch.no_grad(), _looked_up(model, note):
            model(example)
        weights = {name: table.weight for name, table in tables.items()}
        for table in tables.values():  # else a program would hold its rows
            table.weight = nn.Parameter(torch.empty(0, table.dim), requires_grad=False)
        dims = [tables[name].dim for name in self.lookups]
        self.used = [name for name in example if name != "labels_B"]  # only the loss reads them
        for _ in range(2):  # the second time without inputs that nothing reads
            batch = {name: example[name] for name in self.used}
            self.asks = _traced(_Lookups(model, example, self.used, dims), batch)
            self.dense = _traced(_Dense(model, example, self.used), batch, self._rows)
            read = _read(self.asks, batch) | _read(self.dense, batch)
            if read.issuperset(self.used):
                break
            self.used = [name for name in self.used if name in read]
        for name, table in tables.items():
            table.weight = weights[name]
        calls = [("lookups", self.asks), ("dense", self.dense)]
        self.text = _PROGRAMS + "".join(_source(name, program) for name, program in calls)
        self._held: dict[str, Tensor] = {}
        self.takes = {name: self._hold(name, program) for name, program in calls}
        self._space: dict[str, Any] = {}
        exec(compile(self.text, "programs.py", "exec"), self._space)  # noqa: S102 - torch has just written it

    def _hold(self, name: str, program: torch.export.ExportedProgram) -> list[str | None]:
        """Keep the tensors that a program takes before its inputs; return their names, None for those that it
        does not read. Both programs have the model's parameters; their constants may share names."""
        users, takes = _users(program), list[str | None]()
        for spec in program.graph_signature.input_specs:
            if spec.target is not None:
                own = spec.target in program.constants
                key = f"{name}.{spec.target}" if own else spec.target
                takes.append(key if users[spec.arg.name] else None)
                if takes[-1]:
                    held = program.constants if own else program.state_dict
                    self._held[key] = held[spec.target].detach()
        return takes

    def run(self, batch: _Batch) -> Tensor:
        """Return the predictions as predict.py computes them."""
        inputs = [batch[name] for name in self.used]
        ids = self._call("lookups", inputs)
        rows = [self._gathered(name, each) for name, each in zip(self.lookups, ids, strict=True)]
        return self._call("dense", [*inputs, *rows])[0]

    def _call(self, name: str, inputs: list[Tensor]) -> Sequence[Tensor]:
        found: Sequence[Tensor] = self._space[name](
            *(each and self._held[each] for each in self.takes[name]), *inputs
        )
        return found

    def write(self, folder: Path) -> None:
        """Write the tables and the programs: as Python, which a process reads in a moment, and for
        `torch.export.load`, which imports half of torch and checks sizes in each call."""
        (folder / "tables").mkdir()
        for name, (rows_VD, _) in self.tables.items():
            write_tensors(folder / "tables" / f"{name}.safetensors", {"weight": rows_VD})
        write_tensors(folder / "programs.safetensors", self._held)
        write_text(folder / "programs.py", self.text)
        for name, program in (("lookups", self.asks), ("dense", self.dense)):
            torch.export.save(program, folder / f"{name}.pt2")

    def _gathered(self, name: str, ids: Tensor) -> Tensor:
        rows_VD, dtype = self.tables[name]
        return rows_VD[ids].to(dtype)


def _traced(module: nn.Module, *arguments: object) -> torch.export.ExportedProgram:
    """Return the program of a module for arguments of any size, without operations that nothing needs: torch
    keeps those that draw random numbers, which a dropout of an evaluation does not."""
    dims = torch.export.Dim
    sizes = tree_map(
        lambda t: {d: dims.AUTO if d else dims.DYNAMIC for d, size in enumerate(t.shape) if size > 1},
        arguments,
    )
    with torch.no_grad():
        program = torch.export.export(module, arguments, dynamic_shapes=sizes)
    for node in program.graph.find_nodes(
        op="call_function", target=torch.ops.aten._assert_tensor_metadata.default
    ):
        program.graph.erase_node(node)
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.dropout.default):
        if not node.args[2]:
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


def _source(name: str, program: torch.export.ExportedProgram) -> str:
    """Return a program as a Python function. Raises ValueError for one that calls others."""
    if calls := list(program.graph.find_nodes(op="get_attr")):
        raise ValueError(f"it calls a program of its own, {calls[0].target}")
    source = program.graph.python_code("self").src.strip().replace("def forward(self, ", f"def {name}(", 1)
    return f"\n\n{source}\n"


def _users(program: torch.export.ExportedProgram) -> dict[str, int]:
    """Return how often a program reads each of its inputs."""
    return {node.name: len(node.users) for node in program.graph.find_nodes(op="placeholder")}


def _read(program: torch.export.ExportedProgram, batch: _Batch) -> set[str]:
    """Return the inputs of a batch that a program reads."""
    users = _users(program)
    return {
        name for name, place in zip(batch, program.graph_signature.user_inputs, strict=False) if users[place]
    }


def export(checkpoint: Path, out: str | Path, *, onnx: bool = False) -> Path:
    """Write the model of a checkpoint into the new folder `out`, which needs no dphybrid: a model that scores
    rows of a table, or whose recipe's predictor has a method `export(folder)`. `SHA256SUMS` lists its files.

    onnx: also `dense.onnx`, whose inputs are the model's and the rows. Raises UserError when the folder
    exists, when the recipe has no export, and for a model that torch.export cannot trace.
    """
    target = Path(out).expanduser()
    if target.exists():
        raise UserError(f"--out {out}: is there already; give a new folder, or remove it first")
    check_target(target, f"--out {out}")
    predictor = open_predictor(checkpoint)
    of_rows = isinstance(predictor, Predictor)
    if not of_rows and not hasattr(predictor, "export"):
        raise UserError(f"{checkpoint}: its recipe's predictor has no method export(folder)")
    if not of_rows and onnx:
        raise UserError("--onnx: is for models that score rows of a table; this one has its own export")
    with making(target) as folder:
        if isinstance(predictor, Predictor):
            _export_rows(predictor, folder, onnx)
        else:
            predictor.export(folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        lines = [f"{file_digest(path)}  {path.relative_to(folder)}\n" for path in files]
        write_text(folder / "SHA256SUMS", "".join(lines))
    return target


def _export_rows(predictor: Predictor, folder: Path, onnx: bool) -> None:
    columns = predictor.encoder.columns
    if others := [column for column in columns if type(column) not in _KINDS]:
        raise UserError(
            f"column {others[0].name!r}: is of kind {others[0].role}, which exports do not read; they "
            f"read {', '.join(kind.role for kind in _KINDS)}"
        )
    rows = _example(columns)
    programs = _programs(predictor, rows)
    programs.write(folder)
    if onnx:
        _write_onnx(programs, folder / "dense.onnx")
    predictor.encoder.save(folder / "encoder")
    page = folder / "encoder/encoder.json"
    write_json(page, {**read_json(page), "no_value": ["", *predictor.no_value]})
    _write_pages(predictor, programs, rows, folder)


def _example(columns: Sequence[Column]) -> pl.DataFrame:
    """Return rows of values that the columns know, and one without values at the end."""
    read = (column for column in columns if not isinstance(column, Ignore))
    return pl.DataFrame({column.name: [_known(column)] * (_EXAMPLES - 1) + [None] for column in read})


def _known(column: Column) -> object:
    if isinstance(column, Numeric):
        return round(column.learned.mean, 2) if not column.learned.log else 1.0
    if isinstance(column, Time):
        return "2024-03-12 08:30"
    if not isinstance(column, Bag):
        return (column.learned.head(1).to_list() or ["unknown"])[0]
    items = column.learned.head(2).to_list() or ["unknown"]
    return (" " if isinstance(column, Text) else column.separator).join(items)


def _programs(predictor: Predictor, rows: pl.DataFrame) -> _Programs:
    batch = predictor.batch(rows)
    model = _Predicting(predictor.model, predictor.task.link).eval().requires_grad_(False)
    batches = [batch, {name: value[:1] for name, value in batch.items()}]
    with torch.inference_mode():
        wanted = [model(each)["prediction"] for each in batches]
    try:
        programs = _Programs(model, batch)
        with torch.inference_mode():
            found = [programs.run(each) for each in batches]
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{predictor.folder}: torch.export cannot trace this model: {reason}") from error
    if not all(map(torch.equal, wanted, found)):
        raise UserError(
            f"{predictor.folder}: the traced model predicts other numbers; it depends on its batch's values"
        )
    return programs


def _write_onnx(programs: _Programs, file: Path) -> None:
    try:
        names = [*programs.used, *(f"rows_{place}" for place in range(len(programs.lookups)))]
        torch.onnx.export(programs.dense, f=file, input_names=names, dynamo=True, verbose=False)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"--onnx: torch's exporter cannot write this model: {reason}") from error


def _write_pages(predictor: Predictor, programs: _Programs, rows: pl.DataFrame, folder: Path) -> None:
    label = predictor.task.label
    types = {name: str(programs.tables[name][1]).removeprefix("torch.") for name in programs.lookups}
    page = {
        "format": 1,
        "predicts": predictor.predicts,
        "classes": list(predictor.classes),
        "inputs": programs.used,
        "lookups": [[name, types[name]] for name in programs.lookups],
        "tensors": programs.takes,
        "batch_size": predictor.batch_size,
        "torch": torch.__version__,
    }
    write_json(folder / "model.json", page)
    columns = {c.name: "number" if isinstance(c, Numeric) else "text" for c in predictor.encoder.columns}
    asked = {name: columns[name] for name in rows.columns}
    write_json(
        folder / "signature.json",
        {"columns": asked, "returns": label.columns, "classes": list(predictor.classes)},
    )
    shown = rows[[0, -1]]
    answer = {"rows": shown.to_dict(as_series=False), "predictions": predictor.predict(shown).tolist()}
    write_json(folder / "example.json", answer)
    for file in (PROGRAMS / "predict.py", PROGRAMS / "encode.py", Path(cells.__file__)):
        shutil.copyfile(file, folder / file.name)
    write_text(
        folder / "README.md",
        _README.format(predicts=predictor.predicts, torch=torch.__version__, polars=pl.__version__),
    )
