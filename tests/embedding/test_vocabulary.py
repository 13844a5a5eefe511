"""Ids of any size get rows: the same ones always, unknown ones apart."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dphybrid.embedding import GrowingVocabulary, HashedVocabulary
from dphybrid.embedding import vocabulary as vocabulary_module
from dphybrid.util.errors import UserError

ANY = torch.tensor([2**62, -5, 7, 7, -(2**63), 2**63 - 1])


def splitmix64(value: int, seed: int) -> int:
    """The published algorithm in Python's own numbers."""
    mask = 2**64 - 1
    value = (value + 0x9E3779B97F4A7C15 * (seed + 1)) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return (value ^ (value >> 31)) & (2**63 - 1)


def test_hashed_rows_are_those_of_the_published_hash() -> None:
    rows = HashedVocabulary(1000, unknown_rows=3, seed=5)(ANY)
    assert rows.tolist() == [3 + splitmix64(value, 5) % 997 for value in ANY.tolist()]
    assert HashedVocabulary(1000)(torch.tensor([-1, 4]))[0] == 0


def test_hashed_rows_are_spread_evenly() -> None:
    rows = HashedVocabulary(101)(torch.arange(100_000))
    counts = torch.bincount(rows, minlength=101)
    assert counts[0] == 0
    assert 850 < int(counts[1:].min()) <= int(counts[1:].max()) < 1150


def test_growing_gives_rows_in_order_of_appearance() -> None:
    vocabulary = GrowingVocabulary(100, unknown_rows=2)
    assert vocabulary(ANY.view(2, 3)).tolist() == [[2, 3, 4], [4, 5, 6]]
    assert vocabulary(torch.tensor([9, -5])).tolist() == [7, 3]
    assert len(vocabulary) == 6
    vocabulary.eval()
    assert vocabulary(torch.tensor([7]))[0] == 4
    unknown = vocabulary(torch.arange(1000, 1100))
    assert set(unknown.tolist()) == {0, 1}
    assert torch.equal(unknown, vocabulary(torch.arange(1000, 1100)))
    assert len(vocabulary) == 6


def test_a_full_vocabulary_sends_new_ids_to_the_reserved_rows() -> None:
    vocabulary = GrowingVocabulary(5)
    assert vocabulary(torch.arange(10, 17)).tolist() == [1, 2, 3, 4, 0, 0, 0]
    assert vocabulary(torch.tensor([16, 12])).tolist() == [0, 3]


@pytest.mark.parametrize("block", [1, 2**16])
def test_growing_equals_a_dict(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary_module, "_LATELY", block)
    vocabulary, expected = GrowingVocabulary(10_000), dict[int, int]()
    for step in range(40):
        ids = torch.randint(-(2**40), 2**40, (60,), generator=torch.Generator().manual_seed(step)) // (2**31)
        rows = [expected.setdefault(value, len(expected) + 1) for value in ids.tolist()]
        assert vocabulary(ids).tolist() == rows
    again = GrowingVocabulary(10_000)
    again.load_state_dict(vocabulary.state_dict())
    again.eval()
    assert again(torch.tensor(list(expected))).tolist() == list(expected.values())


@pytest.mark.parametrize("kind", [HashedVocabulary, GrowingVocabulary])
def test_a_row_depends_on_the_id_not_on_its_type(kind: Callable[[int], Callable[[Tensor], Tensor]]) -> None:
    ids = torch.tensor([1, 7, 100, 7])
    wanted = kind(50)(ids)
    unsigned = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
    for dtype in [torch.int8, torch.int16, torch.int32, *unsigned]:
        rows = kind(50)(ids.to(dtype))
        assert rows.dtype == torch.int64
        assert rows.tolist() == wanted.tolist()
    for dtype in (torch.float32, torch.float64, torch.bool):
        with pytest.raises(UserError, match=f"Vocabulary: ids are {dtype}"):
            kind(50)(ids.to(dtype))


def test_sizes_that_do_not_go_together_are_named() -> None:
    for kind in (HashedVocabulary, GrowingVocabulary):
        with pytest.raises(ValueError, match="unknown_rows=5 of num_rows=5"):
            kind(5, unknown_rows=5)
