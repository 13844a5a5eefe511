"""Predictions of the model in this folder. Needs torch, safetensors, numpy and polars (see README.md).

python predict.py rows.csv          # or .parquet, or a request such as example.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from encode import Encoder  # type: ignore[import-not-found]
from safetensors import safe_open

HERE = Path(__file__).absolute().parent


class Model:
    """folder: of the export. Its tables are mapped: memory holds only the rows that were looked up."""

    def __init__(self, folder: str | Path = HERE) -> None:
        folder = Path(folder)
        self.page = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        programs = (torch.export.load(folder / f"{name}.pt2") for name in ("lookups", "dense"))
        self._lookups, self._dense = (program.module(check_guards=False) for program in programs)
        files = {name: folder / f"tables/{name}.safetensors" for name, _ in self.page["lookups"]}
        tables = {name: safe_open(file, "pt").get_tensor("weight") for name, file in files.items()}
        self._tables = [(tables[name], getattr(torch, dtype)) for name, dtype in self.page["lookups"]]
        self._encoder = Encoder(folder / "encoder")

    @torch.inference_mode()
    def run(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the outputs by name for a batch of the model's own inputs, samples on dim 0."""
        batch = {name: batch[name] for name in self.page["inputs"]}
        asked = zip(self._tables, self._lookups(batch), strict=True)
        found: dict[str, torch.Tensor] = self._dense(batch, [t[ids].to(dtype) for (t, dtype), ids in asked])
        return found

    def predict(self, rows: Any) -> np.ndarray:
        """Return the prediction of each row of a polars frame, a dict of columns or a list of records. Raises
        ValueError for a missing column, by its name."""
        arrays, size = self._encoder.encode(rows), self.page["batch_size"]
        found = []
        for start in range(0, max(1, len(arrays["ids_BF"])), size):
            batch = {name: torch.from_numpy(array[start : start + size]) for name, array in arrays.items()}
            found.append(self.run(batch)["prediction"].numpy())
        return np.concatenate(found)


def main(path: str) -> None:
    suffix = Path(path).suffix
    if suffix == ".json":
        rows: Any = json.loads(Path(path).read_text(encoding="utf-8"))["rows"]
    else:
        rows = pl.read_parquet(path) if suffix == ".parquet" else pl.read_csv(path)
    print(json.dumps(Model().predict(rows).tolist()))


if __name__ == "__main__":
    main(sys.argv[1])
