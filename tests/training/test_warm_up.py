"""Kernels are compiled while data is prepared, and the first time says so."""

import threading
from pathlib import Path

import pytest

from dphybrid.recipes.configs import load_config
from dphybrid.training.warm_up import compiling_kernels


def test_the_first_run_says_that_it_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "compiled"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(place))
    for exists in (False, True):
        if exists:
            place.mkdir(exist_ok=True)
        with compiling_kernels(load_config(None, ["recipe=ctr"]), tmp_path):
            pass
        assert "dphybrid-compile" not in [thread.name for thread in threading.enumerate()]
        assert ("once" in capsys.readouterr().out) is not exists
    with compiling_kernels(load_config(None, ["recipe=digits"]), tmp_path):  # has no table
        assert "dphybrid-compile" not in [thread.name for thread in threading.enumerate()]
