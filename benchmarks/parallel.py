"""The cost of splitting: a plain call, torch's nn.DataParallel and ours, as medians of interleaved calls.
A small network in microseconds per call, a large one relative to the plain call."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn

from benchmarks.command import flags, show
from dphybrid.parallel.data_parallel import DataParallel
from dphybrid.util.memory import keep_freed_memory

WARM_UP = 30
"""Calls before those that are measured."""


def run(repeats: int = 200) -> dict[str, Any]:
    """Measure; return {"rows": [{"what", "identity_us", "mlp_us", "step_us", "large_ratio"}, ...]} with the
    thread count and version."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        makers: dict[str, Callable[[nn.Module], nn.Module]] = {
            "plain call": lambda module: module,
            "nn.DataParallel, no GPU": nn.DataParallel,
            "dphybrid, cpu": lambda module: DataParallel(module, "cpu"),
            **{f"dphybrid, cpu*{n}": partial(DataParallel, devices=f"cpu*{n}") for n in (2, 3, 8)},
        }
        if torch.cuda.is_available():
            makers["nn.DataParallel, cuda:0"] = lambda module: nn.DataParallel(module.cuda(), device_ids=[0])
            makers["dphybrid, cuda:0"] = lambda module: DataParallel(module, "cuda:0")
            makers["dphybrid, cuda:0*2"] = lambda module: DataParallel(module, "cuda:0*2")
        x = torch.randn(64, 64)
        identity = _interleaved(
            {name: make(nn.Identity()) for name, make in makers.items() if "cuda" not in name},
            x,
            repeats,
            backward=False,
        )
        mlp = _interleaved({name: make(_mlp()) for name, make in makers.items()}, x, repeats, backward=False)
        step = _interleaved({name: make(_mlp()) for name, make in makers.items()}, x, repeats, backward=True)
        keep_freed_memory()  # a training sets this, too; it changes how long large allocations take
        large = _interleaved(
            {name: make(_mlp(1024, 1024, 1024)) for name, make in makers.items() if "cuda" not in name},
            torch.randn(2048, 1024),
            max(1, repeats // 20),
            backward=True,
            warm_up=1,
        )
    finally:
        torch.set_num_threads(threads)
    rows = [
        {
            "what": name,
            "identity_us": identity.get(name),
            "mlp_us": mlp[name],
            "step_us": step[name],
            "large_ratio": large[name] / large["plain call"] if name in large else None,
        }
        for name in makers
    ]
    return {"torch": torch.__version__, "threads": 1, "repeats": repeats, "rows": rows}


def _mlp(inputs: int = 64, *hidden: int) -> nn.Module:
    sizes = (inputs, *(hidden or (128, 128)))
    layers = [(nn.Linear(n, m), nn.ReLU()) for n, m in pairwise(sizes)]
    return nn.Sequential(*chain.from_iterable(layers), nn.Linear(sizes[-1], 8))


def _interleaved(
    calls: dict[str, nn.Module], x: torch.Tensor, repeats: int, backward: bool, warm_up: int = WARM_UP
) -> dict[str, float]:
    """Return the median of each call in microseconds: CPU time of this thread, or wall-clock time with a GPU.
    The calls take turns, so that a busy machine affects all alike."""
    # CPU time does not count what other programs take, but neither what a GPU takes.
    clock = time.perf_counter if torch.cuda.is_available() else time.thread_time
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warm_up + repeats):
        for name, module in calls.items():
            start = clock()
            if backward:
                module(x).sum().backward()
            else:
                with torch.no_grad():
                    module(x)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn >= warm_up:
                times[name].append(clock() - start)
    return {name: 1e6 * statistics.median(seconds) for name, seconds in times.items()}


def text(result: dict[str, Any]) -> str:
    """Return the figures as a table to print."""
    lines = [
        f"torch {result['torch']}, 1 thread, medians of {result['repeats']} calls in us, batch 64 x 64",
        "last column: a step of three layers of 1,024, batch 2,048, relative to the plain call",
        "",
    ]
    lines.append(f"  {'':<26}{'identity':>10}{'MLP':>10}{'MLP + backward':>16}{'large network':>17}")
    for row in result["rows"]:
        identity = f"{row['identity_us']:.1f}" if row["identity_us"] is not None else "-"
        large = f"{row['large_ratio']:.2f}" if row["large_ratio"] is not None else "-"
        lines.append(
            f"  {row['what']:<26}{identity:>10}{row['mlp_us']:>10.0f}{row['step_us']:>16.0f}{large:>17}"
        )
    return "\n".join(lines)


def main() -> None:
    options = flags(__doc__, repeats=200).parse_args()
    show(run(options.repeats), text, options.out)


if __name__ == "__main__":
    main()
