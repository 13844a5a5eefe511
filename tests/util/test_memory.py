"""Freed memory stays."""

from tests.commands import python

FAULTS = """
import resource, torch
from dphybrid.util.memory import keep_freed_memory

def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(30):
        torch.ones(2**24)  # 64 MiB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

returned = page_faults()
assert keep_freed_memory()
torch.ones(2**24)
print(returned, page_faults())
"""


def test_a_step_finds_its_memory_where_it_left_it() -> None:
    returned, kept = map(int, python("-c", FAULTS).stdout.split())
    assert 3 * kept < returned  # in huge pages, where the system gives them
