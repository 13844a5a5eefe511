"""The cost of splitting: a plain call, torch's nn.DataParallel and ours, as medians of interleaved calls on
one thread. The figures of a large network are steps of three layers of 1,024, batch 2,048."""

from collections.abc import Callable
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn

from benchmarks.command import flags, show
from benchmarks.racing import Step, plain, race, table_text
from dphybrid.parallel.data_parallel import DataParallel
from dphybrid.util.memory import keep_freed_memory

WARM_UP = 30


def run(repeats: int = 200) -> dict[str, Any]:
    """Measure; return heading -> contestant -> timing, and the version of torch."""
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
        identity = {name: make(nn.Identity()) for name, make in makers.items() if "cuda" not in name}
        small = {name: make(_mlp()) for name, make in makers.items()}
        found = {
            "identity": race(_calls(identity, x), repeats, WARM_UP),
            "small network": race(_calls(small, x), repeats, WARM_UP),
            "small network, with backward": race(_calls(small, x, backward=True), repeats, WARM_UP),
        }
        keep_freed_memory()  # a training sets this, too; it changes how long large allocations take
        large = {name: make(_mlp(1024, 1024, 1024)) for name, make in makers.items() if "cuda" not in name}
        x = torch.randn(2048, 1024)
        steps = race(_calls(large, x, backward=True), max(1, repeats // 20), 1)
        found["large network, with backward"] = steps
    finally:
        torch.set_num_threads(threads)
    ratios = {name: timing.cpu_ms / steps["plain call"].cpu_ms for name, timing in steps.items()}
    return {"torch": torch.__version__, **found, "large network, CPU time relative to the plain call": ratios}


def _mlp(inputs: int = 64, *hidden: int) -> nn.Module:
    sizes = (inputs, *(hidden or (128, 128)))
    layers = [(nn.Linear(n, m), nn.ReLU()) for n, m in pairwise(sizes)]
    return nn.Sequential(*chain.from_iterable(layers), nn.Linear(sizes[-1], 8))


def _calls(modules: dict[str, nn.Module], x: torch.Tensor, *, backward: bool = False) -> dict[str, Step]:
    def call(module: nn.Module) -> None:
        with torch.set_grad_enabled(backward):
            outputs = module(x)
        if backward:
            outputs.sum().backward()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return {name: partial(call, module) for name, module in modules.items()}


def main() -> None:
    options = flags(__doc__, repeats=200).parse_args()
    show(plain(found := run(options.repeats)), lambda _: table_text(found), options.out)


if __name__ == "__main__":
    main()
