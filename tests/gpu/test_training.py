"""Promises of a whole training, in processes of their own: it repeats, with and without prefetching; stopped
and resumed it ends as the undisturbed one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.gpu.places import ONE, SEVERAL

pytestmark = pytest.mark.nightly


def ends(*options: str) -> dict[str, Any]:
    """What a training ends with."""
    # not tests.commands: a machine with a GPU may lack what it imports, such as pydantic
    command = [sys.executable, "-m", "tests.gpu.program", *options]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout
    return dict(json.loads(printed.splitlines()[-1]))


def bits(*options: str) -> tuple[str, str]:
    found = ends(*options)
    return found["table"], found["dense"]


def test_a_training_repeats_and_goes_on_in_another_process(tmp_path: Path) -> None:
    where = ("--devices", ONE, "--steps", "24")
    whole = bits(*where)
    assert bits(*where) == whole
    assert bits(*where, "--mode", "off") == whole
    state = ("--state", str(tmp_path / "state.pt"))
    assert bits(*where, *state, "--stop-after", "11") != whole
    assert bits(*where, *state) == whole


def test_several_devices_train_alike_with_and_without_prefetching() -> None:
    where = ("--devices", SEVERAL, "--steps", "24")
    ahead = ends(*where)
    assert ahead["prepared_ratio"] > 0.9
    assert (ahead["table"], ahead["dense"]) == bits(*where, "--mode", "off")
