"""Checks a model before training for layers that compute something else once a batch is split."""

import inspect
from collections.abc import Callable
from functools import partial

from torch import nn

from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings
from dphybrid.data import batches
from dphybrid.gpus.devices import wanted_spec
from dphybrid.parallel import check_split, find_data_parallel, resolve_devices, split_sizes
from dphybrid.parallel.check import check_module
from dphybrid.recipes.registry import find_recipe
from dphybrid.run.experiment import Experiment
from dphybrid.util.errors import UserError, failure_text, type_text
from dphybrid.util.importing import import_callable

_COMPARED_ROWS = 64
"""Size of the batch that is computed both unsplit and split."""


def check_target(
    target: str | None, config: ExperimentConfig, settings: Settings, rows: int | None = None
) -> tuple[str, list[tuple[str, list[str]]]]:
    """Check `package.module:factory`, or the recipe's model; return how its batches are split, as text, and
    the findings by block.

    A factory is called without arguments, or with the recipe's ModelContext if it takes one. The model's
    data-parallel blocks are checked; a model without any is checked as if it were one block. If the model is
    built for the recipe's data, its first rows are also computed unsplit and split, in training and in
    evaluation mode, to find layers that compute across the batch. rows: rows of an epoch (None: those of the
    data). Raises UserError when the factory does not return a module.
    """
    across, split = list[tuple[str, list[str]]](), ""
    if target is None or _takes_context(target):
        recipe = find_recipe(config.recipe)
        data = recipe.prepare(config.data, settings.prepared_dir, config.train.seed)
        if target is not None:
            config = config.model_copy(update={"model": config.model.model_copy(update={"factory": target})})
        experiment = Experiment.open(config, settings, data.path)
        config, rows = experiment.config, rows or len(data.dataset("train"))
        devices = resolve_devices(wanted_spec(config, settings).text)
        sizes = split_sizes(min(rows, config.train.batch_size), len(devices))
        split = f"{rows} rows in batches of {config.train.batch_size}, each split into {sizes}"
        build = partial(experiment.build, resolve_devices("cpu"))
        model = build() if target is None else _made(target, build)
        if find_data_parallel(model):
            samples = recipe.training_rows(data.dataset("train"), data.info, config.model)
            compared = min(config.train.batch_size, _COMPARED_ROWS)
            batch = next(batches(samples, compared, seed=0, epoch=0, shuffle=False))
            for mode in ("training", "evaluation"):
                try:
                    check_split(model.train(mode == "training"), batch)
                except UserError as error:
                    across.append((f"the first batch in {mode}, unsplit and split", [str(error)]))
                    break  # in both modes it would be the same layer
    else:
        model = _made(target, import_callable(target, "check"))
    blocks = find_data_parallel(model)
    if not blocks:
        return split, [("the module as one block", check_module(model))]
    found = [(name or "the model", check_module(block.module)) for name, block in blocks.items()]
    return split, [*found, *across]


def _made(target: str, factory: Callable[[], object]) -> nn.Module:
    # Only `check` turns a factory's exception into one line: in training the traceback is worth more, and a
    # sweep does not retry a UserError.
    try:
        model = factory()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"check {target}: {failure_text(error)}; name a function that works") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"check {target}: returned {type_text(model)}; return a torch.nn.Module")
    return model


def _takes_context(target: str) -> bool:
    """Return whether a factory takes a ModelContext: whether its first parameter has no default. Raises
    UserError when it can be called neither with one nor without arguments."""
    factory = import_callable(target, "check")
    try:
        signature = inspect.signature(factory)
        first = next(iter(signature.parameters.values()), None)
        # `def build(width=8)` builds a model of its own, whose width is not a context.
        needed = first is not None and first.default is first.empty and first.kind != first.VAR_KEYWORD
        arguments = [None] if needed else []
        signature.bind(*arguments)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"check {target}: is not a factory of a model ({error}); name a function without arguments, or "
            "one that takes a ModelContext"
        ) from error
    return bool(arguments)
