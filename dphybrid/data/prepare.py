"""From a source to a prepared folder, made once."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dphybrid.data.batches import Dataset
from dphybrid.data.store import (
    ENCODER_VERSION,
    Content,
    Prepared,
    Progress,
    Source,
    build_once,
    open_prepared,
    prepared_path,
    reading_files,
)
from dphybrid.util.digests import combined_digest
from dphybrid.util.errors import UserError


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
        before = _stamps(source)
        digests = source.digests(progress)
        digest = _digest(name, source, seed, digests)

    def make(scratch: Path) -> Content:
        with reading_files():
            content = source.read(progress, scratch)
            after = _stamps(source)
        if changed := [
            file for file, now, then in zip(source.files, after, before, strict=True) if now != then
        ]:
            raise UserError(
                f"data.path: {changed[0]} changed while it was read; run again when it is complete"
            )
        return replace(content, extra={**(content.extra or {}), "source_digest": combined_digest(digests)})

    return replace(build_once(folder, name, digest, make), view=view)


def find_prepared(
    name: str, source: Source, folder: Path, seed: int, view: Callable[[Prepared, str], Dataset] | None = None
) -> Prepared | None:
    """Return the prepared data of a source where it is there, else None. Raises UserError for a source that
    is not there."""
    with reading_files():
        path = prepared_path(folder, name, _digest(name, source, seed, source.digests(_silent)))
    return replace(open_prepared(path), view=view) if path.exists() else None


def _digest(name: str, source: Source, seed: int, digests: list[bytes]) -> str:
    facts = {"recipe": name, "seed": seed, "encoder": ENCODER_VERSION, **source.options}
    return combined_digest([json.dumps(facts, sort_keys=True).encode(), *digests])


def source_digest(source: Source) -> str:
    """Return the digest of the source's bytes alone: it changes when data arrives. Raises UserError for a
    source that is not there."""
    with reading_files():
        return combined_digest(source.digests(_silent))


def _stamps(source: Source) -> list[tuple[int, int]]:
    # A file that grows while it is read would give half of its rows under the digest of all.
    return [(stat.st_size, stat.st_mtime_ns) for stat in (file.stat() for file in source.files)]


def _silent(what: str, done: int, total: int) -> None:
    """Report nothing."""
