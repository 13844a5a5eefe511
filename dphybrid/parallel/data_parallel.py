"""`DataParallel`: torch.nn.DataParallel's interface, right or refused, with every split on record.

One class, as in torch: what subclasses may override, and what a call needs, in the order of a call.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dphybrid.parallel.applying import Mode, default_mode, parallel_apply
from dphybrid.parallel.devices import Devices, resolve_devices
from dphybrid.parallel.gathering import Join, Joining, Leaf, as_device, gather
from dphybrid.parallel.in_place import all_tensors, refuse_changes, refuse_late_change, versions
from dphybrid.parallel.nests import Parts, Whole, batch_rows, map_tensors, parts
from dphybrid.parallel.placing import RowSource, place
from dphybrid.parallel.probing import refuse_chance_rows
from dphybrid.parallel.randomness import Randomness, random_streams
from dphybrid.parallel.record import Key, Record, first_size
from dphybrid.parallel.replication import (
    differing_replicas,
    refuse_unsuitable,
    replicate,
    replicate_modules,
    under_functorch,
)
from dphybrid.parallel.scattering import Places, scatter_kwargs, split
from dphybrid.parallel.splits import Size, Split, split_sizes
from dphybrid.util.compiling import outside_of_graphs
from dphybrid.util.errors import UserError


class DataParallel(nn.DataParallel):
    """Runs one module on every device, each on its share of the batch, and joins the outputs in order.

    module: moved to the first device, where its parameters live. device_ids (or devices): device text,
    `Devices`, a list of CUDA indices, texts or torch devices, or None for auto. output_device: where outputs
    are joined, the first device unless said. dim: the batch dimension of inputs and outputs. weights: shares
    for unlike devices, "memory" for their memory. whole: names of keyword arguments that every replica gets
    unsplit. gather: what becomes of outputs with one value a replica, see `Joining`. mode, randomness: see
    `parallel_apply` and `random_streams`; randomness is "shared", one stream through all replicas, where they
    run one after the other on one generator, else "independent". probe: see `probing`. strict: on virtual
    devices, refuse a replica that uses another one's tensor. The number of used devices is that of
    torch.chunk: a short batch uses fewer.

    What differs from torch.nn.DataParallel, and why, is a table in docs/data-parallel.md. The least: virtual
    devices; what cannot be split or joined is refused with its place; state-dict keys carry no `module.`, so
    files are the same for 1, 8 or virtual devices and for the bare module. As there: BatchNorm normalises
    each chunk by itself, only replica 0's buffers last, and a parameter that no replica used gets a zero
    gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Places | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        *,
        devices: Places | None = None,
        weights: Sequence[float] | Literal["memory"] | None = None,
        whole: Iterable[str] = (),
        gather: Joining = "rows",
        mode: Mode | None = None,
        randomness: Randomness | None = None,
        probe: bool = True,
        strict: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        if devices is not None and device_ids is not None:
            raise UserError(
                f"DataParallel: device_ids={device_ids!r} and devices={devices!r} name the same thing; give "
                "one of them"
            )
        self.devices = resolve_devices(device_ids if devices is None else devices)
        home = self.devices.home
        if isinstance(weights, str):
            weights = memory_weights(self.devices)
        if weights is not None:
            split_sizes(1, len(self.devices), weights)
        real = home.type == "cuda" and not self.devices.virtual
        threads = (mode or default_mode(self.devices)) == "threads" and len(self.devices) > 1
        if randomness == "shared" and threads:
            raise UserError(
                "DataParallel: randomness='shared' needs mode inline or serial; in threads the order of "
                "draws is chance: use 'independent' or 'same'"
            )
        if strict and real:
            raise UserError(
                "DataParallel: strict=True is for virtual devices; GPUs of their own refuse foreign tensors "
                "by themselves"
            )
        if gather not in ("rows", "concat", "weighted mean"):
            raise UserError(f"DataParallel: gather={gather!r}; use rows, concat or weighted mean")
        if len(self.devices) > 1:
            refuse_unsuitable(module)
        self.mode: Mode | None = mode
        self.randomness: Randomness = randomness or ("independent" if threads else "shared")
        self.joining: Joining = gather
        self.probe = probe
        self.strict = strict
        self.module = module.to(home)
        self.dim = dim
        self.weights = None if weights is None else tuple(weights)
        self.whole = frozenset(whole)
        self.device_ids = _device_ids(self.devices)
        self._target = _output_device(output_device, home)
        self.output_device = self._target  # type: ignore[assignment] # upstream keeps an index, we a device
        self.src_device_obj = home
        kind = type(self)
        self._overridden = frozenset(
            name
            for name in ("scatter", "replicate", "parallel_apply", "gather")
            if getattr(kind, name) is not getattr(DataParallel, name)
        )
        self._bare = len(self.devices) == 1 and home == self._target == torch.device("cpu") and not self.whole
        self._record = Record()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's output for the whole batch. Raises UserError for inputs that cannot be split
        and outputs that cannot be joined."""
        # "no code change on the CPU" should cost nothing: no attribute look-ups through nn.Module here
        if self._bare:
            attributes = self.__dict__
            record, module = attributes["_record"], attributes["_modules"]["module"]
            key: Key
            if record.in_place is False and len(inputs) == 1 and not kwargs and type(inputs[0]) is Tensor:
                x = inputs[0]
                try:
                    version = x._version
                except RuntimeError:  # an inference tensor, which does not count
                    output = module(x)
                else:
                    output = module(x)
                    if x._version != version:
                        refuse_late_change("input 0")
                try:
                    key = ((x.shape,), (output.shape if type(output) is Tensor else first_size(output),))
                except RuntimeError:  # a nested tensor, which has no shape
                    key = ((first_size(x),), (first_size(output),))
            else:
                given: list[Tensor] = []
                if record.in_place is False and all_tensors((inputs, kwargs), given):
                    before = versions(given)
                    output = module(*inputs, **kwargs)
                    if versions(given) != before:
                        refuse_changes((inputs, kwargs), given, before)
                    key = ((first_size(given),), (first_size(output),))
                else:
                    output = self._watched(inputs, kwargs)
                    key = ((first_size((inputs, kwargs)),), (first_size(output),))
            if key == record.last:
                record.repeats += 1
            else:
                record.note(key)
            return output
        if len(self.devices) == 1 and not ("scatter" in self._overridden and self.device_ids):
            return self._on_one(inputs, kwargs)
        return self._split_and_joined(inputs, kwargs)

    @outside_of_graphs
    def _split_and_joined(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        overridden = self._overridden
        if self.whole:
            kwargs = self.with_wholes(kwargs)
        stage = self.stage if self.stage is not None and self.training else _untimed
        sizes: list[int] | None = None
        if "scatter" in overridden:
            with stage("scatter"):
                replica_inputs, replica_kwargs = _in_step(*self.scatter(inputs, kwargs, self.device_ids))
            if len(self.devices) == 1:
                return self.module(*replica_inputs[0], **replica_kwargs[0])
        else:
            rows = batch_rows(inputs, kwargs, self.dim)
            if not rows:  # nothing to split: once, on the first device
                return self._on_one(inputs, kwargs)
            sizes = self.sizes(rows)
            places = self.devices.replicas[: len(sizes)]
            with stage("scatter"):
                seen: dict[int, list[Any]] = {}
                replica_inputs = split(inputs, places, sizes, self.dim, seen)
                replica_kwargs = split(kwargs, places, sizes, self.dim, seen)
        with stage("replicate"):
            replicas = self.replicate(self.module, self.device_ids[: len(replica_inputs)])
        if self.check_synchrony and (names := differing_replicas(replicas)):
            raise RuntimeError(f"replicas start from different parameters: {', '.join(names)}")
        outputs = self.parallel_apply(replicas, replica_inputs, replica_kwargs)
        self._note(
            tuple(first_size((i, k)) for i, k in zip(replica_inputs, replica_kwargs, strict=True)),
            tuple(map(first_size, outputs)),
        )
        with stage("gather"):
            if "gather" in overridden:
                return self.gather(outputs, self.output_device)
            join = Join(self._target, self.dim, sizes, self.joining)
            joined = join(list(outputs), "output")
        if self.probe and sizes is not None and len(sizes) > 1:
            self._settle(join.leaves, (inputs, kwargs), outputs, sizes)
        return joined

    def with_wholes(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments, those named in `whole` marked as such; rows in parts are joined for
        it."""
        return {name: Whole(self._joined(v)) if name in self.whole else v for name, v in kwargs.items()}

    def _joined(self, value: Any) -> Any:
        if not isinstance(value, Parts):
            return value
        return torch.cat([part.to(self.devices.home) for part in value.tensors], self.dim)

    def _settle(self, leaves: list[Leaf], inputs: Any, outputs: list[Any], sizes: list[int]) -> None:
        """See to it that no output has its rows by chance, the first time it is seen."""
        settled, training = self._record.settled, self.training
        if all((training, leaf) in settled for leaf in leaves):
            return
        if min(sizes) == max(sizes) or any(leaf.rows != 1 for leaf in leaves):
            refuse_chance_rows(self.module, inputs, outputs, leaves, sizes, self.dim, self.devices.home)
        settled.update((training, leaf) for leaf in leaves)

    @outside_of_graphs
    def rows(self, table: RowSource, ids: Tensor) -> Tensor | Parts:
        """Return the rows of `ids` (B, ...), each replica's share (b, ..., dim) on its device:
        `self.net(self.net.rows(self.table, ids))`.

        table: a `HostEmbedding`, or another `RowSource`. Its unique rows go straight to the devices, and
        `RowPipeline` fetches them ahead. One device gives a plain tensor, several give `Parts`, which only a
        region takes: flatten, sum and the like belong inside. Raises UserError for a region with dim != 0,
        for a table whose rows go to other devices of another region, and for ids that are no rows.
        """
        place(table, self)
        return parts(table.replica_rows(ids))

    def sizes(self, rows: int) -> list[int]:
        """Return the rows of each used replica's share of a batch of `rows`."""
        return split_sizes(rows, len(self.devices), self.weights) if rows else [0]

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Any) -> Any:
        """Split arguments over devices: (tuples of positional, dicts of keyword arguments), one of each a
        used device. May be overridden."""
        return scatter_kwargs(inputs, kwargs, device_ids, self.dim)

    def replicate(self, module: nn.Module, device_ids: Any) -> list[nn.Module]:
        """Return a replica a device. May be overridden. Raises UserError for modules that cannot be
        replicated."""
        if module is not self.module or not len(device_ids):
            return replicate(module, device_ids, not torch.is_grad_enabled())
        modules, record = list(module.modules()), self._record
        if modules != record.modules or any(part._compiled_call_impl is not None for part in modules):
            refuse_unsuitable(module, self.devices.home)  # parts may have been replaced since the last time
            record.modules = modules
        return replicate_modules(
            modules, self.devices.replicas[: len(device_ids)], not torch.is_grad_enabled()
        )

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Call each replica on its inputs; return the outputs in device order. May be overridden."""
        used = Devices(self.devices.text, self.devices.replicas[: len(replicas)], self.devices.virtual)
        watch = _strictly(replicas, inputs, kwargs) if self.strict else None
        if self.randomness == "shared" or under_functorch():  # vmap has a say of its own about draws
            return parallel_apply(replicas, inputs, kwargs, used, self.mode, watch)
        at_once = (self.mode or default_mode(used)) == "threads"
        with random_streams(self.randomness, used.replicas, at_once) as streams:
            return parallel_apply(replicas, inputs, kwargs, used, self.mode, _both(streams, watch))

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Join the outputs on a device. May be overridden. Raises UserError for what cannot be joined."""
        return gather(outputs, output_device, self.dim, joining=self.joining)

    stage: Callable[[str], AbstractContextManager[None]] | None = None
    """Set it to time the parts of a forward in training mode: called with scatter, replicate, host_to_device
    or gather, it gives a context."""

    check_synchrony = False
    """Compare the replicas' parameters before each forward. Set it on the class in tests; it costs one read
    of all parameters."""

    def _on_one(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = self._watched(inputs, kwargs)
        self._note((first_size((inputs, kwargs)),), (first_size(output),))
        if self._target != self.devices.home:
            output = map_tensors(lambda t: t.to(self._target), output)
        return output

    def _watched(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module on the first device without that the caller's tensors change, as on several
        devices.

        The first call gets copies and shows whether the module works in place on its inputs. One that does
        gets copies always; of one that did not and does later, in another branch perhaps, the caller hears.
        """
        home, record = self.devices.home, self._record
        if record.in_place is not False:
            place = nullcontext() if self.stage is None or not self.training else self.stage("host_to_device")
            with place:
                copies: dict[int, Tensor] = {}  # a tensor given twice stays one

                def copied(t: Tensor) -> Tensor:
                    if id(t) not in copies:
                        copies[id(t)] = t.clone() if t.device == home else t.to(home, non_blocking=True)
                    return copies[id(t)]

                inputs, kwargs = map_tensors(copied, (inputs, kwargs))
            given: list[Tensor] = []
            all_tensors((inputs, kwargs), given)
            before = versions(given)
            output = self.module(*inputs, **kwargs)
            # without versions, in inference mode, it cannot be seen
            if not record.in_place and None not in before:
                record.in_place = versions(given) != before
            return output
        given = []
        plain = all_tensors((inputs, kwargs), given)
        before = versions(given)
        args, named = inputs, kwargs
        if not plain or home.type != "cpu":
            with nullcontext() if self.stage is None or not self.training else self.stage("host_to_device"):
                args, named = map_tensors(lambda t: t.to(home, non_blocking=True), (inputs, kwargs))
        output = self.module(*args, **named)
        if versions(given) != before:
            refuse_changes((inputs, kwargs), given, before)
        return output

    def _note(self, input_sizes: tuple[Size, ...], output_sizes: tuple[Size, ...]) -> None:
        self._record.note((input_sizes, output_sizes))

    @contextmanager
    def off_the_record(self) -> Iterator[None]:
        """While the block runs, splits are not recorded."""
        kept, self._record = self._record, Record()
        try:
            yield
        finally:
            self._record = kept

    @property
    def last_split(self) -> Split | None:
        """The split of the latest forward, or None before the first."""
        key = self._record.last
        return None if key is None else self._as_split(key)

    def splits(self) -> list[Split]:
        """Return every split seen, in order of first appearance, with how often it happened."""
        return [self._as_split(key) for key in self._record.counts()]

    def _as_split(self, key: Key) -> Split:
        inputs, outputs = (tuple(map(tuple, sizes)) for sizes in key)
        return Split(
            inputs, outputs, devices=self.devices.labels[: len(inputs)], count=self._record.counts()[key]
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own state dict: keys without `module.`."""
        return self.module.state_dict(*args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        own = self.module.state_dict(keep_vars=True).keys()
        mine = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
        # Torch's files carry `module.`, ours do not, and the module may have a child of that name: the
        # reading that finds more keys is meant.
        wrapped = sum(key.startswith("module.") and key.removeprefix("module.") in own for key in mine)
        if wrapped <= sum(key in own for key in mine):
            found = {key: state_dict.pop(f"{prefix}{key}") for key in mine}
            state_dict.update({f"{prefix}module.{key}": value for key, value in found.items()})
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"devices={self.devices.text!r}"


def _untimed(_: str) -> AbstractContextManager[None]:
    return nullcontext()


def _device_ids(devices: Devices) -> list[Any]:
    """What torch calls device_ids: indices of GPUs, nothing on the plain CPU. Virtual devices on the CPU have
    no index: the device itself."""
    if devices.home.type == "cuda":
        return [device.index for device in devices.replicas]
    return list(devices.replicas) if len(devices) > 1 else []


def _output_device(wanted: int | str | torch.device | None, home: torch.device) -> torch.device:
    # virtual devices on the CPU are all one device
    if wanted is None or (isinstance(wanted, int) and home.type == "cpu"):
        return home
    device = as_device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"DataParallel: output_device={wanted!r} is not here; name one of the module's devices, or cpu"
        )
    return torch.device("cuda", 0) if device == torch.device("cuda") else device


def _in_step(inputs: Any, kwargs: Any) -> tuple[list[Any], list[Any]]:
    """As many positional as keyword arguments, from an overridden `scatter`, which may give either alone."""
    inputs, kwargs = list(inputs or ()), list(kwargs or ())
    count = max(len(inputs), len(kwargs), 1)
    return inputs + [()] * (count - len(inputs)), kwargs + [{}] * (count - len(kwargs))


def memory_weights(devices: Devices) -> list[float] | None:
    """Return each device's memory as its share of a batch, or None where all replicas share hardware."""
    if devices.virtual or devices.home.type != "cuda":
        return None
    return [float(torch.cuda.get_device_properties(device).total_memory) for device in devices.replicas]


_Around = Callable[[int], AbstractContextManager[Any]]


def _strictly(replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> _Around:
    from dphybrid.parallel.placement import Placement

    placement = Placement()
    for index, replica in enumerate(replicas):
        placement.tag((inputs[index], kwargs[index] if kwargs else {}), index)
        for part in replica.modules():
            placement.tag((vars(part).get("_former_parameters", {}), dict(part._buffers)), index)
    return placement.running


def _both(outer: _Around, inner: _Around | None) -> _Around:
    if inner is None:
        return outer

    @contextmanager
    def both(index: int) -> Iterator[None]:
        with outer(index), inner(index):
            yield

    return both


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Places | None = None,
    output_device: int | str | torch.device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call `module` once, split over the devices; return the joined output. inputs: a tensor, a tuple of
    arguments, or None for none."""
    if inputs is None:
        inputs = ()
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    return DataParallel(module, device_ids, output_device, dim)(*arguments, **(module_kwargs or {}))
