"""A table's rows and states in a checkpoint: `tables/NAME.safetensors` holds all of them, and where there is
a `changed/NAME.safetensors`, that holds those rows that have changed since, with their numbers.

Everything that reads tables of checkpoints does it here. Letters: V rows of a table, U changed ones, D width.
"""

from pathlib import Path

import torch
from torch import Tensor

from dphybrid.embedding.storage import GIB, available_memory_bytes
from dphybrid.training.tensor_file import (
    mapped_tensor,
    read_into,
    read_rows_into,
    stored_tensor,
    tensor_shapes,
)
from dphybrid.util.errors import UserError

IDS = "row_numbers"
"""Name of the changed rows' numbers in their file."""

_PAGE_BYTES = 4096


def rows_of(name: str) -> str:
    """Return the name of the changed rows of a tensor in their file; under the name itself it is there
    whole."""
    return f"rows.{name}"


def table_file(checkpoint: Path, table: str) -> Path:
    """Return the file that holds all rows of a table, as they were at the last full checkpoint."""
    return checkpoint / "tables" / f"{table}.safetensors"


def changed_file(checkpoint: Path, table: str) -> Path:
    """Return the file of the rows changed since, which a full checkpoint has not."""
    return checkpoint / "changed" / f"{table}.safetensors"


def changed_rows(checkpoint: Path, table: str) -> Tensor | None:
    """Return the numbers of the rows changed since the last full checkpoint, None in a full one."""
    file = changed_file(checkpoint, table)
    return stored_tensor(file, IDS) if file.is_file() else None


def read_table(checkpoint: Path, table: str, name: str, target: Tensor) -> None:
    """Fill `target` in place with the weight or the state `name` of a table, slice by slice. Raises UserError
    when shapes differ."""
    read_into(table_file(checkpoint, table), name, target)
    ids_U = changed_rows(checkpoint, table)
    if ids_U is None:
        return
    file = changed_file(checkpoint, table)
    if rows_of(name) in tensor_shapes(file):
        read_rows_into(file, rows_of(name), ids_U, target)
    else:
        read_into(file, name, target)


def table_weight(checkpoint: Path, table: str) -> Tensor:
    """Return all rows of a table in memory."""
    weight = stored_tensor(table_file(checkpoint, table), "weight")
    ids_U = changed_rows(checkpoint, table)
    if ids_U is not None:
        read_rows_into(changed_file(checkpoint, table), rows_of("weight"), ids_U, weight)
    return weight


def mapped_weight(checkpoint: Path, table: str, like: Tensor, sums: str) -> Tensor:
    """Return the rows of a table mapped into memory: what is read of them is loaded and checked then. Changed
    rows, and what lies on their pages, are in memory at once.

    Raises UserError when shape or type differ from those of `like`, and when the changed rows do not fit.
    """
    weight = mapped_tensor(table_file(checkpoint, table), "weight", like, sums)
    ids_U = changed_rows(checkpoint, table)
    if ids_U is None:
        return weight
    row_bytes = weight.nbytes // max(1, len(weight))
    pages = len(torch.unique_consecutive(ids_U * row_bytes // _PAGE_BYTES)) if row_bytes < _PAGE_BYTES else 0
    wanted, free = max(pages * _PAGE_BYTES, len(ids_U) * row_bytes), available_memory_bytes()
    if wanted > free:
        raise UserError(
            f"{checkpoint}: rows of table {table} that changed since the last full checkpoint take "
            f"{wanted / GIB:.3g} GiB of memory, {free / GIB:.3g} GiB are free; use a full checkpoint "
            "(one without a folder `changed`; checkpoint.full_every=1 makes each one full)"
        )
    read_rows_into(changed_file(checkpoint, table), rows_of("weight"), ids_U, weight)
    return weight
