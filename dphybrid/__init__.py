"""Hybrid models: embedding tables in host memory, dense blocks data-parallel on GPUs, every split on
record."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # nothing heavy for those who import one part
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from dphybrid.api.estimator import HybridClassifier
    from dphybrid.api.run import Runs, TrainedRun
    from dphybrid.config import ExperimentConfig
    from dphybrid.jobs.predict import Predictor
    from dphybrid.training.callbacks import Callback

__version__ = "0.1.0"
__all__ = ["HybridClassifier", "__version__", "load", "load_model", "runs", "train"]


def train(
    data: Any = None,
    *,
    recipe: str | None = None,
    label: str | None = None,
    valid: Any = None,
    devices: str | None = None,
    config: "ExperimentConfig | Mapping[str, Any] | str | Path | None" = None,
    run_name: str | None = None,
    resume: str | None = None,
    tags: "Mapping[str, str] | None" = None,
    tracking: str | None = None,
    quiet: bool = False,
    callbacks: "Sequence[Callback]" = (),
    **values: Any,
) -> "TrainedRun":
    """Train, and return the run: the same job as `dphybrid train`.

    Args:
        data: a polars DataFrame or LazyFrame, a pandas DataFrame, an Arrow table, a dict of columns, a list
            of records, or the path of files. What is no path is written to the data folder once, and read as
            files are: the same frame gives the same prepared data.
        recipe: kind of experiment; "ctr" for frames, else what the data says.
        label: column with the answer.
        valid: validation rows of their own, in the same form as `data`.
        devices: auto, cpu, cpu*8 (eight virtual devices), cuda:0, cuda:0,cuda:1.
        config: values to start from: a TOML file, nested values, or a config; keywords go over them.
        run_name: name of the run (default: recipe, devices, time).
        resume: "latest", or a run's name, to go on with; give the same data and values.
        tags: for the run in MLflow.
        tracking: MLflow server or database; "none" records nothing (default: the settings').
        quiet: print nothing.
        callbacks: functions that are called after each epoch with a `dphybrid.training.callbacks.EpochEnd`;
            numbers that they return, as a dict by name, are logged as `own/NAME`.
        values: any value of the recipe, by its own name where that is plain (`epochs=3, batch_size=64`), by
            section (`train={"lr": 0.01}`) or in full (`train__lr=0.01`).

    Raises UserError for wrong values before any work, and Interrupted, a KeyboardInterrupt, when stopped: a
    checkpoint is written first, and `resume` goes on from it.
    """
    from dphybrid.api import training

    return training.train(
        data,
        recipe=recipe,
        label=label,
        valid=valid,
        devices=devices,
        config=config,
        run_name=run_name,
        resume=resume,
        tags=tags,
        tracking=tracking,
        quiet=quiet,
        callbacks=callbacks,
        **values,
    )


def runs(recipe: str | None = None) -> "Runs":
    """Return the runs of the data folder, newest first. recipe: only those of one."""
    from dphybrid.api import run

    return run.runs(recipe)


def load(which: str, devices: str = "cpu", batch_size: int = 8192) -> "Predictor":
    """Return the predictor of a trained click model: a run's name, a checkpoint folder, or
    `models:/NAME@champion`.

    Raises UserError when there is none.
    """
    from dphybrid.jobs import predict  # torch and polars: not for everyone who imports dphybrid

    return predict.load(which, devices, batch_size)


def load_model(which: str, devices: str = "cpu") -> "nn.Module":
    """Return the trained module of any recipe: of a run (name or MLflow id), a checkpoint folder, or
    `models:/NAME@champion`.

    Raises UserError when there is none.
    """
    from dphybrid.jobs import load as loading

    return loading.load_model(which, devices)


def __getattr__(name: str) -> Any:
    if name == "HybridClassifier":  # a class, and scikit-learn's base with it, for those who ask
        from dphybrid.api.estimator import HybridClassifier

        return HybridClassifier
    raise AttributeError(f"module 'dphybrid' has no attribute {name!r}")
