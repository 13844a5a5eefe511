"""Sets how many threads torch's operations use. torch keeps the number for each thread, and a new thread
starts with the environment's; MKL computes other last bits with another number."""

import torch


def use_num_threads(number: int | None = None) -> None:
    """Let torch's operations use `number` threads when this thread calls them. None: the number of the
    latest `torch.set_num_threads` in the process, for threads of a server that have no caller of ours."""
    torch.set_num_threads(number or torch.get_num_threads())
