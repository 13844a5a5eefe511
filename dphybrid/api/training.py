"""`dphybrid.train`: trains a run on a frame or on files, by the same job as the command line. Its keywords
name an experiment's values by field, by section or in full."""

import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dphybrid.api.run import TrainedRun
from dphybrid.config import ExperimentConfig, flatten, merge, nest
from dphybrid.config.settings import Settings, load_settings
from dphybrid.recipes.configs import (
    Values,
    build_config,
    explain_unknown,
    field_types,
    given_values,
    read_config_file,
)
from dphybrid.recipes.registry import OF_TABLES, choose_recipe, find_recipe
from dphybrid.util.errors import UserError, suggestion, type_text
from dphybrid.util.files import make_folder, naming
from dphybrid.util.importing import kept_from_gc

if TYPE_CHECKING:
    from dphybrid.training.callbacks import Callback


def train(
    data: object = None,
    *,
    recipe: str | None = None,
    label: str | None = None,
    valid: object = None,
    test: object = None,
    devices: str | None = None,
    config: ExperimentConfig | Mapping[str, object] | str | Path | None = None,
    run_name: str | None = None,
    resume: str | None = None,
    tags: Mapping[str, str] | None = None,
    tracking: str | None = None,
    quiet: bool = False,
    callbacks: "Sequence[Callback]" = (),
    **values: object,
) -> TrainedRun:
    """Train, and return the run: the same job as `dphybrid train`.

    Args:
        data: a polars DataFrame or LazyFrame, a pandas DataFrame, an Arrow table, a dict of columns, a list
            of records, or a path: a file, a folder or a pattern. A frame is written to the data folder once
            and read like any file; the same frame gives the same prepared data.
        recipe: kind of experiment (default: "ctr" for frames and with a label, else "text").
        label: column with the answer.
        valid: separate validation rows, in the same form as `data`.
        test: test rows, in the same form; the best checkpoint is measured on them once, at the end.
        devices: auto, cpu, cpu*8 (eight virtual devices), cuda:0, cuda:0,cuda:1.
        config: values to start from: a TOML file, nested values, or a config; keywords override them.
        run_name: name of the run (default: recipe, devices, time).
        resume: "latest" or the name of a run to continue; give the same data and values.
        tags: for the run in MLflow.
        tracking: MLflow server or database; "none" records nothing (default: by the settings).
        quiet: print nothing.
        callbacks: functions that are called after each epoch with a `dphybrid.training.callbacks.EpochEnd`;
            numbers that they return, as a dict by name, are logged as `own/NAME`.
        values: any value of the recipe, by its own name if only one section has it (`epochs=3,
            batch_size=64`), by section (`train={"lr": 0.01}`) or in full (`train__lr=0.01`).

    Raises UserError for wrong values before any work. When stopped, writes a checkpoint, from which `resume`
    continues, and raises Interrupted, a KeyboardInterrupt.
    """
    settings = load_settings(**({} if tracking is None else {"tracking_uri": tracking}))
    given_tables = {"path": data, "valid_path": valid, "test_path": test}
    tables = {part: table for part, table in given_tables.items() if table is not None}
    framed = {part: table for part, table in tables.items() if not isinstance(table, str | Path)}
    if framed and len(framed) < len(tables):
        raise UserError("data, valid, test: some are paths and others frames; give paths or frames only")
    # Recipes are inferred from a path's name and files, which a frame does not have; a config may name one.
    if framed and config is None:
        recipe = recipe or OF_TABLES
    given = {
        "recipe": recipe,
        "devices": devices,
        "data.label": None if label is None else str(label),
        **{f"data.{part}": _AWAITED if framed else str(table) for part, table in tables.items()},
    }
    # Before frames are written, so that a wrong value leaves no files behind.
    checked = experiment(config, given, values)
    for callback in callbacks:
        if not callable(callback):
            raise UserError(
                f"callbacks: {callback!r} is not a function; train={{'callbacks': [...]}} takes import paths"
            )
    if framed:
        checked = _with_frames(checked, framed, settings)
    # After the checks, because it imports torch, which takes its time. Only the first import is kept from the
    # collector, and with it what the caller has by then.
    with nullcontext() if "dphybrid.run.job" in sys.modules else kept_from_gc():
        from dphybrid.run.job import run_job

    # Standard output belongs to the whole process: only the main thread may redirect it.
    silent = quiet and threading.current_thread() is threading.main_thread()
    with redirect_stdout(StringIO()) if silent else nullcontext():
        report = run_job(
            checked, settings, run_name=run_name, resume=resume, tags=dict(tags or {}), callbacks=callbacks
        )
    return TrainedRun(settings.runs_dir / report.run_name, settings)


_AWAITED = "(a frame)"
"""Placeholder for a frame's path while the other values are checked."""


def _with_frames(
    config: ExperimentConfig, framed: Mapping[str, object], settings: Settings
) -> ExperimentConfig:
    """Write the frames to files, and return the config with the files' paths."""
    named = config.data.named_columns
    if not (named or find_recipe(config.recipe).tabular):
        raise UserError(
            f"data: is {type_text(next(iter(framed.values())))}, and recipe {config.recipe} reads no "
            f"tables. Give data as a path, or use recipe={OF_TABLES!r}"
        )
    from dphybrid.data.table.frames import as_frame, save_frame

    names = {"path": "data", "valid_path": "valid", "test_path": "test"}
    frames = {part: as_frame(table, names[part]) for part, table in framed.items()}
    # All frames are checked before any is written.
    for part, frame in frames.items():
        columns = frame.collect_schema().names()
        for field, column in named:
            if column not in columns and field != "ignore":
                near = suggestion(column, columns)
                raise UserError(f"{field}={column!r}: {names[part]} has no such column{near}")
    with naming(settings.data_dir):
        make_folder(settings.data_dir)
    folder = settings.frames_dir
    saved = {part: str(save_frame(frame, folder, names[part])) for part, frame in frames.items()}
    return build_config(merge(given_values(config), {"data": saved}))


def experiment(
    config: ExperimentConfig | Mapping[str, object] | str | Path | None,
    given: Mapping[str, object],
    values: Mapping[str, object],
) -> ExperimentConfig:
    """Return the config made of `config` and the values given by keyword, which override it.

    given: by full name (`recipe`, `data.path`); None: not given. values: as `_nested` takes them. Without a
    recipe it is that of `registry.choose_recipe`. Raises UserError that names the keyword.
    """
    if isinstance(config, ExperimentConfig):
        config = given_values(config)
    elif isinstance(config, str | Path):
        config = read_config_file(config)
    named = nest({name: value for name, value in given.items() if value is not None})
    known = merge(dict(config or {}), named)
    recipe, origins = choose_recipe(known), dict[str, str]()
    chosen = merge(known, _nested(values, recipe, origins))
    return build_config({**chosen, "recipe": recipe}, origins)


def _nested(values: Mapping[str, object], recipe: str, origins: dict[str, str]) -> Values:
    """Return keywords as nested values of a recipe's config. origins: gets the keyword of each dotted
    name, for messages.

    A keyword is a field's own name if only one section has it (`epochs`), a section with its values
    (`train={"lr": 0.01}`), or section and name joined by two underscores or a dot (`train__lr`). Raises
    UserError for other keywords.
    """
    fields, flat = field_types(recipe), dict[str, Any]()
    sections = {name.partition(".")[0] for name in fields if "." in name}
    for keyword, value in values.items():
        name = keyword.replace("__", ".").replace("-", "_")
        if name in sections:
            if not isinstance(value, Mapping):
                raise UserError(f"{keyword}={value!r}: is a section; give {keyword}={{'name': value}}")
            found = flatten({name: dict(value)})
        else:
            found = {_full_name(keyword, name, fields, recipe): value}
        origins |= dict.fromkeys(found, f"{keyword}=")
        for full, inner in found.items():
            # As fields take it: lists as tuples, paths as texts.
            inner = str(inner) if isinstance(inner, Path) else inner
            flat[full] = tuple(inner) if isinstance(inner, list) else inner
    return nest(flat)


def _full_name(keyword: str, name: str, fields: Mapping[str, object], recipe: str) -> str:
    if name in fields or "." in name:
        return name  # an unknown dotted name gets its message later, from `build_config`
    same = [full for full in fields if full.rpartition(".")[2] == name]
    if len(same) != 1:
        why = explain_unknown(name, recipe)
        end = "" if why.endswith("?") else "."
        raise UserError(f"{keyword}: {why}{end} Write it in full as section__name")
    return same[0]
