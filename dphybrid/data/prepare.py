"""`prepare`: from a recipe and its data config to a prepared folder, made once."""

import errno
import json
from dataclasses import replace
from pathlib import Path

from dphybrid.config import DataConfig
from dphybrid.data.store import ENCODER_VERSION, Content, Prepared, Progress, Source, build_once
from dphybrid.util.digests import combined_digest
from dphybrid.util.errors import UserError

DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""Errors of the folder that is written to, not of the files that are read."""


def prepare(recipe: str, data: DataConfig, folder: Path, seed: int, on_progress: Progress | None = None) -> Prepared:
    """Return the prepared data of a recipe under `folder`, building it when it is not there.

    seed: chooses what is held out. on_progress(what, done, total) is called along the way. The same bytes and values give the same digest
    on any machine. Raises UserError for input that cannot be used; nothing half-made is left then.
    """
    progress = on_progress or _silent
    source = _open_source(recipe, data, seed)
    try:
        before = _stamps(source)
        digests = source.digests(progress)
    except OSError as error:
        raise _unreadable(data, error) from error

    def make(scratch: Path) -> Content:
        try:
            content = source.read(progress, scratch)
            after = _stamps(source)
        except OSError as error:
            if error.errno in DISK_TROUBLE:
                raise
            raise _unreadable(data, error) from error
        if after != before:
            raise UserError(f"data.path={data.path}: changed while it was read; run again when it is complete")
        return replace(content, extra={**(content.extra or {}), "source_digest": combined_digest(digests)})

    facts = json.dumps({"recipe": recipe, "seed": seed, "encoder": ENCODER_VERSION, **source.options}, sort_keys=True)
    return build_once(folder, recipe, combined_digest([facts.encode(), *digests]), make)


def source_digest(recipe: str, data: DataConfig, seed: int) -> str:
    """Return the digest of the source's bytes alone: it changes when data arrives. Raises UserError for a source that is not there."""
    try:
        return combined_digest(_open_source(recipe, data, seed).digests(_silent))
    except OSError as error:
        raise _unreadable(data, error) from error


def _open_source(recipe: str, data: DataConfig, seed: int) -> Source:
    if recipe == "text":
        from dphybrid.recipes.text import data as text

        return text.open_source(data, seed)
    if recipe == "ctr":
        from dphybrid.data.table import source as table  # imports polars: only when it is needed

        return table.open_source(data, seed)
    if recipe == "kge":
        from dphybrid.recipes.kge import data as triples

        return triples.open_source(data, seed)
    from dphybrid.recipes.tutorial import data as synthetic

    return synthetic.open_source(recipe, seed)


def _stamps(source: Source) -> list[tuple[int, int]]:
    return [(stat.st_size, stat.st_mtime_ns) for stat in (file.stat() for file in source.files)]


def _unreadable(data: DataConfig, error: OSError) -> UserError:
    return UserError(
        f"data.path={data.path}: {error.filename or 'a file'} cannot be read: {error.strerror or error}; check its permissions"
    )


def _silent(what: str, done: int, total: int) -> None:
    """Report nothing."""
