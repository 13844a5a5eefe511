"""The paper's arithmetic, by hand and against the figures that the documentation gives."""

from pathlib import Path

import pytest

from dphybrid.cluster.plan import ClusterPlan, Workload
from tests.commands import command
from tests.conftest import REPOSITORY

TERABYTE = Workload(num_rows=3_900_000_000, dim=64, ids=65_536 * 26, dense=5_000_000)


def test_bytes_of_a_step_by_hand() -> None:
    plan = ClusterPlan(Workload(num_rows=1001, dim=8, ids=400, dense=10), ranks=4, nodes=2, link_gbit=10)
    # 200 unique ids; half of them lie on the other machine, and each machine has half of these.
    assert plan.sent_bytes == 50 * (8 + 32 + 32) + 2 * 40
    assert plan.network_ms == pytest.approx(3680 * 8 / 9e9 * 1e3)
    assert plan.rows_a_rank == 251
    assert plan.rank_bytes == 251 * 9 * 4 + 160
    assert ClusterPlan(TERABYTE, 8, 1, 10).sent_bytes == 0


def paper_table(work: Workload, ranks_a_node: int, links_gbit: tuple[float, ...] = (25, 100, 400)) -> str:
    """Return a Markdown table of 1 to 64 machines."""
    head = [
        "machines",
        "ranks",
        "GiB a rank",
        "MB sent a step",
        *(f"ms at {link:g} Gbit/s" for link in links_gbit),
    ]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for nodes in (1, 2, 4, 8, 16, 32, 64):
        plans = [ClusterPlan(work, nodes * ranks_a_node, nodes, link) for link in links_gbit]
        cells = [str(nodes), str(plans[0].ranks), f"{plans[0].rank_bytes / 2**30:.3g}"]
        cells += [f"{plans[0].sent_bytes / 1e6:.3g}", *(f"{plan.network_ms:.2g}" for plan in plans)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_documented_table_is_the_models() -> None:
    assert paper_table(TERABYTE, 8) in (REPOSITORY / "docs/cluster.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("nodes", "link", "memory", "words"),
    [
        (16, 100.0, 2**38, "does not fit"),
        (1, 100.0, 2**50, "stay with one process"),
        (2, 25.0, 2**50, "stay with one machine"),
        (8, 400.0, 2**50, "may pay"),
    ],
)
def test_the_advice_goes_by_memory_and_link(nodes: int, link: float, memory: int, words: str) -> None:
    assert words in ClusterPlan(TERABYTE, 8 * nodes, nodes, link).text(memory)


def test_the_command_plans_for_a_table_that_nobody_has_yet(data_dir: Path) -> None:
    asked = ["plan", "--recipe", "ctr", "--cluster.ranks", "128", "--nodes", "16", "--link-gbit", "100"]
    values = ["--model.dim", "64", "--train.batch-size", "65536", "--table-rows", "3900000000"]
    shown = command(*asked, *values)
    assert "30,468,750 rows" in shown
    assert "row-wise over 128 ranks on 16 machines" in shown
    assert "--nodes 0" in command(*asked, *values, "--nodes", "0", ends=2)
