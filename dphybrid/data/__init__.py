"""What all recipes share: sources are prepared once into a folder of arrays, which is read in batches."""

from dphybrid.data.batches import Dataset, DrawnDataset, Draws, batches, num_batches
from dphybrid.data.store import Prepared, open_prepared, prepare_source, source_digest, verify_prepared
from dphybrid.data.vocabulary import Vocabulary, read_vocabularies

__all__ = [
    "Dataset",
    "DrawnDataset",
    "Draws",
    "Prepared",
    "Vocabulary",
    "batches",
    "num_batches",
    "open_prepared",
    "prepare_source",
    "read_vocabularies",
    "source_digest",
    "verify_prepared",
]
