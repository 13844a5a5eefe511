"""Machine code is kept, loaded without numba, and compiled again where it was cut off as the power failed."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dphybrid.embedding.machine_code import kernel_of

GATHERS = """
import sys, torch
from dphybrid.embedding.kernels import gather
out = torch.empty(1, 4)
assert gather(torch.arange(40.0).view(10, 4), torch.tensor([2]), out)
assert out.tolist() == [[8, 9, 10, 11]]
print("compiled" if "numba" in sys.modules else "loaded")
"""


@pytest.mark.slow
def test_code_is_loaded_without_numba_and_made_anew_where_it_was_cut_off(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}

    def how() -> str:
        done = subprocess.run(
            [sys.executable, "-c", GATHERS], env=environment, capture_output=True, text=True, check=False
        )
        return done.stdout.strip() or done.stderr

    assert how() == "compiled"
    assert how() == "loaded"
    (file,) = tmp_path.rglob("*.o")
    for length in (0, file.stat().st_size // 2):
        os.truncate(file, length)
        assert how() == "compiled"
    assert how() == "loaded"
    environment["NUMBA_CACHE_DIR"] = str(file / "no folder")
    assert how() == "compiled"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/maps")
def test_code_stays_when_a_second_thread_has_loaded_it_once_more() -> None:
    address = kernel_of("dphybrid.embedding.compiled", "arrange").address  # nobody else has this one
    gc.collect()
    ranges = [line.split() for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()]
    places = [[int(end, 16) for end in place.split("-")] for place, rights, *_ in ranges if "x" in rights]
    assert any(start <= address < end for start, end in places)
