"""Prepared data: a folder of memory-mapped arrays named by the digest of what went in.

Built under a temporary name and renamed when complete; a lock of the kernel lets processes that want the same
folder build it once, and ends with its process, so that whoever comes next clears away what a killed one
left.
"""

import hashlib
import io
import json
import os
import shutil
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from pydantic import BaseModel, Field

from dphybrid.data.batches import Array, ArrayDataset, Dataset
from dphybrid.util.digests import combined_digest, file_digest, verify_files
from dphybrid.util.errors import UserError, counted
from dphybrid.util.files import clear_leftovers, make_folder, making, naming, sync
from dphybrid.util.locks import locked
from dphybrid.util.pages import Page

S = TypeVar("S")
T = TypeVar("T")

ENCODER_VERSION = 10
"""Raise it when the same input would be encoded differently: old folders are then left alone."""

_PIECE_BYTES = 2**24
"""Bytes of a file that are digested at a time."""

_ANEW = "delete the folder and run the preparation again"

THREADS = min(4, os.cpu_count() or 1)
"""Threads of `mapped`."""

Progress = Callable[[str, int, int], None]
"""Told about long work: what is being done, how much of it is done, how much there is."""


class _ArrayFacts(BaseModel):
    """An array's file."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    sha256: str = ""


class Manifest(Page):
    """`manifest.json`: what a prepared folder holds.

    info: facts that models need. description: lines for people. rejected: rows left out. base: the prepared
    folder that was extended.
    split: how the validation split was chosen. files: sha256 of the other files by name. facts: what else the
    source tells.
    """

    VERSION: ClassVar[int] = 2

    version: int = VERSION
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
    def sums(self) -> dict[str, str]:
        """The sha256 of every file by its name in the folder."""
        return {
            f"{name}.npy": facts.sha256 for name, facts in self.arrays.items() if facts.sha256
        } | self.files


@dataclass(frozen=True)
class Prepared:
    """A prepared folder. reused: it was there before this call. view: makes a split of it, as its recipe
    reads it; None: rows of arrays."""

    path: Path
    manifest: Manifest
    reused: bool = True
    view: "Callable[[Prepared, str], Dataset] | None" = None

    @property
    def digest(self) -> str:
        """Hex digest of source bytes, schema and encoder."""
        return self.manifest.digest

    @property
    def info(self) -> dict[str, Any]:
        """Facts that models need: task, num_words, num_ids, num_dense, ..."""
        return self.manifest.info

    def describe(self) -> str:
        """Return what a person wants to know of the data, in lines."""
        return "\n".join(self.manifest.description)

    @cached_property
    def arrays(self) -> dict[str, Array]:
        return {name: np.load(self.path / f"{name}.npy", mmap_mode="r") for name in self.manifest.arrays}

    @property
    def parts(self) -> list[str]:
        """What the rows are divided into: train, valid, and test where the source comes with one."""
        return [
            part
            for part in ("train", "valid", "test")
            if any(name.startswith(f"{part}_") for name in self.manifest.arrays)
        ]

    def dataset(self, part: str) -> Dataset:
        """Return one of the parts, as the recipe reads it."""
        return self.rows(part) if self.view is None else self.view(self, part)

    def rows(self, part: str) -> ArrayDataset:
        """Return the rows of a part that the manifest's batch arrays have."""
        rows = self.arrays[f"{part}_rows"]
        return ArrayDataset({name: self.arrays[name] for name in self.manifest.batch_arrays}, rows)


_Shapes = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""Shape and type of arrays by name."""


@dataclass(frozen=True)
class Content:
    """What a source comes to: arrays to save, facts for models, lines for people, rejected rows. save: writes
    more files into the folder. shapes, blocks: of arrays too large for memory, which come side by side, block
    by block along dim 0."""

    arrays: Mapping[str, Array]
    info: Mapping[str, object]
    description: list[str]
    batch_arrays: tuple[str, ...] = ()
    extra: Mapping[str, object] = field(default_factory=dict)
    rejected: Sequence[Mapping[str, object]] = ()
    save: Callable[[Path], None] | None = None
    shapes: _Shapes = field(default_factory=dict)
    blocks: Callable[[], Iterable[Mapping[str, Array]]] = tuple


def file_stamps(files: Sequence[Path]) -> list[tuple[int, int]]:
    """Return the size and the time of change of each file."""
    return [(stat.st_size, stat.st_mtime_ns) for stat in (file.stat() for file in files)]


def check_unchanged(files: Sequence[Path], before: list[tuple[int, int]]) -> None:
    """Raise UserError for a file that changed since `file_stamps` gave `before`: one that grows while it is
    read would give half of its rows under the digest of all."""
    for file, now, then in zip(files, file_stamps(files), before, strict=True):
        if now != then:
            raise UserError(f"data.path: {file} changed while it was read; run again when it is complete")


class Source(Protocol):
    """Something to prepare. What a class below says nothing of: no options, no files, and these files'
    digests."""

    @property
    def options(self) -> dict[str, object]:
        """Values that the prepared data depends on, beside its files."""
        return {}

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that are read."""
        return ()

    def digests(self, progress: Progress) -> list[bytes]:
        """Return digests of the source's bytes."""
        return source_digests(self.files, progress)

    @abstractmethod
    def read(self, progress: Progress, scratch: Path) -> Content:
        """Read and encode everything; scratch: an empty folder that lasts until the content is written.
        Raises UserError for input that cannot be used."""


def mapped(function: Callable[[S], T], items: Iterable[S], threads: int = THREADS) -> Iterator[T]:
    """Yield `function(item)` of each item in order, computed by threads that are two items ahead."""
    pending: deque[Future[T]] = deque()
    with ThreadPoolExecutor(threads) as workers:
        try:
            for item in items:
                pending.append(workers.submit(function, item))
                if len(pending) > threads + 2:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def open_prepared(path: Path) -> Prepared:
    """Open a prepared folder, its parts as plain rows; `Recipe.open` reads them as the recipe does.

    Raises UserError when it is none, or when an array is missing, not as long as it was written, or another.
    """
    try:
        manifest = Manifest.read(path / "manifest.json")
    except UserError as error:
        raise UserError(f"{path}: is not complete prepared data ({error}); {_ANEW}") from error
    # Sizes and headers alone, so that it takes no time; `verify_prepared` reads every byte.
    for name, facts in manifest.arrays.items():
        file = path / f"{name}.npy"
        found = file.stat().st_size if file.is_file() else 0
        if found != facts.bytes:
            raise UserError(f"{file}: has {found:,} bytes of {facts.bytes:,}; {_ANEW}")
        head = _header(facts.shape, np.dtype(facts.dtype))
        try:
            with file.open("rb") as stream:
                is_whole = stream.read(len(head)) == head
        except OSError:
            is_whole = False
        if not is_whole:
            raise UserError(
                f"{file}: is damaged (its header is not that of a {facts.shape} array of {facts.dtype}); "
                f"{_ANEW}"
            )
    return Prepared(path, manifest)


def verify_prepared(path: Path) -> Prepared:
    """Open a prepared folder and check every byte of it against its manifest. Raises UserError that names the
    first damaged file."""
    prepared = open_prepared(path)
    verify_files(path, {"sha256": prepared.manifest.sums}, _ANEW)
    return prepared


def _header(shape: tuple[int, ...], dtype: "np.dtype[Any]") -> bytes:
    """Return what numpy's file of an array begins with."""
    head = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(head, {"descr": descr, "fortran_order": False, "shape": shape})
    return head.getvalue()


def _prepared_path(folder: Path, name: str, digest: str) -> Path:
    """Return where the prepared data of a digest lies."""
    return folder / f"{name}-{digest[:12]}"


def build_once(folder: Path, name: str, digest: str, make: Callable[[Path], Content]) -> Prepared:
    """Return the prepared folder `folder/name-digest`, built by `make(scratch folder)` when it is not there
    yet.

    Raises UserError when the folder is damaged or cannot be written; nothing half-made is left then.
    """
    final = _prepared_path(folder, name, digest)
    # Without the lock: a folder of this name is complete, and never changed.
    if final.exists():
        return verify_prepared(final)
    try:
        make_folder(folder)
        # Another process that wants the same data waits here instead of making it twice.
        with locked(folder / f".{final.name}.lock"):
            # of a killed process: whoever holds the lock is the only one alive
            clear_leftovers(folder, final.name)
            if final.exists():  # another process was faster
                return verify_prepared(final)
            with making(final) as partial:
                scratch = partial / "scratch"
                scratch.mkdir()
                manifest = _write(partial, make(scratch), digest)
    except OSError as error:
        raise UserError(
            f"{folder}: prepared data cannot be written there: {error}; make room, or name another folder "
            "in DPHYBRID_DATA_DIR"
        ) from error
    return Prepared(final, manifest, reused=False)


def _write(partial: Path, content: Content, digest: str) -> Manifest:
    shapes = {name: (array.shape, array.dtype) for name, array in content.arrays.items()}
    arrays = _save_blocks(partial, shapes, [content.arrays])
    arrays |= _save_blocks(partial, content.shapes, content.blocks())
    if content.save:
        content.save(partial)
    shutil.rmtree(partial / "scratch")
    num_rejected, description = len(content.rejected), content.description
    with naming(partial), (partial / "rejected.jsonl").open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in content.rejected)
    if num_rejected:
        place = "rejected.jsonl in the prepared folder says which and why"
        description = [*description, f"  {counted(num_rejected, 'row')} rejected: {place}"]
    facts: dict[str, Any] = dict(content.extra)
    there = [file for file in sorted(partial.rglob("*")) if file.is_file()]
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
        files={str(file.relative_to(partial)): file_digest(file) for file in there if file.suffix != ".npy"},
        facts=facts,
    )
    manifest.write(partial / "manifest.json")
    return manifest


def _save_blocks(
    folder: Path, shapes: _Shapes, blocks: Iterable[Mapping[str, Array]]
) -> dict[str, _ArrayFacts]:
    """Write arrays as numpy's format has them; return the facts about them."""
    files = {name: folder / f"{name}.npy" for name in shapes}
    sums = {name: hashlib.sha256() for name in files}
    with ExitStack() as opened:
        streams = {name: opened.enter_context(file.open("wb")) for name, file in files.items()}

        def write(name: str, piece: memoryview | bytes) -> None:
            with naming(files[name]):
                sums[name].update(piece)
                streams[name].write(piece)

        for name, (shape, dtype) in shapes.items():
            write(name, _header(shape, dtype))
        # Summed on their way to the disk, so that no array is read again for it.
        for block in blocks:
            for name, (_, dtype) in shapes.items():
                data = np.ascontiguousarray(block[name], dtype).reshape(-1).view(np.uint8).data
                for start in range(0, len(data), _PIECE_BYTES):
                    write(name, data[start : start + _PIECE_BYTES])
    found = {}
    for name, (shape, dtype) in shapes.items():
        sync(files[name])
        size = files[name].stat().st_size
        found[name] = _ArrayFacts(shape=shape, dtype=str(dtype), bytes=size, sha256=sums[name].hexdigest())
    return found


@contextmanager
def reading_files() -> Iterator[None]:
    """Raise UserError for a data file that cannot be read in the body."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"data.path: {error.filename or 'a file'} cannot be read: {error.strerror or error}; check its "
            "permissions"
        ) from error


def source_digests(files: Sequence[Path], progress: Progress) -> list[bytes]:
    """Return one digest a file, in the given order: the sha256 of its pieces' sha256, which threads
    compute."""

    def digest(piece: tuple[Path, int]) -> bytes:
        with piece[0].open("rb", buffering=0) as stream:
            stream.seek(piece[1])
            return hashlib.sha256(stream.read(_PIECE_BYTES)).digest()

    pieces = [
        (file, start) for file in files for start in range(0, max(1, file.stat().st_size), _PIECE_BYTES)
    ]
    totals = {file: hashlib.sha256() for file in files}
    for done, ((file, _), found) in enumerate(zip(pieces, mapped(digest, pieces), strict=True)):
        progress("digest files", done, len(pieces))
        totals[file].update(found)
    return [total.digest() for total in totals.values()]


def prepare_source(
    name: str,
    source: Source,
    folder: Path,
    seed: int,
    on_progress: Progress | None = None,
    view: Callable[[Prepared, str], Dataset] | None = None,
) -> Prepared:
    """Return the prepared data of a source under `folder`, building it when it is not there.

    name: of the recipe. seed: chooses what is held out for validation. on_progress(what, done, total) is
    called along the way. view: see `Prepared`. The same bytes and values give the same digest on any machine.
    Raises UserError for input that cannot be used; nothing half-made is left then.
    """
    progress = on_progress or _silent
    with reading_files():
        before = file_stamps(source.files)
        digests = source.digests(progress)
        digest = _digest(name, source, seed, digests)

    def make(scratch: Path) -> Content:
        content = source.read(progress, scratch)
        check_unchanged(source.files, before)
        return replace(content, extra={**content.extra, "source_digest": combined_digest(digests)})

    return replace(build_once(folder, name, digest, make), view=view)


def find_prepared(
    name: str, source: Source, folder: Path, seed: int, view: Callable[[Prepared, str], Dataset] | None = None
) -> Prepared | None:
    """Return the prepared data of a source where it is there, else None. Raises UserError for a source that
    is not there."""
    with reading_files():
        path = _prepared_path(folder, name, _digest(name, source, seed, source.digests(_silent)))
    return replace(open_prepared(path), view=view) if path.exists() else None


def _digest(name: str, source: Source, seed: int, digests: list[bytes]) -> str:
    facts = {"recipe": name, "seed": seed, "encoder": ENCODER_VERSION, **source.options}
    return combined_digest([json.dumps(facts, sort_keys=True).encode(), *digests])


def source_digest(source: Source) -> str:
    """Return the digest of the source's bytes alone: it changes when data arrives. Raises UserError for a
    source that is not there."""
    with reading_files():
        return combined_digest(source.digests(_silent))


def _silent(what: str, done: int, total: int) -> None:
    """Report nothing."""
