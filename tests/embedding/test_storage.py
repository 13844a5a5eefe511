"""Storage in memory and in files, and the benchmark of tables."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.embedding import run, text
from benchmarks.racing import plain
from dphybrid.embedding import (
    HostEmbedding,
    HostEmbeddingCollection,
    find_tables,
    row_optimizer,
    storage,
)
from dphybrid.embedding.storage import open_states
from tests.refusing import refused


def test_empty_lookups() -> None:
    table = HostEmbedding(20, 4, seed=0)
    none = torch.zeros(0, dtype=torch.int64)
    table(none.view(0, 3)).sum().backward()
    row_optimizer("sgd", {"t": table}, lr=1.0).step()
    assert torch.equal(table.weight, HostEmbedding(20, 4, seed=0).weight)


def test_files_of_a_folder_go_with_the_process(tmp_path: Path) -> None:
    table = HostEmbedding(1000, 8, seed=3, path=tmp_path)
    state = row_optimizer("adam", {"t": table}, lr=0.1).states()
    assert torch.equal(table.weight, HostEmbedding(1000, 8, seed=3).weight)
    assert state["t.mean"].shape == (1000, 8)
    assert not list(tmp_path.iterdir())


def test_states_that_do_not_fit_are_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mean for its rows takes 4\.1e\+03 GiB, .* of memory are free"):
        open_states({"mean": ((2**40,), torch.float32)}, None, "t")
    with pytest.raises(ValueError, match=r"mean for its rows takes 4\.1e\+03 GiB, .* has .* GiB free"):
        open_states({"mean": ((2**40,), torch.float32)}, tmp_path, "t")


def test_a_table_that_does_not_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    rows = 2**40
    with pytest.raises(
        ValueError, match=r"1,099,511,627,776 rows x 64 .* GiB of memory are free.*or files \(path=FOLDER"
    ):
        HostEmbedding(rows, 64, seed=0)
    with pytest.raises(ValueError, match=r"has .* GiB free"):
        HostEmbedding(rows, 64, path=tmp_path, seed=0)
    with pytest.raises(ValueError, match="is not a folder; make it"):
        HostEmbedding(9, 64, path=tmp_path / "rows")
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_the_benchmark_runs() -> None:
    told: list[str] = []
    results = run((1,), rounds=1, scale=0.01, log=told.append)
    assert len(told) == 4
    shown = text(results)
    assert shown.startswith("Milliseconds per step")
    assert "SparseAdam / dphybrid adam" in shown
    json.dumps(plain(results))


def test_a_container_may_use_the_memory_of_its_page_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemAvailable: 8388608 kB\n",
        "/sys/fs/cgroup/memory.max": "4294967296\n",
        "/sys/fs/cgroup/memory.current": "4000000000\n",
        "/sys/fs/cgroup/memory.stat": "anon 900000000\nactive_file 1000000000\ninactive_file 2000000000\n",
    }
    monkeypatch.setattr(Path, "read_text", lambda path, **_: files[str(path)])
    assert storage.available_memory_bytes() == 2**32 - 10**9


def test_a_full_disk_is_an_error_before_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    table = HostEmbedding(1000, 8, path=tmp_path)
    assert len(list(tmp_path.iterdir())) == 0
    monkeypatch.setattr(os, "posix_fallocate", full)
    for build in (
        lambda: HostEmbedding(1000, 8, path=tmp_path),
        lambda: row_optimizer("lazy-adam", table),
    ):
        with refused("GiB for rows: No space left on device; choose another folder"):
            build()


def test_a_collection_is_its_tables_in_one() -> None:
    tables = HostEmbeddingCollection({"user": 30, "item": 5}, 4, seed=3)
    assert find_tables(nn.ModuleDict({"columns": tables})) == {"columns": tables}
    assert torch.equal(tables.weight[:30], HostEmbedding(30, 4, seed=3).weight)
    rows, before = row_optimizer("sgd", {"t": tables}, lr=1.0), tables.weight.detach().clone()
    ids_BF = torch.tensor([[3, 0], [29, 4]], dtype=torch.uint8)  # too narrow for rows of many tables
    rows_BFD = tables(tables.flat_ids(ids_BF))
    assert torch.equal(rows_BFD, before[torch.tensor([[3, 30], [29, 34]])])
    rows_BFD.sum().backward()
    rows.step()
    assert (tables.weight != before).any(1).nonzero().squeeze(1).tolist() == [3, 29, 30, 34]
    with pytest.raises(ValueError, match=r"'item': id 5 at position \[1\] is not a row; rows are 0 to 4"):
        tables.flat_ids(torch.tensor([[3, 4], [3, 5]]))
    with pytest.raises(ValueError, match="give 2 columns, one per table"):
        tables.flat_ids(torch.zeros(2, 3, dtype=torch.int64))
