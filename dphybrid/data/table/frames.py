"""Tables from memory (polars, pandas, Arrow, columns, records) as polars frames, and as files named by their
digest; and frames of predictions, written chunk by chunk to the user's file."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl
from polars.io.plugins import register_io_source
from polars.selectors import by_name  # takes names literally; select() reads `*` as a pattern

from dphybrid.config.tables import RowFiles
from dphybrid.data.table.files import Rows, frame_digest, read_rows
from dphybrid.data.vocabulary import is_nothing
from dphybrid.util.errors import UserError, counted, type_text
from dphybrid.util.files import (
    check_target,
    given_path,
    make_folder,
    replacing,
    sync,
    write_text,
    writing,
)

PART_ROWS = 2**20
"""Rows per file when a frame is saved."""
_ROW_GROUP = 2**17
_WRITTEN = (".parquet", ".csv")
"""Endings of the files that predictions can be written to."""


def as_frame(data: object, where: str) -> pl.DataFrame | pl.LazyFrame:
    """Return a table from memory as a polars frame; a lazy frame stays lazy. The index of pandas is dropped.

    where: the user's name for the table, for messages. Raises UserError if `data` is not a table.
    """
    if isinstance(data, pl.DataFrame | pl.LazyFrame):
        return data
    # Recognised by the module's name, so that pandas and pyarrow need not be installed.
    module = type(data).__module__.partition(".")[0]
    try:
        if module == "pandas" and hasattr(data, "columns"):
            import pyarrow  # type: ignore[import-untyped]

            data, module = pyarrow.Table.from_pandas(data, preserve_index=False), "pyarrow"
        if hasattr(data, "__arrow_c_stream__"):
            frame = pl.DataFrame(data)
            # polars drops that a column is a dictionary, unless of texts.
            fields = data.schema if module == "pyarrow" and hasattr(data, "schema") else ()
            kinds = [field.name for field in fields if str(field.type).startswith("dictionary<")]
            return frame.with_columns(by_name(*kinds).cast(pl.String).cast(pl.Categorical))
        if isinstance(data, Sequence) and all(isinstance(row, Mapping) for row in data):
            data = {n: [row.get(n) for row in data] for n in dict.fromkeys(chain.from_iterable(data))}
        if isinstance(data, Mapping):
            return pl.DataFrame([_column(str(name), values) for name, values in data.items()])
    except ImportError as error:
        raise UserError(
            f"{where}: pandas frames are read by pyarrow ({error}): pip install pyarrow"
        ) from error
    except (pl.exceptions.PolarsError, ArithmeticError, NotImplementedError, TypeError, ValueError) as error:
        # Of pyarrow, with the column as its second argument.
        raise UserError(f"{where}: {'; '.join(map(str, error.args))}") from error
    raise UserError(
        f"{where}: is {type_text(data)}; give a polars DataFrame or LazyFrame, a pandas DataFrame, an Arrow "
        "table, a dict of columns, a list of records, or a path"
    )


def _column(name: str, values: Any) -> pl.Series:
    """Return a column of Python, numpy, pandas or polars."""
    if isinstance(values, str) or not hasattr(values, "__len__"):  # which polars would repeat in every row
        raise TypeError(f"column {name!r} is {values!r}; give it a list or an array")
    if isinstance(values, list | tuple) or str(getattr(values, "dtype", "")) == "object":
        # nan would make floats of whole numbers, which hold them up to 2^53 only.
        values = [None if is_nothing(value) else value for value in values]
    column = pl.Series(name, values, strict=False)
    if column.dtype == pl.Object:
        raise TypeError(f"column {name!r} holds {column[0]!r:.60}; write texts, numbers, dates or lists")
    return column


def save_frame(frame: pl.DataFrame | pl.LazyFrame, folder: Path, where: str) -> Path:
    """Write a frame as Parquet files of `PART_ROWS` rows into a folder below `folder`, named by their digest,
    so that equal frames share a folder. A lazy frame is computed and written part by part.

    Raises UserError for fewer than two rows, for a column that Parquet cannot hold, and if a lazy frame
    fails.
    """
    # Saved even though the frame is in memory: a resumed or compared run must find its rows again.
    make_folder(folder)
    num_rows = 0
    try:
        with writing(folder / "frame") as written:
            written.mkdir()
            # Parts of a fixed size, however the rows were computed: otherwise equal frames would be written
            # as different bytes, and get different digests.
            for number, part in enumerate(
                frame.lazy().collect_batches(chunk_size=PART_ROWS, maintain_order=True)
            ):
                file = written / f"part-{number:05d}.parquet"
                # Copied: a slice of lists keeps the buffers of the rows around it, which the file would show.
                copied = part.select(pl.all().gather(pl.int_range(pl.len())))
                copied.write_parquet(file, row_group_size=_ROW_GROUP)
                sync(file)
                num_rows += len(part)
            if num_rows < 2:
                raise UserError(
                    f"{where}: has {counted(num_rows, 'row')}; at least 2 are needed, one for validation"
                )
            target = folder / frame_digest(written.iterdir())
            if target.is_dir():
                os.utime(target)  # the time of its last use, by which `dphybrid runs remove` keeps it
            else:
                written.rename(target)
                sync(folder)
            return target
    except (pl.exceptions.PolarsError, OSError) as error:
        raise UserError(f"{where}: cannot be written to {folder}: {error}") from error


@dataclass
class Written:
    """Counts of the rows that were predicted and of those that could not be read. out: the file written."""

    out: Path
    num_rows: int = 0
    num_rejected: int = 0

    def summary(self) -> list[str]:
        """Return a line that says how many rows could not be read; no line if all could be."""
        if not self.num_rejected:
            return []
        file = _rejected_file(self.out)
        left_out = counted(self.num_rejected, "row cannot be read and is", "rows cannot be read and are")
        return [f"{left_out} left out: {file} lists them with the reasons"]


def table_target(out: str | Path, files: Sequence[Path]) -> Path:
    """Return the path of --out. Raises UserError if its ending is unknown, if no file can be written there,
    and if it is one of the files to predict."""
    target = given_path(str(out), "--out")
    if target.exists() and any(target.samefile(file) for file in files):
        raise UserError(f"--out {out}: is one of the files to predict; name another file")
    if target.suffix.lower() not in _WRITTEN:
        raise UserError(f"--out {out}: give a name that ends in {' or '.join(_WRITTEN)}")
    check_target(target, f"--out {out}")
    return target


@contextmanager
def new_rows(
    files: Sequence[Path], data: RowFiles, named: Sequence[str] = (), *, whole: bool = False
) -> Iterator[Rows]:
    """Read files, for the block, as an encoder takes new ones: texts stay texts. named: columns by which a
    header is known. Raises UserError as `read_rows` does; with `whole` also for a row that cannot be read, as
    others would take its place."""
    given = data.model_copy(update={"max_rejected": 1.0}) if whole else data
    with TemporaryDirectory(prefix="dphybrid-rows-") as scratch:
        rows = read_rows(files, given, Path(scratch), named, as_text=True)
        for first in rows.rejected[:whole]:
            raise UserError(
                f"{first['file']}: line {first['line']} cannot be read ({first['reason']}); correct or "
                "remove it, or use predict_file, which writes line numbers"
            )
        yield rows


def write_predictions(
    files: Sequence[Path],
    data: RowFiles,
    done: Written,
    predicted: Callable[[pl.DataFrame, pl.Series, pl.Series], pl.DataFrame],
    keep: Sequence[str] = (),
    on_progress: Callable[[str, int, int], None] | None = None,
    named: Sequence[str] = (),
) -> None:
    """Write to `done.out` what `predicted` returns for each chunk of the files, and count the rows in `done`.

    predicted: takes rows, and the file and the line of each; returns frames of one schema. keep: columns of
    the files to add, if each row gives one prediction. named: columns by which a header is known. Raises
    UserError for such a column that the files lack or the predictions have, and as `read_rows` and
    `write_frames` do; nothing is left at `done.out` then.
    """
    with new_rows(files, data, named) as rows:
        names, (of_file, lines) = rows.names, rows.lines()
        if absent := [name for name in keep if name not in names]:
            raise UserError(f"--keep {absent[0]}: {files[0]} has no such column; columns: {', '.join(names)}")

        def frames() -> Iterator[pl.DataFrame]:
            for chunk in rows.chunks():
                own = slice(done.num_rows, done.num_rows + len(chunk))
                frame = predicted(chunk, of_file[own], lines[own])
                if taken := sorted(set(keep).intersection(frame.columns)):
                    raise UserError(
                        f"--keep {taken[0]}: predictions have a column of that name; rename the table's "
                        "column"
                    )
                if keep and len(frame) != len(chunk):
                    raise UserError(f"--keep {keep[0]}: the recipe does not give one prediction per row")
                done.num_rows += len(chunk)
                if on_progress:
                    on_progress("predict rows", done.num_rows, len(rows))
                yield frame.with_columns(chunk.get_column(name) for name in keep)

        chunks = frames()
        # The first chunk decides the file's columns. There is one: a file without rows gives an empty chunk.
        first = next(chunks)
        write_frames(chain([first], chunks), dict(first.schema), done.out, rows.rejected)
        done.num_rejected = len(rows.rejected)


def write_frames(
    frames: Iterator[pl.DataFrame],
    schema: Mapping[str, pl.DataType | type[pl.DataType]],
    target: Path,
    rejected: Sequence[Mapping[str, object]],
) -> None:
    """Write frames of one schema to `target`, which appears when all of them are written. The rows that could
    not be read go to TARGET.rejected.jsonl beside it; an older such file is replaced or deleted.

    rejected: may grow while `frames` is consumed. Errors of `frames` are raised unchanged, and UserError if
    the file cannot be written; nothing is left at `target` then.
    """
    rejected_file = _rejected_file(target)
    try:
        with replacing(target) as partial:
            # Wrapped as a lazy frame, which polars writes chunk by chunk.
            lazy = register_io_source(lambda *_: frames, schema=dict(schema))
            lazy.sink_parquet(partial) if target.suffix.lower() == ".parquet" else lazy.sink_csv(partial)
            if rejected:
                write_text(rejected_file, "".join(json.dumps(row) + "\n" for row in rejected))
            else:
                rejected_file.unlink(missing_ok=True)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise UserError(f"--out {target}: cannot be written: {error}") from error


def _rejected_file(target: Path) -> Path:
    return target.with_name(f"{target.name}.rejected.jsonl")
