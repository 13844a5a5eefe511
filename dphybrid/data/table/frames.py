"""Tables from memory - polars, pandas, Arrow, columns, records - as polars frames, and as files that are
named by what they hold; and frames written piece by piece to a file of the user's."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from polars.io.plugins import register_io_source
from polars.selectors import by_name  # names as they are: `*` is a pattern elsewhere

from dphybrid.data.table.cells import FEW
from dphybrid.data.table.rows import check_types
from dphybrid.util.errors import UserError, counted, type_text
from dphybrid.util.files import check_target, make_folder, sync, temporary, write_text

PART_ROWS = 2**20
"""Rows of a file that a frame is written to."""
_ROW_GROUP = 2**17
_WRITTEN = (".parquet", ".csv")
_PLAIN = {"object", "str", "string", "int64", "float64", "bool"}
"""Types of pandas that mean the same to Python, which copies up to `FEW` rows in a third of Arrow's time."""
KINDS = (
    "a polars DataFrame or LazyFrame, a pandas DataFrame, an Arrow table, a dict of columns, a list of "
    "records, or a path"
)


def as_frame(data: object, where: str) -> pl.DataFrame | pl.LazyFrame:
    """Return a table from memory as a polars frame; a lazy one stays lazy. An index of pandas is left out.

    where: what a person calls the table, for messages. Raises UserError for what is not a table.
    """
    if isinstance(data, pl.DataFrame | pl.LazyFrame):
        return data
    try:
        if type(data).__module__.partition(".")[0] == "pandas" and hasattr(data, "columns"):
            return _from_pandas(data, where)
        if hasattr(data, "__arrow_c_stream__"):
            return pl.DataFrame(data)
        if isinstance(data, Mapping):
            columns = {
                str(name): _of_series(values) if hasattr(values, "iloc") else values
                for name, values in data.items()
            }
            for name, values in columns.items():  # polars would repeat a single value for each row
                if isinstance(values, str) or not hasattr(values, "__len__"):
                    raise UserError(f"{where}: column {name!r} is {values!r}; give it a list or an array")
            return pl.DataFrame(columns, strict=False)
        if isinstance(data, Sequence) and all(isinstance(row, Mapping) for row in data):
            names = dict.fromkeys(str(name) for row in data for name in row)
            return pl.DataFrame({name: [row.get(name) for row in data] for name in names}, strict=False)
    except (pl.exceptions.PolarsError, TypeError, OverflowError) as error:
        raise UserError(f"{where}: cannot be read as a table: {error}") from error
    raise UserError(f"{where}: is {type_text(data)}; give {KINDS}")


def _from_pandas(frame: Any, where: str) -> pl.DataFrame:
    names = [str(name) for name in frame.columns]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{where}: has two columns named {twice[0]!r}; rename one")
    if 0 < len(frame) <= FEW and set(map(str, frame.dtypes)) <= _PLAIN:
        columns = zip(*frame.to_numpy(object, na_value=None).tolist(), strict=True)
        found = [pl.Series(name, cells, strict=False) for name, cells in zip(names, columns, strict=True)]
        return pl.DataFrame([c.cast(pl.String) if c.dtype == pl.Null else c for c in found])
    return pl.DataFrame({name: _of_series(frame.iloc[:, place]) for place, name in enumerate(names)})


def _of_series(series: Any) -> pl.Series:
    try:
        return pl.Series(pl.from_pandas(series))
    except Exception:  # noqa: BLE001 - pyarrow's errors for columns of mixed objects are of many classes
        return pl.Series([None if value != value else value for value in series.to_list()], strict=False)


def check_frame(frame: pl.DataFrame | pl.LazyFrame, where: str, ignored: Sequence[str] = ()) -> list[str]:
    """Return the columns' names. Raises UserError where a column that is not ignored holds what no file of
    rows could."""
    schema = frame.collect_schema() if isinstance(frame, pl.LazyFrame) else frame.schema
    if not schema:
        raise UserError(f"{where}: has no columns")
    check_types(schema, where, "ignore", ignored)
    return schema.names()


def save_frame(
    frame: pl.DataFrame | pl.LazyFrame, folder: Path, where: str, ignored: Sequence[str] = ()
) -> Path:
    """Write a frame as Parquet files of `PART_ROWS` rows into a folder below `folder`, named by their digest;
    equal frames are one folder. A lazy frame is computed and written part by part.

    Raises UserError for fewer than two rows, for columns that no file of rows could hold, and where a lazy
    frame fails.
    """
    # A file, not the frame: a run must find its rows again when it is resumed or compared.
    names = check_frame(frame, where, ignored)
    keep = [name for name in names if name not in ignored] or names
    make_folder(folder)
    written, digest, num_rows = temporary(folder / "frame"), hashlib.blake2b(digest_size=8), 0
    try:
        written.mkdir()
        # Parts of one size, however the rows were computed: how they lie shows in the bytes of their file.
        parts = frame.lazy().select(by_name(*keep)).collect_batches(chunk_size=PART_ROWS, maintain_order=True)
        for number, part in enumerate(parts):
            file = written / f"part-{number:05d}.parquet"
            _compact(part).write_parquet(file, row_group_size=_ROW_GROUP)
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
            sync(file)
            num_rows += len(part)
        if num_rows < 2:
            raise UserError(
                f"{where}: has {counted(num_rows, 'row')}; at least 2 are needed, one of them for validation"
            )
        target = folder / digest.hexdigest()
        if not target.exists():
            written.rename(target)
            sync(folder)
        return target
    except (pl.exceptions.PolarsError, OSError) as error:
        raise UserError(f"{where}: cannot be written to {folder}: {error}") from error
    finally:
        shutil.rmtree(written, ignore_errors=True)


def _compact(rows: pl.DataFrame) -> pl.DataFrame:
    """Copy rows into buffers of their own: lists keep what lies around a slice of them, even rechunked."""
    return rows.select(pl.all().gather(pl.int_range(pl.len())))


@dataclass
class Written:
    """What became of the rows of files."""

    out: Path
    num_rows: int = 0
    num_rejected: int = 0

    def told(self) -> list[str]:
        """Return the line that says which rows could not be read, or none."""
        if not self.num_rejected:
            return []
        page = _rejected_page(self.out)
        left_out = counted(self.num_rejected, "row cannot be read and is", "rows cannot be read and are")
        return [f"{left_out} left out: {page} says which and why"]


def table_target(out: str | Path) -> Path:
    """Return the path of --out. Raises UserError where no file can be written, or of no such kind."""
    target = Path(out)
    if target.suffix.lower() not in _WRITTEN:
        raise UserError(f"--out {out}: give a name that ends in {' or '.join(_WRITTEN)}")
    check_target(target, f"--out {out}")
    return target


def write_frames(
    frames: Iterator[pl.DataFrame],
    schema: Mapping[str, pl.DataType | type[pl.DataType]],
    target: Path,
    rejected: Sequence[Mapping[str, object]],
) -> None:
    """Write the frames, all of one schema; the file is there when all of them are. Beside it a page says
    which rows could not be read, and why; `rejected` may grow while frames are made. An earlier page goes.

    Errors of `frames` are raised as they are, and UserError where the file cannot be written; nothing is left
    at `target` then.
    """
    partial, page = temporary(target), _rejected_page(target)
    try:
        # A lazy frame over the frames: polars writes it piece by piece.
        lazy = register_io_source(lambda *_: frames, schema=dict(schema))
        lazy.sink_parquet(partial) if target.suffix.lower() == ".parquet" else lazy.sink_csv(partial)
        sync(partial)
        if rejected:
            write_text(page, "".join(json.dumps(row) + "\n" for row in rejected))
        else:
            page.unlink(missing_ok=True)
        partial.replace(target)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise UserError(f"--out {target}: cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _rejected_page(target: Path) -> Path:
    return target.with_name(f"{target.name}.rejected.jsonl")
