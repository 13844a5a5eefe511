"""Several threads in one kernel: the team that torch has already, so that no second pool competes with it for
the cores.

numba's own pools are not used: the first parallel call of one sets torch's number of threads anew, one layer
kills forked children and the other one the process when two threads call it at once. torch's OpenMP library
has no such habits, needs no parallel compilation (9 s), and `torch.set_num_threads`, hence DPHYBRID_THREADS,
governs all.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

_LIBRARIES = ("libgomp", "libiomp", "libomp")
_BORN_IN = os.getpid()


class Kernel:
    """Machine code at an address, where it stays, and a way to call it."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)


def run_kernel(kernel: Kernel, page: int, threads: int) -> None:
    """Let up to `threads` threads enter a compiled kernel; it returns when all its blocks are done.

    A forked child (a worker of a DataLoader) has lost the team's threads and goes alone.
    """
    if threads > 1 and os.getpid() == _BORN_IN:
        _team()(kernel, page, threads)
    else:
        kernel.call(page)


@cache
def _team() -> Callable[[Kernel, int, int], None]:
    for line in _loaded_libraries():
        if Path(line).name.startswith(_LIBRARIES):
            library = ctypes.CDLL(line)
            if hasattr(library, "GOMP_parallel"):
                start = library.GOMP_parallel
                start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
                start.restype = None
                return lambda kernel, page, threads: start(kernel.address, page, threads, 0)
    return _with_python_threads  # another OpenMP, or none


def _loaded_libraries() -> list[str]:
    assert torch.__version__  # loading torch has loaded its OpenMP library
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return []
    return sorted({line.split(maxsplit=5)[5] for line in lines if line.count("/")})


def _with_python_threads(kernel: Kernel, page: int, threads: int) -> None:
    helpers = [threading.Thread(target=kernel.call, args=(page,)) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    kernel.call(page)
    for helper in helpers:
        helper.join()
