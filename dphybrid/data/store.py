"""Prepared data: a folder of memory-mapped arrays named by the digest of what went in.

Built under a temporary name and renamed when complete; a lock lets processes that want the same folder build it once.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dphybrid.data.batches import Array, ArrayDataset, Dataset
from dphybrid.errors import UserError

ENCODER_VERSION = 2
"""Raise it when the same input would be encoded differently: old folders are then left alone."""


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

    def dataset(self, part: str) -> Dataset:
        """Return the `train` or the `valid` part."""
        if self.manifest["kind"] == "text":
            from dphybrid.data.text import WindowDataset

            return WindowDataset(self.arrays[f"{part}_tokens"], self.info["window"])
        rows = self.arrays[f"{part}_rows"]
        return ArrayDataset({name: self.arrays[name] for name in self.manifest["batch_arrays"]}, rows)


@dataclass(frozen=True)
class Content:
    """What a source comes to: arrays to save, facts for models, lines for people, rejected rows."""

    kind: str
    arrays: dict[str, Array]
    info: dict[str, Any]
    description: list[str]
    batch_arrays: tuple[str, ...] = ()
    extra: dict[str, Any] | None = None
    rejected: Iterable[dict[str, Any]] = ()


class Source(Protocol):
    """Something to prepare. options: the values that change what comes out."""

    @property
    def options(self) -> dict[str, Any]: ...

    def digests(self) -> list[bytes]:
        """Return digests of the source's bytes."""
        ...

    def read(self) -> Content:
        """Read and encode everything. Raises UserError for input that cannot be used."""
        ...


def open_prepared(path: Path) -> Prepared:
    """Open a prepared folder. Raises UserError when it is none or incomplete."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: is no prepared data ({error}); run the preparation again") from error
    missing = [name for name in manifest["arrays"] if not (path / f"{name}.npy").is_file()]
    if missing:
        raise UserError(f"{path}: lacks {', '.join(missing)}; delete the folder and run the preparation again")
    return Prepared(path, manifest)


def build_once(folder: Path, name: str, digest: str, make: Callable[[], Content]) -> Prepared:
    """Return the prepared folder `folder/name-digest`, built by `make` when it is not there yet."""
    final = folder / f"{name}-{digest[:12]}"
    if (final / "manifest.json").is_file():
        return open_prepared(final)
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / f".{final.name}.lock"):
        if (final / "manifest.json").is_file():  # another process was faster
            return open_prepared(final)
        partial = folder / f".{final.name}.partial-{os.getpid()}"
        try:
            content = make()
            partial.mkdir()
            manifest = _write(partial, content, digest)
            partial.rename(final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return Prepared(final, manifest, reused=False)


def _write(partial: Path, content: Content, digest: str) -> dict[str, Any]:
    sums: dict[str, str] = {}
    for name, array in content.arrays.items():
        file = partial / f"{name}.npy"
        np.save(file, array)
        _sync(file)
        sums[name] = _file_digest(file)
    num_rejected = 0
    with (partial / "rejected.jsonl").open("w", encoding="utf-8") as lines:
        for row in content.rejected:
            lines.write(json.dumps(row) + "\n")
            num_rejected += 1
    manifest = {
        "digest": digest,
        "encoder_version": ENCODER_VERSION,
        "kind": content.kind,
        "arrays": {
            name: {"shape": list(a.shape), "dtype": str(a.dtype), "sha256": sums[name]} for name, a in content.arrays.items()
        },
        "batch_arrays": list(content.batch_arrays),
        "info": content.info,
        "description": content.description,
        "rejected": num_rejected,
        **(content.extra or {}),
    }
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8")
    _sync(partial / "manifest.json")
    return manifest


def combined_digest(parts: Iterable[bytes]) -> str:
    """Return the sha256 of parts in hex; their borders count."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()


def source_digests(files: Iterable[Path]) -> list[bytes]:
    """Return one sha256 a file, in the given order."""
    return [bytes.fromhex(_file_digest(file)) for file in files]


def _file_digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
