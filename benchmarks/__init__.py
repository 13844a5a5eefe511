"""Measurements beside other libraries, for maintainers: `python -m benchmarks.NAME --help`."""
