"""Errors of polars at files: content of another form, and disks that take no more."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl

from dphybrid.util.errors import UserError


@contextmanager
def misread(what: object) -> Iterator[None]:
    """Raise UserError if the block, which makes objects of the content of files, fails as it does for content
    of another form. what: the folder or file, for the message."""
    forms = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, StopIteration, OSError)
    try:
        yield
    except (*forms, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{what}: cannot be read ({type(error).__name__}: {error}); use another checkpoint, or prepare "
            "the data and train again"
        ) from error


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Raise OSError with its file if polars cannot write it, in the block."""
    try:
        yield
    # polars' own errors have no number; a full disk is their usual cause.
    except (pl.exceptions.PolarsError, OSError) as error:
        number = error.errno if isinstance(error, OSError) else None
        raise OSError(number or errno.ENOSPC, str(error), str(file)) from error
