"""Storage in memory and in files, pooled lookups, collections of tables, and what the package imports."""

import errno
import json
import os
from contextlib import nullcontext
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
    table = HostEmbedding(1000, 8, seed=3, storage="mmap", path=tmp_path)
    state = row_optimizer("adam", {"t": table}, lr=0.1).states()
    assert torch.equal(table.weight, HostEmbedding(1000, 8, seed=3).weight)
    assert state["t.mean"].shape == (1000, 8)
    assert not list(tmp_path.iterdir())


def test_states_that_do_not_fit_are_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"states of its rows are 4\.1e\+03 GiB, .* GiB of memory are free"):
        open_states({"mean": ((2**40,), torch.float32)}, None, "t")
    with pytest.raises(ValueError, match=r"states of its rows are 4\.1e\+03 GiB, .* has .* GiB free"):
        open_states({"mean": ((2**40,), torch.float32)}, tmp_path, "t")


def test_a_table_that_does_not_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    rows = 2**40
    with pytest.raises(
        ValueError, match=r"1,099,511,627,776 rows x 64 .* GiB of memory are free.*storage mmap"
    ):
        HostEmbedding(rows, 64, seed=0)
    with pytest.raises(ValueError, match=r"has .* GiB free"):
        HostEmbedding(rows, 64, storage="mmap", path=tmp_path, seed=0)
    with pytest.raises(ValueError, match="or mmap with the path of a folder"):
        HostEmbedding(9, 64, storage="mmap", path=tmp_path / "rows")
    assert not list(tmp_path.iterdir())


def test_a_collection_is_its_tables_side_by_side() -> None:
    tables = HostEmbeddingCollection({"user": 30, "item": 5}, 4, padding={"item": 0}, seed=3)
    assert not tables.flat.weight[30].any()
    assert torch.equal(tables.flat.weight[:30], HostEmbedding(30, 4, seed=3).weight)
    rows = row_optimizer("sgd", {"flat": tables.flat}, lr=1.0)
    ids_BF = torch.tensor([[3, 0], [29, 4]])
    rows_BFD = tables(ids_BF)
    assert torch.equal(rows_BFD, tables.flat.weight[torch.tensor([[3, 30], [29, 34]])])
    before = tables.flat.weight.detach().clone()
    rows_BFD.sum().backward()
    items_N = tables.flat_ids(torch.tensor([[0], [2]]), slice(1, 2)).flatten()
    tables.flat(items_N).sum().backward()
    rows.step()
    changed = (tables.flat.weight != before).any(1).nonzero().squeeze(1)
    assert changed.tolist() == [3, 29, 32, 34]
    with pytest.raises(ValueError, match=r"'item': id 5 at position \[0, 1\] is not a row; rows are 0 to 4"):
        tables(torch.tensor([[3, 5]]))


def test_a_collection_counts_as_one_table_of_its_name() -> None:
    model = nn.ModuleDict(
        {"columns": HostEmbeddingCollection({"user": 30}, 4), "rest": nn.ModuleList([HostEmbedding(3, 4)])}
    )
    assert find_tables(model) == {"columns": model["columns"].flat, "rest.0": model["rest"][0]}
    assert find_tables(model["columns"]) == {"flat": model["columns"].flat}


def test_ids_of_some_tables_are_shifted() -> None:
    tables = HostEmbeddingCollection({"user": 300, "item": 5, "tags": 7}, 4)
    assert tables.flat_ids(torch.tensor([[0, 1], [4, 6]]), slice(1, None)).tolist() == [
        [300, 306],
        [304, 311],
    ]
    narrow = torch.ones(2, 3, dtype=torch.uint8)  # too narrow for rows of all tables
    assert torch.equal(tables.flat_ids(narrow), torch.tensor([[1, 301, 306]] * 2))
    columns_first = torch.arange(12).view(2, 3, 2) // 4
    expected = columns_first.mT + torch.tensor([0, 300, 305])
    assert torch.equal(tables.flat_ids(columns_first.mT), expected)
    assert torch.equal(torch.vmap(tables.flat_ids)(columns_first.mT), expected)
    with pytest.raises(ValueError, match=r"columns, one per table"):
        tables.flat_ids(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"'tags': id 7 at position \[0, 1\] is not a row; rows are 0 to 6"):
        tables.flat_ids(torch.tensor([[0, 7]]), slice(1, None))


@pytest.mark.nightly
def test_the_benchmark_runs() -> None:
    told: list[str] = []
    results = run((1,), rounds=1, scale=0.01, log=told.append)
    assert len(told) == 5
    shown = text(results)
    assert shown.startswith("Milliseconds per step")
    assert "SparseAdam / dphybrid adam" in shown
    assert "faults)" in shown
    json.dumps(plain(results))


@pytest.mark.parametrize("filled", [False, True])
def test_tables_and_states_are_reserved_together(monkeypatch: pytest.MonkeyPatch, filled: bool) -> None:
    rows = 2**19  # 32 MiB at a width of 16
    monkeypatch.setattr(storage, "_reserved", [])
    monkeypatch.setattr(storage, "available_memory_bytes", lambda: 96 * 2**20)
    with nullcontext() if filled else storage.unfilled_rows():
        first = HostEmbedding(rows, 16, seed=0)
    if filled:  # the system counts these as used
        monkeypatch.setattr(storage, "available_memory_bytes", lambda: 64 * 2**20)
    with refused("the optimizer's states of its rows are 0.0645 GiB, but 0.0625 GiB of memory are free"):
        row_optimizer("lazy-adam", first, lr=0.1)
    with storage.unfilled_rows():
        second = HostEmbedding(rows, 16, seed=0)
    with refused("but 0.0312 GiB of memory are free"), storage.unfilled_rows():
        HostEmbedding(rows + 2**18, 16, seed=0)
    del second
    with storage.unfilled_rows():
        HostEmbedding(rows + 2**18, 16, seed=0)


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

    table = HostEmbedding(1000, 8, storage="mmap", path=tmp_path)
    assert len(list(tmp_path.iterdir())) == 0
    monkeypatch.setattr(os, "posix_fallocate", full)
    for build in (
        lambda: HostEmbedding(1000, 8, storage="mmap", path=tmp_path),
        lambda: row_optimizer("lazy-adam", table),
    ):
        with refused("GiB for rows: No space left on device; choose another folder"):
            build()
