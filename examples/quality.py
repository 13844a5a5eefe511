"""Compares the quality of the models with scikit-learn's models and simple recommenders; prints tables and
writes JSON.

    python -m examples.quality --data FOLDER [--only tables] [--seeds 2] [--out quality.json]

FOLDER holds the data: adult/adult.data (UCI Adult) and ml-100k/u.data (MovieLens). Everything runs on the
CPU, in a temporary data folder; nothing is recorded in MLflow. The JSON file is rewritten after each model,
so that an interrupted script leaves its finished results.

- tables: recipe ctr, scikit-learn's boosted trees and a linear model, on Adult and tables that ship with
  scikit-learn, or on `--table FILE --label NAME`. A seed is one of five folds, on which the models are
  evaluated; they are trained on the others.
- retrieval: recipe retrieval, EASE and the most popular items. Three quarters of each user's ratings are for
  training, the others are to be found.
- next: the networks of recipe retrieval, in time: each user's last rating is to be found.

Letters: B rows, U users, I items, K items of a list.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import torch
from sklearn import datasets
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

import dphybrid
from dphybrid.util.errors import UserError
from dphybrid.util.files import given_path, write_json

PARTS = ("tables", "retrieval", "next")
SHIPPED = {"breast_cancer": "binary", "wine": "multiclass", "diabetes": "regression"}
"""Tables that ship with scikit-learn, and the kinds of their labels."""
METRICS = {"binary": "AUC", "multiclass": "accuracy", "regression": "RMSE"}
FOLDS, CUTOFF, EASE_PENALTY = 5, 10, 300.0
Lists = Mapping[str, list[str]]


class Results:
    """The results by group and model, written to a JSON file after each."""

    def __init__(self, out: Path) -> None:
        machine = {"date": str(date.today()), "CPU": f"{os.cpu_count()} cores {platform.machine()}"}
        machine |= {"torch": torch.__version__, "threads": str(torch.get_num_threads())}
        self.out = out
        self.page: dict[str, Any] = {"machine": machine, "groups": {}}

    @contextmanager
    def measuring(self, group: str, metric: str, model: str, seed: int) -> Iterator[dict[str, Any]]:
        """Yield a dict that the block gives its `value`; keep it with the CPU time of all threads."""
        start, run = time.process_time(), dict[str, Any](seed=seed)
        yield run
        run["cpu_s"] = time.process_time() - start
        of_group = self.page["groups"].setdefault(group, {"metric": metric, "runs": {}})
        of_group["runs"].setdefault(model, []).append(run)
        print(f"{group}, seed {seed}: {model} {run['value']:.4f}", file=sys.stderr, flush=True)
        write_json(self.out, self.page)

    def lines(self) -> Iterator[str]:
        """Yield the results as Markdown tables."""
        for group, found in self.page["groups"].items():
            yield from ("", f"| {group} | {found['metric']} | lowest to highest | CPU s |")
            yield "| --- | --- | --- | --- |"
            for model, runs in found["runs"].items():
                values, cpu_s = [run["value"] for run in runs], [run["cpu_s"] for run in runs]
                between = f"{min(values):.4g} to {max(values):.4g}"
                mean = f"{statistics.mean(values):.4g}"
                yield f"| {model} | {mean} | {between} | {statistics.median(cpu_s):.1f} |"


def train(data: Any, recipe: str, **values: Any) -> Any:
    return dphybrid.train(data, recipe=recipe, devices="cpu", tracking="none", quiet=True, **values)


def tables(files: Mapping[str, Path], label: str, seeds: range, results: Results) -> None:
    """For each table and seed, train ctr and scikit-learn's models on the same rows."""
    for name in [*files, *(() if "table" in files else SHIPPED)]:
        frame, task = labelled(files[name], label) if name in files else shipped(name)
        for seed in seeds:
            # FOLDS consecutive seeds share one permutation, so that their folds do not overlap.
            fold_B = np.random.default_rng(seed // FOLDS).permutation(len(frame)) % FOLDS == seed % FOLDS
            rows, asked = frame[~fold_B], frame.loc[fold_B].drop(columns="label")
            labels_B = frame["label"][fold_B].to_numpy()
            for model, fit in MODELS.items():
                with results.measuring(f"{name}: {len(frame):,} rows", METRICS[task], model, seed) as run:
                    run["value"] = metric(task, labels_B, fit(rows, asked, task, seed))


def labelled(file: Path, label: str) -> tuple[pd.DataFrame, str]:
    """Return the rows of a CSV file with the label as numbers in the column "label", and the label's kind.
    label: a name, or a position in a file without a header."""
    at = f"column {label}" if label.isdigit() else label
    frame = pd.read_csv(file, header=None if label.isdigit() else 0, skipinitialspace=True, na_values="?")
    frame.columns = [f"column {name}" if label.isdigit() else str(name) for name in frame.columns]
    if at not in frame:
        raise UserError(f"--label {label}: {file} has no such column")
    frame = frame.rename(columns={at: "label"}).dropna(subset="label")
    # Few different numbers are classes.
    if frame["label"].dtype.kind in "fi" and frame["label"].nunique() > 20:
        return frame.reset_index(drop=True), "regression"
    frame["label"] = np.unique(frame["label"].astype(str), return_inverse=True)[1]
    return frame.reset_index(drop=True), "binary" if frame["label"].nunique() == 2 else "multiclass"


def shipped(name: str) -> tuple[pd.DataFrame, str]:
    frame = getattr(datasets, f"load_{name}")(as_frame=True).frame
    return frame.rename(columns={"target": "label"}), SHIPPED[name]


def metric(task: str, labels_B: np.ndarray, outputs_B: np.ndarray) -> float:
    if task == "regression":
        return float(np.sqrt(np.square(outputs_B - labels_B).mean()))
    if task == "multiclass":
        return float((outputs_B == labels_B).mean())
    return float(roc_auc_score(labels_B, outputs_B))


def ctr(rows: pd.DataFrame, asked: pd.DataFrame, task: str, seed: int) -> np.ndarray:
    run = train(rows, "ctr", label="label", task=task, seed=seed)
    outputs = np.asarray(dphybrid.load(str(run.folder), devices="cpu").predict(asked))
    return outputs.argmax(1) if task == "multiclass" else outputs


def trees(rows: pd.DataFrame, asked: pd.DataFrame, task: str, seed: int) -> np.ndarray:
    """Fit boosted trees with their default values."""
    texts = [name for name in asked if asked[name].dtype.kind not in "fiu"]
    # The trees take at most 255 values of a column; rarer ones share a code.
    codes = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=np.nan, max_categories=254)
    kind = HistGradientBoostingRegressor if task == "regression" else HistGradientBoostingClassifier
    model = kind(categorical_features=range(len(texts)), random_state=seed)
    return fitted(make_column_transformer((codes, texts), remainder="passthrough"), model, rows, asked, task)


def linear(rows: pd.DataFrame, asked: pd.DataFrame, task: str, seed: int) -> np.ndarray:
    """Fit ridge or logistic regression on standardized numbers and one-hot categories."""
    texts = [name for name in asked if asked[name].dtype.kind not in "fiu"]
    numbers = make_pipeline(SimpleImputer(), StandardScaler())
    columns = make_column_transformer((OneHotEncoder(handle_unknown="ignore"), texts), remainder=numbers)
    model = Ridge() if task == "regression" else LogisticRegression(max_iter=500)
    return fitted(columns, model, rows, asked, task)


def fitted(columns: Any, model: Any, rows: pd.DataFrame, asked: pd.DataFrame, task: str) -> np.ndarray:
    both = make_pipeline(columns, model).fit(rows.drop(columns="label"), rows["label"])
    return np.asarray(both.predict_proba(asked)[:, 1] if task == "binary" else both.predict(asked))


MODELS = {"ctr, defaults": ctr, "HistGradientBoosting": trees, "linear model": linear}


def retrieval(file: Path, seeds: range, results: Results) -> None:
    """Train all `RECOMMENDERS` on three quarters of each user's ratings, drawn by the seed, and look for the
    others among all items that the user has not met in training."""
    pairs = ratings(file).select("user", "item")
    for seed in seeds:
        drawn = pairs.sample(fraction=1.0, shuffle=True, seed=seed)
        in_train = pl.int_range(pl.len()).over("user") < 0.75 * pl.len().over("user")
        known, wanted = drawn.filter(in_train), drawn.filter(~in_train)
        for name, recommend in RECOMMENDERS.items():
            with results.measuring("MovieLens-100k", f"NDCG@{CUTOFF}", name, seed) as run:
                run["value"] = ndcg(recommend(known, seed), wanted)


def in_time(file: Path, seeds: range, results: Results) -> None:
    """Train each network on all but each user's last rating, of which the last one is for validation, and
    look for the last one among all items that the user has not met."""
    rows = ratings(file).sort("time", maintain_order=True)
    is_last = pl.int_range(pl.len()).over("user") == pl.len().over("user") - 1
    known, wanted = rows.filter(~is_last), rows.filter(is_last)
    for seed in seeds:
        for kind in ("bag", "transformer"):
            with results.measuring("MovieLens-100k, next item", f"NDCG@{CUTOFF}", kind, seed) as run:
                lists = by_recipe(known, seed, kind=kind, time="time", split="last")
                run["value"] = ndcg(lists, wanted)


def ratings(file: Path) -> pl.DataFrame:
    names = ["user", "item", "rating", "time"]
    rows = pl.read_csv(file, separator="\t", has_header=False, new_columns=names)
    return rows.with_columns(pl.col("user", "item").cast(pl.String))


def ndcg(lists: Lists, wanted: pl.DataFrame) -> float:
    """Return the mean NDCG at `CUTOFF` of the users' lists, with binary gains."""
    gains = 1 / np.log2(np.arange(2, CUTOFF + 2))
    return statistics.mean(
        float(sum(gain for gain, item in zip(gains, lists.get(user, ()), strict=False) if item in set(items)))
        / float(gains[: len(items)].sum())
        for user, items in wanted.group_by("user").agg("item").iter_rows()
    )


def by_recipe(known: pl.DataFrame, seed: int, **values: str) -> Lists:
    run = train(known, "retrieval", seed=seed, **values)
    found = run.recommend(known["user"].unique().to_list(), k=CUTOFF).sort("rank")
    return dict(found.group_by("user", maintain_order=True).agg("item").iter_rows())


def by_scores(known: pl.DataFrame, scores_of: Callable[[np.ndarray], np.ndarray]) -> Lists:
    """Return for each user the items with the highest scores that the user has not met. scores_of: met_UI
    (ones and zeros) -> scores."""
    (users_B, users), (items_B, items) = (
        (known[name].rank("dense").to_numpy() - 1, known[name].unique().sort().to_list())
        for name in known.columns
    )
    met_UI = np.zeros((len(users), len(items)))
    met_UI[users_B, items_B] = 1
    scores_UI = np.where(met_UI > 0, -np.inf, scores_of(met_UI))
    best_UK = np.argsort(-scores_UI, axis=1, kind="stable")[:, :CUTOFF]
    return {user: [items[place] for place in row] for user, row in zip(users, best_UK, strict=True)}


def popular(known: pl.DataFrame, seed: int) -> Lists:
    return by_scores(known, lambda met_UI: met_UI.sum(0))


def ease(known: pl.DataFrame, seed: int) -> Lists:
    """Recommend by EASE (Steck 2019, "Embarrassingly Shallow Autoencoders for Sparse Data", equation 8): the
    linear map from items to items that best reconstructs the interactions, with a diagonal of 0 so that no
    item predicts itself. One matrix inverse gives it."""

    def scores(met_UI: np.ndarray) -> np.ndarray:
        inverse_II = np.linalg.inv(met_UI.T @ met_UI + EASE_PENALTY * np.eye(met_UI.shape[1]))
        map_II = -inverse_II / np.diag(inverse_II)
        np.fill_diagonal(map_II, 0)
        return np.asarray(met_UI @ map_II)

    return by_scores(known, scores)


RECOMMENDERS: dict[str, Callable[..., Lists]] = {
    "retrieval, defaults": by_recipe,
    "EASE": ease,
    "most popular": popular,
}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure the parts that were asked for; print, write and return the results."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--data", type=Path, help="folder with adult/ and ml-100k/")
    parser.add_argument("--only", choices=PARTS, help="measure only this part")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (5)")
    parser.add_argument("--first-seed", type=int, default=0, help="first seed (0)")
    parser.add_argument("--table", help="CSV file to compare on, instead of the usual tables")
    parser.add_argument("--label", default="14", help="label column of --table: its name or position (14)")
    parser.add_argument("--out", type=Path, default=Path("quality.json"), help="JSON file to write")
    given = parser.parse_args(argv)
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    results = Results(given.out)

    def file(name: str) -> Path:
        if given.data is None or not (given.data / name).exists():
            raise UserError(
                f"--data {given.data}: has no {name}; give the folder that holds it, or another --only"
            )
        return Path(given.data / name)

    with tempfile.TemporaryDirectory(prefix="dphybrid-quality-") as folder:
        os.environ["DPHYBRID_DATA_DIR"] = folder
        for part in [given.only] if given.only else PARTS:
            if part == "tables":
                adult = {"adult": file("adult/adult.data")} if given.data else {}
                files = {"table": given_path(given.table, "--table")} if given.table else adult
                tables(files, given.label, seeds, results)
            elif part == "retrieval":
                retrieval(file("ml-100k/u.data"), seeds, results)
            else:
                in_time(file("ml-100k/u.data"), seeds, results)
    print("\n".join(results.lines()))
    return results.page


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"quality: {error}")
