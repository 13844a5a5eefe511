"""Tables: compares recipe ctr with scikit-learn's boosted trees and a linear model.

Letters: B rows.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import dphybrid
from dphybrid.util.errors import UserError
from dphybrid.util.files import given_path
from examples.quality.common import Keep, Page, data_path, installed, taking, tell, train

METRICS = {"binary": "AUC", "multiclass": "accuracy", "regression": "RMSE"}
SHIPPED = {"breast_cancer": "binary", "wine": "multiclass", "diabetes": "regression"}
"""Tables that ship with scikit-learn, and the kinds of their labels."""
FOLDS = 5
MOST_CODES = 254
"""Maximum number of values that a column keeps for scikit-learn's trees, which take at most 255; rarer values
share a code."""


def tables(data: Path | None, table: Path | None, label: str, seeds: range, keep: Keep) -> None:
    """For each table and seed, train ctr and scikit-learn's models on the same rows."""
    if not installed("scikit-learn"):
        raise UserError(
            "scikit-learn is not installed, and this part compares with it: python -m pip install "
            "scikit-learn, or --only text"
        )
    given = {} if table or not data else {"adult": data_path(data, "adult/adult.data")}
    files = {table.stem: given_path(str(table), "--table")} if table else given
    found: dict[str, Page] = {}
    for name in [*files, *(() if table else SHIPPED)]:
        frame, task = labelled(files[name], label) if name in files else shipped(name)
        found[name] = {"rows": len(frame), "task": task, "runs": {model: [] for model in MODELS}}
        for seed in seeds:
            # FOLDS consecutive seeds share one permutation, so that their folds do not overlap.
            fold_B = np.random.default_rng(seed // FOLDS).permutation(len(frame)) % FOLDS == seed % FOLDS
            for model, fit in MODELS.items():
                times: Page = {}
                with taking(times):
                    outputs_B = fit(frame[~fold_B], frame.loc[fold_B].drop(columns="label"), task, seed)
                run = {"metric": metric(task, frame["label"][fold_B].to_numpy(), outputs_B), **times}
                found[name]["runs"][model].append(run)
                tell(f"{name}, seed {seed}: {model} {run['metric']:.4f}, {run['cpu_s']:.1f} s of CPU")
            keep({"seeds": list(seeds), "tables": found})


def labelled(file: Path, label: str) -> tuple[pd.DataFrame, str]:
    """Return the rows of a CSV file with the label as numbers in the column "label", and the label's kind.
    label: a name, or a position in a file without a header."""
    frame = pd.read_csv(
        file,
        header=None if label.isdigit() else 0,
        skipinitialspace=True,
        na_values="?",
        skip_blank_lines=True,
    )
    frame.columns = [f"column {name}" if label.isdigit() else str(name) for name in frame.columns]
    name = f"column {label}" if label.isdigit() else label
    if name not in frame:
        raise UserError(f"--label {label}: {file} has no such column")
    frame = frame.rename(columns={name: "label"}).dropna(subset="label")
    # Few different numbers are classes.
    numbers = frame["label"].dtype.kind in "fi" and frame["label"].nunique() > 20
    if not numbers:
        frame["label"] = np.unique(frame["label"].astype(str), return_inverse=True)[1]
    task = "regression" if numbers else "binary" if frame["label"].nunique() == 2 else "multiclass"
    return frame.reset_index(drop=True), task


def shipped(name: str) -> tuple[pd.DataFrame, str]:
    """Return a table that ships with scikit-learn, in the form of `labelled`."""
    from sklearn import datasets

    frame = getattr(datasets, f"load_{name}")(as_frame=True).frame
    return frame.rename(columns={"target": "label"}), SHIPPED[name]


def metric(task: str, labels_B: np.ndarray, outputs_B: np.ndarray) -> float:
    from sklearn.metrics import roc_auc_score

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
    """Fit scikit-learn's boosted trees with their default values."""
    from sklearn.compose import make_column_transformer
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.preprocessing import OrdinalEncoder

    texts = [name for name in asked if asked[name].dtype.kind not in "fiu"]
    codes = OrdinalEncoder(
        handle_unknown="use_encoded_value", unknown_value=np.nan, max_categories=MOST_CODES
    )
    columns = make_column_transformer((codes, texts), remainder="passthrough")
    kind = HistGradientBoostingRegressor if task == "regression" else HistGradientBoostingClassifier
    model = kind(categorical_features=range(len(texts)), random_state=seed)
    return fitted(columns, model, rows, asked, task)


def linear(rows: pd.DataFrame, asked: pd.DataFrame, task: str, seed: int) -> np.ndarray:
    """Fit ridge or logistic regression on standardized numbers and one-hot categories."""
    from sklearn.compose import make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    texts = [name for name in asked if asked[name].dtype.kind not in "fiu"]
    numbers = make_pipeline(SimpleImputer(), StandardScaler())
    ones = OneHotEncoder(handle_unknown="ignore")
    columns = make_column_transformer((ones, texts), remainder=numbers)
    return fitted(
        columns, Ridge() if task == "regression" else LogisticRegression(max_iter=500), rows, asked, task
    )


def fitted(columns: Any, model: Any, rows: pd.DataFrame, asked: pd.DataFrame, task: str) -> np.ndarray:
    from sklearn.pipeline import make_pipeline

    both = make_pipeline(columns, model).fit(rows.drop(columns="label"), rows["label"])
    return np.asarray(both.predict_proba(asked)[:, 1] if task == "binary" else both.predict(asked))


MODELS = {"ctr, defaults": ctr, "HistGradientBoosting": trees, "linear model": linear}
