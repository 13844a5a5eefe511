"""Freed memory stays."""

import sys

import pytest

from tests.commands import python

FAULTS = """
import resource, sys, torch
from dphybrid.util.memory import keep_freed_memory

def page_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "keep":
    assert keep_freed_memory()
for turn in range(40):
    if turn == 10:
        before = page_faults()
    torch.ones(2**24)  # 64 MiB, freed at once
print(page_faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_a_step_finds_its_memory_where_it_left_it() -> None:
    def faults(how: str) -> int:
        done = python("-c", FAULTS, how)
        return int(done.stdout)

    assert 3 * faults("keep") < faults("return")  # in huge pages, where the system gives them
