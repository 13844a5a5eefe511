"""Models: plain modules with a host table and one data-parallel region, and the registry that builds them.

A model takes a batch (dict of CPU tensors, samples on dim 0) and returns a dict with

- `loss` (B,): the loss of each sample, summed over its terms,
- `weight` (B,): the number of those terms (ones where a sample has one label),
- what the task's metric reads: `logits` (B,) or (B, C), or `prediction` (B, O).

The mean loss is `loss.sum() / weight.sum()`: right for short last chunks too, where a mean of means is not.
"""

from dphybrid.embedding import DeclaresIds
from dphybrid.recipes.registry import ModelContext, build_from_config, build_model

__all__ = ["DeclaresIds", "ModelContext", "build_from_config", "build_model"]
