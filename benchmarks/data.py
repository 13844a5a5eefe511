"""Time and memory of preparing a generated file of clicks, compared with the same work written in polars, and
with polars' plain parse of the file.

Each measurement is a separate process, for its peak memory. The three take turns, so that a busy moment of
the machine affects all of them.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.clicks import write_clicks
from benchmarks.command import at_least_one, flags, show
from dphybrid.config.settings import load_settings
from dphybrid.recipes.configs import load_config

NUM_ROWS = 2_000_000
# Programs of the measured processes. All imports come before `measured`: `prepare` would otherwise import
# `source` within the measured time.
_PLAIN = """
import polars, sys
from benchmarks.data import measured
measured(lambda: polars.read_csv(sys.argv[1]))
"""
_POLARS = """
import polars, sys
from pathlib import Path
from benchmarks.data import by_hand, measured
measured(lambda: by_hand(Path(sys.argv[1]), Path(sys.argv[2])))
"""
_PREPARE = """
import polars, sys
from pathlib import Path
from dphybrid.config.tables import TableDataConfig
from dphybrid.recipes import find_recipe
from dphybrid.data.table import source as table
from benchmarks.data import measured
config = TableDataConfig(path=sys.argv[1], label="label")
measured(lambda: find_recipe("ctr").prepare(config, Path(sys.argv[2]), 0))
"""


def by_hand(file: Path, folder: Path) -> None:
    """Do the work of preparing in plain polars: split the rows, number categories by their count in the
    training split, scale the numbers and put them into quantile buckets, write the arrays."""
    import numpy as np
    import polars as pl

    frame = pl.read_csv(file, schema_overrides={f"C{i + 1}": pl.String for i in range(26)})
    # A fifth of the rows for validation.
    held = pl.Series(np.random.default_rng(0).random(len(frame)) < 0.2)
    train, ids, dense = frame.filter(~held), [], []
    for name in (name for name in frame.columns if name.startswith("I")):
        known = train[name].drop_nulls().to_numpy()
        edges = np.unique(np.quantile(known, np.arange(1, 32) / 32)).tolist()
        ids.append(frame[name].cut(edges, left_closed=True).to_physical().fill_null(len(edges) + 1))
        mean, std = (float(figure(np.log1p(known))) for figure in (np.mean, np.std))
        dense += [((frame[name].log1p() - mean) / std).fill_null(0), frame[name].is_null()]
    for name in (name for name in frame.columns if name.startswith("C")):
        # Id 0: the cell is missing. Id 1: its value occurs at most once in training.
        counts = train[name].drop_nulls().value_counts(sort=True).filter(pl.col("count") > 1)
        numbered = counts.select(name).with_row_index("id", 2)
        found = frame.select(name).join(numbered, on=name, how="left", maintain_order="left")["id"]
        ids.append(found.fill_null(1).set(frame[name].is_null(), 0))
    folder.mkdir()
    np.save(folder / "ids.npy", pl.DataFrame(_numbered(ids)).cast(pl.Int32).to_numpy())
    np.save(folder / "dense.npy", pl.DataFrame(_numbered(dense)).cast(pl.Float32).to_numpy())
    np.save(folder / "labels.npy", frame["label"].to_numpy())
    np.save(folder / "held.npy", held.to_numpy())


def _numbered(columns: Any) -> Any:
    return [column.alias(str(place)) for place, column in enumerate(columns)]


def measured(work: Any) -> None:
    """Call `work`; print its wall-clock and CPU seconds and the process's peak memory in MiB, as JSON."""
    import resource
    import time

    start, cpu = time.perf_counter(), time.process_time()
    work()
    found = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, on macOS bytes
    print(json.dumps(found | {"peak_mib": peak / (2**20 if sys.platform == "darwin" else 2**10)}))


def run(rounds: int = 5, num_rows: int = NUM_ROWS, file: Path | None = None) -> dict[str, Any]:
    """Write the clicks (into `file`, or a temporary file), then measure. Return the medians and the best AUC
    that a model can reach."""
    with tempfile.TemporaryDirectory(prefix="dphybrid-bench-") as name:
        folder = Path(name)
        planted = write_clicks(file or folder / "clicks.csv", num_rows)
        times: dict[str, list[dict[str, float]]] = {"plain": [], "polars": [], "prepare": []}
        for number in range(rounds):
            for what, code in (("plain", _PLAIN), ("polars", _POLARS), ("prepare", _PREPARE)):
                out = str(folder / f"{what}-{number}")
                command = [sys.executable, "-c", code, str(planted.file), out]
                done = subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8")
                times[what].append(json.loads(done.stdout))
        size = planted.file.stat().st_size
    medians: dict[str, Any] = {
        what: {key: statistics.median(one[key] for one in each) for key in each[0]}
        for what, each in times.items()
    }
    # Ratios within a round: its two processes ran one after the other, under the same load.
    pairs = zip(times["polars"], times["prepare"], strict=True)
    ratios = sorted(own["cpu_seconds"] / theirs["cpu_seconds"] for theirs, own in pairs)
    return {
        "num_rows": num_rows,
        "mib": size / 2**20,
        "rounds": rounds,
        **medians,
        "cpu_ratio": statistics.median(ratios),
        "cpu_ratios": ratios,
        "click_rate": planted.click_rate,
        "best_auc": planted.best_auc,
    }


def text(result: dict[str, Any]) -> str:
    """Return the figures as a table to print."""
    rows = [f"{result['num_rows']:,} rows, {result['mib']:,.0f} MiB, medians of {result['rounds']} rounds"]
    rows.append(f"  {'':<20} {'seconds':>8} {'CPU s':>9} {'rows/s':>11} {'peak MiB':>9}")
    for what, name in (
        ("plain", "polars.read_csv"),
        ("polars", "same work in polars"),
        ("prepare", "prepare"),
    ):
        one = result[what]
        speed = result["num_rows"] / one["seconds"]
        rows.append(
            f"  {name:<20} {one['seconds']:>8.2f} {one['cpu_seconds']:>9.2f} {speed:>11,.0f} "
            f"{one['peak_mib']:>9,.0f}"
        )
    low, high = result["cpu_ratios"][0], result["cpu_ratios"][-1]
    rows.append(
        f"preparing takes {result['cpu_ratio']:.2f} times the CPU time of the same work in polars "
        f"({low:.2f} to {high:.2f})"
    )
    rows.append(f"best AUC that a model can reach on this file: {result['best_auc']:.4f}")
    if "auc" in result:
        rows.append(
            f"validation AUC of recipe ctr: {result['auc']:.4f}, {result['best_auc'] - result['auc']:.4f} "
            "below that"
        )
    return "\n".join(rows)


def train_on(file: Path) -> float:
    """Train recipe ctr on a file of clicks for one epoch; return its validation AUC."""
    from dphybrid.run.train import run_job

    # min_count: rare values, which carry no weight in these clicks, share a row.
    values = [f"data.path={file}", "data.label=label", "data.min_count=50", "train.epochs=1"]
    return run_job(load_config(None, ["recipe=ctr", *values]), load_settings()).metrics["auc"]


def main() -> None:
    parser = flags(__doc__, repeats=5)
    rows = f"rows of the file (default: {NUM_ROWS:,})"
    parser.add_argument("--rows", type=at_least_one, default=NUM_ROWS, metavar="N", help=rows)
    train = "also train recipe ctr for an epoch, and compare its AUC with the best"
    parser.add_argument("--train", action="store_true", help=train)
    options = parser.parse_args()
    if not options.train:
        show(run(options.repeats, options.rows), text, options.out)
        return
    with tempfile.TemporaryDirectory(prefix="dphybrid-bench-") as folder:
        file = Path(folder, "clicks.csv")
        result = run(options.repeats, options.rows, file)
        show(result | {"auc": train_on(file)}, text, options.out)


if __name__ == "__main__":
    main()
