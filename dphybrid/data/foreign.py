"""Errors of polars at files: how much memory an encoder needs that somebody else may have made, content of
another form, and disks that take no more."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl

from dphybrid.util.errors import UserError

_MOST_BYTES, _MOST_TIMES = 2**26, 100
"""What a Parquet file may need in memory: so much, or so many times its own size."""
_VIEW_BYTES = 16
"""What polars needs for each text besides its letters, which equal texts share."""


@contextmanager
def misread(what: object) -> Iterator[None]:
    """Raise UserError if the block, which makes objects of the content of files, fails as it does for content
    of another form. what: the folder or file, for the message."""
    forms = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, StopIteration, OSError)
    try:
        yield
    except (*forms, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{what}: cannot be read ({type(error).__name__}: {error}); use another checkpoint, or prepare "
            "the data and train again"
        ) from error


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Raise OSError with its file if polars cannot write it, in the block."""
    try:
        yield
    # polars' own errors have no number; a full disk is their usual cause.
    except (pl.exceptions.PolarsError, OSError) as error:
        number = error.errno if isinstance(error, OSError) else None
        raise OSError(number or errno.ENOSPC, str(error), str(file)) from error


def check_memory(folder: Path) -> None:
    """Raise UserError if a Parquet file in the `encoder` folder of a checkpoint needs far more memory than
    room on the disk, as no real one does. By their footers, which a forger may have changed, too."""
    import duckdb

    sizes = "SELECT sum(num_values), sum(total_uncompressed_size) FROM parquet_metadata(?)"
    for file in sorted((folder / "encoder").rglob("*.parquet")):
        try:
            with duckdb.connect(":memory:") as database:
                values, unpacked = database.execute(sizes, [str(file)]).fetchone() or (0, 0)
        except duckdb.Error as error:
            raise UserError(f"{file}: cannot be read ({error}); use another checkpoint") from error
        needed, size = (values or 0) * _VIEW_BYTES + (unpacked or 0), file.stat().st_size
        if needed > max(_MOST_BYTES, size * _MOST_TIMES):
            raise UserError(
                f"{file}: needs {needed >> 20:,} MiB in memory, {needed // size:,} times its size, as no "
                "vocabulary does; use another checkpoint"
            )
