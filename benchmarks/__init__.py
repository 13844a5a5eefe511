"""Measurements against other libraries, for maintainers: `python -m benchmarks.NAME --help`."""
