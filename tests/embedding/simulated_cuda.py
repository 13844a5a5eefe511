"""Simulate CUDA without a device: streams, events, pinned and device memory. Vector clocks find two accesses
without an order between them, although everything runs on the CPU, one after the other.

An actor is a host thread or a stream. Work launched on a stream happens after everything its thread has done
so far and after earlier work of the stream; the thread continues at once. Freed memory is used again: device
memory in the order of the stream on which it was made and of those that `record_stream` names, pinned memory
when the copies from and to it have ended. Synchronisations have names, `FUNCTION.METHOD`, and a test can drop
one to show that it is needed.

After Lamport's and Mattern's clocks; memory follows the rules of torch's caching allocators.
"""

import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict[str, int]


class Memory:
    """A piece of memory, and which actors have accessed it at what time of their clocks."""

    def __init__(self, device: torch.device | None, before: "Memory | None" = None) -> None:
        self.device = device  # None: pinned
        self.write: tuple[str, int] | None = before.write if before else None
        self.reads: dict[str, int] = dict(before.reads) if before else {}
        self.made_on = ""
        self.ends: Clock = {}  # after which it may be given out again


class World(TorchDispatchMode):
    """The whole simulation of one test. dropped: the name of the synchronisation that does nothing."""

    def __init__(self, dropped: str = "") -> None:
        super().__init__()
        self.dropped, self.syncs = dropped, dict[str, int]()
        self.races: list[str] = []
        self.accesses = 0
        self._clocks: dict[str, Clock] = defaultdict(dict)
        self._memory: dict[int, Memory] = {}
        self._free: dict[str, list[Memory]] = defaultdict(list)
        self._lock = threading.RLock()
        self._local = threading.local()
        self._streams = 0

    # Clocks

    def thread(self) -> str:
        return threading.current_thread().name

    def join(self, actor: str, other: Clock) -> None:
        with self._lock:
            own = self._clocks[actor]
            for name, time in other.items():
                own[name] = max(own.get(name, 0), time)

    def now(self, actor: str) -> Clock:
        with self._lock:
            return dict(self._clocks[actor])

    def _tick(self, actor: str) -> int:
        self._clocks[actor][actor] = self._clocks[actor].get(actor, 0) + 1
        return self._clocks[actor][actor]

    def happens(self, method: str, frames: int = 2) -> bool:
        """Count a synchronisation, named after the calling function; return whether it takes place."""
        name = f"{sys._getframe(frames).f_code.co_name}.{method}"
        with self._lock:
            self.syncs[name] = self.syncs.get(name, 0) + 1
        return name != self.dropped

    # Memory

    def memory_of(self, tensor: Tensor) -> Memory | None:
        dense = tensor._values() if tensor.is_sparse else tensor
        return self._memory.get(dense.untyped_storage()._cdata)

    def adopt(self, tensor: Tensor, device: torch.device | None, actor: str) -> Tensor:
        """Give a tensor memory: freed memory if there is some, else new memory."""
        with self._lock:
            memory = Memory(device, self._free[actor].pop() if self._free[actor] else None)
            memory.made_on = actor
            storage = tensor.untyped_storage()
            key = storage._cdata
            self._memory[key] = memory
            weakref.finalize(storage, self._let_go, key, memory)
        return tensor

    def _let_go(self, key: int, memory: Memory) -> None:
        with self._lock:
            if self._memory.get(key) is memory:
                del self._memory[key]
            # Whoever gets it next does so after these: torch's allocators wait for the events of recorded
            # streams, and of copies of pinned memory.
            again = Memory(memory.device, memory)
            if memory.device is None:
                again.write, again.reads = None, {}  # it waits for all copies from and to it
            else:
                covered = {memory.made_on, *memory.ends}
                again.reads = {who: when for who, when in memory.reads.items() if who not in covered}
                if memory.write is not None and memory.write[0] in covered:
                    again.write = None
            self._free[memory.made_on].append(again)

    def access(self, actor: str, tensor: Tensor, *, writes: bool) -> None:
        memory = self.memory_of(tensor)
        if memory is None:
            return
        with self._lock:
            self.accesses += 1
            clock, when = self._clocks[actor], self._clocks[actor].get(actor, 0)
            before = dict(memory.reads) if writes else {}
            if memory.write is not None:
                before[memory.write[0]] = max(before.get(memory.write[0], 0), memory.write[1])
            late = [who for who, time in before.items() if who != actor and clock.get(who, 0) < time]
            if late:
                self.races.append(f"{actor} {'writes' if writes else 'reads'} beside {', '.join(late)}")
            if writes:
                memory.write, memory.reads = (actor, when), {}
            else:
                memory.reads[actor] = when

    # Streams

    def default(self, device: torch.device) -> "Stream":
        return Stream(self, device, f"{device} default")

    def current(self, device: Any) -> "Stream":
        found: Stream | None = vars(self._local).get(str(device))
        return found or self.default(torch.device(device))

    @contextmanager
    def on(self, stream: "Stream | None") -> Iterator[None]:
        if stream is None:
            yield
            return
        key = str(stream.device)
        before = vars(self._local).get(key)
        setattr(self._local, key, stream)
        try:
            yield
        finally:
            setattr(self._local, key, before)

    def launch(self, stream: "Stream") -> str:
        self.join(stream.name, self.now(self.thread()))
        with self._lock:
            self._tick(stream.name)
        return stream.name

    def host(self, tensor: Tensor, *, writes: bool) -> None:
        """Record that this thread reads or writes the tensor itself, as a compiled kernel does."""
        with self._lock:
            self._tick(self.thread())
        self.access(self.thread(), tensor, writes=writes)

    # Copies

    def pin(self, tensor: Tensor) -> Tensor:
        pinned = self.adopt(_duplicate(tensor), None, "pinned")
        self.host(pinned, writes=True)
        return pinned

    def to(self, tensor: Tensor, device: torch.device, *, non_blocking: bool, copy: bool) -> Tensor:
        """`Tensor.to` a simulated device; its backward copies the gradients back."""
        memory = self.memory_of(tensor)
        if memory is not None and memory.device == device and not copy:
            return tensor
        copied: Tensor = _Copied.apply(self, tensor, device, non_blocking)
        return copied

    def copied(self, tensor: Tensor, device: torch.device, non_blocking: bool) -> Tensor:
        memory, target = self.memory_of(tensor), self.current(device)
        source = target if memory is None or memory.device is None else self.current(memory.device)
        # As torch does between devices: the copy runs on the source's stream, and both streams wait for the
        # other one.
        self.join(source.name, self.now(self.launch(target)))
        actor = self.launch(source)
        made = self.adopt(_duplicate(tensor), device, target.name)
        self.access(actor, tensor, writes=False)
        self.access(actor, made, writes=True)
        self.join(target.name, self.now(actor))
        if memory is None or not non_blocking:
            self.join(self.thread(), self.now(actor))
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        with self._lock:
            owners = [memory.device for t in tensors if (memory := self.memory_of(t)) is not None]
        devices = [device for device in owners if device is not None]
        out = func(*args, **kwargs)
        if not owners:
            return out
        mutated = {id(args[i]) for i, a in enumerate(func._schema.arguments) if i < len(args) and _mutates(a)}
        if not devices:  # pinned memory alone
            for tensor in tensors:
                if not _is_view(func):
                    self.host(tensor, writes=id(tensor) in mutated)
            return out
        stream = self.current(devices[0])
        if _is_view(func):
            return out
        actor = self.launch(stream)
        for tensor in tensors:
            self.access(actor, tensor, writes=id(tensor) in mutated)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and self.memory_of(leaf) is None:
                self.adopt(leaf, devices[0], actor)
                self.access(actor, leaf, writes=True)
        blocking = func is torch.ops.aten._local_scalar_dense.default or (
            func is torch.ops.aten.copy_.default and not (args[2] if len(args) > 2 else False)
        )
        if blocking:
            self.join(self.thread(), self.now(actor))
        return out


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, world: World, tensor: Tensor, device: torch.device, non_blocking: bool) -> Tensor:
        memory = world.memory_of(tensor)
        ctx.world, ctx.back = world, memory and memory.device
        return world.copied(tensor, device, non_blocking)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        came = None if ctx.back is None else ctx.world.copied(grad, ctx.back, True)
        return None, came, None, None


def _duplicate(tensor: Tensor) -> Tensor:
    """Return a copy that the simulation does not record."""
    return torch.from_numpy(tensor.detach().numpy().copy())


def _mutates(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


class Event:
    """torch.cuda.Event."""

    def __init__(self, world: World, **_: Any) -> None:
        self._world, self._clock = world, dict[str, int]()

    def record(self, stream: "Stream | None" = None) -> None:
        assert stream is not None
        if self._world.happens("record"):
            self._world.launch(stream)
            self._clock = self._world.now(stream.name)

    def synchronize(self) -> None:
        if self._world.happens("synchronize"):
            self._world.join(self._world.thread(), self._clock)

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: "Event") -> float:
        return 1.0


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, world: World, device: torch.device, name: str = "") -> None:
        world._streams += 1
        self._world, self.device, self.name = world, device, name or f"{device} #{world._streams}"

    def wait_event(self, event: Event) -> None:
        if self._world.happens("wait_event"):
            self._world.join(self.name, event._clock)

    def wait_stream(self, other: "Stream") -> None:
        if self._world.happens("wait_stream"):
            self._world.launch(other)
            self._world.join(self.name, self._world.now(other.name))


class Carried:
    """A queue between threads whose items bring the sender's clock with them."""

    def __init__(self, world: World, inner: Any) -> None:
        self._world, self._inner = world, inner

    def put(self, item: Any) -> None:
        self._inner.put((self._world.now(self._world.thread()), item))

    def get(self) -> Any:
        clock, item = self._inner.get()
        self._world.join(self._world.thread(), clock)
        return item

    def get_nowait(self) -> Any:
        return self._inner.get_nowait()

    def empty(self) -> bool:
        return bool(self._inner.empty())


class Pool(ThreadPoolExecutor):
    """A thread pool whose threads belong to the same simulation as the thread that submits."""

    world: World

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:  # type: ignore[override]
        world, start, end = self.world, self.world.now(self.world.thread()), dict[str, int]()

        def run() -> Any:
            world.join(world.thread(), start)
            with world:
                try:
                    return call(*args)
                finally:
                    end.update(world.now(world.thread()))

        future = super().submit(run)
        result = future.result

        def joined(timeout: float | None = None) -> Any:
            value = result(timeout)
            world.join(world.thread(), end)
            return value

        future.result = joined  # type: ignore[method-assign]
        return future


class Torch:
    """`torch` for the code that moves rows to devices, with its CUDA parts simulated."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.cuda = SimpleNamespace(
            Stream=lambda device: Stream(world, device),
            Event=lambda **options: Event(world, **options),
            stream=world.on,
            current_stream=world.current,
        )

    def empty(self, *size: Any, pin_memory: bool = False, device: Any = None, **options: Any) -> Tensor:
        tensor = torch.empty(*size, **options)
        if pin_memory:
            return self._world.adopt(tensor, None, "pinned")
        return (
            tensor if device is None else self._world.adopt(tensor, device, self._world.current(device).name)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
