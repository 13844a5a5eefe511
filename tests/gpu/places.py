"""The devices on which the tests of this folder run: GPUs, or virtual devices on a machine without one, which
shows that the tests themselves work, and nothing about GPUs."""

import torch

CUDA = torch.cuda.is_available()
ONE = "cuda:0" if CUDA else "cpu*2"
SEVERAL = "cuda:0*4" if CUDA else "cpu*4"
ALL = ",".join(f"cuda:{index}" for index in range(torch.cuda.device_count())) or "cpu*3"
