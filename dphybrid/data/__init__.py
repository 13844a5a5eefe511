"""Sources -> prepared data set on disk -> batches."""

from dphybrid.data.batches import Dataset, batches, num_batches
from dphybrid.data.prepare import prepare_source, source_digest
from dphybrid.data.store import Prepared, open_prepared, verify_prepared

__all__ = [
    "Dataset",
    "Prepared",
    "batches",
    "num_batches",
    "open_prepared",
    "prepare_source",
    "source_digest",
    "verify_prepared",
]
