"""Rows that are looked up in a checkpoint's file are checked, block by block."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dphybrid.embedding import HostEmbedding
from dphybrid.embedding.native import check_when_read
from dphybrid.embedding.storage import deferred_rows
from dphybrid.training.tensor_file import mapped_weight, read_tensors, table_file, write_tensors
from dphybrid.util.digests import BLOCK, file_block_sums
from tests.refusing import refused
from tests.reliability.damages import damage

Look = Callable[[torch.Tensor], Any]
NUM_ROWS, DIM = 3000, 100  # 400 bytes a row: rows lie across the blocks' borders


def written(file: Path) -> tuple[torch.Tensor, str]:
    file.parent.mkdir()
    weight = torch.randn(NUM_ROWS, DIM, generator=torch.Generator().manual_seed(0))
    sums = write_tensors(file, {"state": torch.arange(7), "weight": weight})
    assert sums == file_block_sums(file)
    return weight, sums


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.uint32, torch.uint64])
def test_buffers_of_rarer_types_are_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    """`complex64` is the usual type of precomputed rotary embeddings."""
    values = torch.arange(6.0).view(2, 3)
    given = (torch.complex(values, -values) if dtype.is_complex else values).to(dtype)
    write_tensors(tmp_path / "blocks.safetensors", {"buffer": given})
    kept = read_tensors(tmp_path / "blocks.safetensors")["buffer"]
    assert kept.dtype == dtype
    assert kept.tolist() == given.tolist()


def mapped(file: Path, sums: str) -> HostEmbedding:
    with deferred_rows():
        table = HostEmbedding(NUM_ROWS, DIM, seed=0)
    table.map_rows(mapped_weight(file.parents[1], file.stem, table.settled(), sums))
    return table


class _Summed(torch.nn.Module):
    """A model that looks rows up, and that programs can be made of."""

    def __init__(self, table: HostEmbedding) -> None:
        super().__init__()
        self.table = table

    def forward(self, ids_N: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.table(ids_N)
        return rows.sum(1)


def on_replicas(table: HostEmbedding) -> Look:
    table.place_on([torch.device("cpu")] * 3, lambda rows: [rows - 2, 1, 1])
    return lambda ids_N: torch.cat(table.replica_rows(ids_N))


def exported(table: HostEmbedding) -> Look:
    with torch.no_grad():
        program = torch.export.export(_Summed(table), (torch.tensor([0, 1, 2, 3]),))
    return program.module()


LOOKS: dict[str, Callable[[HostEmbedding], Look]] = {
    "a lookup": lambda table: table,
    "replicas": on_replicas,
    "a compiled model": lambda table: torch.compile(_Summed(table), backend="eager", fullgraph=True),
    "an exported program": exported,
    "a call with other parameters": lambda table: (
        lambda ids_N: torch.func.functional_call(table, dict(table.named_parameters()), (ids_N,))
    ),
}
"""Way to read rows by their ids -> what does so."""

WHOLES: dict[str, Callable[[HostEmbedding], object]] = {
    "all rows": HostEmbedding.settled,
    "a copy": copy.deepcopy,
    "a pickle": pickle.dumps,
}


def rotten(tmp_path: Path) -> tuple[HostEmbedding, torch.Tensor, list[int]]:
    """Return a table with a damaged block, its rows as they were, and the rows that lie there."""
    file = table_file(tmp_path, "table")
    weight, sums = written(file)
    whole = file.read_bytes()
    start = len(whole) - weight.nbytes
    damage(file, whole[: 2 * BLOCK + 9] + bytes([whole[2 * BLOCK + 9] ^ 1]) + whole[2 * BLOCK + 10 :])
    places = [(start + row * 4 * DIM, start + (row + 1) * 4 * DIM - 1) for row in range(NUM_ROWS)]
    hit = [row for row, ends in enumerate(places) if any(end // BLOCK == 2 for end in ends)]
    return mapped(file, sums), weight, hit


DAMAGED = r"table\.safetensors: is damaged \(in bytes 524,288 to 786,432"


@pytest.mark.parametrize("way", LOOKS)
def test_each_row_of_a_damaged_block_is_refused_and_no_other_one(way: str, tmp_path: Path) -> None:
    table, weight, hit = rotten(tmp_path)
    look = LOOKS[way](table)
    for row in (hit[0], hit[1], hit[-1]):
        with refused(DAMAGED):
            look(torch.tensor([0, 1, row, 0]))
    good = torch.tensor([row for row in range(NUM_ROWS) if row not in hit])
    torch.testing.assert_close(table(good), weight[good], rtol=0, atol=0)
    look(good[:4])


@pytest.mark.parametrize("way", WHOLES)
def test_a_damaged_table_is_not_read_as_a_whole(way: str, tmp_path: Path) -> None:
    table, *_ = rotten(tmp_path)
    with refused(DAMAGED):
        WHOLES[way](table)


def test_rows_are_checked_as_long_as_their_memory_is_there() -> None:
    rows_VD, read = torch.zeros(5, 2), list[list[int]]()
    memory = rows_VD.numpy()
    check_when_read(rows_VD, lambda ids_N: read.append(ids_N.tolist()), memory)
    HostEmbedding.from_pretrained(rows_VD)(torch.tensor([3, 0]))
    assert read == [[3, 0]]
    del memory
    HostEmbedding.from_pretrained(rows_VD)(torch.tensor([3, 0]))
    assert read == [[3, 0]]


HEADERS: list[Callable[[bytes], bytes]] = [
    lambda whole: whole[:9] + b"?" + whole[10:],
    lambda whole: whole[:-1],
    lambda whole: b"x" * 2**20,
    lambda whole: b"",
]


@pytest.mark.parametrize("content", HEADERS)
def test_a_damaged_header_and_another_size_are_told(
    tmp_path: Path, content: Callable[[bytes], bytes]
) -> None:
    file = table_file(tmp_path, "table")
    _, sums = written(file)
    damage(file, content(file.read_bytes()))
    with refused(r"table\.safetensors: is damaged .*use another checkpoint"):
        mapped(file, sums)
