"""Config - what an experiment is - and settings - where it runs."""

from dphybrid.config.experiment import (
    KINDS,
    RECIPES,
    CheckpointConfig,
    DataConfig,
    ExperimentConfig,
    ModelConfig,
    Section,
    TableConfig,
    TrainConfig,
    flatten,
    given_values,
    merge,
)

__all__ = [
    "KINDS",
    "RECIPES",
    "CheckpointConfig",
    "DataConfig",
    "ExperimentConfig",
    "ModelConfig",
    "Section",
    "TableConfig",
    "TrainConfig",
    "flatten",
    "given_values",
    "merge",
]
