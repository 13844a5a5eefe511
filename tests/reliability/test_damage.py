"""Files are damaged one after the other: that is told by name, or harms nothing; never other numbers, never
an error foreign to the user.

A seeded few of all damages by default; DPHYBRID_DAMAGES=all takes every one.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dphybrid.config.settings import load_settings
from dphybrid.serving.load import find_checkpoint
from dphybrid.serving.predict import Predictor
from dphybrid.util.errors import UserError
from tests.commands import run_with
from tests.conftest import own_settings
from tests.refusing import refused
from tests.reliability.damages import DAMAGES, damage
from tests.reliability.test_faults import OPTIONS
from tests.reliability.trials import run_results

COUNT = os.environ.get("DPHYBRID_DAMAGES", "12")
ROWS = {"age": [20, 45, 80], "city": ["a", "b", "elsewhere"]}
SHORT = [*OPTIONS, "train.schedule=constant", "checkpoint.keep_last=2"]
LONGER = [*[text for text in SHORT if "epochs" not in text], "train.epochs=3"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A data folder with a finished run, at the place where every copy of it will be."""
    root = tmp_path_factory.mktemp("damage")
    with pytest.MonkeyPatch.context() as patch:
        own_settings(patch, root / "data", TRACKING_URI="none")
        run_with(*SHORT, run_name="run")
        shutil.copytree(root / "data", root / "whole")
        yield root


def renewed(root: Path) -> None:
    """Make the data folder a fresh copy of the whole one."""
    shutil.rmtree(root / "data")
    shutil.copytree(root / "whole", root / "data")


def resumed(root: Path) -> dict[str, Any]:
    run_with(*LONGER, resume="latest")
    return run_results(root / "data")


def predicted(_: Path) -> list[float]:
    scores: list[float] = Predictor(find_checkpoint("run", load_settings())).predict(ROWS).tolist()
    return scores


def told_or_harmless(
    root: Path, file: Path, damaged: bytes | None, work: Callable[[Path], Any], expected: Any, shown: Any
) -> bool:
    """Damage a fresh copy and work with it; return whether it was told. Fails on another outcome untold."""
    renewed(root)
    damage(file, damaged)
    try:
        found = work(root)
    except UserError:
        return True
    if damaged is None and "Note: the best checkpoint" in shown.readouterr().err:
        return True
    assert found == expected, f"{file}: another outcome, without a word"
    return False


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("work", [resumed, predicted])
def test_damage_is_told_or_harmless(
    finished: Path, work: Callable[[Path], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    renewed(finished)
    expected = work(finished)
    files = [path for path in sorted((finished / "whole").rglob("*")) if path.is_file()]
    there = [path.relative_to(finished / "whole") for path in files]
    every = [(file, kind, place) for file in there for kind in DAMAGES for place in (0.03, 0.4, 0.77)]
    chosen = every if COUNT == "all" else random.Random(0).sample(every, int(COUNT))
    told = 0
    for name, kind, place in chosen:
        damaged = DAMAGES[kind]((finished / "whole" / name).read_bytes(), place)
        told += told_or_harmless(finished, finished / "data" / name, damaged, work, expected, capsys)
    assert told > len(chosen) // 12


@pytest.mark.parametrize("name", ["dense_BN.npy", "train_rows.npy"])
def test_damaged_training_data_is_named(finished: Path, name: str) -> None:
    renewed(finished)
    (file,) = (finished / "data").glob(f"prepared/*/{name}")
    content = file.read_bytes()
    damage(file, content[:-1] + b"\x7f")  # a number of 1e38, and a row far beyond the last
    with refused(f"{name}: is damaged .*run the preparation again"):
        resumed(finished)


def test_a_resume_names_a_damaged_checkpoint_and_takes_the_one_before(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    renewed(finished)
    expected = resumed(finished)
    renewed(finished)
    table = finished / "data/runs/run/checkpoints/step-000006/tables/table.safetensors"
    damage(table, DAMAGES["a flipped bit"](table.read_bytes(), 0.9))
    assert resumed(finished) == expected
    assert f"skipped a damaged checkpoint: {table}: is damaged" in capsys.readouterr().err
    assert not list((finished / "data/runs/run/checkpoints").glob("*.damaged"))  # there is a later one now

    for path in (finished / "data/runs/run/checkpoints").glob("step-*/blocks.safetensors"):
        path.write_bytes(b"")
    with refused("no checkpoint is whole .*start a new run"):
        resumed(finished)
