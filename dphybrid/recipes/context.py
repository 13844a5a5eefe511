"""`ModelContext`: what a recipe's `build`, or a user's factory, gets to build a model."""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch

from dphybrid.config import ExperimentConfig, ModelConfig
from dphybrid.data.batches import Dataset
from dphybrid.embedding import HostEmbedding
from dphybrid.parallel import Devices
from dphybrid.util.errors import UserError, suggestion
from dphybrid.util.files import make_folder

Options = TypeVar("Options", bound=ModelConfig)


@runtime_checkable
class FixedForPredictions(Protocol):
    """A module that precomputes what depends on its weights alone; it must not be trained any more."""

    def fix_for_predictions(self) -> None: ...


@dataclass(frozen=True)
class ModelContext(Generic[Options]):
    """What a model is built from.

    Attributes:
        devices: The blocks' devices; pass them to `dphybrid.parallel.DataParallel`.
        info: Facts about the prepared data, depending on the recipe: `num_words`, `num_ids`, `num_dense`, ...
        options, data: The `model` and the `data` section of the config.
        seed: Of the tables' initial values, which torch's global generator does not draw.
        table_dtype: "bfloat16", or "model" for the blocks' number format.
        table_folder: Of the tables' files; None: tables are in memory.
        rows: The training split, from which a new model may compute start weights; None where a checkpoint
            supplies them.
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
        """Return the context of an experiment. table_folder: created if it does not exist."""
        if table_folder is not None:
            make_folder(table_folder)
        dtype, seed = config.table.dtype, config.train.seed
        return ModelContext(devices, info, config.model, seed, dtype, table_folder, rows, config.data)

    def num_ids(self, *names: str) -> int:
        """Return how many rows a table needs if these arrays, columns or vocabularies share it. Raises
        UserError for names without ids."""
        known = self.info["num_ids"]
        if unknown := [name for name in names if name not in known]:
            raise UserError(
                f"num_ids: {unknown[0]!r} is neither an array of whole numbers nor a vocabulary"
                f"{suggestion(unknown[0], list(known))}"
            )
        # The largest, not the sum: the same id means the same row for all of them.
        return max(int(known[name]) for name in names)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.options.dtype == "float64" else torch.float32

    def table(self, num_rows: int, dim: int, *, name: str, std: float = 0.1, **options: Any) -> HostEmbedding:
        """Return a host table with the config's number format and the settings' storage. options: further
        arguments of `HostEmbedding`. Raises UserError when it does not fit into memory or on the disk, and
        for number formats that do not go together."""
        if self.table_dtype == "bfloat16" and self.dtype != torch.float32:
            better = f"use model.dtype=float32, not {self.options.dtype}"
            raise UserError(f"table.dtype=bfloat16: its rows are looked up as float32; {better}")
        return HostEmbedding(
            num_rows,
            dim,
            std=std,
            dtype=torch.bfloat16 if self.table_dtype == "bfloat16" else self.dtype,
            # Each table of a model draws its own initial values. Not hash(): it differs between processes.
            seed=self.seed << 32 | zlib.crc32(name.encode()),
            name=name,
            path=self.table_folder,
            **options,
        )
