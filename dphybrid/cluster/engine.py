"""The engine of several ranks, in the process that starts them. Before work starts it refuses experiments
that ranks compute differently or cannot train yet."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torch import nn

from dphybrid.cluster.launch import OUTCOME, local_ranks, train_in_ranks
from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.data import Prepared
from dphybrid.data.table.labels import Label
from dphybrid.embedding import find_tables
from dphybrid.embedding.storage import deferred_rows
from dphybrid.training.callbacks import Callback
from dphybrid.training.engine import Engine
from dphybrid.util.device_spec import parse_device_spec
from dphybrid.util.errors import UserError
from dphybrid.util.stop import Interrupted, StopRequest

_INSTALL = "pip install 'dphybrid[cluster]' (docs/cluster.md says how on a machine without a GPU)"
_NEEDED = {"torchrec": "1.9.", "fbgemm-gpu": "1.9.", "torch": "2.14."}
"""Versions of the packages that work together."""


class ClusterEngine(Engine):
    """Training by `cluster.ranks` processes, which share the rows of the model's only table."""

    # The machine that evaluates the finished run may not have the memory of all ranks.
    mapped = True
    trains_here = False

    def check(
        self, one_process: bool, settings: Settings, devices: str, callbacks: Sequence[Callback]
    ) -> None:
        ranks = self.config.cluster.ranks
        if reason := _reason(self.config, one_process, settings, devices, callbacks):
            raise UserError(f"cluster.ranks={ranks}: {reason}; or use cluster.ranks=0, one process")
        check_installed(ranks)

    def check_data(self, data: Prepared, tabular: bool) -> None:
        ranks, rows = self.config.cluster.ranks, self.config.train.batch_size
        if rows < ranks:
            raise UserError(f"cluster.ranks={ranks}: {_too_small(rows, ranks)}")
        if not tabular:
            return
        task = Label.of(data.info).task
        if task != "binary" or "weights_B" in data.manifest.arrays:
            weight = data.manifest.facts.get("weight")
            what = f"data.weight={weight}" if task == "binary" else f"a {task} label"
            raise UserError(
                f"cluster.ranks={ranks}: {what} was not tried with several ranks, only binary labels without "
                "weights; use cluster.ranks=0, one process"
            )

    def check_model(self, model: nn.Module) -> None:
        tables, where = find_tables(model), f"cluster.ranks={self.config.cluster.ranks}"
        if len(tables) != 1:
            several, none = (
                "put them into one HostEmbeddingCollection",
                "for a model without tables use torch's DistributedDataParallel",
            )
            raise UserError(
                f"{where}: the model has {len(tables)} tables ({', '.join(tables) or 'none'}), but ranks "
                f"need exactly one; {several if tables else none}"
            )
        (table,) = tables.values()
        if table.dim % 4:
            raise UserError(
                f"{where}: the rows of table {table.name!r} are {table.dim} wide, but FBGEMM's kernels need "
                f"a multiple of 4; use {-(-table.dim // 4) * 4} (model.dim)"
            )

    def launch(self, folder: Path, settings: Settings, stop: StopRequest) -> bool:
        """Train a built run in ranks. When a rank dies, all ranks restart from the newest checkpoint, up to
        three times.

        Raises UserError if the ranks refuse the run, Interrupted if they were stopped.
        """
        (folder / OUTCOME).unlink(missing_ok=True)
        outcome = train_in_ranks(folder, self.config.cluster.ranks, settings, stop)
        if outcome.state == "refused":
            raise UserError(outcome.words)
        if outcome.state == "stopped":
            if not stop.pending:  # nobody asked this process: a signal reached a rank
                stop.ask("a request to a rank")
            interruption = stop.interruption()
            raise Interrupted(outcome.words, interruption.signal_number, interruption.requeue)
        return True

    def shown_devices(self, devices: str) -> str:
        return f"{self.config.cluster.ranks} ranks on {devices}"

    def num_parts(self, devices: str) -> int:
        return self.config.cluster.ranks

    def new_tables(self, filled: bool) -> AbstractContextManager[None]:
        # The whole table may not fit into this process: each rank draws its own rows later.
        return deferred_rows()


def check_installed(ranks: int) -> None:
    """Raise UserError if a package that ranks need is missing or has a version that does not fit."""
    found = {name: installed_version(name) for name in _NEEDED}
    # The build for machines without CUDA is a package of another name.
    found["fbgemm-gpu"] = found["fbgemm-gpu"] or installed_version("fbgemm-gpu-cpu")
    wrong = [
        f"{name} {found[name] or 'is missing'}, needed {prefix}*"
        for name, prefix in _NEEDED.items()
        if not found[name].startswith(prefix)
    ]
    if wrong:
        raise UserError(f"cluster.ranks={ranks}: {'; '.join(wrong)}; {_INSTALL}")


def installed_version(package: str) -> str:
    """Return a package's version, or "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _too_small(batch_size: int, ranks: int) -> str:
    return f"train.batch_size={batch_size} leaves ranks without rows; use at least {ranks}"


def _reason(
    config: ExperimentConfig,
    one_process: bool,
    settings: Settings,
    devices: str,
    callbacks: Sequence[Callback],
) -> str:
    """Return why ranks cannot train the experiment, with a remedy; "" if they can."""
    table, train, ranks = config.table, config.train, config.cluster.ranks
    spec = parse_device_spec(devices)
    if one_process:
        return (
            f"recipe {config.recipe} was not tried with several ranks, or has its own step; use ctr, or a "
            "recipe of your own with one table"
        )
    if table.optimizer not in ("adagrad", "sgd"):
        return f"table.optimizer={table.optimizer} has no equal among FBGEMM's optimizers; use adagrad or sgd"
    if table.optimizer == "sgd" and table.weight_decay:
        return (
            f"table.weight_decay={table.weight_decay:g} with table.optimizer=sgd: FBGEMM ignores the weight "
            "decay of sgd; use adagrad, or 0"
        )
    if table.dtype == "bfloat16":
        return "table.dtype=bfloat16: FBGEMM rounds such rows differently; use table.dtype=model"
    if config.model.dtype == "float64":
        return "model.dtype=float64: FBGEMM computes rows in float32; use model.dtype=float32"
    if settings.table_storage == "mmap":
        return "DPHYBRID_TABLE_STORAGE=mmap: each rank holds its rows in memory; use memory, or more ranks"
    if train.precision != "float32":
        return f"train.precision={train.precision} was not tried with several ranks; use float32"
    if train.callbacks or callbacks:
        return "callbacks (train.callbacks) cannot be called, as other processes train; leave them out"
    if train.warm_start and config.data.model_dump().get("base"):
        return (
            "train.warm_start with data.base grows the table, which only one process can do; train a step "
            "with one process, then resume"
        )
    if 0 < train.batch_size < ranks:
        return _too_small(train.batch_size, ranks)
    if spec.text != "cpu" and len(spec.names) != (here := local_ranks(ranks)):
        remedy = f"use devices=cpu, or as many GPUs as ranks here, {here}"
        return f"devices={devices} are {len(spec.names)}, but each rank needs one; {remedy}"
    if spec.virtual:
        return f"devices={devices} are virtual, but each rank needs a device of its own; use devices=cpu"
    return ""
