"""Frames written to a .parquet or .csv file, piece by piece; the file is there when all of them are."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import polars as pl
from polars.io.plugins import register_io_source

from dphybrid.util.errors import UserError
from dphybrid.util.files import check_target, sync, temporary

WRITTEN = (".parquet", ".csv")


def table_target(out: str | Path) -> Path:
    """Return the path of --out. Raises UserError where no file can be written, or of no such kind."""
    target = Path(out)
    if target.suffix.lower() not in WRITTEN:
        raise UserError(f"--out {out}: give a name that ends in {' or '.join(WRITTEN)}")
    check_target(target, f"--out {out}")
    return target


def write_frames(
    frames: Iterator[pl.DataFrame], schema: Mapping[str, type[pl.DataType]], target: Path
) -> None:
    """Write the frames, all of one schema. Errors of `frames` are raised as they are, and UserError where the
    file cannot be written; nothing is left at `target` then."""
    failed: list[BaseException] = []

    def noted(*_: object) -> Iterator[pl.DataFrame]:
        try:
            yield from frames
        except BaseException as error:
            failed.append(error)  # polars would wrap it
            raise

    partial = temporary(target)
    try:
        lazy = register_io_source(noted, schema=dict(schema))
        lazy.sink_parquet(partial) if target.suffix.lower() == ".parquet" else lazy.sink_csv(partial)
        sync(partial)
        partial.rename(target)
    except (pl.exceptions.PolarsError, OSError) as error:
        if failed:
            raise failed[0] from None
        raise UserError(f"--out {target}: cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
