"""Keep freed memory in the process, and recognize out-of-memory errors."""

import ctypes
import resource
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # M_... of mallopt(3), from malloc.h
_SIGNS = ("out of memory", "ALLOC_FAILED")  # CUDA's words, and cuDNN's and cuBLAS's


def keep_freed_memory() -> bool:
    """Make this process keep the memory it frees, for reuse; return whether that worked. Only with glibc.

    By default glibc returns blocks above 32 MiB, and some smaller ones, to the system at every free, and the
    next step gets them back page by page: 12,900 page faults and 60 % of the time of a step that looks up
    200,000 rows of 64. The price is that memory once used stays with the process.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    # Older versions of glibc refuse so large a threshold: then use no mmap at all.
    kept = library.mallopt(_MMAP_THRESHOLD, 2**30) or library.mallopt(_MMAP_MAX, 0)
    return bool(kept and library.mallopt(_TRIM_THRESHOLD, 2**31 - 1))


def peak_gib() -> dict[str, float]:
    """Return the most memory in GiB that this process has had so far: of the host, and of the GPU where torch
    has allocated the most, if it uses any."""
    found = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    # Not imported for this: a process without torch uses no GPU.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        found["gpu"] = max(map(torch.cuda.max_memory_allocated, devices)) / 2**30
    return found


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means out of memory. torch raises OutOfMemoryError; cuDNN, cuBLAS and CUDA raise
    plain RuntimeErrors."""
    return isinstance(error, RuntimeError) and (
        type(error).__name__ == "OutOfMemoryError" or any(sign in str(error) for sign in _SIGNS)
    )
