"""Prepared data: a folder of memory-mapped arrays named by the digest of what went in.

Built under a temporary name and renamed when complete; a lock of the kernel lets processes that want the same folder build it once, and
ends with its process, so that whoever comes next clears away what a killed one left.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dphybrid.data.ahead import mapped
from dphybrid.data.batches import Array, ArrayDataset, Dataset
from dphybrid.util.errors import UserError

ENCODER_VERSION = 5
"""Raise it when the same input would be encoded differently: old folders are then left alone."""

PIECE_BYTES = 2**24
"""Bytes of a source file that are digested at a time."""

Progress = Callable[[str, int, int], None]
"""Told about long work: what is being done, how much of it is done, how much there is."""


@dataclass(frozen=True)
class Prepared:
    """A prepared folder. reused: it was there before this call."""

    path: Path
    manifest: dict[str, Any]
    reused: bool = True

    @property
    def digest(self) -> str:
        """Hex digest of source bytes, schema and encoder."""
        return str(self.manifest["digest"])

    @property
    def info(self) -> dict[str, Any]:
        """Facts that models need: task, num_words, num_ids, num_dense, ..."""
        info: dict[str, Any] = self.manifest["info"]
        return info

    def describe(self) -> str:
        """Return what a person wants to know of the data, in lines."""
        return "\n".join(self.manifest["description"])

    @cached_property
    def arrays(self) -> dict[str, Array]:
        return {name: np.load(self.path / f"{name}.npy", mmap_mode="r") for name in self.manifest["arrays"]}

    @property
    def parts(self) -> list[str]:
        """What the rows are divided into: train, valid, and test where the source comes with one."""
        return [
            part for part in ("train", "valid", "test") if any(name.startswith(f"{part}_") for name in self.manifest["arrays"])
        ]

    def dataset(self, part: str) -> Dataset:
        """Return one of the parts."""
        if self.manifest["kind"] == "text":
            from dphybrid.recipes.text.data import WindowDataset

            return WindowDataset(self.arrays[f"{part}_tokens"], self.info["window"])
        if self.manifest["kind"] == "triples":
            from dphybrid.recipes.kge.data import part_of

            return part_of(part, self.arrays, self.info)
        rows = self.arrays[f"{part}_rows"]
        return ArrayDataset({name: self.arrays[name] for name in self.manifest["batch_arrays"]}, rows)


@dataclass(frozen=True)
class Streamed:
    """An array that is written block by block along dim 0."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    blocks: Callable[[], Iterator[Array]]


def _no_more_files(_: Path) -> None:
    """Write nothing."""


@dataclass(frozen=True)
class Content:
    """What a source comes to: arrays to save, facts for models, lines for people, rejected rows. save: writes more files into the folder."""

    kind: str
    arrays: Mapping[str, Array | Streamed]
    info: dict[str, Any]
    description: list[str]
    batch_arrays: tuple[str, ...] = ()
    extra: dict[str, Any] | None = None
    rejected: Iterable[dict[str, Any]] = ()
    save: Callable[[Path], None] = _no_more_files


class Source(Protocol):
    """Something to prepare. options: the values that change what comes out."""

    @property
    def options(self) -> dict[str, Any]: ...

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that are read."""
        ...

    def digests(self, progress: Progress) -> list[bytes]:
        """Return digests of the source's bytes."""
        ...

    def read(self, progress: Progress, scratch: Path) -> Content:
        """Read and encode everything; scratch: an empty folder that lasts until the content is written. Raises UserError for input that
        cannot be used."""
        ...


def open_prepared(path: Path) -> Prepared:
    """Open a prepared folder. Raises UserError when it is none, or when arrays are missing or not as long as they were written."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        sizes = {name: int(facts["bytes"]) for name, facts in manifest["arrays"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path}: is no complete prepared data ({error}); delete the folder and run the preparation again"
        ) from error
    for name, size in sizes.items():
        file = path / f"{name}.npy"
        found = file.stat().st_size if file.is_file() else 0
        if found != size:
            raise UserError(f"{file}: has {found:,} bytes of {size:,}; delete the folder {path} and run the preparation again")
    return Prepared(path, manifest)


def build_once(folder: Path, name: str, digest: str, make: Callable[[Path], Content]) -> Prepared:
    """Return the prepared folder `folder/name-digest`, built by `make(scratch folder)` when it is not there yet.

    Raises UserError when the folder is damaged or cannot be written; nothing half-made is left then.
    """
    final = folder / f"{name}-{digest[:12]}"
    if final.exists():
        return open_prepared(final)
    with _told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f".{final.name}.lock"):
            if final.exists():  # another process was faster
                return open_prepared(final)
            partial = folder / f".{final.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)  # of a killed process: whoever holds the lock is the only one alive
            try:
                (partial / "scratch").mkdir(parents=True)
                content = make(partial / "scratch")
                manifest = _write(partial, content, digest)
                partial.rename(final)
                _sync(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return Prepared(final, manifest, reused=False)


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{folder}: prepared data cannot be written there: {error}; make room, or name another folder in DPHYBRID_DATA_DIR"
        ) from error


def _write(partial: Path, content: Content, digest: str) -> dict[str, Any]:
    with ThreadPoolExecutor(1) as beside:
        others = beside.submit(content.save, partial)
        found = mapped(lambda name: _save(partial / f"{name}.npy", content.arrays[name]), content.arrays)
        sums = dict(zip(content.arrays, found, strict=True))
        others.result()
    shutil.rmtree(partial / "scratch")  # needs no sync, large as it is
    for file in partial.rglob("*"):
        _sync(file)
    num_rejected = 0
    with (partial / "rejected.jsonl").open("w", encoding="utf-8") as lines:
        for row in content.rejected:
            lines.write(json.dumps(row) + "\n")
            num_rejected += 1
    _sync(partial / "rejected.jsonl")
    manifest = {
        "digest": digest,
        "encoder_version": ENCODER_VERSION,
        "kind": content.kind,
        "arrays": {
            name: {
                "shape": list(a.shape),
                "dtype": str(a.dtype),
                "bytes": (partial / f"{name}.npy").stat().st_size,
                "sha256": sums[name],
            }
            for name, a in content.arrays.items()
        },
        "batch_arrays": list(content.batch_arrays),
        "info": content.info,
        "description": content.description,
        "rejected": num_rejected,
        **(content.extra or {}),
    }
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8")
    _sync(partial / "manifest.json")
    _sync(partial)
    return manifest


def _save(file: Path, array: Array | Streamed) -> str:
    """Write an array and return the file's sha256."""
    if isinstance(array, Streamed):
        digest = _save_blocks(file, array)
    else:
        np.save(file, array)
        digest = _file_digest(file)
    _sync(file)
    return digest


def _save_blocks(file: Path, array: Streamed) -> str:
    """Write an array as numpy's format has it; return the file's sha256."""
    total = hashlib.sha256()
    with file.open("wb") as stream:
        np.lib.format.write_array_header_1_0(
            stream, {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": array.shape}
        )
        stream.flush()
        total.update(file.read_bytes())
        for block in array.blocks():
            data = np.ascontiguousarray(block, array.dtype).data
            total.update(data)
            stream.write(data)
    return total.hexdigest()


def combined_digest(parts: Iterable[bytes]) -> str:
    """Return the sha256 of parts in hex; their borders count."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()


def source_digests(files: Sequence[Path], progress: Progress) -> list[bytes]:
    """Return one digest a file, in the given order: the sha256 of its pieces' sha256, which threads compute."""

    def digest(piece: tuple[Path, int]) -> bytes:
        with piece[0].open("rb", buffering=0) as stream:
            stream.seek(piece[1])
            return hashlib.sha256(stream.read(PIECE_BYTES)).digest()

    pieces = [(file, start) for file in files for start in range(0, max(1, file.stat().st_size), PIECE_BYTES)]
    totals = {file: hashlib.sha256() for file in files}
    for done, ((file, _), found) in enumerate(zip(pieces, mapped(digest, pieces), strict=True)):
        progress("digest files", done, len(pieces))
        totals[file].update(found)
    return [total.digest() for total in totals.values()]


def _file_digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)  # a folder's entries need it as much as a file's bytes
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    while True:
        with file.open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            if not _is_open_file(file, stream.fileno()):  # its last holder removed it: a newer one may be held by someone else
                continue
            try:
                yield
            finally:
                file.unlink(missing_ok=True)
            return


def _is_open_file(file: Path, handle: int) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
