"""Hybrid models: embedding tables in host memory, dense blocks data-parallel on GPUs, every split on record."""

__version__ = "0.1.0"
