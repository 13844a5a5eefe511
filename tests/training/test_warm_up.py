"""Kernels are compiled while data is prepared, and the first time says so."""

import threading
from pathlib import Path

import pytest

from dphybrid.embedding import kernels
from dphybrid.recipes.configs import load_config
from dphybrid.training.warm_up import compiling_kernels


def test_the_first_run_says_that_it_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "compiled"))
    for exists in (False, True):
        if exists:
            kernels.kept_in().mkdir(parents=True, exist_ok=True)
        with compiling_kernels(load_config(None, ["recipe=ctr"]), tmp_path):
            pass
        assert "dphybrid-compile" not in [thread.name for thread in threading.enumerate()]
        assert ("once" in capsys.readouterr().out) is not exists
    with compiling_kernels(load_config(None, ["recipe=digits"]), tmp_path):  # has no table
        assert "dphybrid-compile" not in [thread.name for thread in threading.enumerate()]
