"""`DataParallel`: torch.nn.DataParallel's interface, right or refused, with every split on record."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from dphybrid.parallel.devices import Devices, resolve_devices
from dphybrid.parallel.primitives import (
    Mode,
    Randomness,
    Whole,
    batch_rows,
    differing_replicas,
    gather,
    map_tensors,
    parallel_apply,
    random_streams,
    replicate,
    scatter,
)
from dphybrid.parallel.splits import Size, Split, split_sizes
from dphybrid.util.errors import UserError

_Key = tuple[tuple[Size, ...], tuple[Size, ...]]


class _Record:
    """The splits seen so far. Apart from the module: setting a module's attribute costs more than all the rest of recording."""

    __slots__ = ("counts", "last")

    def __init__(self) -> None:
        self.counts: dict[_Key, int] = {}
        self.last: _Key | None = None


class DataParallel(nn.DataParallel):
    """Runs one module on every device, each on its share of the batch, and joins the outputs in order.

    module: moved to the first device, where its parameters live. devices: device text, `Devices`, CUDA indices, or None for auto.
    dim: the batch dimension of inputs and outputs. weights: shares for unlike devices, "memory" for their memory. whole: names of
    keyword arguments that every replica gets unsplit. mode, randomness: see `parallel_apply` and `random_streams`. strict: on virtual
    devices, refuse a replica that uses another one's tensor. The number of used devices is that of torch.chunk: a short batch uses fewer.

    What differs from torch.nn.DataParallel: virtual devices; tensors that disagree on the batch size are refused instead of cut; a
    non-tensor keyword with a short batch works; an empty batch runs once; 0-dim outputs are refused; state-dict keys carry no `module.`,
    so files are the same for 1, 8 or virtual devices and for the bare module. As there: BatchNorm normalises each chunk by itself, only
    replica 0's buffers last, and a parameter that no replica used gets a zero gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: str | Devices | Sequence[int] | None = None,
        *,
        dim: int = 0,
        weights: Sequence[float] | Literal["memory"] | None = None,
        whole: Iterable[str] = (),
        mode: Mode | None = None,
        randomness: Randomness = "shared",
        strict: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        self.devices = resolve_devices(devices)
        _refuse_unsuitable(module)
        if isinstance(weights, str):
            weights = memory_weights(self.devices)
        if weights is not None:
            split_sizes(1, len(self.devices), weights)
        real = self.devices.home.type == "cuda" and not self.devices.virtual
        threads = mode == "threads" or (mode is None and real)
        if randomness != "shared" and threads and not real:
            raise UserError(
                f"DataParallel: randomness={randomness!r} needs mode inline or serial; in threads the order of draws is chance"
            )
        if strict and real:
            raise UserError(
                "DataParallel: strict=True is for virtual devices; GPUs of their own refuse foreign tensors by themselves"
            )
        self.mode: Mode | None = mode
        self.randomness: Randomness = randomness
        self.strict = strict
        self.module = module.to(self.devices.home)
        self.dim = dim
        self.weights = None if weights is None else tuple(weights)
        self.whole = frozenset(whole)
        self.device_ids = [device.index for device in self.devices.replicas] if real else []
        self.output_device = self.devices.home  # type: ignore[assignment] # upstream keeps an index, we a device
        self.src_device_obj = self.devices.home
        self._bare = len(self.devices) == 1 and self.devices.home.type == "cpu" and not self.whole
        self._record = _Record()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's output for the whole batch, on the first device. Raises UserError for inputs that cannot be split."""
        if self._bare:  # "no code change on the CPU" should cost nothing: no attribute look-ups through nn.Module here
            attributes = self.__dict__
            output = attributes["_modules"]["module"](*inputs, **kwargs)
            key: _Key
            if len(inputs) == 1 and type(output) is Tensor and type(inputs[0]) is Tensor:
                key = ((inputs[0].shape,), (output.shape,))
            else:
                key = ((_first_size((inputs, kwargs)),), (_first_size(output),))
            record = attributes["_record"]
            record.last = key
            record.counts[key] = record.counts.get(key, 0) + 1
            return output
        if len(self.devices) == 1:
            return self._on_one(inputs, kwargs)
        if self.whole:
            kwargs = {name: Whole(value) if name in self.whole else value for name, value in kwargs.items()}
        rows = batch_rows(inputs, kwargs, self.dim)
        if not rows:  # nothing to split: once, on the first device
            return self._on_one(inputs, kwargs)
        sizes = self.sizes(rows)
        stage = self.stage if self.stage is not None and self.training else _untimed
        with stage("scatter"):
            replica_inputs = scatter(inputs, self.devices, sizes, self.dim)
            replica_kwargs = scatter(kwargs, self.devices, sizes, self.dim)
        used = Devices(self.devices.text, self.devices.replicas[: len(sizes)], self.devices.virtual)
        with stage("replicate"):
            replicas = replicate(self.module, used, detach=not torch.is_grad_enabled())
        if self.check_synchrony and (names := differing_replicas(replicas)):
            raise RuntimeError(f"replicas start from different parameters: {', '.join(names)}")
        with random_streams(self.randomness, self.devices.home, len(sizes)) as around:
            if self.strict:
                around = _strictly(around, replicas, replica_inputs, replica_kwargs)
            outputs = parallel_apply(replicas, replica_inputs, replica_kwargs, used, self.mode, around)
        self._note(
            tuple(_first_size((i, k)) for i, k in zip(replica_inputs, replica_kwargs, strict=True)),
            tuple(map(_first_size, outputs)),
        )
        with stage("gather"):
            return gather(outputs, self.devices.home, self.dim, sizes)

    def sizes(self, rows: int) -> list[int]:
        """Return the rows of each used replica's share of a batch of `rows`."""
        return split_sizes(rows, len(self.devices), self.weights) if rows else [0]

    stage: Callable[[str], AbstractContextManager[None]] | None = None
    """Set it to time the parts of a forward in training mode: called with scatter, replicate, host_to_device or gather, it gives a context."""

    check_synchrony = False
    """Compare the replicas' parameters before each forward. Set it on the class in tests; it costs one read of all parameters."""

    def _on_one(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        home = self.devices.home
        if home.type != "cpu" or self.whole or len(self.devices) > 1:
            with (self.stage if self.stage is not None and self.training else _untimed)("host_to_device"):
                inputs, kwargs = map_tensors(lambda t: t.to(home, non_blocking=True), (inputs, kwargs))
        output = self.module(*inputs, **kwargs)
        self._note((_first_size((inputs, kwargs)),), (_first_size(output),))
        return output

    def _note(self, input_sizes: tuple[Size, ...], output_sizes: tuple[Size, ...]) -> None:
        self._record.last = key = (input_sizes, output_sizes)
        self._record.counts[key] = self._record.counts.get(key, 0) + 1

    @property
    def last_split(self) -> Split | None:
        """The split of the latest forward, or None before the first."""
        key = self._record.last
        return None if key is None else self._as_split(key)

    def splits(self) -> list[Split]:
        """Return every split seen, in order of first appearance, with how often it happened."""
        return [self._as_split(key) for key in self._record.counts]

    def _as_split(self, key: _Key) -> Split:
        inputs, outputs = (tuple(map(tuple, sizes)) for sizes in key)
        return Split(inputs, outputs, devices=self.devices.labels[: len(inputs)], count=self._record.counts[key])

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own state dict: keys without `module.`."""
        return self.module.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        inner = f"{prefix}module."
        for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(inner)]:
            state_dict[inner + key.removeprefix(prefix)] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"devices={self.devices.text!r}"


class LossInside(nn.Module):
    """A block with its loss, for the inside of a `DataParallel`: only per-sample losses leave the devices, not the logits.

    loss: (output, targets) -> (B,), such as a torch loss with reduction="none". The mean is taken outside, over all samples: a mean of the
    devices' means weighs the samples of a short last chunk too much.
    """

    def __init__(self, block: nn.Module, loss: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.block = block
        self.loss = loss

    def forward(self, inputs: Any, targets: Any) -> Tensor:
        """Return the loss of each sample, (B,). inputs: a tensor, or a tuple of arguments. Raises UserError for a loss that is a mean."""
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        loss_B = self.loss(self.block(*arguments), targets)
        if loss_B.dim() == 0:
            raise UserError(
                'LossInside: the loss is one number for the whole chunk; give it reduction="none", one value a sample'
            )
        return loss_B


def _untimed(_: str) -> AbstractContextManager[None]:
    return nullcontext()


def memory_weights(devices: Devices) -> list[float] | None:
    """Return each device's memory as its share of a batch, or None where all replicas share hardware."""
    if devices.virtual or devices.home.type != "cuda":
        return None
    return [float(torch.cuda.get_device_properties(device).total_memory) for device in devices.replicas]


def _strictly(
    around: Any, replicas: list[nn.Module], inputs: list[Any], kwargs: list[Any]
) -> Callable[[int], AbstractContextManager[Any]]:
    from dphybrid.parallel.placement import Placement

    placement = Placement()
    for index, replica in enumerate(replicas):
        placement.tag((inputs[index], kwargs[index]), index)
        for part in replica.modules():
            placement.tag((vars(part).get("_former_parameters", {}), dict(part._buffers)), index)

    @contextmanager
    def both(index: int) -> Iterator[None]:
        with around(index), placement.running(index):
            yield

    return both


def data_parallel(module: nn.Module, inputs: Any, devices: str | Devices | Sequence[int] | None = None, dim: int = 0) -> Any:
    """Call `module` once, split over the devices; return the joined output. inputs: a tensor or a tuple of arguments."""
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    return DataParallel(module, devices, dim=dim)(*arguments)


def find_data_parallel(model: nn.Module) -> dict[str, DataParallel]:
    """Return the data-parallel blocks of a model by dotted name ("" for the model itself)."""
    return {name: module for name, module in model.named_modules() if isinstance(module, DataParallel)}


def _first_size(value: Any) -> Size:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for item in value:
            if size := _first_size(item):
                return size
    return ()


def _refuse_unsuitable(module: nn.Module) -> None:
    for name, part in module.named_modules():
        place = f"module {name!r}" if name else "the module"
        if isinstance(part, nn.DataParallel):
            raise UserError(f"DataParallel: {place} is data-parallel itself; wrap one region, not a region within a region")
        if type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None:
            raise UserError(
                f"DataParallel: {place} is compiled, and replicas would run the original's code; compile outside or not at all"
            )
        if isinstance(part, LazyModuleMixin) and part.has_uninitialized_params():  # type: ignore[misc]
            raise UserError(f"DataParallel: {place} has parameters without a size yet; run it once on a sample first")
