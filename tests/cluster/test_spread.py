"""Rows that lie with several processes are read and written by the first as if they were its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dphybrid.training.tensor_file import IDS, changed_file, rows_of, table_file, write_tensors
from tests.conftest import REPOSITORY

RANK = """
import sys
from pathlib import Path
import torch
from dphybrid.cluster.ranks import joined
from dphybrid.cluster.spread import Spread
from dphybrid.training import tensor_file
from dphybrid.training.tensor_file import read_table, write_tensors

tensor_file._WRITTEN_BYTES = tensor_file._READ_BYTES = 64  # slices that end within ranks
folder = Path(sys.argv[1])
with joined(60, torch.device("cpu"), folder) as ranks:
    first, last = [(0, 4), (4, 4), (4, 11)][ranks.rank]  # the second has none
    rows, sums = torch.zeros(last - first, 3), torch.zeros(last - first)
    spread = Spread(ranks, [rows, sums], ranks.all_gather((first, last)))
    if ranks.leads:
        weight, total = spread.tensors()
        with spread.served():
            read_table(folder, "in", "weight", weight)
            read_table(folder, "in", "sum", total)
            write_tensors(folder / "out.safetensors", {"weight": weight, "sum": total})
            assert weight.first_bad() is None and total.first_bad()[0] == 9
    else:
        spread.serve()
    total = ranks.sum(rows.double().sum())
    print(ranks.broadcast(f"sum {float(total)}" if ranks.leads else None))
"""


@pytest.mark.nightly
def test_slices_rows_and_checks_reach_their_owners(tmp_path: Path) -> None:
    weight, total = torch.arange(33.0).view(11, 3), torch.arange(11.0)
    total[9] = torch.nan
    changed = -torch.ones(4, 3)
    for name in ("tables", "changed", "ranks"):
        (tmp_path / name).mkdir()
    write_tensors(table_file(tmp_path, "in"), {"weight": weight, "sum": total})
    rows = {IDS: torch.tensor([1, 3, 4, 10]), rows_of("weight"): changed, "sum": total}
    write_tensors(changed_file(tmp_path, "in"), rows)
    shared = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    # As torch's launcher sets them for its first start of a job.
    shared |= {"TORCHELASTIC_RUN_ID": "job", "MASTER_PORT": "1"}
    shared |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    shared |= {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    program: dict[str, Any] = {"args": [sys.executable, "-c", RANK, str(tmp_path)], "cwd": REPOSITORY}
    program |= {"stdout": subprocess.PIPE, "text": True}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(3)]
    ranks = [subprocess.Popen(env=shared | place, **program) for place in places]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    expected = weight.clone()
    expected[[1, 3, 4, 10]] = -1
    found = load_file(tmp_path / "out.safetensors")
    torch.testing.assert_close(found["weight"], expected)
    torch.testing.assert_close(found["sum"], total, equal_nan=True)
    assert said == [f"sum {float(expected.sum())}\n"] * 3
