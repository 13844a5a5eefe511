"""Checks of rows that are mapped from a checkpoint's files: every kernel that reads rows asks for them."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

_CHECKS: dict[int, Callable[[Tensor], None]] = {}
"""Address of such rows -> what checks those of given ids (N,)."""

_AT_ONCE = 2**16


def check_when_read(rows_VD: Tensor, check: Callable[[Tensor], None], memory: object) -> None:
    """Have `check(ids_N)` called for ids whose rows were read. memory: what holds the rows, as long as it
    exists. check: raises UserError when the rows are damaged."""
    _CHECKS[rows_VD.data_ptr()] = check
    weakref.finalize(memory, _CHECKS.pop, rows_VD.data_ptr())


def check_read(address: int, ids_N: Tensor) -> None:
    """Check the rows of ids_N (on the CPU) that a kernel read of the table at this address. Raises UserError
    when some are damaged."""
    if address in _CHECKS:
        _CHECKS[address](ids_N)


def check_all(rows_VD: Tensor) -> None:
    """Check all rows of a table, whose memory is about to be read. Raises UserError when some are damaged."""
    if _CHECKS and (check := _CHECKS.get(rows_VD.data_ptr())):
        for first in range(0, len(rows_VD), _AT_ONCE):
            check(torch.arange(first, min(first + _AT_ONCE, len(rows_VD))))
