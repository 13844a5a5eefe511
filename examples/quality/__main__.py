"""Compares the quality of the models with scikit-learn's models, published figures and a plain PyTorch loop;
prints tables and writes JSON.

    python -m examples.quality --data FOLDER [--only tables] [--seeds 2] [--out quality.json]

FOLDER holds the data: adult/adult.data (UCI Adult), ml-100k/u.data (MovieLens), wn18rr/ and fb15k237/
(train.txt, valid.txt, test.txt) and wikitext2/valid.txt. Everything runs on the CPU, in a temporary data
folder; nothing is recorded in MLflow. The JSON file is rewritten after each seed or turn, so that an
interrupted script leaves its finished results.

- tables: recipe ctr, scikit-learn's boosted trees and a linear model, on Adult and tables that ship with
  scikit-learn, or on `--table FILE --label NAME`. A seed is one of five folds: the models are trained on the
  other folds and evaluated on it. ctr takes its validation rows from the training folds.
- retrieval: recipe retrieval, EASE and the most popular items. Three quarters of each user's ratings are for
  training, the others are to be found.
- next: the networks of recipe retrieval, in time: each user's last rating is to be found.
- kge: recipe kge on the graphs in FOLDER, by filtered ranks among all entities, compared with published
  figures.
- text: recipe text and the same LSTM in plain loops take turns of some steps on the same batches. Compares
  their speed in CPU time, and their perplexity on the validation split at the end. Without --data the text
  is Python's language reference.
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
from examples.quality.common import Keep, Page, data_path, installed, taking, tell, train
from examples.quality.retrieval import CUTOFF, in_time, retrieval
from examples.quality.tables import METRICS, tables
from examples.quality.text import text

PARTS = ("tables", "retrieval", "next", "kge", "text")
PUBLISHED = {
    "wn18rr": {"ComplEx": 0.475, "RESCAL": 0.467, "DistMult": 0.452, "ConvE": 0.442, "TransE": 0.228},
    "fb15k237": {"RESCAL": 0.356, "ComplEx": 0.348, "DistMult": 0.343, "ConvE": 0.339, "TransE": 0.313},
}
"""Filtered MRR on the test splits, from the README of LibKGE (github.com/uma-pi1/kge; Ruffinelli, Broscheit
and Gemulla 2020), each after a search for the best hyperparameters on that graph."""


def kge(data: Path | None, seeds: range, epochs: int | None, keep: Keep) -> None:
    """Train recipe kge on each graph in `data`, for `epochs` epochs or the recipe's default."""
    found: Page = {}
    folders = [data / name for name in PUBLISHED if (data / name).exists()] if data else []
    # Without any graph, `data_path` raises the error that names the missing folder.
    for folder in folders or [data_path(data, "wn18rr")]:
        runs = found[folder.name] = []
        for seed in seeds:
            times: Page = {}
            tell(f"{folder.name}, seed {seed}: kge with default values; several minutes on one core")
            with taking(times):
                run = train(str(folder), "kge", seed=seed, **({} if epochs is None else {"epochs": epochs}))
            mrr = {"mrr": run.test_metrics["mrr"], "valid_mrr": run.metrics["mrr"]}
            runs.append({"seed": seed, "epochs": run.config.train.epochs, **mrr, **times})
            tell(f"{folder.name}, seed {seed}: {mrr['mrr']:.4f}, {times['cpu_s']:.0f} s of CPU")
            keep({"runs": found, "published": PUBLISHED})


def lines(found: Page) -> list[str]:
    """Return the results as lines of Markdown tables."""
    told = [", ".join(f"{name} {value}" for name, value in found["machine"].items())]
    for name, table in found.get("tables", {}).get("tables", {}).items():
        heads = (
            f"| {name}: {table['rows']:,} rows | {METRICS[table['task']]} | lowest to highest | CPU s a fit |"
        )
        told += ["", heads, "| --- | --- | --- | --- |"]
        told += [line(model, runs, "metric") for model, runs in table["runs"].items() if runs]
    for name in ("retrieval", "next"):
        if part := found.get(name):
            heads = f"| MovieLens-100k, {name} | NDCG@{CUTOFF} | lowest to highest | CPU s |"
            told += ["", heads, "| --- | --- | --- | --- |"]
            told += [line(model, runs, "ndcg") for model, runs in part["runs"].items()]
            told += [
                f"| {other}, published | {value} | | |" for other, value in part.get("published", {}).items()
            ]
    for name, runs in found.get("kge", {}).get("runs", {}).items():
        heads = f"| {name}, {runs[0]['epochs']} epochs | test MRR, filtered | lowest to highest | CPU s |"
        told += ["", heads, "| --- | --- | --- | --- |", line("kge, defaults", runs, "mrr")]
        told += [f"| {other}, published (LibKGE) | {mrr:.3f} | | |" for other, mrr in PUBLISHED[name].items()]
    if part := found.get("text"):
        heads = f"tokens per CPU second | speed-up of text, by turn | perplexity after {part['steps']} steps"
        told += ["", f"| LSTM | {heads} |", "| --- | --- | --- | --- |"]
        for name, speeds in part["tokens_per_cpu_s"].items():
            # Turn by turn, because both run one after the other under the same load of the machine.
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
    """Return facts about this machine and its packages that the results depend on."""
    versions = {name: installed(name) for name in ("torch", "scikit-learn")}
    python = {"python": platform.python_version(), "threads": torch.get_num_threads()}
    return (
        {"date": str(date.today()), "CPU": f"{os.cpu_count()} cores {platform.machine()}"} | versions | python
    )


def main(argv: list[str] | None = None) -> Page:
    """Measure the parts that were asked for; print, write and return the results."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument(
        "--data", type=Path, help="folder with adult/, ml-100k/, wn18rr/, fb15k237/ and wikitext2/"
    )
    parser.add_argument("--only", choices=PARTS, help="measure only this part")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, except for text (5)")
    parser.add_argument("--first-seed", type=int, default=0, help="first seed (0)")
    parser.add_argument("--table", type=Path, help="CSV file to compare on, instead of the usual tables")
    parser.add_argument("--label", default="14", help="label column of --table: its name or position (14)")
    parser.add_argument("--epochs", type=int, help="epochs of kge, instead of its default")
    parser.add_argument("--turns", type=int, default=5, help="turns of text (5)")
    parser.add_argument("--out", type=Path, default=Path("quality.json"), help="JSON file to write")
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
            retrieval(data_path(given.data, "ml-100k/u.data"), seeds, keeper("retrieval"))
        if "next" in parts:
            in_time(data_path(given.data, "ml-100k/u.data"), seeds, keeper("next"))
        if "kge" in parts:
            kge(given.data, seeds, given.epochs, keeper("kge"))
        if "text" in parts:
            text(
                data_path(given.data, "wikitext2/valid.txt") if given.data else None,
                given.turns,
                keeper("text"),
            )
    print("\n".join(lines(found)))
    tell(f"wrote {given.out}")
    return found


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"quality: {error}")
