"""The whole job on generated clicks, from a CSV file to predictions: CPU time, memory and AUC of recipe ctr,
of a script in polars and plain PyTorch, and of LightGBM.

    python -m benchmarks.whole_job [--rows 200000] [--tests 100000] [--repeats 5] [--only NAME]
        [--against COMMIT]

dphybrid is measured as a script of three lines in one process, like the others, and as three commands: as
users run it, with its record in an MLflow database that earlier runs have made, and without a record. Each
process counts with its imports and its peak memory. The ways take turns, so that a busy moment of the machine
affects all of them. Set OMP_NUM_THREADS=1 to compare single threads. --against measures dphybrid's ways also
at another commit, in a worktree and an environment of its own: a figure of another day or machine is no peer.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.clicks import NUM_CATEGORIES, NUM_INTEGERS, write_clicks
from benchmarks.command import flags, processor, show
from dphybrid.util.roc import area_under_roc

NUMBERS = [f"I{i + 1}" for i in range(NUM_INTEGERS)]
CATEGORIES = [f"C{i + 1}" for i in range(NUM_CATEGORIES)]
OURS, COMMANDS = "dphybrid, a script", "dphybrid, three commands"
ALONE = ", no record"
PLAIN, TREES = "polars and plain PyTorch", "LightGBM"
WAYS = [OURS, OURS + ALONE, COMMANDS, COMMANDS + ALONE, PLAIN, TREES]
_EPOCHS = 1
"""Passes of the plain script: after a second one its AUC is lower."""
_OURS = """import dphybrid
run = dphybrid.train({train!r}, label="label", devices="cpu")
run.predictor.predict_file({test!r}, {out!r})"""
"""The job in three lines of dphybrid."""


@dataclass(frozen=True)
class Checkout:
    """A commit's code, and the Python that has its dependencies."""

    folder: Path
    python: str


HERE = Checkout(Path(__file__).parents[1], sys.executable)


def main() -> None:
    """Measure from the command line; print a table."""
    parser = flags(__doc__, repeats=5)
    parser.add_argument("--rows", type=int, default=200_000, metavar="N", help="rows to train on")
    parser.add_argument("--tests", type=int, default=100_000, metavar="N", help="rows to predict")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=WAYS, help="measure these ways")
    parser.add_argument("--against", metavar="COMMIT", help="measure this commit, too, in turns")
    options = parser.parse_args()
    ways = [way for way in options.only if way != TREES or find_spec("lightgbm")]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dphybrid-bench-")))
        other = stack.enter_context(checkout(options.against, folder)) if options.against else None
        found = run(folder, options.rows, options.tests, options.repeats, ways, other)
    show(found, text, options.out)


@contextmanager
def checkout(commit: str, folder: Path) -> Iterator[tuple[str, Checkout]]:
    """Make a worktree and an environment of a commit in `folder`, with this environment's version of torch;
    give the commit's short name and its checkout. The worktree is removed at the end.

    Raises subprocess.CalledProcessError: git does not know the commit, or its installation failed."""
    import torch

    git = ["git", "-C", str(HERE.folder)]
    asked = subprocess.run([*git, "rev-parse", "--short", commit], capture_output=True, text=True, check=True)
    tree, environment = folder / "worktree", folder / "environment"
    subprocess.run([*git, "worktree", "add", "--quiet", "--detach", tree, commit], check=True)
    try:
        print(f"installing {commit} takes minutes", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        python = str(environment / "bin" / "python")
        packages = [f"torch=={torch.__version__.partition('+')[0]}", "-e", f"{tree}[mlflow]"]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        yield asked.stdout.strip(), Checkout(tree, python)
    finally:
        subprocess.run([*git, "worktree", "remove", "--force", tree], check=True)


def run(
    folder: Path,
    rows: int,
    tests: int,
    rounds: int,
    ways: list[str],
    other: tuple[str, Checkout] | None = None,
) -> dict[str, Any]:
    """Write the clicks into `folder` and let the ways take turns; return medians by way and part.

    other: another commit's name and checkout; dphybrid's ways are measured there, too.
    """
    # Imported here, not by the processes that are measured.
    from dphybrid.tracking.opening import make_database
    from dphybrid.tracking.tracker import embedded_uri

    best_auc = write_clicks(folder / "all.csv", rows + tests, seed=1)
    frame = pl.scan_csv(folder / "all.csv", infer_schema=False)
    frame.slice(0, rows).sink_csv(folder / "train.csv")
    frame.slice(rows, tests).sink_csv(folder / "test.csv")
    labels_B = frame.slice(rows, tests).select(pl.col("label").cast(pl.Int8)).collect().to_series().to_numpy()
    store = folder / "mlflow"
    if recorded := {OURS, COMMANDS} & {*ways}:
        make_database(embedded_uri(store), store)
    turns = {way: (way, HERE) for way in ways}
    if other:
        commit, there = other
        turns |= {f"{way}, {commit}": (way, there) for way in ways if way not in _PEERS}
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in turns}
    for number in range(rounds):
        for turn, (name, (way, code)) in enumerate(turns.items()):
            place = folder / f"{number}-{turn}"
            place.mkdir()
            if way in recorded:
                shutil.copytree(store, place / "data" / "mlflow")
            measure = partial(_commands if way.startswith(COMMANDS) else _script, way, code)
            parts = measure(folder, place)
            column = pl.read_parquet(place / "out.parquet")[:, -1]
            parts["auc"] = area_under_roc(labels_B, column.to_numpy().astype(float))
            measured[name].append(parts)
    cpu_s = {name: [_total(parts) for parts in in_rounds] for name, in_rounds in measured.items()}
    pairs = [(name, peer) for name, (way, _) in turns.items() for peer in _PEERS if way not in _PEERS]
    pairs += [(way, name) for name, (way, code) in turns.items() if code != HERE]
    return {
        "rows": rows,
        "tests": tests,
        "rounds": rounds,
        "processor": processor(),
        "load": os.getloadavg()[0],
        "best_auc": best_auc,
        "ways": {name: _medians(in_rounds) for name, in_rounds in measured.items()},
        "ratios": {
            f"{mine} / {peer}": [ours / its for ours, its in zip(cpu_s[mine], cpu_s[peer], strict=True)]
            for mine, peer in pairs
            if peer in cpu_s
        },
    }


def _env(way: str, code: Checkout, place: Path) -> dict[str, str]:
    """Return the variables of a way's processes."""
    own = {name: value for name, value in os.environ.items() if not name.endswith("_TRACKING_URI")}
    own |= {"DPHYBRID_TRACKING_URI": "none"} if way.endswith(ALONE) else {}
    return own | {"PYTHONPATH": str(code.folder), "DPHYBRID_DATA_DIR": str(place / "data")}


def _commands(way: str, code: Checkout, folder: Path, place: Path) -> dict[str, Any]:
    data = ["--data.path", str(folder / "train.csv"), "--data.label", "label"]
    env = _env(way, code, place)
    command = [code.python, "-m", "dphybrid"]
    rows = ["--data.path", str(folder / "test.csv"), "--out", str(place / "out.parquet")]
    parts = {"prepare": _measured([*command, "prepare", "--recipe", "ctr", *data], env)}
    job = ["train", "--recipe", "ctr", *data, "--devices", "cpu", "--run-name", "job"]
    parts["train"] = _measured([*command, *job], env)
    parts["predict"] = _measured([*command, "predict", "job", *rows], env)
    return parts


def _script(way: str, code: Checkout, folder: Path, place: Path) -> dict[str, Any]:
    if way in _PEERS:
        job = _PEERS[way].__name__
        program = f"from benchmarks.whole_job import {job}; {job}({str(folder)!r}, {str(place)!r})"
    else:
        files = {"train": f"{folder}/train.csv", "test": f"{folder}/test.csv", "out": f"{place}/out.parquet"}
        program = _OURS.format(**files)
    return {"all": _measured([code.python, "-c", program], _env(way, code, place))}


def _measured(command: list[str], env: dict[str, str]) -> dict[str, float]:
    """Run a command; return its CPU and wall seconds and its peak memory in MiB."""
    started = time.monotonic()
    # Python imports from the working folder first, which is this checkout: the root folder has no packages.
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=env, cwd="/", **pipes)
    assert process.stderr
    told = process.stderr.read()  # to its end, so that the process is not blocked by a full pipe
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: {told.decode(errors='replace')[-2000:]}")
    seconds = {"cpu_s": usage.ru_utime + usage.ru_stime, "wall_s": time.monotonic() - started}
    return seconds | {"peak_mib": usage.ru_maxrss / 1024}


def plain(folder: str, place: str) -> None:
    """A script as one writes it without a library for this: a sparse `nn.Embedding` with Adagrad, the same
    hidden layers as recipe ctr on plain numbers, one pass, and values that occur once share a row."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    frame = _read(folder, "train")
    held_B = np.random.default_rng(0).random(len(frame)) < 0.2
    train = frame.filter(pl.Series(~held_B))
    known = {c: _frequent(train[c]) for c in CATEGORIES}
    logs = {i: train[i].log1p() for i in NUMBERS}
    scales = {i: (float(log.mean()), float(log.std())) for i, log in logs.items()}  # type: ignore[arg-type]
    starts_F = np.cumsum([0, *(len(values) + 2 for values in known.values())])

    def encoded(rows: pl.DataFrame) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids_BF and dense_BN. Ids of a column: 0 missing, 1 not known, then the known values."""
        ids = []
        for first, (c, values) in zip(starts_F, known.items(), strict=False):
            codes = pl.col(c).cast(pl.Enum(values), strict=False).to_physical().cast(pl.Int64)
            found = pl.when(pl.col(c).is_null()).then(0).otherwise(codes.fill_null(-1) + 2)
            ids.append((found + int(first)).alias(c))
        dense = [((pl.col(i).log1p() - m) / s).fill_null(0).cast(pl.Float32) for i, (m, s) in scales.items()]
        return rows.select(ids).to_torch(), rows.select(dense).to_torch()

    ids_BF, dense_BN = encoded(frame)
    labels_B = torch.from_numpy(frame["label"].to_numpy().astype(np.float32))
    table = nn.Embedding(int(starts_F[-1]), 16, sparse=True)
    nn.init.normal_(table.weight, std=0.05)
    hidden = [nn.Linear(16 * NUM_CATEGORIES + NUM_INTEGERS, 128), nn.ReLU(), nn.Dropout(0.1)]
    network = nn.Sequential(*hidden, nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 1))
    dense = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.3, fused=True)
    sparse = torch.optim.Adagrad(table.parameters(), lr=0.02)

    def logits(ids_BF: torch.Tensor, dense_BN: torch.Tensor) -> torch.Tensor:
        return network(torch.cat([table(ids_BF).flatten(1), dense_BN], dim=1)).squeeze(1)

    train_B = torch.from_numpy(np.flatnonzero(~held_B))
    for _ in range(_EPOCHS):
        for part_B in train_B[torch.randperm(len(train_B))].split(512):
            dense.zero_grad()
            sparse.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(
                logits(ids_BF[part_B], dense_BN[part_B]), labels_B[part_B]
            )
            loss.backward()
            dense.step()
            sparse.step()
    network.eval()
    with torch.no_grad():
        held = torch.from_numpy(np.flatnonzero(held_B))
        valid_B = torch.cat([logits(ids_BF[part_B], dense_BN[part_B]) for part_B in held.split(8192)])
        print("validation AUC", area_under_roc(labels_B[held].numpy(), valid_B.numpy()))
        pairs = zip(*(each.split(8192) for each in encoded(_read(folder, "test"))), strict=True)
        found_B = torch.cat([logits(*pair) for pair in pairs]).sigmoid()
    pl.DataFrame({"p": found_B.numpy()}).write_parquet(Path(place, "out.parquet"))


def trees(folder: str, place: str) -> None:
    """LightGBM with 63 leaves, its categorical splits, and early stopping on a fifth of the rows."""
    import lightgbm

    frame, asked = _read(folder, "train"), _read(folder, "test")
    known = {c: _frequent(frame[c]) for c in CATEGORIES}

    def encoded(rows: pl.DataFrame) -> np.ndarray:
        codes = [
            pl.col(c).cast(pl.Enum(v), strict=False).to_physical().cast(pl.Float64) for c, v in known.items()
        ]
        return rows.select(*(pl.col(i).cast(pl.Float64) for i in NUMBERS), *codes).to_numpy()

    held_B, labels_B = np.random.default_rng(0).random(len(frame)) < 0.2, frame["label"].to_numpy()
    inputs_BX = encoded(frame)
    categories = [*range(NUM_INTEGERS, NUM_INTEGERS + NUM_CATEGORIES)]
    data = lightgbm.Dataset(inputs_BX[~held_B], labels_B[~held_B], categorical_feature=categories)
    valid = data.create_valid(inputs_BX[held_B], labels_B[held_B])
    values = {
        "objective": "binary",
        "metric": "auc",
        "num_leaves": 63,
        "learning_rate": 0.05,
        "verbosity": -1,
    }
    values |= {"num_threads": int(os.environ.get("OMP_NUM_THREADS", "0"))}
    model = lightgbm.train(
        values, data, 500, valid_sets=[valid], callbacks=[lightgbm.early_stopping(20, verbose=False)]
    )
    pl.DataFrame({"p": np.asarray(model.predict(encoded(asked)))}).write_parquet(Path(place, "out.parquet"))


_PEERS = {PLAIN: plain, TREES: trees}


def _read(folder: str, part: str) -> pl.DataFrame:
    return pl.read_csv(Path(folder, f"{part}.csv"), schema_overrides=dict.fromkeys(CATEGORIES, pl.String))


def _frequent(values: pl.Series) -> pl.Series:
    """Return the values that occur at least twice."""
    return values.drop_nulls().value_counts().filter(pl.col("count") > 1)[values.name].sort()


def _total(parts: dict[str, Any]) -> float:
    return sum(float(part["cpu_s"]) for part in parts.values() if isinstance(part, dict))


def _medians(each: list[dict[str, Any]]) -> dict[str, Any]:
    first = each[0]
    parts = [name for name, part in first.items() if isinstance(part, dict)]
    return {
        "parts": {name: statistics.median(one[name]["cpu_s"] for one in each) for name in parts},
        "cpu_s": statistics.median(map(_total, each)),
        "wall_s": statistics.median(sum(one[name]["wall_s"] for name in parts) for one in each),
        "peak_mib": statistics.median(max(one[name]["peak_mib"] for name in parts) for one in each),
        "auc": statistics.median(one["auc"] for one in each),
    }


def text(found: dict[str, Any]) -> str:
    """Return the figures as a table to print."""
    lines = [
        f"{found['rows']:,} rows to train on, {found['tests']:,} to predict, medians of {found['rounds']} "
        f"rounds, {found['processor']}, load {found['load']:.1f}",
        f"  {'':<44} {'CPU s':>7} {'wall s':>7} {'peak MiB':>9} {'test AUC':>9}  parts",
    ]
    for way, one in found["ways"].items():
        parts = ", ".join(f"{name} {cpu_s:.1f}" for name, cpu_s in one["parts"].items())
        seconds = f"{one['cpu_s']:>7.1f} {one['wall_s']:>7.1f}"
        lines.append(f"  {way:<44} {seconds} {one['peak_mib']:>9,.0f} {one['auc']:>9.4f}  {parts}")
    for ways, ratios in found["ratios"].items():
        times = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"CPU time, {ways}: {times}")
    lines.append(f"AUC of the true log-odds: {found['best_auc']:.4f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
