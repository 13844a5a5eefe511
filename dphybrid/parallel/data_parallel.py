"""`DataParallel`: the interface of torch.nn.DataParallel, but a result is exact or an error, and every split
is recorded.

One class, as in torch. Its methods are in the order of a call.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from dphybrid.parallel.applying import parallel_apply
from dphybrid.parallel.devices import Devices, resolve_devices
from dphybrid.parallel.gathering import as_device, gather
from dphybrid.parallel.nests import Parts, Whole, batch_rows, leaves, map_tensors, parts
from dphybrid.parallel.replication import (
    copied_and_shared,
    refuse_unsuitable,
    replicate,
    replicate_modules,
)
from dphybrid.parallel.scattering import DeviceNames, RowSource, connect, shared_tables, split
from dphybrid.parallel.splits import Key, Record, Split, first_size, shares, sizes_of_shares, split_sizes
from dphybrid.util.compiling import outside_of_graphs
from dphybrid.util.errors import UserError, type_text
from dphybrid.util.stages import stage


class DataParallel(nn.DataParallel):
    """Runs a module on every device, each on its share of the batch, and joins the outputs in order.

    Args:
        module: Moved to the first device, where its parameters live.
        device_ids: Device text, `Devices`, a list of CUDA indices, texts or torch devices, or None for
            `DPHYBRID_DEVICES`, else auto.
        output_device: Where outputs are joined; the first device by default.
        dim: Batch dimension of inputs and outputs.

    Batches are split as by torch.chunk, so a short batch uses fewer devices. Every replica gets a `Whole`
    input unsplit.

    docs/data-parallel.md lists all differences from torch.nn.DataParallel. The main ones:
    devices may be virtual; inputs and outputs that cannot be split or joined raise an error that names them;
    a parameter that no replica used gets no gradient; scatter and gather cannot be overridden. As in torch,
    state-dict keys begin with `module.`, BatchNorm normalises each share by itself, and only replica 0's
    changes to buffers last.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: DeviceNames | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
    ) -> None:
        nn.Module.__init__(self)  # not nn.DataParallel's, which needs GPUs and the module on the first
        if not isinstance(module, nn.Module):
            raise UserError(f"DataParallel: {type_text(module)} is not a module; give an nn.Module")
        for step in ("scatter", "gather"):
            if getattr(type(self), step) is not getattr(nn.DataParallel, step):
                raise UserError(
                    f"DataParallel: {type(self).__name__} overrides {step}, which is not called here. Pass "
                    "tensors or pytrees, or subclass torch.nn.DataParallel"
                )
        self.use_devices(resolve_devices(device_ids))
        home = self.devices.home
        if len(self.devices) > 1:
            refuse_unsuitable(module)
        self.module = module.to(home)
        self.dim = dim
        self._target = _output_device(output_device, home)
        self.output_device = self._target  # type: ignore[assignment] # torch keeps an index
        self.src_device_obj = home
        self._record = Record()
        if dim == 0:  # else rows cannot be fetched ahead; lookups work
            for table in shared_tables(module).values():
                connect(cast(RowSource, table), self)

    def use_devices(self, devices: Devices) -> None:
        """Split over these devices from now on; their first one must be where the parameters are."""
        self.devices = devices
        # torch's attribute: indices of GPUs, none on the plain CPU. Virtual devices on the CPU have no index.
        replicas = devices.replicas
        on_cpu: list[Any] = list(replicas) if len(devices) > 1 else []
        self.device_ids = [device.index for device in replicas] if devices.home.type == "cuda" else on_cpu

    def forward(self, *inputs: object, **kwargs: object) -> object:
        """Return the module's output for the whole batch. Raises UserError for inputs that cannot be split
        and outputs that cannot be joined."""
        if len(self.devices) == 1:
            return self._on_first_device(inputs, kwargs)
        return self._split_and_joined(inputs, kwargs)

    @outside_of_graphs
    def _split_and_joined(self, inputs: tuple[object, ...], kwargs: dict[str, object]) -> object:
        rows = batch_rows(inputs, kwargs, self.dim)
        if not rows:  # no tensor, or an empty batch: call the module once, on the first device
            return self._on_first_device(inputs, kwargs)
        sizes = split_sizes(rows, len(self.devices))
        with stage("scatter"):
            # Together, so that a tensor that is passed twice stays one tensor in each share.
            shares_of_both = split((inputs, kwargs), self.devices.replicas[: len(sizes)], sizes, self.dim)
            replica_inputs, replica_kwargs = map(list, zip(*shares_of_both, strict=True))
        with stage("replicate"):
            replicas = self.replicate(self.module, self.device_ids[: len(sizes)])
        outputs = self.parallel_apply(replicas, replica_inputs, replica_kwargs)
        self._record.note(
            (sizes_of_shares((inputs, kwargs), sizes, self.dim), tuple(map(first_size, outputs)))
        )
        with stage("gather"):
            return gather(outputs, self._target, self.dim, sizes)

    @outside_of_graphs
    def rows(self, table: RowSource, ids: Tensor) -> Tensor | Parts:
        """Look up `ids` (B, ...) and send each replica's share of the rows (b, ..., dim) to its device. Use:
        `self.net(self.net.rows(self.table, ids))`.

        table: a `HostEmbedding`, or another `RowSource`. Its unique rows go straight to the devices, and
        `RowPipeline` fetches them ahead. Returns a plain tensor for one device, and `Parts` for several,
        which only a region accepts: flatten, sum and the like belong inside. Raises UserError for a region
        with dim != 0, for a table whose rows go to another region on other devices, and for ids that are not
        rows.
        """
        connect(table, self)
        return parts(table.replica_rows(ids))

    def sizes(self, rows: int) -> list[int]:
        """Return the number of rows of each used replica's share of a batch of `rows` rows."""
        return shares(len(self.devices), rows)

    def replicate(self, module: nn.Module, device_ids: DeviceNames) -> list[nn.Module]:
        """Return one replica per device. Raises UserError for modules that cannot be
        replicated."""
        if module is not self.module or not len(device_ids):
            return replicate(module, device_ids, not torch.is_grad_enabled())
        # The check is needed once for each set of parts: they may have been replaced, or compiled, meanwhile.
        modules, record = list(module.modules()), self._record
        if modules != record.modules or any(part._compiled_call_impl is not None for part in modules):
            refuse_unsuitable(module, self.devices.home)
            record.modules = modules
            record.copied, record.tables = copied_and_shared(module)
        devices, detach = self.devices.replicas[: len(device_ids)], not torch.is_grad_enabled()
        return replicate_modules(record.copied, devices, detach, record.tables)

    def parallel_apply(
        self,
        replicas: Sequence[nn.Module],
        inputs: Sequence[object],
        kwargs: Sequence[dict[str, object]] | None,
    ) -> list[object]:
        """Call each replica on its inputs; return the outputs in device order."""
        return parallel_apply(replicas, inputs, kwargs, self.devices)  # a short batch uses the first of them

    def _on_first_device(self, inputs: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Call the module on the first device."""
        home = self.devices.home
        size = first_size((inputs, kwargs))
        # Plain tensors on the CPU, the usual case, need no copy and no walk through the nest.
        values = (*inputs, *kwargs.values())
        if home.type != "cpu" or any(
            type(value) is not Tensor and any(isinstance(leaf, Whole | Parts) for leaf in leaves(value))
            for value in values
        ):
            with nullcontext() if torch.compiler.is_compiling() else stage("host_to_device"):
                inputs, kwargs = map_tensors(lambda t: t.to(home, non_blocking=True), (inputs, kwargs))
        module: Any = self._modules["module"]  # `self.module` goes through __getattr__: a microsecond
        output = module(*inputs, **kwargs)
        if not torch.compiler.is_compiling():  # a graph that is captured runs no real batch
            self._record.note(((size,), (first_size(output),)))
        return output if self._target == home else map_tensors(lambda t: t.to(self._target), output)

    @property
    def last_sizes(self) -> Key | None:
        """The replicas' input and output sizes of the latest forward, or None before the first. The same
        object as long as they repeat."""
        return self._record.last

    @property
    def last_split(self) -> Split | None:
        """The split of the latest forward, or None before the first."""
        last = self._record.last
        return None if last is None else self._split(last, self._record.counts[last])

    def splits(self) -> list[Split]:
        """Return every split so far with its count, in order of first appearance."""
        return [self._split(key, count) for key, count in self._record.counts.items()]

    def _split(self, key: Key, count: int) -> Split:
        inputs, outputs = (tuple(map(tuple, sizes)) for sizes in key)
        return Split(inputs, outputs, self.devices.labels[: len(inputs)], count)

    def extra_repr(self) -> str:
        return f"devices={self.devices.text!r}"


def _output_device(wanted: int | str | torch.device | None, home: torch.device) -> torch.device:
    # An index, such as output_device=0, of virtual devices on the CPU: they are all the same device.
    if wanted is None or (isinstance(wanted, int) and home.type == "cpu"):
        return home
    device = as_device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"DataParallel: output_device={wanted!r} does not exist; name one of the module's devices, or cpu"
        )
    return torch.device("cuda", 0) if device == torch.device("cuda") else device


def data_parallel(
    module: nn.Module,
    inputs: object,
    device_ids: DeviceNames | None = None,
    output_device: int | str | torch.device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, object] | None = None,
) -> Any:
    """Call `module` once, split over the devices; return the joined output. inputs: a tensor, a tuple of
    arguments, or None for no positional argument."""
    arguments = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    return DataParallel(module, device_ids, output_device, dim)(*arguments, **(module_kwargs or {}))


def find_data_parallel(model: nn.Module) -> dict[str, DataParallel]:
    """Return the data-parallel blocks of a model by dotted name ("" for the model itself)."""
    return {name: module for name, module in model.named_modules() if isinstance(module, DataParallel)}
