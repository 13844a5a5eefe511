"""Checksums of files and values, and the check of files against their checksums."""

import hashlib
import inspect
import json
import marshal
import os
import stat
import sys
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dphybrid.util.errors import UserError

_CHUNK_BYTES = 2**20


def file_digest(path: Path) -> str:
    """Return the sha256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def combined_digest(parts: Iterable[bytes]) -> str:
    """Return the sha256 of a sequence of parts in hex. It depends on where one part ends."""
    total = hashlib.sha256()
    for part in parts:
        # The length first: otherwise ("ab", "c") and ("a", "bc") would have the same digest.
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()


def value_digest(value: object) -> str:
    """Return the sha256 in hex of a value that JSON can represent. The order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def code_digest(cls: type) -> str:
    """Return the sha256 in hex of the code of a class and of its base classes: of the files of their modules.
    Empty if all of them are in this package, whose code has a version."""
    package = __name__.partition(".")[0]
    own = (package, "builtins", "abc", "typing", "pydantic")
    others = [base for base in cls.__mro__ if base.__module__.partition(".")[0] not in own]
    return value_digest([_code_of(base) for base in others]) if others else ""


def _code_of(cls: type) -> str:
    try:
        # Of the running program only the class: a script's other lines may change from run to run.
        return inspect.getsource(cls if cls.__module__ == "__main__" else sys.modules[cls.__module__])
    except (OSError, TypeError, KeyError):  # typed into an interpreter
        functions = filter(inspect.isfunction, vars(cls).values())
        return repr([marshal.dumps(function.__code__) for function in functions])


def file_crc(path: Path) -> str:
    """Return the CRC-32 of a file in hex. It detects damage, not forgery, much faster than sha256."""
    crc, chunk = 0, memoryview(bytearray(_CHUNK_BYTES))
    # readinto reuses one buffer; read() would allocate one for each chunk.
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            crc = zlib.crc32(chunk[:count], crc)
    return f"{crc:08x}"


SUMS = {"sha256": file_digest, "crc32": file_crc}
"""Kinds of file checksums, by the names of the page fields that hold them."""


def own_files(folder: Path, remedy: str) -> list[str]:
    """Return the names of all files in `folder` and below, except hidden ones. Opens nothing. Raises
    UserError unless everything there is a regular file or a folder: opening a pipe or a device may wait
    forever, and a link may lead to somebody's file."""
    found = list[str]()
    try:
        for entry in sorted(folder.rglob("*")):
            mode = entry.lstat().st_mode
            if stat.S_ISREG(mode) and not entry.name.startswith("."):
                found.append(entry.relative_to(folder).as_posix())
            elif not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                kind = "a link" if stat.S_ISLNK(mode) else "neither a file nor a folder"
                raise UserError(f"{entry}: is {kind}, which this folder must not have; {remedy}")
    except OSError as error:
        raise UserError(f"{error.filename or folder}: cannot be read ({error.strerror}); {remedy}") from error
    return found


def inside(folder: Path, name: str, remedy: str = "") -> Path:
    """Return the path that a page of `folder` names. Raises UserError unless it is in that folder, and no
    link in it leads out."""
    path = folder / name
    below = folder.absolute() in Path(os.path.normpath(path.absolute())).parents
    if not below or not path.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{folder}: names the file {name!r}, which is outside of this folder{remedy}")
    return path


def verify_files(folder: Path, page: str, sums: Mapping[str, Mapping[str, str]], remedy: str) -> None:
    """Check that `folder` holds the files that its page lists, with their checksums, and no other ones.

    Raises UserError that names the first file that differs or is not listed, and for a name that leads out of
    the folder.

    Args:
        page: Name of the page.
        sums: Kind (a key of `SUMS`) -> name in the folder -> checksum.
    """
    listed = {name for files in sums.values() for name in files}
    for name in listed:
        inside(folder, name, f"; {remedy}")
    for name in own_files(folder, remedy):
        if name not in listed and name != page:
            raise UserError(f"{folder / name}: is not listed in {page}, so it is not checked; remove it")
    # Threads use all cores, because hashing releases the interpreter lock.
    with ThreadPoolExecutor() as pool:
        for done in [
            pool.submit(_check_file, folder / name, kind, wanted, remedy)
            for kind, files in sums.items()
            for name, wanted in files.items()
        ]:
            done.result()


def _check_file(file: Path, kind: str, wanted: str, remedy: str) -> None:
    try:
        found = SUMS[kind](file)
    except FileNotFoundError as error:
        raise UserError(f"{file}: is missing; {remedy}") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); {remedy}") from error
    if found != wanted:
        raise UserError(f"{file}: is damaged (its checksum differs); {remedy}")
