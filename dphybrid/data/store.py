"""Prepared data: a folder of memory-mapped arrays, named by the digest of its input.

It is built under a temporary name and renamed when complete. A kernel lock makes processes that want the same
folder build it only once. The kernel releases it with its process, so that the next process can clear away
the partial work of a killed one.
"""

import io
import json
import os
import shutil
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from tokenize import TokenError
from typing import Any, ClassVar, Protocol

import numpy as np
from pydantic import BaseModel, Field

from dphybrid.data.batches import Array, ArrayDataset, Dataset
from dphybrid.util.digests import code_digest, combined_digest, file_digest, value_digest, verify_files
from dphybrid.util.errors import UserError, counted
from dphybrid.util.files import disk_text, making, naming, sync
from dphybrid.util.pages import Page

PREPARED_VERSION = 25
"""Part of the digest. Increase it when the same input and options would give other arrays or another split,
so that folders prepared before are not used."""
ENCODER_VERSION = 15
"""Version of a saved encoder. Increase it when an older one can no longer be read, or would be read as
another; checkpoints with an older one are then refused."""

PARTS = {"train": "to train", "valid": "to validate", "test": "to test"}
"""The parts of prepared data, each with what its rows are for."""
_REMEDY = "delete the folder and run the preparation again"

_BLOCK_ROWS = 2**16
"""Rows of an array that are written at a time."""
THREADS = min(4, os.cpu_count() or 1)
"""Number of threads that digest files."""

Progress = Callable[[str, int, int], None]
"""Callback of long work: (what is being done, amount done, total amount)."""


class _ArrayFacts(BaseModel):
    """What the manifest records of an array's file."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    crc32: str


class Manifest(Page):
    """`manifest.json`: what a prepared folder holds.

    Attributes:
        info: Facts that models need.
        description: Lines for people.
        rejected: Number of rows left out.
        base: The prepared folder that was extended.
        split: How the validation split was chosen.
        files: sha256 of the files that are not arrays, by name.
        facts: Further facts from the source.
    """

    VERSION: ClassVar[int] = 2
    DEPTH: ClassVar[int] = 2

    digest: str
    arrays: dict[str, _ArrayFacts]
    batch_arrays: tuple[str, ...] = ()
    info: dict[str, object]
    description: list[str]
    rejected: int
    source_digest: str = ""
    base: str | None = None
    split: dict[str, object] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)
    facts: dict[str, object] = Field(default_factory=dict)

    @property
    def sums(self) -> dict[str, dict[str, str]]:
        """The checksums of the folder's files: kind (a key of `digests.SUMS`) -> name -> checksum."""
        crc32 = {f"{name}.npy": facts.crc32 for name, facts in self.arrays.items()}
        return {"crc32": crc32, "sha256": self.files}


@dataclass(frozen=True)
class Prepared:
    """A prepared folder. reused: it existed before this call. view: the recipe's function that returns a part
    of it as a data set; None: plain rows of arrays."""

    path: Path
    manifest: Manifest
    reused: bool = True
    view: "Callable[[Prepared, str], Dataset] | None" = None

    @property
    def digest(self) -> str:
        """Hex digest of the source's bytes, its options (such as the schema) and the encoder's version."""
        return self.manifest.digest

    @property
    def held_out(self) -> str:
        """A digest of the validation rows: equal for data prepared from the same files with the same rows
        held out, whatever else is read from them and however, and whatever the test part holds."""
        arrays = self.manifest.arrays
        rows = {name: facts.crc32 for name, facts in arrays.items() if name.startswith("valid_")}
        return value_digest([self.manifest.source_digest or self.digest, rows])

    @property
    def info(self) -> dict[str, Any]:
        """Facts that models need: task, num_words, num_ids, num_dense, ..."""
        return self.manifest.info

    def describe(self) -> str:
        """Return a description of the data for people, in lines."""
        return "\n".join(self.manifest.description)

    @cached_property
    def arrays(self) -> dict[str, Array]:
        """The arrays by name, mapped from their files. Raises UserError for a file that is missing or damaged
        in its size or header."""
        return {name: _mapped_array(self.path / f"{name}.npy", f) for name, f in self.manifest.arrays.items()}

    @property
    def parts(self) -> list[str]:
        """The parts of the rows: train, valid, and test if the source has one."""
        # A batch's own arrays may have names such as test_score, too.
        names = {*self.manifest.arrays} - {*self.manifest.batch_arrays}
        parts = {name.partition("_")[0] for name in names}
        return [part for part in PARTS if part in parts]

    def dataset(self, part: str) -> Dataset:
        """Return the data set of a part, as the recipe reads it."""
        return self.rows(part) if self.view is None else self.view(self, part)

    def rows(self, part: str) -> ArrayDataset:
        """Return a part as plain rows of the manifest's batch arrays."""
        rows = self.arrays[f"{part}_rows"]
        return ArrayDataset({name: self.arrays[name] for name in self.manifest.batch_arrays}, rows)


@dataclass(frozen=True)
class Content:
    """What a source was encoded to: arrays to save, facts for models, lines for people, rejected rows.

    Attributes:
        arrays: Of numpy, or a `SideBySide`, which may be larger than memory.
        save: Writes more files into the folder.
        extra: The manifest's source_digest, base, split and facts.
    """

    arrays: Mapping[str, Any]
    info: Mapping[str, object]
    description: list[str]
    batch_arrays: tuple[str, ...] = ()
    extra: Mapping[str, object] = field(default_factory=dict)
    rejected: Sequence[Mapping[str, object]] = ()
    save: Callable[[Path], None] | None = None


class Source(Protocol):
    """Something to prepare. By default it has no options, files or test part, and `digests` digests its
    files."""

    @property
    def options(self) -> dict[str, object]:
        """Values, other than the files, that the prepared data depends on."""
        return {}

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that are read."""
        return ()

    def digests(self, progress: Progress) -> list[bytes]:
        """Return digests of the source's bytes."""
        return source_digests(self.files, progress)

    @property
    def num_test_digests(self) -> int:
        """How many of `digests`, the last ones, are those of the test part, which decides nothing."""
        return 0

    @abstractmethod
    def read(self, progress: Progress, scratch: Path) -> Content:
        """Read and encode everything. scratch: an empty folder that is deleted after the content is written.
        Raises UserError for input that cannot be used."""


def open_prepared(path: Path) -> Prepared:
    """Open a prepared folder, with its parts as plain rows; `Recipe.open` reads them as the recipe does.

    Raises UserError if it is not a prepared folder, or if an array's file is missing or has another size or
    header than the one written.
    """
    try:
        manifest = Manifest.read(path / "manifest.json")
    except UserError as error:
        raise UserError(f"{path}: is not complete prepared data ({error}); {_REMEDY}") from error
    # Only sizes and headers, which takes no time; `verify_prepared` reads every byte.
    prepared = Prepared(path, manifest)
    _ = prepared.arrays
    return prepared


def _mapped_array(file: Path, facts: _ArrayFacts) -> Array:
    size = file.stat().st_size if file.is_file() else 0
    if size != facts.bytes:
        raise UserError(f"{file}: has {size:,} bytes of {facts.bytes:,}; {_REMEDY}")
    try:
        array: Array = np.load(file, mmap_mode="r")
    except (OSError, ValueError, TokenError) as error:  # numpy reads a header as Python, line by line
        raise UserError(f"{file}: is damaged ({error}); {_REMEDY}") from error
    if (array.shape, str(array.dtype)) != (facts.shape, facts.dtype) or array.flags.fnc:
        raise UserError(
            f"{file}: is damaged (it does not hold a {facts.shape} array of {facts.dtype}); {_REMEDY}"
        )
    return array


def verify_prepared(path: Path) -> Prepared:
    """Open a prepared folder and check every byte against its manifest. Raises UserError that names the first
    damaged file."""
    prepared = open_prepared(path)
    verify_files(path, "manifest.json", prepared.manifest.sums, _REMEDY)
    return prepared


def build_once(folder: Path, name: str, digest: str, make: Callable[[Path], Content]) -> Prepared:
    """Return the prepared folder `folder/name-digest`. If it does not exist, build it from
    `make(scratch folder)`.

    Raises UserError if the folder is damaged or cannot be written; no partial work is left then.
    """
    final = folder / f"{name}-{digest[:12]}"
    # No lock is needed: a folder with its final name is complete and never changes.
    if final.exists():
        with suppress(OSError):  # another user's
            os.utime(final)  # the time of its last use, by which `dphybrid runs remove` keeps it
        return verify_prepared(final)
    try:
        # A second process that wants the same data waits here instead of building it too.
        with making(final) as partial:
            scratch = partial / "scratch"
            scratch.mkdir()
            manifest = _write(partial, make(scratch), digest)
    except OSError as error:
        if final.exists():  # another process has made it
            return verify_prepared(final)
        raise UserError(
            f"{folder}: prepared data cannot be made there: {disk_text(error)}; or set DPHYBRID_DATA_DIR to "
            "another folder"
        ) from error
    return Prepared(final, manifest, reused=False)


def _write(partial: Path, content: Content, digest: str) -> Manifest:
    arrays = {name: _save(partial / f"{name}.npy", array) for name, array in content.arrays.items()}
    if content.save:
        content.save(partial)
    # Before the files are listed below: the arrays were read from it until here.
    shutil.rmtree(partial / "scratch")
    num_rejected, description = len(content.rejected), content.description
    with naming(partial), (partial / "rejected.jsonl").open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in content.rejected)
    if num_rejected:
        where = "see rejected.jsonl in the prepared folder for lines and reasons"
        description = [*description, f"  {counted(num_rejected, 'row')} rejected: {where}"]
    facts: dict[str, Any] = dict(content.extra)
    # The arrays' checksums were computed while they were written.
    written = [file for file in sorted(partial.rglob("*")) if file.is_file() and file.suffix != ".npy"]
    manifest = Manifest(
        digest=digest,
        arrays=arrays,
        batch_arrays=content.batch_arrays,
        info=dict(content.info),
        description=description,
        rejected=num_rejected,
        source_digest=facts.pop("source_digest", ""),
        base=facts.pop("base", None),
        split=facts.pop("split", {}),
        files={str(file.relative_to(partial)): file_digest(file) for file in written},
        facts=facts,
    )
    manifest.write(partial / "manifest.json")
    return manifest


def _save(file: Path, array: Any) -> _ArrayFacts:
    """Write an array as .npy, block by block; return the facts about it."""
    head, crc32 = io.BytesIO(), 0
    form = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": array.shape}
    np.lib.format.write_array_header_1_0(head, form)
    starts = range(0, array.shape[0], _BLOCK_ROWS)
    blocks = (np.ascontiguousarray(array[start : start + _BLOCK_ROWS]) for start in starts)
    with naming(file), file.open("wb") as stream:
        # Checksums are computed while writing, so that no array has to be read again.
        for chunk in chain([head.getbuffer()], (block.reshape(-1).view(np.uint8).data for block in blocks)):
            crc32 = zlib.crc32(chunk, crc32)
            stream.write(chunk)
    sync(file)
    size = file.stat().st_size
    return _ArrayFacts(shape=array.shape, dtype=str(array.dtype), bytes=size, crc32=f"{crc32:08x}")


@contextmanager
def reading_files() -> Iterator[None]:
    """Turn an OSError in the body into a UserError that names the data file."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"data.path: {error.filename or 'a file'} cannot be read: {error.strerror or error}; check its "
            "permissions"
        ) from error


def source_digests(files: Sequence[Path], progress: Progress) -> list[bytes]:
    """Return the sha256 of each file, in the given order; threads compute them."""
    with ThreadPoolExecutor(THREADS) as workers:
        found = list[bytes]()
        for digest in workers.map(file_digest, files):
            found.append(bytes.fromhex(digest))
            progress("digest files", len(found), len(files))
    return found


def prepare_source(
    name: str,
    source: Source,
    folder: Path,
    seed: int,
    on_progress: Progress | None = None,
    view: Callable[[Prepared, str], Dataset] | None = None,
) -> Prepared:
    """Return the prepared data of a source under `folder`; build it if it does not exist.

    The same bytes and values give the same digest on any machine. Raises UserError for input that cannot be
    used; no partial work is left then.

    Args:
        name: The recipe's.
        seed: Chooses the validation rows.
        on_progress: Called during the work, as on_progress(what, done, total).
        view: See `Prepared`.
    """
    progress = on_progress or (lambda *_: None)
    with reading_files():
        before = _stamps(source.files)
        digests = source.digests(progress)
        digest = _digest(name, source, seed, digests)

    def make(scratch: Path) -> Content:
        content = source.read(progress, scratch)
        # Otherwise a part of a growing file's rows could be saved under the digest of all of them.
        for file, stamp in _stamps(source.files).items():
            if stamp != before[file]:
                raise UserError(f"data.path: {file} changed while it was read; run again when it is complete")
        return replace(content, extra={**content.extra, "source_digest": _without_test(source, digests)})

    return replace(build_once(folder, name, digest, make), view=view)


def _stamps(files: Sequence[Path]) -> dict[Path, tuple[int, int]]:
    """Return the size and the modification time of each file."""
    return {file: (stat.st_size, stat.st_mtime_ns) for file in files if (stat := file.stat())}


def _digest(name: str, source: Source, seed: int, digests: list[bytes]) -> str:
    code = code_digest(type(source))
    facts = {"recipe": name, "seed": seed, "prepared": PREPARED_VERSION, **source.options}
    # Only with code from outside of the package: its own has PREPARED_VERSION.
    facts |= {"code": code} if code else {}
    return combined_digest([json.dumps(facts, sort_keys=True).encode(), *digests])


def source_digest(source: Source) -> str:
    """Return the digest of only the source's bytes, without its options and its test part: it changes when
    data arrives. Raises UserError if the source cannot be read."""
    with reading_files():
        return _without_test(source, source.digests(lambda *_: None))


def _without_test(source: Source, digests: list[bytes]) -> str:
    return combined_digest(digests[: len(digests) - source.num_test_digests])
