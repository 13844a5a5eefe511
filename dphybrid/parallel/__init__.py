"""Blocks on several devices, real or virtual: splits that are exact and on record. Needs torch alone."""

from dphybrid.parallel.data_parallel import DataParallel, LossInside, data_parallel, find_data_parallel
from dphybrid.parallel.devices import Devices, resolve_devices
from dphybrid.parallel.primitives import Parts, Whole, current_replica, gather, parallel_apply, parts, replicate, scatter
from dphybrid.parallel.splits import Split, SplitPlan, split_plan, split_sizes, splits_table

__all__ = [
    "DataParallel",
    "Devices",
    "LossInside",
    "Parts",
    "Split",
    "SplitPlan",
    "Whole",
    "current_replica",
    "data_parallel",
    "find_data_parallel",
    "gather",
    "parallel_apply",
    "parts",
    "replicate",
    "resolve_devices",
    "scatter",
    "split_plan",
    "split_sizes",
    "splits_table",
]
