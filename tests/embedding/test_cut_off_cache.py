"""Compiled kernels whose cache was cut off, as the power failed, are compiled again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_cache_that_was_cut_off_is_made_anew(tmp_path: Path) -> None:
    code = "from dphybrid.embedding.kernels import _kernel; _kernel('arrange'); print('made')"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}

    def made() -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        return done.stdout.strip() or done.stderr

    assert made() == "made"
    files = [file for file in tmp_path.rglob("*") if file.suffix in (".nbi", ".nbc")]
    assert files
    for file in files:
        for length in (0, file.stat().st_size // 2):
            os.truncate(file, length)
            assert made() == "made"
