"""Embedding tables in host memory, and the optimizers of their rows. Needs only torch and numpy.

A table's weight is a parameter on the host with a sparse gradient. A step gathers the batch's rows, sends
each replica the unique rows of its share, gets their summed gradients back, and updates only those rows.

Where to read: `table` (the module), `gradients` (from lookups to one sparse gradient), `optim` (the
optimizers), `native` (the C kernels as functions of tensors), `replicas` (rows to the devices, gradients
back), `ahead` and `pipeline` (exact prefetching), `collection` (many tables in one), `storage` (memory or
files), `hosting` (embeddings of any model), `published` (checkpoints), `ngrams` (memory of a language model).
"""

from dphybrid.embedding.collection import HostEmbeddingCollection
from dphybrid.embedding.combined import CombinedOptimizer
from dphybrid.embedding.gradients import clip_grad_norm_, clip_rows_too
from dphybrid.embedding.hosting import host_tables, load_rows, save_rows
from dphybrid.embedding.ngrams import NgramMemory
from dphybrid.embedding.optim import RowOptimizer, row_optimizer
from dphybrid.embedding.pipeline import RowPipeline
from dphybrid.embedding.published import merge_rows
from dphybrid.embedding.ranking import Ranked, rank_rows
from dphybrid.embedding.softmax import linear_cross_entropy
from dphybrid.embedding.table import HostEmbedding, dense_parameters, find_tables

__all__ = [
    "CombinedOptimizer",
    "HostEmbedding",
    "HostEmbeddingCollection",
    "NgramMemory",
    "Ranked",
    "RowOptimizer",
    "RowPipeline",
    "clip_grad_norm_",
    "clip_rows_too",
    "dense_parameters",
    "find_tables",
    "host_tables",
    "load_rows",
    "merge_rows",
    "linear_cross_entropy",
    "rank_rows",
    "row_optimizer",
    "save_rows",
]
