"""No access to memory of devices, or on its way to them, races another one: the real channels, table,
pipeline and threads on a simulated CUDA that has clocks. Nothing of this needs a GPU, and none was used."""

import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dphybrid.embedding import (
    HostEmbedding,
    RowPipeline,
    clip_grad_norm_,
    native,
    pipeline,
    replicas,
    row_optimizer,
)
from dphybrid.embedding.lookup import Counters
from dphybrid.parallel import Devices, applying, gather, parallel_apply, parts, split_sizes
from dphybrid.parallel.replication import replicate_modules
from dphybrid.parallel.scattering import split
from tests.embedding.simulated_cuda import Carried, Pool, Stream, Torch, World

ROWS, DIM, COLUMNS = 600, 8, 4
DEVICES = {
    "cuda:0": ("cuda:0",),
    "cuda:0,cuda:1": ("cuda:0", "cuda:1"),
    "cuda:0,...,cuda:3": ("cuda:0", "cuda:1", "cuda:2", "cuda:3"),
    "cuda:0*4": ("cuda:0",) * 4,
}
SYNCHRONISATIONS = {
    "_start_copy.record": "the copy's end is marked",
    "replace_rows.record": "the end of what is sent again is marked",
    "wait_for.wait_event": "the device's computation waits for the rows",
    "wait_for.record_stream": "the rows' memory is not given out before the computation has read it",
    "start_receiving.wait_stream": "the way back waits for the gradients",
    "start_receiving.record_stream": "the gradients' memory is not given out before they were copied",
    "start_receiving.record": "the end of the way back is marked",
    "_wait_for.synchronize": "the host waits for the gradients",
}


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a world, in which CUDA is simulated from then on."""

    def begin(dropped: str = "") -> World:
        world = World(dropped)
        monkeypatch.setattr(replicas, "torch", Torch(world))
        pool = type("WorldsPool", (Pool,), {"world": world})
        monkeypatch.setattr(applying, "_pool", pool)
        monkeypatch.setattr(pipeline, "queue", SimpleNamespace(Queue=lambda: Carried(world, queue.Queue())))

        def thread(target: Any, **options: Any) -> threading.Thread:
            start = world.now(world.thread())

            def run() -> None:
                world.join(world.thread(), start)
                with world:
                    target()

            return threading.Thread(target=run, **options)

        threads = {name: getattr(threading, name) for name in ("Semaphore", "Event", "current_thread")}
        monkeypatch.setattr(pipeline, "threading", SimpleNamespace(Thread=thread, **threads))

        def record_stream(tensor: Tensor, stream: Any) -> None:
            memory = world.memory_of(tensor)
            if memory is not None and world.happens("record_stream"):
                memory.ends[stream.name] = 1

        monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: False)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: world.pin(tensor))
        monkeypatch.setattr(torch.Tensor, "to", partialmethod(_to, world, torch.Tensor.to))
        monkeypatch.setattr(torch.cuda, "device", lambda _: world.on(None))
        monkeypatch.setattr(torch.cuda, "stream", world.on)
        monkeypatch.setattr(torch.cuda, "current_stream", world.current)
        module = sys.modules["torch.nn.parallel.replicate"]  # whose name in its package is the function's
        monkeypatch.setattr(module, "_broadcast_coalesced_reshape", _copies)
        monkeypatch.setattr(torch.cuda, "default_generators", [torch.Generator() for _ in range(4)])
        gather = native.gather

        def gathers(weight: Tensor, threads: int | None, ids: Tensor, out: Tensor) -> None:
            world.host(out, writes=True)
            gather(weight, threads, ids, out)

        monkeypatch.setattr(native, "gather", gathers)
        for name in ("update", "sum_rows"):
            monkeypatch.setattr(native, name, partial(_reads, world, getattr(native, name)))
        return world

    return begin


def _reads(world: World, kernel: Any, *args: Any, **options: Any) -> Any:
    for segment in next(each for each in args if isinstance(each, list)):
        world.host(segment.rows_ND, writes=False)
    return kernel(*args, **options)


def _copies(tensors: list[Tensor], gpus: list[int], detach: bool = False) -> list[list[Tensor]]:
    """torch's broadcast between GPUs, without its few large messages."""
    given = [tensor.detach() for tensor in tensors] if detach else tensors
    places = [torch.device("cuda", gpu) for gpu in gpus[1:]]
    return [given, *([tensor.to(place, copy=True) for tensor in given] for place in places)]


def _to(tensor: Tensor, world: World, plain: Any, *args: Any, **options: Any) -> Tensor:
    device = options.get("device", args[0] if args else None)
    if not isinstance(device, torch.device) or device.type != "cuda":
        return plain(tensor, *args, **options)
    blocks, copies = not options.get("non_blocking", False), options.get("copy", False)
    return world.to(tensor, device, non_blocking=not blocks, copy=copies)


def batches(steps: int) -> Iterator[Tensor]:
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        yield (torch.rand(24, COLUMNS, generator=draw).square() * ROWS).long()


class Losses(nn.Module):
    """A region with parameters and a buffer, whose labels come from the batch."""

    shift_H: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(COLUMNS * DIM, 3)
        self.register_buffer("shift_H", torch.ones(3))

    def forward(self, rows_BFD: Tensor, labels_B: Tensor) -> Tensor:
        hidden_BH = (self.layer(rows_BFD.flatten(1)) + self.shift_H).tanh()
        return (hidden_BH.sum(1) - labels_B).square()


def train(world: World, devices: str, mode: Any = "threads", steps: int = 8) -> None:
    """What a DataParallel does in a step, on a stream of the caller's own: scatter, replicate, apply, gather,
    and all ways back; with clipping and an evaluation now and then."""
    places = tuple(torch.device(name) for name in DEVICES[devices])
    where, count = Devices(devices, places, virtual=len(set(places)) < len(places)), len(places)
    table, region = HostEmbedding(ROWS, DIM, seed=1), Losses()
    table.place_on(places, lambda rows: split_sizes(rows, count))
    rows = row_optimizer("adagrad", {"t": table}, lr=0.1)
    dense = torch.optim.SGD(region.parameters(), lr=0.1, foreach=False)
    mine = world.on(Stream(world, places[0]))
    given = ({"ids": ids, "labels": ids.sum(1).float()} for ids in batches(steps))
    with world, mine, RowPipeline({"t": table}, on_cpu=True) as ahead:
        for tensor in region.state_dict().values():
            world.adopt(tensor, places[0], world.current(places[0]).name)
        for step, batch in enumerate(ahead.prefetch(given, lambda batch: {"t": batch["ids"]})):
            rows.zero_grad()
            dense.zero_grad()
            sizes = split_sizes(len(batch["ids"]), count)
            inputs = split((parts(table.replica_rows(batch["ids"])), batch["labels"]), places, sizes, 0)
            replicas = replicate_modules(list(region.modules()), places, detach=False)
            losses = parallel_apply(replicas, inputs, None, where, mode)
            loss_B = gather(losses, places[0], sizes=sizes)
            loss_B.mean().backward()
            if step % 2:
                clip_grad_norm_(table.parameters(), 0.1)
            dense.step()
            rows.step()
            float(loss_B.detach().mean())
            del inputs, replicas, losses, loss_B
            if step % 5 == 4:
                with torch.no_grad():
                    table.replica_rows(batch["ids"])


def test_replicas_that_leave_the_caller_s_stream_are_noticed(
    simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = simulated()
    monkeypatch.setattr(applying, "_on", lambda place, stream: nullcontext())
    train(world, "cuda:0*4")
    assert world.races


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("mode", ["inline", "threads"])
def test_every_access_is_ordered(devices: str, mode: str, simulated: Any) -> None:
    world = simulated()
    train(world, devices, mode)
    assert world.accesses > 600
    assert world.races == []


def test_all_synchronisations_are_listed(simulated: Any) -> None:
    world = simulated()
    train(world, "cuda:0,cuda:1")
    assert world.syncs.keys() == SYNCHRONISATIONS.keys()


def test_batches_are_pinned_by_the_worker_and_memory_for_more_before_the_first(
    simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, str]] = []
    world = simulated()

    def pin(tensor: Tensor) -> Tensor:
        said.append(("pin", threading.current_thread().name))
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    table = HostEmbedding(ROWS, DIM, seed=0)
    table.place_on([torch.device("cuda:0")], lambda rows: [rows])
    given = [{"ids": ids, "labels": [torch.ones(3)], "name": "x"} for ids in batches(3)]
    with world, RowPipeline({"t": table}, on_cpu=True) as ahead:
        for number, batch in enumerate(ahead.prefetch(given, lambda batch: {"t": batch["ids"]})):
            said.append(("forward", ""))
            assert batch["labels"][0] is not given[number]["labels"][0]
            assert torch.equal(batch["ids"], given[number]["ids"])
            table.replica_rows(batch["ids"])
    assert {thread for what, thread in said if what == "pin"} == {"dphybrid-rows"}
    before = said.index(("forward", ""))
    assert before >= 2 + 2 * 2, "of the first batch, and for two on their way"
    assert said.count(("forward", "")) == 3


def receive_and_compute_on(world: World) -> None:
    """Let gradients go while they are on their way, as an update that fails in between does."""
    device = torch.device("cuda:0")
    with world:
        channel = replicas.Channel(device, Counters())
        for _ in range(3):
            grads_UD = world.adopt(torch.zeros(4, DIM), device, world.current(device).name) + 1
            channel.start_receiving(grads_UD)
            del grads_UD


@pytest.mark.parametrize("name", SYNCHRONISATIONS)
def test_taking_a_synchronisation_out_is_noticed(name: str, simulated: Any) -> None:
    world = simulated()
    receive_and_compute_on(world)
    assert world.races == []
    world = simulated(dropped=name)
    receive_and_compute_on(world)
    train(world, "cuda:0,cuda:1", steps=20)
    assert world.races, f"nobody notices that {SYNCHRONISATIONS[name]} no more"
