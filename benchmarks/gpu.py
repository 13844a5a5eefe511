"""All tests and measurements that need a GPU, by one command into one file: the tests of tests/gpu, one of
them under torch's CUDA sanitizer, steps of several shapes and on virtual devices, the time of a step's
kernels, and what a language model's memory adds to its step.

    python -m benchmarks.gpu --out results.json [--only tests,steps]

Needs torch, numpy, pytest (with pytest-xdist and pytest-timeout) and dphybrid's embedding and parallel parts.
All stages take about forty minutes. Each is written to the file when it is done, so the stages may be spread
over several commands. Without a GPU this is a rehearsal on virtual devices and smaller shapes: it shows that
everything runs, and nothing about GPUs.
"""

import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch.profiler import ProfilerActivity, profile

import dphybrid
from benchmarks.command import flags, processor
from benchmarks.memory import overhead
from benchmarks.steps import Shape, measured
from dphybrid.embedding import HostEmbedding, RowPipeline, row_optimizer
from dphybrid.parallel import DataParallel, parts, resolve_devices
from dphybrid.util.files import read_json, write_json

REPOSITORY = Path(__file__).parent.parent
CUDA = torch.cuda.is_available()
# A rehearsal takes virtual devices, so that it has several replicas, too.
ONE, SEVERAL = ("cuda:0", "cuda:0*4") if CUDA else ("cpu*2", "cpu*4")

DLRM = Shape(1_000_000, 26, 64, 8192)
SHAPES = {
    "small": Shape(100_000, 26, 16, 256, 256),
    "dlrm, batch 2048": Shape(1_000_000, 26, 64, 2048),
    "dlrm, batch 8192": DLRM,
    "dlrm, uniform ids": Shape(1_000_000, 26, 64, 8192, uniform=True),
    "dlrm, wide layers": Shape(1_000_000, 26, 64, 8192, 4096, 4),
    "dlrm, batch 32768": Shape(1_000_000, 26, 64, 32768),
    # Each row is looked up about 2,000 times in a batch: the most work for summing the gradients of an id.
    "columns of 4 rows": Shape(4, 26, 64, 8192, uniform=True),
}
"""Name -> model whose steps are measured. dlrm: 26 columns, as in Criteo's data."""
REHEARSED = {name: Shape(200, 3, 8, 64, 16, 2, shape.uniform) for name, shape in SHAPES.items()}
"""Small shapes under the same names, for machines without a GPU."""


def _shapes() -> dict[str, Shape]:
    return SHAPES if CUDA else REHEARSED


def _pytest(*options: str, **variables: str) -> dict[str, str]:
    """Run pytest; return test -> outcome: passed, or skipped or failed with the reason."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "tests.xml")
        # append: an installed dphybrid is tested rather than this checkout.
        command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--import-mode=append"]
        command += [f"--junitxml={report}", *options]
        # check=False: a failed test is a result, which the report has.
        subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **variables}, check=False)
        cases = ElementTree.parse(report).iter("testcase")  # noqa: S314 - pytest has just written it
        found = {}
        for case in cases:
            said = [f"{each.tag}: {each.get('message')}"[:300] for each in case if each.tag != "properties"]
            found[f"{case.get('classname')}::{case.get('name')}"] = said[0] if said else "passed"
    return found


def _tests(rounds: int) -> dict[str, str]:  # noqa: ARG001 - all stages have the same parameters
    return _pytest("tests/gpu", DPHYBRID_LONG_TESTS="1")


def _sanitizer(rounds: int) -> dict[str, str]:  # noqa: ARG001
    same = "test_same_bits_as_without and adagrad"
    return _pytest(
        "tests/gpu/test_embedding.py", "-k", same, **({"TORCH_CUDA_SANITIZER": "1"} if CUDA else {})
    )


def _steps(rounds: int) -> dict[str, Any]:
    return {name: measured(shape, ONE, rounds) for name, shape in _shapes().items()}


def _virtual(rounds: int) -> dict[str, Any]:
    return measured(_shapes()["dlrm, batch 2048"], SEVERAL, rounds)


def _kernels(rounds: int) -> dict[str, Any]:  # noqa: ARG001
    """Return the 20 longest operations of steps 20 to 24, by their own time in ms per step."""
    shape = _shapes()["dlrm, batch 2048"]
    where, table = resolve_devices(ONE), HostEmbedding(shape.num_rows, shape.dim)
    rows = row_optimizer("adagrad", {"t": table}, lr=0.01)
    region = DataParallel(shape.region(), where)
    table.place_on(where.replicas, region.sizes)
    watched = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if CUDA else [])]
    profiler = profile(activities=watched, acc_events=True)
    with RowPipeline({"t": table}, on_cpu=True) as pipeline:
        batches = (shape.ids(step % 4) for step in range(25))
        for step, ids_BF in enumerate(pipeline.prefetch(batches, lambda ids: {"t": ids})):
            if step == 20:  # after the warm-up
                profiler.start()
            rows.zero_grad()
            region(parts(table.replica_rows(ids_BF))).square().mean().backward()
            rows.step()
    profiler.stop()
    found = {}
    for kind in ("cpu", "device") if CUDA else ("cpu",):
        key = f"self_{kind}_time_total"
        longest = sorted(profiler.key_averages(), key=lambda each: -getattr(each, key))[:20]
        # microseconds of five steps
        found[kind] = {each.key: getattr(each, key) / 5e3 for each in longest}
    return found


def _memory(rounds: int) -> dict[str, float]:
    """Return the ms of a language model's step without a memory, and with one: looked up, and fetched
    ahead."""
    device = resolve_devices(ONE).replicas[0]
    if CUDA:
        return overhead(device, rounds, rows=8_000_000, width=2048)
    return overhead(device, rounds, rows=4000, width=16)


STAGES: dict[str, Callable[[int], dict[str, Any]]] = {
    "tests": _tests,
    "sanitizer": _sanitizer,
    "steps": _steps,
    "virtual": _virtual,
    "kernels": _kernels,
    "memory": _memory,
}


def machine() -> dict[str, Any]:
    """Return the machine's hardware and the versions of what is installed."""
    ask = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    gpus = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.splitlines() if CUDA else []
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    versions = {name: installed.get(name) for name in ("numpy", "dphybrid")}
    missing = [name for name in ("prefect", "mlflow", "polars", "pydantic") if name not in installed]
    return {
        "rehearsal": not CUDA,
        "hardware": {
            "gpus": gpus,
            "cpu": processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        }
        | versions,
        "not installed": missing,
        "dphybrid is": "this checkout" if Path(dphybrid.__file__).is_relative_to(REPOSITORY) else "installed",
    }


def main(argv: list[str] | None = None) -> None:
    parser = flags(__doc__, repeats=15)
    parser.add_argument("--only", metavar="STAGES", help=f"some of {','.join(STAGES)} (default: all)")
    options = parser.parse_args(argv)
    wanted = options.only.split(",") if options.only else list(STAGES)
    if unknown := set(wanted) - STAGES.keys():
        parser.error(f"--only: no stage {', '.join(sorted(unknown))}; use {','.join(STAGES)}")
    if options.out is None:
        parser.error("--out FILE is required: the results are written there after each stage")
    # An existing file keeps the stages that this command does not run.
    found: dict[str, Any] = read_json(options.out) if options.out.exists() else {"stages": {}}
    found |= machine()
    if not CUDA:
        print("A rehearsal without a GPU: it shows that everything runs, and nothing about GPUs.")
    for name in wanted:
        start = time.time()
        result = STAGES[name](options.repeats)
        took_s = time.time() - start
        found["stages"][name] = {"began": start, "seconds": took_s, "result": result}
        write_json(options.out, found)
        print(f"{name}: {took_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
