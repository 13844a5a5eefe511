"""How good the models are: beside scikit-learn's models, published figures and a plain PyTorch loop, as
tables and as JSON.

    python -m examples.quality --data FOLDER [--only tables] [--seeds 2] [--out quality.json]

FOLDER holds what a part reads: adult/adult.data (UCI Adult), ml-100k/u.data (MovieLens), wn18rr/ and
fb15k237/ (train.txt, valid.txt, test.txt) and wikitext2/valid.txt. Everything runs on the CPU, in a data
folder of its own; nothing is recorded. The JSON file is written anew after each seed or turn, so that an
interrupted script leaves what it has finished.

- tables: recipe ctr, scikit-learn's boosted trees and a linear model, on Adult and tables that ship with
  scikit-learn, or on `--table FILE --label NAME`. A seed is one of five folds: the models are trained on the
  rest and asked about the fold. ctr sets validation rows of its own aside from the rest.
- retrieval: three quarters of each user's ratings to train, the others to be found, by recipe retrieval, EASE
  and the most popular items.
- kge: recipe kge on the graphs that are there, filtered ranks among all entities, beside figures that others
  have published.
- text: steps of recipe text and of the same LSTM in plain loops, on the same batches, in turns, by CPU time;
  and the perplexity of each on the validation split afterwards. Without --data the text is the reference that
  ships with Python.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch

from dphybrid.util.errors import UserError
from dphybrid.util.files import write_json
from examples.quality.common import Keep, Page, installed, taking, tell, there, train
from examples.quality.retrieval import CUTOFF, retrieval
from examples.quality.tables import METRICS, tables
from examples.quality.text import text

PARTS = ("tables", "retrieval", "kge", "text")
PUBLISHED = {
    "wn18rr": {"ComplEx": 0.475, "RESCAL": 0.467, "DistMult": 0.452, "ConvE": 0.442, "TransE": 0.228},
    "fb15k237": {"RESCAL": 0.356, "ComplEx": 0.348, "DistMult": 0.343, "ConvE": 0.339, "TransE": 0.313},
}
"""Filtered MRR on the test parts, from the README of LibKGE (github.com/uma-pi1/kge; Ruffinelli, Broscheit
and Gemulla 2020), each after a search for its best values on that graph."""


def kge(data: Path | None, seeds: range, epochs: int | None, keep: Keep) -> None:
    """Train recipe kge on each graph that is there, for as many epochs as it says or for `epochs`."""
    found: Page = {}
    folders = [data / name for name in PUBLISHED if (data / name).exists()] if data else []
    for folder in folders or [there(data, "wn18rr")]:
        runs = found[folder.name] = []
        for seed in seeds:
            times: Page = {}
            tell(f"{folder.name}, seed {seed}: kge, as it comes; several minutes on one core")
            with taking(times):
                run = train(str(folder), "kge", seed=seed, **({} if epochs is None else {"epochs": epochs}))
            mrr = {"mrr": run.metrics["test_mrr"], "valid_mrr": run.metrics["mrr"]}
            runs.append({"seed": seed, "epochs": run.config.train.epochs, **mrr, **times})
            tell(f"{folder.name}, seed {seed}: {mrr['mrr']:.4f}, {times['cpu_s']:.0f} s of CPU")
            keep({"runs": found, "published": PUBLISHED})


def lines(found: Page) -> list[str]:
    """Return the figures as Markdown for people."""
    told = [", ".join(f"{name} {value}" for name, value in found["machine"].items())]
    for name, table in found.get("tables", {}).get("tables", {}).items():
        heads = (
            f"| {name}: {table['rows']:,} rows | {METRICS[table['task']]} | lowest to highest | CPU s a fit |"
        )
        told += ["", heads, "| --- | --- | --- | --- |"]
        told += [line(model, runs, "metric") for model, runs in table["runs"].items() if runs]
    if part := found.get("retrieval"):
        told += [
            "",
            f"| MovieLens-100k | NDCG@{CUTOFF} | lowest to highest | CPU s |",
            "| --- | --- | --- | --- |",
        ]
        told += [line(name, runs, "ndcg") for name, runs in part["runs"].items()]
    for name, runs in found.get("kge", {}).get("runs", {}).items():
        heads = f"| {name}, {runs[0]['epochs']} epochs | test MRR, filtered | lowest to highest | CPU s |"
        told += ["", heads, "| --- | --- | --- | --- |", line("kge, as it comes", runs, "mrr")]
        told += [f"| {other}, published (LibKGE) | {mrr:.3f} | | |" for other, mrr in PUBLISHED[name].items()]
    if part := found.get("text"):
        heads = f"tokens a second of CPU | text beside it, by turn | perplexity after {part['steps']} steps"
        told += ["", f"| LSTM | {heads} |", "| --- | --- | --- | --- |"]
        for name, speeds in part["tokens_per_cpu_s"].items():
            ratios = [
                ours / other for ours, other in zip(part["tokens_per_cpu_s"]["text"], speeds, strict=True)
            ]
            beside = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            reached = f"{part['perplexity'][name]:.0f}" if "perplexity" in part else ""
            told.append(f"| {name} | {statistics.median(speeds):,.0f} | {beside} | {reached} |")
    return told


def line(name: str, runs: list[Page], key: str) -> str:
    values = [run[key] for run in runs]
    cpu_s = statistics.median(run["cpu_s"] for run in runs)
    return (
        f"| {name} | {statistics.mean(values):.4g} | {min(values):.4g} to {max(values):.4g} | {cpu_s:.1f} |"
    )


def machine() -> Page:
    """Return what the figures depend on."""
    versions = {name: installed(name) for name in ("torch", "scikit-learn")}
    python = {"python": platform.python_version(), "threads": torch.get_num_threads()}
    return (
        {"date": str(date.today()), "CPU": f"{os.cpu_count()} cores {platform.machine()}"} | versions | python
    )


def main(argv: list[str] | None = None) -> Page:
    """Measure what was asked for, print it, write it, and return it."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument(
        "--data", type=Path, help="folder with adult/, ml-100k/, wn18rr/, fb15k237/ and wikitext2/"
    )
    parser.add_argument("--only", choices=PARTS, help="one part; else all")
    parser.add_argument("--seeds", type=int, default=5, help="how many, of all but text (5)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--table", type=Path, help="a CSV file to compare on instead of the tables")
    parser.add_argument("--label", default="14", help="its label: a name, or a position (14)")
    parser.add_argument("--epochs", type=int, help="of kge, instead of its own")
    parser.add_argument("--turns", type=int, default=5, help="of text (5)")
    parser.add_argument("--out", type=Path, default=Path("quality.json"), help="the JSON file")
    given = parser.parse_args(argv)
    parts = [given.only] if given.only else PARTS
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    found: Page = {"machine": machine()}

    def keeper(name: str) -> Keep:
        def keep(part: Page) -> None:
            found[name] = part
            write_json(given.out, found)

        return keep

    with tempfile.TemporaryDirectory(prefix="dphybrid-quality-") as folder:
        os.environ["DPHYBRID_DATA_DIR"] = folder
        if "tables" in parts:
            tables(given.data, given.table, given.label, seeds, keeper("tables"))
        if "retrieval" in parts:
            retrieval(there(given.data, "ml-100k/u.data"), seeds, keeper("retrieval"))
        if "kge" in parts:
            kge(given.data, seeds, given.epochs, keeper("kge"))
        if "text" in parts:
            text(
                there(given.data, "wikitext2/valid.txt") if given.data else None, given.turns, keeper("text")
            )
    print("\n".join(lines(found)))
    tell(f"wrote {given.out}")
    return found


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"quality: {error}")
