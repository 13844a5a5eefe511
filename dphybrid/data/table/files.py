"""Which files a path means."""

from pathlib import Path

from dphybrid.util.errors import UserError
from dphybrid.util.files import given_path

SUFFIXES = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz", ".parquet", ".pq")
"""Files of a folder that are read."""


def find_files(path: str, place: str) -> tuple[Path, ...]:
    """Return the files of a file, a folder (with what is below it) or a pattern such as `logs/day-*.csv.gz`,
    sorted by name.

    Raises UserError when there are none, and for an empty file.
    """
    root = given_path(path, place)
    if root.is_file():
        files = [root]
    elif root.is_dir():
        files = [
            file
            for file in root.rglob("*")
            if file.name.lower().endswith(SUFFIXES) and file.is_file() and file.name[0] not in "._"
        ]
        if not files:
            raise UserError(
                f"{place}={path}: is a folder without files of rows ({', '.join(SUFFIXES)}); name a file, "
                "or one that has some"
            )
    else:
        anchor = Path(root.anchor) if root.anchor else Path()
        pattern = str(root.relative_to(anchor))
        try:
            wild = any(sign in pattern for sign in "*?[")
            files = [file for file in anchor.glob(pattern) if file.is_file()] if wild else []
        except ValueError as error:
            raise UserError(f"{place}={path}: {error}") from error
        if not files:
            raise UserError(f"{place}={path}: there is no such file")
    for file in files:
        if not file.stat().st_size:
            raise UserError(f"{place}={file}: is empty; give a file with rows")
    return tuple(sorted(files))
