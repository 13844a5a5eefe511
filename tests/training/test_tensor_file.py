"""Rows that are looked up in a checkpoint's file are checked, block by block."""

from pathlib import Path

import pytest
import torch

from dphybrid.embedding import HostEmbedding
from dphybrid.embedding.storage import deferred_rows
from dphybrid.training.tensor_file import mapped_tensor, write_tensors
from dphybrid.util.digests import BLOCK, BlockSums
from dphybrid.util.errors import UserError
from tests.reliability.damages import damage

NUM_ROWS, DIM = 3000, 100  # 400 bytes a row: rows lie across the blocks' borders


def written(file: Path) -> tuple[torch.Tensor, str]:
    weight, sums = torch.randn(NUM_ROWS, DIM, generator=torch.Generator().manual_seed(0)), BlockSums()
    write_tensors(file, {"state": torch.arange(7), "weight": weight}, sums)
    return weight, sums.hex()


def mapped(file: Path, sums: str) -> HostEmbedding:
    with deferred_rows():
        table = HostEmbedding(NUM_ROWS, DIM)
    table.map_rows(*mapped_tensor(file, "weight", table.settled(), sums))
    return table


def test_each_row_of_a_damaged_block_is_refused_and_no_other_one(tmp_path: Path) -> None:
    file = tmp_path / "table.safetensors"
    weight, sums = written(file)
    whole = file.read_bytes()
    start = len(whole) - weight.nbytes
    assert len(sums) == 8 * -(-len(whole) // BLOCK) > 8 * 4
    damage(file, whole[: 2 * BLOCK + 9] + bytes([whole[2 * BLOCK + 9] ^ 1]) + whole[2 * BLOCK + 10 :])
    places = [(start + row * 4 * DIM, start + (row + 1) * 4 * DIM - 1) for row in range(NUM_ROWS)]
    hit = [row for row, ends in enumerate(places) if any(end // BLOCK == 2 for end in ends)]
    good = torch.tensor([row for row in range(NUM_ROWS) if row not in hit])
    table = mapped(file, sums)
    torch.testing.assert_close(table(good), weight[good], rtol=0, atol=0)
    placed = mapped(file, sums)
    placed.place_on([torch.device("cpu")], lambda rows: [rows])
    looks = [table, lambda ids: table.bags(ids, torch.tensor([0])), placed.replica_rows]
    for row in (hit[0], hit[1], hit[-1]):
        for look in looks:
            with pytest.raises(
                UserError, match=r"table\.safetensors: is damaged \(in bytes 524,288 to 786,432"
            ):
                look(torch.tensor([0, row]))
    torch.testing.assert_close(table(good), weight[good], rtol=0, atol=0)


@pytest.mark.parametrize("content", [b"", b"x" * 2**20, None])
def test_a_damaged_header_and_another_size_are_told(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "table.safetensors"
    _, sums = written(file)
    whole = file.read_bytes()
    damage(file, whole[:9] + b"?" + whole[10:] if content is None else content)
    with pytest.raises(UserError, match=r"table\.safetensors: is damaged .*use another checkpoint"):
        mapped(file, sums)
    damage(file, whole)
    damage(file, whole[:-1])
    with pytest.raises(UserError, match=r"table\.safetensors: is damaged .*use another checkpoint"):
        mapped(file, sums)
