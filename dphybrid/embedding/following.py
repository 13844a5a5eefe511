"""Learns from the first batch where its tensors are looked up, so that `RowPipeline` needs no declaration if
the ids, or the tokens of an `NgramMemory`, are a tensor of the batch."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dphybrid.embedding.ngrams import NgramMemory

Found = tuple[int, bool]
"""Number of a batch's leaf, and whether its last column is left out, as of tokens that are predicted."""


def joined(lookups: Sequence[tuple[int | None, Tensor]]) -> list[Tensor]:
    """Return the ids of whole batches, given (replica, its share of the ids) of each lookup in a table;
    replica None: a whole batch already."""
    by_replica: dict[int | None, list[Tensor]] = defaultdict(list)
    for replica, ids in lookups:
        by_replica[replica].append(ids)
    whole = by_replica.pop(None, [])
    replicas = [by_replica[replica] for replica in sorted(by_replica)]  # type: ignore[type-var] # no None is left
    # A short batch has fewer shares in its last lookups, or other shapes: then nothing is learned from it.
    return [*whole, *(torch.cat(shares) for shares in zip(*replicas, strict=False))]


def learned_ids(
    batch: object, looked_up: Mapping[str, Sequence[Tensor]], memories: Mapping[str, NgramMemory]
) -> Callable[[Any], dict[str, list[Tensor]]] | None:
    """Return a function from a batch to the ids of each table; None if those of one are not in the batch.

    looked_up: the ids that the model has looked up for `batch`, by table. memories: those whose tables these
    are, by table.
    """
    found: dict[str, list[Found]] = {}
    for name, lookups in looked_up.items():
        places = [_place_of(ids, batch, memories.get(name)) for ids in lookups]
        known = [place for place in places if place is not None]
        if len(known) < len(places):
            return None
        found[name] = known
    return partial(_ids_of, found, memories) if found else None


def _place_of(ids: Tensor, batch: object, memory: NgramMemory | None) -> Found | None:
    for number, leaf in enumerate(pytree.tree_leaves(batch)):
        for trimmed in (False, True):
            given = _given(leaf, trimmed, ids.dim() - (memory is not None))
            if given is not None and torch.equal(given if memory is None else memory.row_ids(given), ids):
                return number, trimmed
    return None


def _given(leaf: object, trimmed: bool, dims: int) -> Tensor | None:
    """Return a leaf of a batch as ids on the CPU, if it can be some."""
    if (
        not isinstance(leaf, Tensor)
        or leaf.dim() != dims
        or leaf.is_floating_point()
        or (trimmed and dims < 2)
    ):
        return None
    ids = (leaf[..., :-1] if trimmed else leaf).long().cpu()
    return None if bool((ids < 0).any()) else ids


def _ids_of(
    found: Mapping[str, Sequence[Found]], memories: Mapping[str, NgramMemory], batch: object
) -> dict[str, list[Tensor]]:
    leaves = pytree.tree_leaves(batch)
    ids = {
        name: [leaves[number][..., :-1] if trimmed else leaves[number] for number, trimmed in places]
        for name, places in found.items()
    }
    return {
        name: [memories[name].row_ids(each) for each in given] if name in memories else given
        for name, given in ids.items()
    }
