"""Exports a trained model as a folder that predicts without dphybrid: tables to map into memory, two programs
of `torch.export`, the encoder's page, and the Python code that joins them.

The model is cut at its lookups: `lookups.pt2` computes the ids of each lookup, `predict.py` gathers their
rows, and `dense.pt2` computes the predictions from the rows. Nothing here depends on the recipe. Letters: B
samples, V rows of a table, D dimension of a row.
"""

import io
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import polars as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dphybrid.data.table import cells
from dphybrid.data.table.column import Column
from dphybrid.data.table.kinds import Bag, Category, Ignore, Numeric, Text, Time, Whole
from dphybrid.embedding import find_tables
from dphybrid.parallel import find_data_parallel
from dphybrid.serving.predict import Predictor, open_predictor
from dphybrid.training.tensor_file import table_file, write_tensors
from dphybrid.util.digests import file_digest
from dphybrid.util.errors import UserError
from dphybrid.util.files import (
    check_target,
    given_path,
    making,
    read_json,
    write_bytes,
    write_json,
    write_text,
)

_EXAMPLES = 11
"""Samples of the batch that programs are traced with: hardly a size that also occurs in the model, which
torch.export could take for the batch size."""
_KINDS = (Bag, Category, Ignore, Numeric, Text, Time, Whole)
"""Kinds of columns that exported/predict.py can encode."""
PROGRAM = Path(__file__).parent / "exported" / "predict.py"
_README = """# Predictions of {predicts}

    python predict.py example.json

needs torch, safetensors, numpy and polars (exported with torch {torch}, polars {polars}). In Python:

    import sys; sys.path.append("this/folder")
    from predict import Model
    model = Model()
    model.predict({{"column": [value, ...], ...}})   # or a polars frame, or a list of records
    model.predict_classes(...)                     # the classes of a label that has some

| file | what it holds |
| --- | --- |
| predict.py, cells.py | the program: from cells to arrays, and to predictions |
| tables/*.safetensors | the embedding tables, mapped into memory: only looked-up rows take memory |
| lookups.pt2, dense.pt2 | the model as torch.export traced it: columns to ids; rows to predictions |
| encoder/ | columns, their statistics and values |
| model.json, example.json | the names of inputs and outputs; an example of a request and its answer |
| SHA256SUMS | `sha256sum --check --quiet SHA256SUMS` names damaged files |
"""

_Batch = dict[str, Tensor]


@contextmanager
def _looked_up(model: nn.Module, answer: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """While the block runs, lookups return `answer(table's name, ids)`, and regions call their module
    directly: a region records how it splits a batch, which would make the batch size a constant."""
    tables, regions = find_tables(model), find_data_parallel(model).values()

    def forward(name: str, ids: Tensor, *, by_replica: bool = False) -> Tensor | list[Tensor]:
        rows = answer(name, ids)
        return [rows] if by_replica else rows

    # Set on the objects, where they hide the methods of the classes until they are deleted.
    try:
        for name, table in tables.items():
            table.forward = partial(forward, name)  # type: ignore[method-assign,assignment]
        for region in regions:
            region.forward = region.module.__call__  # type: ignore[method-assign]
        yield
    finally:
        for changed in (*tables.values(), *regions):
            del changed.forward


class _Lookups(nn.Module):
    """batch -> the ids of each lookup. dims: for each lookup the width of its rows."""

    def __init__(self, model: nn.Module, dims: list[int]) -> None:
        super().__init__()
        self.model, self._dims = model, dims

    def forward(self, batch: _Batch) -> list[Tensor]:
        found: list[Tensor] = []

        def note(_: str, ids: Tensor) -> Tensor:
            found.append(ids)
            # With zeros as rows the trace reaches the next lookup. `_traced` removes the operations that no
            # ids depend on.
            return torch.zeros(*ids.shape, self._dims[len(found) - 1])

        with _looked_up(self.model, note):
            self.model(batch)
        return found


class _Dense(nn.Module):
    """(batch, rows of each lookup) -> predictions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: _Batch, rows: list[Tensor]) -> Tensor:
        left = iter(rows)
        with _looked_up(self.model, lambda *_: next(left)):
            found: Tensor = self.model(batch)
        return found


class _Predicting(nn.Module):
    """batch -> predictions. link: from logits to predictions of the label."""

    def __init__(self, model: nn.Module, link: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self._link = model, link

    def forward(self, batch: _Batch) -> Tensor:
        labels_B = torch.zeros(batch["ids_BF"].shape[0])  # only the loss reads them
        return self._link(self.model({**batch, "labels_B": labels_B})["logits"])


class _Programs:
    """A model's two programs. inputs: names of the batch's tensors, in the order of the arguments. tables:
    name -> (rows, type that the model computes with). lookups: for each lookup the table's name."""

    def __init__(self, model: nn.Module, example: _Batch) -> None:
        """Trace the model. Raises any error of torch.export, if it cannot trace the model."""
        tables = find_tables(model)
        self.inputs = list(example)
        self.tables = {name: (table.settled(), table.out_dtype) for name, table in tables.items()}
        self.lookups: list[str] = []
        rows: list[Tensor] = []

        def note(name: str, ids: Tensor) -> Tensor:
            self.lookups.append(name)
            rows.append(self._gathered(name, ids))
            return rows[-1]

        with torch.no_grad(), _looked_up(model, note):
            model(example)
        weights = {name: table.weight for name, table in tables.items()}
        for table in tables.values():  # otherwise the programs would contain the rows, too
            table.weight = nn.Parameter(torch.empty(0, table.dim), requires_grad=False)
        dims = [tables[name].dim for name in self.lookups]
        self.programs = {
            "lookups": _traced(_Lookups(model, dims), example),
            "dense": _traced(_Dense(model), example, rows),
        }
        for name, table in tables.items():
            table.weight = weights[name]

    def run(self, batch: _Batch) -> Tensor:
        """Return the predictions as predict.py computes them."""
        # Without guards, as predict.py runs them.
        find_ids, dense = (program.module(check_guards=False) for program in self.programs.values())
        ids = zip(self.lookups, find_ids(batch), strict=True)
        found: Tensor = dense(batch, [self._gathered(name, each) for name, each in ids])
        return found

    def write(self, folder: Path) -> None:
        """Write the tables and the programs."""
        (folder / "tables").mkdir()
        for name, (rows_VD, _) in self.tables.items():
            write_tensors(table_file(folder, name), {"weight": rows_VD})
        for name, program in self.programs.items():
            content = io.BytesIO()  # a full disk would end the process inside torch's own writer
            torch.export.save(program, content)
            write_bytes(folder / f"{name}.pt2", content.getvalue())

    def _gathered(self, name: str, ids: Tensor) -> Tensor:
        rows_VD, dtype = self.tables[name]
        return rows_VD[ids].to(dtype)


def _traced(module: nn.Module, *arguments: object) -> torch.export.ExportedProgram:
    """Return the program of a module for arguments of any size."""
    dims = torch.export.Dim
    # Dim 0, the batch size, is DYNAMIC: torch raises an error if the model makes it a constant. Other sizes
    # are AUTO, which may become constants; a size of 1 always does.
    sizes = tree_map(
        lambda t: {d: dims.AUTO if d else dims.DYNAMIC for d, size in enumerate(t.shape) if size > 1},
        arguments,
    )
    with torch.no_grad():
        program = torch.export.export(module, arguments, dynamic_shapes=sizes)
    # Remove the type checks that torch adds at conversions: they take longer than the prediction of one row.
    checks = torch.ops.aten._assert_tensor_metadata.default
    for node in program.graph.find_nodes(op="call_function", target=checks):
        program.graph.erase_node(node)
    # In evaluation, dropout returns its input. While it is there, torch takes it for an operation with an
    # effect, so that the lookups' program would keep all operations before it: the whole network.
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.dropout.default):
        if node.args[2] is False:
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()  # in `_Lookups`, all operations after the last lookup
    program.graph_module.recompile()
    return program


def export(checkpoint: Path, out: str | Path) -> Path:
    """Export the model of a checkpoint into the new folder `out`, which predicts without dphybrid.
    `SHA256SUMS` lists its files.

    The model must score rows of a table, or its recipe's predictor must have a method `export(folder)`.
    Raises UserError when the folder exists, when the recipe has no export, and for a model that torch.export
    cannot trace.
    """
    target = given_path(str(out), "--out")
    taken = f"--out {out}: exists already; give a new folder, or remove it first"
    if target.exists():
        raise UserError(taken)
    check_target(target, f"--out {out}")
    predictor = open_predictor(checkpoint)
    of_rows = isinstance(predictor, Predictor)
    if not of_rows and not hasattr(predictor, "export"):
        raise UserError(f"{checkpoint}: its recipe's predictor has no method export(folder)")
    try:
        with making(target) as folder:
            if of_rows:
                _export_rows(predictor, folder)
            else:
                predictor.export(folder)
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            lines = [f"{file_digest(path)}  {path.relative_to(folder)}\n" for path in files]
            write_text(folder / "SHA256SUMS", "".join(lines))
    except FileExistsError as error:  # made by another process meanwhile
        raise UserError(taken) from error
    return target


def _export_rows(predictor: Predictor, folder: Path) -> None:
    columns = predictor.encoder.columns
    if others := [column for column in columns if type(column) not in _KINDS]:
        raise UserError(
            f"column {others[0].name!r}: its kind {others[0].role} cannot be exported; exports read "
            f"{', '.join(kind.role for kind in _KINDS)}. Use dphybrid.load for this model"
        )
    rows = _example(columns)
    programs = _programs(predictor, rows)
    programs.write(folder)
    predictor.encoder.save(folder / "encoder")
    # predict.py has no config, so the texts that mean "no value" go into the encoder's page.
    page = folder / "encoder/encoder.json"
    write_json(page, {**read_json(page), "no_value": ["", *predictor.no_value]})
    _write_pages(predictor, programs, rows, folder)


def _example(columns: Sequence[Column]) -> pl.DataFrame:
    """Return rows of values that the encoder knows, and a last row without values."""
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
    del batch["labels_B"]
    model = _Predicting(predictor.model, predictor.task.link).eval().requires_grad_(False)
    # Also one sample, for which a traced program is most likely to differ.
    batches = [batch, {name: value[:1] for name, value in batch.items()}]
    with torch.inference_mode():
        wanted = [model(each) for each in batches]
    try:
        programs = _Programs(model, batch)
        with torch.inference_mode():
            found = [programs.run(each) for each in batches]
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{predictor.folder}: torch.export cannot trace this model: {reason}") from error
    if not all(map(torch.equal, wanted, found)):
        raise UserError(
            f"{predictor.folder}: the traced model predicts other numbers than the model, probably because "
            "the model's Python code depends on the values of a batch; use dphybrid.load for it"
        )
    return programs


def _write_pages(predictor: Predictor, programs: _Programs, rows: pl.DataFrame, folder: Path) -> None:
    types = {name: str(programs.tables[name][1]).removeprefix("torch.") for name in programs.lookups}
    columns = {c.name: "number" if isinstance(c, Numeric) else "text" for c in predictor.encoder.columns}
    page = {
        "format": 2,
        "predicts": predictor.predicts,
        "columns": {name: columns[name] for name in rows.columns},
        "returns": predictor.task.label.columns,
        "classes": list(predictor.classes),
        "threshold": predictor.threshold,
        "inputs": programs.inputs,
        "lookups": [[name, types[name]] for name in programs.lookups],
        "batch_size": predictor.batch_size,
        "torch": torch.__version__,
    }
    write_json(folder / "model.json", page)
    # One row of known values and the row without values.
    shown = rows[[0, -1]]
    answer = {"rows": shown.to_dict(as_series=False), "predictions": predictor.predict(shown).tolist()}
    write_json(folder / "example.json", answer)
    for file in (PROGRAM, Path(cells.__file__)):
        shutil.copyfile(file, folder / file.name)
    facts = {"predicts": predictor.predicts, "torch": torch.__version__, "polars": pl.__version__}
    write_text(folder / "README.md", _README.format(**facts))
