"""Data-parallel blocks on several devices, real or virtual, with exact, recorded splits. Needs only torch.

A forward of `DataParallel` has torch's four steps, one module each: `scattering` (inputs to the devices),
`replication` (copies of the module), `applying` (calls them), `gathering` (joins the outputs).

Where to read: `data_parallel` (the class), then the four steps; `splits` (sizes of the shares, and their
record), `nests` (nested inputs and outputs), `comparison` (a step split and on one device), `devices`
(device texts).
"""

from dphybrid.parallel.applying import parallel_apply
from dphybrid.parallel.comparison import check_split
from dphybrid.parallel.data_parallel import DataParallel, data_parallel, find_data_parallel
from dphybrid.parallel.devices import Devices, before_cuda_starts, device_count, resolve_devices, start_on
from dphybrid.parallel.gathering import gather
from dphybrid.parallel.nests import Parts, Whole, parts
from dphybrid.parallel.replication import replicate
from dphybrid.parallel.scattering import RowSource, scatter, scatter_kwargs
from dphybrid.parallel.splits import Split, split_sizes

__all__ = [
    "DataParallel",
    "Devices",
    "Parts",
    "RowSource",
    "Split",
    "Whole",
    "before_cuda_starts",
    "check_split",
    "data_parallel",
    "device_count",
    "find_data_parallel",
    "gather",
    "parallel_apply",
    "parts",
    "replicate",
    "resolve_devices",
    "scatter",
    "scatter_kwargs",
    "split_sizes",
    "start_on",
]
