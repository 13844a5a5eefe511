"""Config - what an experiment is - and settings - where it runs."""

from dphybrid.config.experiment import (
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    ExperimentConfig,
    ModelConfig,
    Names,
    Section,
    TableConfig,
    TrainConfig,
    fields_of,
    flatten,
    merge,
    nest,
)

__all__ = [
    "CheckpointConfig",
    "ClusterConfig",
    "DataConfig",
    "ExperimentConfig",
    "ModelConfig",
    "Names",
    "Section",
    "TableConfig",
    "TrainConfig",
    "fields_of",
    "flatten",
    "merge",
    "nest",
]
