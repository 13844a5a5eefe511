"""Predictions of the model in this folder. Needs torch, safetensors, numpy and polars (see README.md).

python predict.py rows.csv          # or .parquet, or a request such as example.json
"""

import json
import sys
from pathlib import Path

import numpy as np
import polars as pl
import torch
from safetensors import safe_open
from safetensors.torch import load_file

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE))
import programs  # type: ignore[import-not-found]  # noqa: E402
from encode import Encoder  # type: ignore[import-not-found]  # noqa: E402


class Model:
    """The exported model. Its tables are mapped: memory holds only the rows that were looked up."""

    def __init__(self) -> None:
        self.page = json.loads((HERE / "model.json").read_text(encoding="utf-8"))
        # copied as torch aligns memory, on which the last bits of a matrix product may depend
        held = {name: each.clone() for name, each in load_file(HERE / "programs.safetensors").items()}
        self._held = {
            name: [held.get(each) for each in takes] for name, takes in self.page["tensors"].items()
        }
        files = {name: HERE / f"tables/{name}.safetensors" for name, _ in self.page["lookups"]}
        tables = {name: safe_open(file, "pt").get_tensor("weight") for name, file in files.items()}
        self._tables = [(tables[name], getattr(torch, dtype)) for name, dtype in self.page["lookups"]]
        self._encoder = Encoder(HERE / "encoder")

    @torch.inference_mode()
    def run(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the predictions for a batch of the model's own inputs, samples on dim 0."""
        inputs = [batch[name] for name in self.page["inputs"]]
        ids = programs.lookups(*self._held["lookups"], *inputs)
        rows = [table[each].to(dtype) for (table, dtype), each in zip(self._tables, ids, strict=True)]
        found: torch.Tensor = programs.dense(*self._held["dense"], *inputs, *rows)[0]
        return found

    def predict(self, rows: object) -> np.ndarray:
        """Return the prediction of each row of a polars frame, a dict of columns or a list of records. Raises
        ValueError for a missing column, by its name."""
        arrays, size = self._encoder.encode(rows), self.page["batch_size"]
        found = []
        for start in range(0, max(1, len(arrays["ids_BF"])), size):
            batch = {name: torch.from_numpy(array[start : start + size]) for name, array in arrays.items()}
            found.append(self.run(batch).numpy())
        return np.concatenate(found)


def main(path: str) -> None:
    suffix = Path(path).suffix
    if suffix == ".json":
        rows: object = json.loads(Path(path).read_text(encoding="utf-8"))["rows"]
    else:
        rows = pl.read_parquet(path) if suffix == ".parquet" else pl.read_csv(path)
    print(json.dumps(Model().predict(rows).tolist()))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        main(sys.argv[1])
    except (OSError, ValueError) as error:
        sys.exit(f"error: {sys.argv[1]}: {error}")
