"""The context from which a recipe's `build`, or a user's factory, builds a model."""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from dphybrid.config import ExperimentConfig, ModelConfig
from dphybrid.data.batches import Dataset
from dphybrid.embedding import HostEmbedding
from dphybrid.parallel import Devices
from dphybrid.util.errors import UserError, suggestion

Options = TypeVar("Options", bound=ModelConfig)


@dataclass(frozen=True)
class ModelContext(Generic[Options]):
    """What a model is built from.

    devices: where its blocks belong; pass it to `dphybrid.parallel.DataParallel`.
    info: facts about the prepared data: `num_words`, `num_ids`, `num_dense`, `num_classes`, ... as the recipe
    has them.
    options, data: the `model` and the `data` section of the config.
    seed: start for tables, which do not draw from torch's global generator.
    table_dtype: "bfloat16", or "model" for the blocks' number format. table_folder: where tables lie in
    files; None: in memory. rows: the training split of a new model, to start weights from; else None.
    """

    devices: Devices
    info: dict[str, Any]
    options: Options
    seed: int
    table_dtype: str = "model"
    table_folder: Path | None = None
    rows: Dataset | None = None
    data: Any = None

    @staticmethod
    def of(
        config: ExperimentConfig,
        info: dict[str, Any],
        devices: Devices,
        table_folder: Path | None = None,
        rows: Dataset | None = None,
    ) -> "ModelContext[Any]":
        """Return the context of an experiment. table_folder: is made when it is not there."""
        if table_folder is not None:
            table_folder.mkdir(parents=True, exist_ok=True)
        dtype, seed = config.table.dtype, config.train.seed
        return ModelContext(devices, info, config.model, seed, dtype, table_folder, rows, config.data)

    def num_ids(self, *names: str) -> int:
        """Return the rows that one table needs for the ids of these arrays, columns or vocabularies together.
        Raises UserError for names without ids."""
        known = self.info["num_ids"]
        if unknown := [name for name in names if name not in known]:
            raise UserError(
                f"num_ids: {unknown[0]!r} is neither an array of whole numbers nor a vocabulary"
                f"{suggestion(unknown[0], list(known))}"
            )
        # The largest, not the sum: names that share a table share its rows' numbers.
        return max(int(known[name]) for name in names)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.options.dtype == "float64" else torch.float32

    def table(self, num_rows: int, dim: int, *, name: str, std: float = 0.1, **options: Any) -> HostEmbedding:
        """Return a host table as config and settings want it. options: what else `HostEmbedding` takes.
        Raises UserError when it does not fit."""
        if self.table_dtype == "bfloat16" and self.dtype != torch.float32:
            better = f"use model.dtype=float32, not {self.options.dtype}"
            raise UserError(f"table.dtype=bfloat16: its rows are looked up as float32; {better}")
        return HostEmbedding(
            num_rows,
            dim,
            std=std,
            dtype=torch.bfloat16 if self.table_dtype == "bfloat16" else self.dtype,
            seed=self.seed << 32 | zlib.crc32(name.encode()),  # tables of one model start from other values
            name=name,
            storage="memory" if self.table_folder is None else "mmap",
            path=self.table_folder,
            **options,
        )
