"""Predictions of the model in this folder. Needs torch, safetensors, numpy and polars (see README.md).

python predict.py rows.csv          # or .parquet, or a request such as example.json

Letters: B rows.
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from safetensors import safe_open

HERE = Path(__file__).absolute().parent
# Read by MKL at its first product: without it, bits depend on where inputs lie in memory.
os.environ.setdefault("MKL_CBWR", "AUTO")
# The folder is not a package, so that Python can import it from any place, `cells` included.
sys.path.insert(0, str(HERE))
from cells import (  # type: ignore[import-not-found]  # noqa: E402
    FIRST_ID,
    MISSING_ID,
    bag_ids,
    bucket_ids,
    by_column,
    clean,
    ids_of,
    is_odd,
    items_of,
    numbers_of,
    of_objects,
    one_width,
    read_times,
    standardized,
    texts_of,
    time_parts,
    value_ids,
    words_of,
)

# In the order in which the arrays have their columns.
_GROUPS = (("numeric", "whole", "time"), ("categorical",), ("bag", "text"))

Column = dict[str, Any]


class Encoder:
    """Turns rows into the model's arrays. folder: the encoder's page, and the values of the columns by id."""

    def __init__(self, folder: Path) -> None:
        page = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
        texts = iter(pl.read_parquet(folder / "vocabularies.parquet", glob=False)["values"])
        for column in page["columns"]:
            # Only these columns have values in the file of vocabularies, in the order of the page.
            if column["role"] in ("categorical", "bag", "text"):
                column["learned"] = next(texts)
                known = {text: number for number, text in enumerate(column["learned"], FIRST_ID)}
                column |= {"known": {None: MISSING_ID, **known}, "first": FIRST_ID + len(known)}
            elif column["role"] == "whole":
                known_V = next(texts).cast(pl.Int64).to_numpy()
                order_V = known_V.argsort()
                column["learned"]["known"] = known_V[order_V], order_V + FIRST_ID
        self.columns = [c for group in _GROUPS for c in page["columns"] if c["role"] in group]
        self.no_value: list[str] = page["no_value"]

    def encode(self, rows: Any) -> dict[str, np.ndarray]:
        """Return the model's arrays for rows. Raises ValueError with the name of a missing column."""
        names = [column["name"] for column in self.columns]
        wanted = set(names)
        if not isinstance(rows, pl.DataFrame | dict):
            for number, row in enumerate(rows, start=1):
                if not row.keys() >= wanted:
                    missing = [name for name in names if name not in row]
                    raise ValueError(f"row {number} has no column {missing[0]!r}; write null for no value")
        frame = rows if isinstance(rows, pl.DataFrame) else _frame(rows)
        schema = frame.schema  # made anew by each access
        if missing := [name for name in names if name not in schema]:
            raise ValueError(f"the rows have no column {missing[0]!r}; columns: {', '.join(schema)}")
        for column in self.columns:
            name, kind = column["name"], schema[column["name"]]
            if is_odd(kind):
                raise ValueError(f"column {name!r} holds {kind}; write it as text")
            if kind.is_nested() and column["role"] not in _GROUPS[-1]:
                raise ValueError(f"column {name!r} holds {kind}; write one value in each row")
        dense: list[np.ndarray] = []
        ids: list[np.ndarray] = []
        bags: list[np.ndarray] = []
        cells = clean([frame.get_column(name) for name in names], self.no_value)
        for column, values in zip(self.columns, cells, strict=True):
            if column["role"] in _GROUPS[0]:
                for scale, numbers_B in _numbers_of(column, values):
                    dense.append(standardized(numbers_B, scale["log"], scale["mean"], scale["std"]))
                    dense += [np.isnan(numbers_B)] if scale["indicator"] else []
                    if "known" in scale:
                        ids.append(value_ids(numbers_B, *scale["known"]))
                    ids += [] if scale["edges"] is None else [bucket_ids(numbers_B, scale["edges"])]
            elif column["role"] == "categorical":
                ids.append(_text_ids(column, _texts_of(column, values)))
            else:
                most = column["max_items"]
                of_text = column["role"] == "text"
                items = words_of(values, most) if of_text else items_of(values, column["separator"], most)
                bags.append(bag_ids(_texts_of(column, items), partial(_text_ids, column)))
        arrays: dict[str, np.ndarray] = {
            "ids_BF": np.stack(ids, 1).astype(np.int64) if ids else np.zeros((len(frame), 0), np.int64),
            "dense_BN": np.array(dense, np.float32).reshape(len(dense), len(frame)).T.copy(),
        }
        # At least two items, as the programs were traced with; the padding adds only zeros to a bag's rows.
        return arrays | ({"bags_BFL": one_width(bags, 2).astype(np.int64)} if bags else {})


def _frame(rows: Any) -> pl.DataFrame:
    """Return a dict of columns, or a list of records, as a frame."""
    columns = rows if isinstance(rows, dict) else by_column(rows)
    return pl.DataFrame([of_objects(name, list(values)) for name, values in columns.items()])


def _texts_of(column: Column, values: pl.Series) -> pl.Series:
    """Return the cells of a column of categories as texts of its form."""
    return texts_of(values, column["type"], _notation(column), column["ignore_case"])


def _notation(column: Column) -> tuple[str, str, bool]:
    return column["decimal"], column["thousands"], column["marks"]


def _numbers_of(column: Column, values: pl.Series) -> list[tuple[Column, np.ndarray]]:
    """Return the numbers of a column, each with its scaling: one array for a numeric column, several for a
    time."""
    if column["role"] != "time":
        numbers = numbers_of(values, *_notation(column))
        return [(column["learned"], numbers.to_numpy())]
    parts = time_parts(read_times(values, column["dayfirst"]))
    return [(part["learned"], numbers_B) for part, numbers_B in zip(column["learned"], parts, strict=True)]


def _text_ids(column: Column, texts: pl.Series) -> np.ndarray:
    """Return the ids of texts, of which some may be None."""
    found: np.ndarray = ids_of(texts.to_list(), column["known"], column["first"], column["hash_buckets"])
    return found


def _program(name: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return a traced program as a function of its inputs."""
    # Not through its module(), which checks sizes and flattens its arguments in each call: that takes longer
    # than the prediction of one row.
    program = torch.export.load(HERE / f"{name}.pt2")
    held = {**program.state_dict, **program.constants}
    signature = program.graph_signature.input_specs
    return partial(program.graph_module, *(held[spec.target] for spec in signature if spec.target))


class Model:
    """The exported model. Its tables are mapped: memory holds only the rows that were looked up."""

    def __init__(self) -> None:
        self.page = json.loads((HERE / "model.json").read_text(encoding="utf-8"))
        self._lookups, self._dense = _program("lookups"), _program("dense")
        names = [name for name, _ in self.page["lookups"]]
        files = {name: HERE / "tables" / f"{name.replace('/', '%2F')}.safetensors" for name in names}
        tables = {name: safe_open(file, "pt").get_tensor("weight") for name, file in files.items()}
        self._tables = [(tables[name], getattr(torch, dtype)) for name, dtype in self.page["lookups"]]
        self._encoder = Encoder(HERE / "encoder")

    @torch.inference_mode()
    def run(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the predictions for a batch of the model's own tensors, with samples on dim 0."""
        inputs = [batch[name] for name in self.page["inputs"]]
        ids = zip(self._tables, self._lookups(*inputs), strict=True)
        return self._dense(*inputs, *(table[each].to(dtype) for (table, dtype), each in ids))[0]

    def predict(self, rows: object) -> np.ndarray:
        """Return the prediction of each row of a polars frame, a dict of columns or a list of records. Raises
        ValueError with the name of a missing column."""
        arrays, size = self._encoder.encode(rows), self.page["batch_size"]
        found = []
        # At least once: without rows the result must have the right type and width, too.
        for start in range(0, max(1, len(arrays["ids_BF"])), size):
            batch = {name: torch.from_numpy(array[start : start + size]) for name, array in arrays.items()}
            found.append(self.run(batch).numpy())
        return np.concatenate(found)

    def predict_classes(self, rows: object) -> np.ndarray:
        """Return the class of each row, as text: of two classes the positive one from the model's threshold
        on, of several the most probable one. Raises ValueError for a model of numbers."""
        if not self.page["classes"]:
            raise ValueError("the model predicts numbers, not classes; use predict")
        found, classes = self.predict(rows), np.array(self.page["classes"], object)
        return classes[found.argmax(1) if found.ndim == 2 else (found >= self.page["threshold"]) * 1]


def main(path: str) -> None:
    suffix = Path(path).suffix
    if suffix == ".json":
        rows: object = json.loads(Path(path).read_text(encoding="utf-8"))["rows"]
    else:
        # As texts, like in training: polars would read the text 007 as the number 7.
        csv = partial(pl.read_csv, infer_schema=False, glob=False)
        rows = pl.read_parquet(path, glob=False) if suffix == ".parquet" else csv(path)
    print(json.dumps(Model().predict(rows).tolist()))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        main(sys.argv[1])
    except (OSError, ValueError) as error:
        sys.exit(f"error: {sys.argv[1]}: {error}")
