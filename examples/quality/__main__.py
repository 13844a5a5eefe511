"""How good the models are: beside scikit-learn's models, published figures and a plain PyTorch loop, as
tables and as JSON.

    python -m examples.quality --data FOLDER [--only tables] [--seeds 2] [--out quality.json]

FOLDER holds what a part reads: adult/adult.data (UCI Adult), ml-100k/u.data (MovieLens), wn18rr/ (train.txt,
valid.txt, test.txt) and wikitext2/valid.txt. Everything runs on the CPU, in a data folder of its own; nothing
is recorded. The JSON file is written anew after each seed, training or turn, so that an interrupted script
leaves what it has finished.

- tables: recipe ctr, scikit-learn's boosted trees and a linear model, on Adult and tables that ship with
  scikit-learn, or on `--table FILE --label NAME`. A seed is one of five folds: the models are trained on the
  rest and asked about the fold. ctr sets validation rows of its own aside from the rest.
- retrieval: three quarters of each user's ratings to train, the others to be found, by recipe retrieval, EASE
  and the most popular items.
- wn18rr: recipe kge with each of `KGE`, filtered ranks among all entities, beside figures that others have
  published.
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

PARTS = ("tables", "retrieval", "wn18rr", "text")
KGE: dict[str, Page] = {
    "kge, as it comes": {},
    "kge, best known": {"penalty": 0.2, "batch_size": 256, "epochs": 36, "table__lr": 0.5},
}
"""Values over the recipe's own. The last ones were chosen on WN18RR's validation part."""
PUBLISHED = {"ComplEx": 0.475, "RESCAL": 0.467, "DistMult": 0.452, "ConvE": 0.442, "TransE": 0.228}
"""Filtered MRR on WN18RR's test part, from the README of LibKGE (github.com/uma-pi1/kge; Ruffinelli,
Broscheit and Gemulla 2020), each after a search for its best values."""


def wn18rr(folder: Path, epochs: int | None, keep: Keep) -> None:
    """Train each of `KGE`, for as many epochs as it says or for `epochs`."""
    found: dict[str, Page] = {}
    for name, values in KGE.items():
        times: Page = {}
        given = values if epochs is None else values | {"epochs": epochs}
        tell(f"wn18rr: {name}; several minutes on one core")
        with taking(times):
            run = train(str(folder), "kge", **given)
        mrr = {part: run.metrics[metric] for part, metric in (("valid", "mrr"), ("test", "test_mrr"))}
        found[name] = {"values": given, "epochs": run.config.train.epochs, "mrr": mrr, **times}
        tell(f"wn18rr: {name} {mrr['test']:.4f}, {times['wall_s']:.0f} s")
        keep({"runs": found, "published_test_mrr": PUBLISHED})


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
    if part := found.get("wn18rr"):
        told += [
            "",
            "| WN18RR | filtered MRR, test part | validation | seconds | of CPU |",
            "| --- | --- | --- | --- | --- |",
            *(
                f"| {name}, {run['epochs']} epochs | {run['mrr']['test']:.3f} | {run['mrr']['valid']:.3f} | "
                f"{run['wall_s']:.0f} | {run['cpu_s']:.0f} |"
                for name, run in part["runs"].items()
            ),
            *(f"| {name}, published (LibKGE) | {mrr:.3f} | | | |" for name, mrr in PUBLISHED.items()),
        ]
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
    parser.add_argument("--data", type=Path, help="folder with adult/, ml-100k/, wn18rr/ and wikitext2/")
    parser.add_argument("--only", choices=PARTS, help="one part; else all")
    parser.add_argument("--seeds", type=int, default=5, help="how many, of tables and retrieval (5)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--table", type=Path, help="a CSV file to compare on instead of the tables")
    parser.add_argument("--label", default="14", help="its label: a name, or a position (14)")
    parser.add_argument("--epochs", type=int, help="of wn18rr, instead of each training's own")
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
        if "wn18rr" in parts:
            wn18rr(there(given.data, "wn18rr"), given.epochs, keeper("wn18rr"))
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
