"""Frames written to a .parquet or .csv file, piece by piece; the file is there when all of them are."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import polars as pl
from polars.io.plugins import register_io_source

from dphybrid.util.errors import UserError
from dphybrid.util.files import check_target, sync, temporary, write_text

_WRITTEN = (".parquet", ".csv")


def table_target(out: str | Path) -> Path:
    """Return the path of --out. Raises UserError where no file can be written, or of no such kind."""
    target = Path(out)
    if target.suffix.lower() not in _WRITTEN:
        raise UserError(f"--out {out}: give a name that ends in {' or '.join(_WRITTEN)}")
    check_target(target, f"--out {out}")
    return target


def write_frames(
    frames: Iterator[pl.DataFrame], schema: Mapping[str, pl.DataType | type[pl.DataType]], target: Path
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
        partial.replace(target)
    except (pl.exceptions.PolarsError, OSError) as error:
        if failed:
            raise failed[0] from None
        raise UserError(f"--out {target}: cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def write_rejected(rejected: Sequence[Mapping[str, object]], target: Path) -> None:
    """Write which rows could not be read, and why, beside what was made of the others; an earlier page of
    that kind goes."""
    page = _rejected_page(target)
    if rejected:
        write_text(page, "".join(json.dumps(row) + "\n" for row in rejected))
    else:
        page.unlink(missing_ok=True)


def told_of_rejected(count: int, target: Path) -> list[str]:
    """Return the line that says so, or none."""
    if not count:
        return []
    return [f"{count:,} rows cannot be read and are left out: {_rejected_page(target)} says which and why"]


def _rejected_page(target: Path) -> Path:
    return target.with_name(f"{target.name}.rejected.jsonl")
