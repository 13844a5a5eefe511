"""Promises of a whole training, in processes of their own: it repeats, with and without prefetching; stopped
and resumed it ends as the undisturbed one; a batch that does not fit is trained in parts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.gpu.places import CUDA, ONE, SEVERAL


def ends(*options: str) -> dict[str, Any]:
    """What a training ends with."""
    # not tests.commands: a machine with a GPU may lack what it imports, such as pydantic
    command = [sys.executable, "-m", "tests.gpu.program", *options]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout
    return dict(json.loads(printed.splitlines()[-1]))


def bits(*options: str) -> tuple[str, str]:
    found = ends(*options)
    return found["table"], found["dense"]


@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_a_training_repeats_and_goes_on_in_another_process(kind: str, tmp_path: Path) -> None:
    where = ("--devices", ONE, "--kind", kind, "--steps", "24")
    whole = bits(*where)
    assert bits(*where) == whole
    assert bits(*where, "--mode", "off") == whole
    state = ("--state", str(tmp_path / "state.pt"))
    assert bits(*where, *state, "--stop-after", "11") != whole
    assert bits(*where, *state) == whole


def test_several_devices_train_alike_with_and_without_prefetching() -> None:
    where = ("--devices", SEVERAL, "--kind", "lstm", "--steps", "24")
    ahead = ends(*where)
    assert ahead["prepared_ratio"] > 0.9
    assert (ahead["table"], ahead["dense"]) == bits(*where, "--mode", "off")


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_batch_that_does_not_fit_is_trained_in_parts() -> None:
    """(B, T, wide) in float32 is 3.1 GB, of which backward holds three at once: more than a twentieth of the
    GPU's memory, while those of a quarter of the batch fit."""
    where = ("--devices", ONE, "--steps", "4", "--kind", "lstm")
    found = ends(*where, "--batch", "8000", "--wide", "8192", "--memory-share", "0.05")
    assert found["ran_out"] == 1
    assert found["loss"] < 10
