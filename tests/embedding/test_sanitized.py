"""rows.c under AddressSanitizer and UndefinedBehaviorSanitizer: no access outside of what it was given; under
ThreadSanitizer: no two threads write the same memory; and for another processor, from the same source."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dphybrid.kernels.compile_rows import HERE, compile_library, levels
from tests.commands import python

pytestmark = pytest.mark.nightly

THREADS = Path(__file__).with_name("rows_in_threads.c")
FLAGS = ("-O2", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
ZIG = [sys.executable, "-m", "ziglang", "cc"]

DRIVER = """
import torch
from dphybrid.embedding import HostEmbedding, clip_grad_norm_, row_optimizer
from dphybrid.embedding.lookup import sort_ids
from dphybrid.recipes.ctr.numbers import EmbeddedBins
from dphybrid.recipes.ctr.pairs import Pairs
from dphybrid.util.errors import UserError
from dphybrid.util.row_rules import RULES

generator = torch.Generator().manual_seed(0)
for threads in (1, 2):
    torch.set_num_threads(threads)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for dim in (1, 16, 129):
            for kind in RULES:
                table = HostEmbedding(50, dim, dtype=dtype, padding_idx=3, seed=0)
                other = HostEmbedding(9, dim, dtype=dtype, name="other", seed=0)
                rows = row_optimizer(kind, {"t": table, "other": other}, lr=0.1, weight_decay=0.01)
                for count in (0, 700):
                    ids = torch.randint(0, 50, (count,), generator=generator)
                    (table(ids).square().sum() + table(ids[1:]).sum() + other(ids % 9).sum()).backward()
                    clip_grad_norm_([table.weight], 1.0)
                    table(ids[::3]).sum().backward()
                    rows.step()
                    rows.zero_grad()
                    sort_ids(ids, 50)
                assert not table.weight.detach()[3].any()
    for bins, width in ((1, 8), (5, 3)):
        EmbeddedBins(torch.rand(4, bins + 1).sort().values, width, [1])(torch.randn(700, 5)).sum().backward()
    for vectors, dim in ((1, 5), (5, 3), (128, 128)):
        given = torch.randn(9, vectors, dim, requires_grad=True), torch.randn(9, dim)
        Pairs(vectors)(given[0]).sum().backward()
        if vectors < 128:
            Pairs(vectors + 1)(*given).sum().backward()
    for wrong in ([50], [-1], [0, 2**62], [2**63 - 1], [-(2**63)]):
        try:
            table(torch.tensor(wrong))
        except UserError as error:
            assert "is not a row" in str(error)
        else:
            raise SystemExit(f"{wrong} was looked up")
print("complete", flush=True)
"""

FAULT = """
from dphybrid import kernels

rows, out = torch.ones(2, 3, 4), torch.ones(2, 3)
addresses = None, rows.data_ptr(), out.data_ptr(), None, None, None
kernels.call("multiply_pairs", kernels.Pairs(kernels.Team(None, 1), *addresses, 9, 3, 4))
"""


def test_lookups_and_updates_stay_within_their_memory(tmp_path: Path) -> None:
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("the sanitizers' runtime is gcc's")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", gcc)
        flags = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
        library = compile_library(levels()[0], tmp_path, flags)
    runtimes = [
        subprocess.run([gcc, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
        for name in ("libasan.so", "libubsan.so")
    ]
    sanitized = {
        "LD_PRELOAD": " ".join(map(str.strip, runtimes)),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own, at exit
        "DPHYBRID_ROWS_LIBRARY": str(library),
    }
    done = python("-c", DRIVER + FAULT, ends=None, env={**os.environ, **sanitized})
    assert done.stdout == "complete\n", done.stderr[-3000:]
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
    assert "pairs" in done.stderr


def built(compiler: list[str], file: Path, *flags: str) -> str:
    """Compile rows_in_threads.c."""
    done = subprocess.run(
        [*compiler, *FLAGS, *flags, f"-I{HERE}", str(THREADS), "-o", str(file), "-lpthread"],
        env={**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(file.parent), "ZIG_LOCAL_CACHE_DIR": str(file.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return str(file)


def digest(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_threads_share_no_row(compiler: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    program = built([compiler], tmp_path / "rows", "-g", "-fsanitize=thread")
    assert digest(program, "4") == digest(built([compiler], tmp_path / "plain"), "1")
    twice = subprocess.run([program, "4", "twice"], capture_output=True, text=True, check=False)
    assert twice.returncode != 0
    assert "data race" in twice.stderr
    assert "updates_float32" in twice.stderr


def test_aarch64_is_built_from_the_same_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("ziglang") is None:
        pytest.skip("no ziglang, which compiles for other processors")
    monkeypatch.setenv("CC", shlex.join([*ZIG, "-target", "aarch64-linux-gnu"]))
    header = compile_library("aarch64", tmp_path).read_bytes()[:20]
    assert header.startswith(b"\x7fELF")
    assert int.from_bytes(header[18:20], "little") == 183, "the number of aarch64 in ELF files"


@pytest.mark.parametrize("level", levels()[1:])
def test_wider_vectors_compute_the_same_bits(level: str, tmp_path: Path) -> None:
    if (gcc := shutil.which("gcc")) is None:
        pytest.skip("no gcc")
    narrow, wide = (built([gcc], tmp_path / name, f"-march={name}") for name in (levels()[0], level))
    done = subprocess.run([wide, "1"], capture_output=True, text=True, check=False)
    if done.returncode == -signal.SIGILL:
        pytest.skip(f"this processor is below {level}")
    assert done.stdout == digest(narrow, "4")


def test_aarch64_computes_the_same_bits(tmp_path: Path) -> None:
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None or find_spec("ziglang") is None:
        pytest.skip("no qemu-aarch64, or no ziglang")
    here = built(ZIG, tmp_path / "here", "-mcpu=x86_64_v2")
    there = built(ZIG, tmp_path / "there", "-target", "aarch64-linux-musl", "-static")
    assert digest(emulator, there, "4") == digest(here, "1")
