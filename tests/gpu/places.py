"""Where the tests of this folder run: on the GPUs, or without one on virtual devices, which shows that the
tests themselves are right and nothing about GPUs."""

import torch

CUDA = torch.cuda.is_available()
ONE = "cuda:0" if CUDA else "cpu*2"
SEVERAL = "cuda:0*4" if CUDA else "cpu*4"
ALL = ",".join(f"cuda:{index}" for index in range(torch.cuda.device_count())) or "cpu*3"
