"""What several ranks would not compute as one process does, or cannot do yet: refused before work starts."""

from importlib.metadata import PackageNotFoundError, version

from torch import nn

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.data import Prepared
from dphybrid.data.table.labels import Label
from dphybrid.embedding import find_tables
from dphybrid.recipes.registry import find_recipe
from dphybrid.util.device_spec import parse_device_spec
from dphybrid.util.errors import UserError

INSTALL = "pip install 'dphybrid[cluster]' (docs/cluster.md says how on a machine without a GPU)"
NEEDED = {"torchrec": "1.8.", "fbgemm-gpu": "1.8.", "torch": "2.13."}
"""Packages and the versions that belong together."""


def refuse_ranks(
    config: ExperimentConfig, settings: Settings, devices: str, local_ranks: int | None = None
) -> None:
    """Raise UserError with the reason and the remedy when a config cannot be trained by its `cluster.ranks`.

    devices: of this machine, for its local_ranks (None: all are here). A config of one process passes.
    """
    ranks = config.cluster.ranks
    if not ranks:
        return
    reason = _reason(config, settings, devices, local_ranks or ranks)
    if reason:
        raise UserError(f"cluster.ranks={ranks}: {reason}; or use cluster.ranks=0, one process")
    check_installed(ranks)


def refuse_model_for_ranks(config: ExperimentConfig, model: nn.Module) -> None:
    """Raise UserError when a model's tables are not what several ranks can hold: one, of a width that the
    kernels know."""
    if not config.cluster.ranks:
        return
    tables = find_tables(model)
    if len(tables) == 1:
        (table,) = tables.values()
        if table.dim % 4:
            raise UserError(
                f"cluster.ranks={config.cluster.ranks}: the rows of table {table.name!r} are {table.dim} "
                f"wide, and the kernels there want a multiple of 4; use {-(-table.dim // 4) * 4} (model.dim)"
            )
        return
    remedy = (
        "put them into one HostEmbeddingCollection"
        if tables
        else "without one, DistributedDataParallel does it"
    )
    raise UserError(
        f"cluster.ranks={config.cluster.ranks}: the model has {len(tables)} tables "
        f"({', '.join(tables) or 'none'}), and the ranks share one; {remedy}"
    )


def refuse_label_for_ranks(config: ExperimentConfig, data: Prepared) -> None:
    """Raise UserError when several ranks have not been tried with a table's label, or its weights."""
    if not config.cluster.ranks or not find_recipe(config.recipe).tabular:
        return
    task = Label.of(data.info).task
    if task != "binary" or "weights_B" in data.manifest.arrays:
        what = f"data.weight={data.manifest.facts.get('weight')}" if task == "binary" else f"a {task} label"
        raise UserError(
            f"cluster.ranks={config.cluster.ranks}: {what} was not tried with several ranks, which learn "
            "binary labels without weights; use cluster.ranks=0, one process"
        )


def check_installed(ranks: int) -> None:
    """Raise UserError when what the ranks run on is not there, or in versions that do not belong together."""
    found = {name: installed_version(name) for name in NEEDED}
    found["fbgemm-gpu"] = found["fbgemm-gpu"] or installed_version("fbgemm-gpu-cpu")
    wrong = [
        f"{name} {found[name] or 'is missing'}, needed {prefix}*"
        for name, prefix in NEEDED.items()
        if not found[name].startswith(prefix)
    ]
    if wrong:
        raise UserError(f"cluster.ranks={ranks}: {'; '.join(wrong)}; {INSTALL}")


def installed_version(package: str) -> str:
    """Return a package's version, "" where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _reason(config: ExperimentConfig, settings: Settings, devices: str, local_ranks: int) -> str:
    table, train, ranks = config.table, config.train, config.cluster.ranks
    names = parse_device_spec(devices).names
    if find_recipe(config.recipe).one_process:
        return (
            f"recipe {config.recipe} was not tried with several ranks; use ctr, or a recipe of your own with "
            "one table"
        )
    if table.optimizer in ("adam", "lazy-adam"):
        return (
            f"table.optimizer={table.optimizer} has no equal in FBGEMM, which corrects the bias by the steps "
            "of the run and not of the row; use adagrad or sgd"
        )
    if table.optimizer == "sgd" and table.weight_decay:
        return (
            f"table.weight_decay={table.weight_decay:g} with table.optimizer=sgd, of which FBGEMM takes no "
            "weight decay; use adagrad, or 0"
        )
    if table.dtype == "bfloat16":
        return "table.dtype=bfloat16 rounds otherwise there; use table.dtype=model"
    if config.model.dtype == "float64":
        return "model.dtype=float64: the kernels there compute rows in float32; use model.dtype=float32"
    if settings.table_storage == "mmap":
        return "DPHYBRID_TABLE_STORAGE=mmap: each rank holds its rows in memory; use memory, or more ranks"
    if train.precision != "float32":
        return f"train.precision={train.precision} was not tried with several ranks; use float32"
    if train.compile:
        return "train.compile was not tried with several ranks; leave it out"
    if train.callbacks:
        return "train.callbacks would be called in one of the ranks alone; leave them out"
    if train.check_split:
        return "train.check_split looks at replicas of one process; check first, with one process"
    if train.warm_start and config.data.model_dump().get("base"):
        return "train.warm_start with data.base grows a table in one process; train a step there, then resume"
    if train.batch_size < ranks:
        return f"train.batch_size={train.batch_size} leaves ranks without rows; use at least {ranks}"
    if parse_device_spec(devices).text != "cpu" and len(names) != local_ranks:
        return (
            f"devices={devices} are {len(names)}, and each rank has one; use devices=cpu, or as many GPUs as "
            f"ranks here, {local_ranks}"
        )
    if parse_device_spec(devices).virtual:
        return f"devices={devices} are virtual; each rank has one device of its own, use devices=cpu"
    return ""
