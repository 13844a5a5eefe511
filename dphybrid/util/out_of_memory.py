"""Recognition of out-of-memory errors of a GPU."""

_SIGNS = ("out of memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Did memory not suffice? torch says so by a type of its own; cuDNN and cuBLAS (ALLOC_FAILED), and CUDA
    itself, by plain RuntimeErrors."""
    return isinstance(error, RuntimeError) and (
        type(error).__name__ == "OutOfMemoryError" or any(sign in str(error) for sign in _SIGNS)
    )
