"""`DataParallel`: torch.nn.DataParallel's interface, right or refused, with every split on record.

One class, as in torch: what subclasses may override, and what a call needs, in the order of a call.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dphybrid.parallel.applying import parallel_apply
from dphybrid.parallel.devices import Devices, resolve_devices
from dphybrid.parallel.gathering import Join, as_device, gather
from dphybrid.parallel.nests import Parts, Whole, batch_rows, is_marked, joined, map_tensors, parts
from dphybrid.parallel.probing import Trial, note_shares, refuse_chance_rows, refuse_shared_inputs
from dphybrid.parallel.replication import refuse_unsuitable, replicate, replicate_modules, under_functorch
from dphybrid.parallel.scattering import Places, RowSource, place, scatter_kwargs, split
from dphybrid.parallel.splits import Key, Record, Split, first_size, shares
from dphybrid.util.compiling import outside_of_graphs
from dphybrid.util.errors import UserError, type_text
from dphybrid.util.memory import is_out_of_memory


class DataParallel(nn.DataParallel):
    """Runs one module on every device, each on its share of the batch, and joins the outputs in order.

    module: moved to the first device, where its parameters live. device_ids (or devices): device text,
    `Devices`, a list of CUDA indices, texts or torch devices, or None for `DPHYBRID_DEVICES` or else auto.
    output_device: where outputs are joined, the first device unless said. dim: the batch dimension of inputs
    and outputs. whole: names of keyword arguments that every replica gets unsplit. The number of used devices
    is that of torch.chunk: a short batch uses fewer.

    What differs from torch.nn.DataParallel, and why, is a table in docs/differences.md. The least: virtual
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
        whole: Iterable[str] = (),
    ) -> None:
        nn.Module.__init__(self)  # not nn.DataParallel's, which moves the module and asks for GPUs
        if not isinstance(module, nn.Module):
            raise UserError(f"DataParallel: {type_text(module)} is not a module; give an nn.Module")
        if devices is not None and device_ids is not None:
            raise UserError(
                f"DataParallel: device_ids={device_ids!r} and devices={devices!r} name the same thing; give "
                "one of them"
            )
        self.devices = resolve_devices(device_ids if devices is None else devices)
        home = self.devices.home
        if len(self.devices) > 1:
            refuse_unsuitable(module)
        self.module = module.to(home)
        self.dim = dim
        self.whole = frozenset([whole] if isinstance(whole, str) else whole)
        self.device_ids = _device_ids(self.devices)
        self._target = _output_device(output_device, home)
        self.output_device = self._target  # type: ignore[assignment] # upstream keeps an index, we a device
        self.src_device_obj = home
        steps = ("scatter", "replicate", "parallel_apply", "gather")
        self._overridden = {n for n in steps if getattr(type(self), n) is not getattr(DataParallel, n)}
        self._record = Record()

    def forward(self, *inputs: object, **kwargs: object) -> object:
        """Return the module's output for the whole batch. Raises UserError for inputs that cannot be split
        and outputs that cannot be joined."""
        if len(self.devices) == 1 and not ("scatter" in self._overridden and self.device_ids):
            return self._on_one(inputs, kwargs)
        return self._split_and_joined(inputs, kwargs)

    @outside_of_graphs
    def _split_and_joined(self, inputs: tuple[object, ...], kwargs: dict[str, object]) -> object:
        kwargs = self.with_wholes(kwargs)
        sizes, trial, record = None, None, self._record
        if "scatter" in self._overridden:
            with self._timed("scatter"):
                replica_inputs, replica_kwargs = _in_step(*self.scatter(inputs, kwargs, self.device_ids))
            if len(self.devices) == 1:
                return self.module(*replica_inputs[0], **replica_kwargs[0])
        else:
            found = batch_rows(inputs, kwargs, self.dim)
            paths, rows = tuple(found), max(found.values(), default=0)
            if not rows:  # nothing to split: once, on the first device
                return self._on_one(inputs, kwargs)
            sizes = self.sizes(rows)
            if len(sizes) > 1:
                trial = Trial(self.module, (inputs, kwargs), self.dim, self.devices.home, sizes)
                if len(paths) > 1 and paths not in record.asked and not under_functorch():
                    refuse_shared_inputs(trial)
                    record.asked.add(paths)
            places = self.devices.replicas[: len(sizes)]
            with self._timed("scatter"):
                # both at once: a tensor that is given twice stays one in each share
                shares_of_both = split((inputs, kwargs), places, sizes, self.dim)
                replica_inputs, replica_kwargs = map(list, zip(*shares_of_both, strict=True))
        with self._timed("replicate"):
            replicas = self.replicate(self.module, self.device_ids[: len(replica_inputs)])
        try:
            outputs = self.parallel_apply(replicas, replica_inputs, replica_kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            if trial is not None and not is_out_of_memory(error):
                # what the module was given is what the user can change; the traceback shows only the inside
                note_shares(error, trial)
            raise
        given_sizes = tuple(first_size(given) for given in zip(replica_inputs, replica_kwargs, strict=True))
        record.note((given_sizes, tuple(map(first_size, outputs))))
        with self._timed("gather"):
            if "gather" in self._overridden:
                return self.gather(outputs, self.output_device)
            # an overridden scatter knows its sizes alone: outputs are joined then without being checked
            join = Join(self._target, self.dim, sizes)
            output = join(list(outputs), "output")
        if trial is not None:
            # each output once in each mode
            seen = {(self.training, leaf) for leaf in join.leaves}
            if not seen <= record.settled:
                refuse_chance_rows(trial, outputs[0], join.leaves)
                record.settled |= seen
        return output

    def with_wholes(self, kwargs: dict[str, object]) -> dict[str, object]:
        """Return the keyword arguments, those named in `whole` marked as such; rows in parts are joined for
        it."""
        wholes = {name: kwargs[name] for name in self.whole & kwargs.keys()}
        return kwargs | {name: Whole(joined(v, self.devices.home, self.dim)) for name, v in wholes.items()}

    @outside_of_graphs
    def rows(self, table: RowSource, ids: Tensor) -> Tensor | Parts:
        """Return the rows of `ids` (B, ...), each replica's share (b, ..., dim) on its device:
        `self.net(self.net.rows(self.table, ids))`.

        table: a `HostEmbedding`, or another `RowSource`. Its unique rows go straight to the devices, and
        `RowPipeline` fetches them ahead. One device gives a plain tensor, several give `Parts`, which only a
        region takes: flatten, sum and the like belong inside. Raises UserError for a region with dim != 0,
        for a table whose rows go to other devices of another region, and for ids that are not rows.
        """
        place(table, self)
        return parts(table.replica_rows(ids))

    def sizes(self, rows: int) -> list[int]:
        """Return the rows of each used replica's share of a batch of `rows`."""
        return shares(len(self.devices), rows)

    def scatter(
        self, inputs: tuple[object, ...], kwargs: dict[str, object] | None, device_ids: Places
    ) -> Any:
        """Split arguments over devices: (tuples of positional, dicts of keyword arguments), one of each a
        used device. May be overridden."""
        return scatter_kwargs(inputs, kwargs, device_ids, self.dim)

    def replicate(self, module: nn.Module, device_ids: Places) -> list[nn.Module]:
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

    def parallel_apply(
        self,
        replicas: Sequence[nn.Module],
        inputs: Sequence[object],
        kwargs: Sequence[dict[str, object]] | None,
    ) -> list[object]:
        """Call each replica on its inputs; return the outputs in device order. May be overridden."""
        # a short batch uses fewer: a prefix of the devices
        used = Devices(self.devices.text, self.devices.replicas[: len(replicas)], self.devices.virtual)
        return parallel_apply(replicas, inputs, kwargs, used)

    def gather(self, outputs: Sequence[object], output_device: int | str | torch.device) -> object:
        """Join the outputs on a device. May be overridden. Raises UserError for what cannot be joined."""
        return gather(outputs, output_device, self.dim)

    stage: Callable[[str], AbstractContextManager[None]] | None = None
    """Set it to time the parts of a forward in training mode: called with scatter, replicate, host_to_device
    or gather, it gives a context."""

    def _timed(self, part: str) -> AbstractContextManager[None]:
        return nullcontext() if self.stage is None or not self.training else self.stage(part)

    def _on_one(self, inputs: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Call the module on the first device."""
        home = self.devices.home
        given = (*inputs, *kwargs.values())
        if home.type != "cpu" or any(type(each) is not Tensor and is_marked(each) for each in given):
            with self._timed("host_to_device"):
                inputs, kwargs = map_tensors(lambda t: t.to(home, non_blocking=True), (inputs, kwargs))
        module: Any = self._modules["module"]  # nn.Module's way to `self.module` takes a microsecond
        output = module(*inputs, **kwargs)
        if not torch.compiler.is_exporting():  # a graph in the making computes no batch
            self._record.note(((first_size(inputs) or first_size(kwargs),), (first_size(output),)))
        return output if self._target == home else map_tensors(lambda t: t.to(self._target), output)

    @contextmanager
    def off_the_record(self) -> Iterator[None]:
        """While the block runs, splits are not recorded."""
        kept, self._record = self._record, Record()
        try:
            yield
        finally:
            self._record = kept

    @property
    def last_sizes(self) -> Key | None:
        """The replicas' input and output sizes of the latest forward, one object as long as they repeat, or
        None before the first."""
        return self._record.last

    @property
    def last_split(self) -> Split | None:
        """The split of the latest forward, or None before the first."""
        last = self._record.last
        return None if last is None else self._split(last, self._record.earlier[last] + self._record.repeats)

    def splits(self) -> list[Split]:
        """Return every split seen, in order of first appearance, with how often it happened."""
        return [self._split(key, count) for key, count in self._record.counts().items()]

    def _split(self, key: Key, count: int) -> Split:
        inputs, outputs = (tuple(map(tuple, sizes)) for sizes in key)
        return Split(inputs, outputs, self.devices.labels[: len(inputs)], count)

    def __getattr__(self, name: str) -> Any:
        # functional_call and get_parameter go through modules by the names of the state dict: ours has no
        # `module.`
        try:
            return super().__getattr__(name)
        except AttributeError:
            for held in self._named(name):
                return held[name]
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        for held in self._named(name) if isinstance(value, Tensor) else ():
            held[name] = value
            return
        super().__setattr__(name, value)

    def _named(self, name: str) -> Iterator[dict[str, object]]:
        """Yield what of the module has a parameter, buffer or part of this name."""
        module = self.__dict__.get("_modules", {}).get("module")
        if module is not None:
            yield from (h for h in (module._parameters, module._buffers, module._modules) if name in h)

    def state_dict(self, *args: object, **kwargs: object) -> Any:
        """The module's own state dict: keys without `module.`."""
        return self.module.state_dict(*args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, object], prefix: str, *args: object, **kwargs: object
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


def data_parallel(
    module: nn.Module,
    inputs: object,
    device_ids: Places | None = None,
    output_device: int | str | torch.device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, object] | None = None,
) -> Any:
    """Call `module` once, split over the devices; return the joined output. inputs: a tensor, a tuple of
    arguments, or None for none."""
    arguments = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    return DataParallel(module, device_ids, output_device, dim)(*arguments, **(module_kwargs or {}))


def find_data_parallel(model: nn.Module) -> dict[str, DataParallel]:
    """Return the data-parallel blocks of a model by dotted name ("" for the model itself)."""
    return {name: module for name, module in model.named_modules() if isinstance(module, DataParallel)}


def compile_regions(model: nn.Module, **options: Any) -> list[str]:
    """Compile the modules of a model's data-parallel blocks in place, parameters and state-dict keys as
    before; return the blocks' names.

    options: those of torch.compile. Raises UserError for a block on several devices: replicas are made anew
    for each batch, and a graph would run with the weights of the ones that it was made for.
    """
    blocks = find_data_parallel(model)
    for name, block in blocks.items():
        if len(block.devices) > 1:
            raise UserError(
                f"compile: {name or 'the model'} runs on {len(block.devices)} devices "
                f"({block.devices.text}), and replicas cannot be compiled; use one device, or do not compile"
            )
    for block in blocks.values():
        block.module._compiled_call_impl = torch.compile(partial(_call, block.module), **options)
    return list(blocks)


def _call(module: nn.Module, *args: object, **kwargs: object) -> object:
    # A function of ours: `module.compile()` leaves modules of torch's own classes, such as nn.Sequential, as
    # they are.
    return module._call_impl(*args, **kwargs)
