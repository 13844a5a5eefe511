"""Files survive a kill and a power loss at each operation: each step's outcome is whole, or not there."""

import json
from pathlib import Path

import pytest

from tests.commands import python
from tests.conftest import REPOSITORY
from tests.util.crashing import STEPS

OUTCOMES = [[None, None], *(outcome for _, outcome in STEPS)]


@pytest.mark.parametrize("mode", ["kill", "torn", "unsynced", "lost"])
def test_what_is_done_is_there_and_what_is_not_is_no_half(tmp_path: Path, mode: str) -> None:
    trials = json.loads(python("-m", "tests.util.crashing", tmp_path, mode, cwd=REPOSITORY).stdout)
    for operation, (done, _, outcome) in enumerate(trials, start=1):
        assert outcome in OUTCOMES[done : done + 2], f"operation {operation}, after {done} steps: {outcome}"
    assert trials[-1][:2] == [len(STEPS), 0]
    assert len(trials) > 30
