"""Next items: compares recipe retrieval with EASE and the most popular items, and its networks with each
other.

Letters: B rows, U users, I items, K items of a list.
"""

import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl

import dphybrid
from examples.quality.common import Keep, Page, taking, tell, train

CUTOFF, EASE_PENALTY = 10, 300.0
NETWORKS = ("bag", "transformer")
PUBLISHED_NEXT = {"GRU4Rec": 0.0650, "SASRec": 0.0594, "FEARec": 0.0622}
"""NDCG@10 of RecBole's networks where each user's last rating is to be found among all items and the one
before is for validation: github.com/kanishkaRandunu/pswrec2k26, results/ml100k_results.md. Users and items
with less than five ratings are left out there."""


def retrieval(file: Path, seeds: range, keep: Keep) -> None:
    """For each seed, train all `RECOMMENDERS` on three quarters of each user's ratings, and evaluate how well
    they find the others among all items that the user has not met in training."""
    rows = pl.read_csv(file, separator="\t", has_header=False)
    pairs = rows.select(pl.nth(0).alias("user"), pl.nth(1).alias("item")).cast(pl.String)
    found: dict[str, list[Page]] = {name: [] for name in RECOMMENDERS}
    for done, seed in enumerate(seeds, start=1):
        drawn = pairs.sample(fraction=1.0, shuffle=True, seed=seed)
        in_train = pl.int_range(pl.len()).over("user") < 0.75 * pl.len().over("user")
        known, wanted = drawn.filter(in_train), drawn.filter(~in_train)
        for name, recommend in RECOMMENDERS.items():
            times: Page = {}
            with taking(times):
                lists = recommend(known, seed)
            found[name].append({"ndcg": ndcg(lists, wanted), **times})
            tell(f"retrieval, seed {seed}: {name} {found[name][-1]['ndcg']:.4f}")
        keep({"seeds": list(seeds)[:done], "runs": found})


def in_time(file: Path, seeds: range, keep: Keep) -> None:
    """For each seed, train each of `NETWORKS` on all but each user's last rating, of which the last one is
    for validation, and look for the last one among all items that the user has not met."""
    rows = pl.read_csv(file, separator="\t", has_header=False, new_columns=["user", "item", "rating", "time"])
    rows = rows.with_columns(pl.col("user", "item").cast(pl.String)).sort("time", maintain_order=True)
    is_last = pl.int_range(pl.len()).over("user") == pl.len().over("user") - 1
    known, wanted = rows.filter(~is_last), rows.filter(is_last)
    found: dict[str, list[Page]] = {name: [] for name in NETWORKS}
    for done, seed in enumerate(seeds, start=1):
        for name in NETWORKS:
            times: Page = {}
            with taking(times):
                lists = by_recipe(known, seed, kind=name, time="time", split="last")
            found[name].append({"ndcg": ndcg(lists, wanted), "hit": hits(lists, wanted), **times})
            tell(f"next item, seed {seed}: {name} {found[name][-1]['ndcg']:.4f}")
        keep({"seeds": list(seeds)[:done], "runs": found, "published": PUBLISHED_NEXT})


def hits(lists: dict[str, list[str]], wanted: pl.DataFrame) -> float:
    """Return the share of the rows in `wanted` whose item is in the user's list."""
    return statistics.mean(
        item in lists.get(user, ()) for user, item in wanted.select("user", "item").iter_rows()
    )


def ndcg(lists: dict[str, list[str]], wanted: pl.DataFrame) -> float:
    """Return the mean NDCG at `CUTOFF` of the users' lists, with binary gains."""
    gains = 1 / np.log2(np.arange(2, CUTOFF + 2))
    users = wanted.group_by("user").agg("item").iter_rows()
    return statistics.mean(
        float(sum(gain for gain, item in zip(gains, lists.get(user, ()), strict=False) if item in set(items)))
        / float(gains[: len(items)].sum())
        for user, items in users
    )


def by_recipe(known: pl.DataFrame, seed: int, **values: str) -> dict[str, list[str]]:
    run = train(known, "retrieval", seed=seed, **values)
    found = dphybrid.load(str(run.folder), devices="cpu").recommend(
        known["user"].unique().to_list(), k=CUTOFF
    )
    return dict(found.sort("rank").group_by("user", maintain_order=True).agg("item").iter_rows())


def by_scores(known: pl.DataFrame, scores_of: Callable[[np.ndarray], np.ndarray]) -> dict[str, list[str]]:
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


def popular(known: pl.DataFrame, seed: int) -> dict[str, list[str]]:
    return by_scores(known, lambda met_UI: met_UI.sum(0))


def ease(known: pl.DataFrame, seed: int) -> dict[str, list[str]]:
    """Recommend by EASE (Steck 2019, "Embarrassingly Shallow Autoencoders for Sparse Data", equation 8): the
    linear map from items to items that best reconstructs the interactions, with a diagonal of 0 so that no
    item predicts itself. One matrix inverse gives it."""

    def scores(met_UI: np.ndarray) -> np.ndarray:
        inverse_II = np.linalg.inv(met_UI.T @ met_UI + EASE_PENALTY * np.eye(met_UI.shape[1]))
        map_II = -inverse_II / np.diag(inverse_II)
        np.fill_diagonal(map_II, 0)
        return np.asarray(met_UI @ map_II)

    return by_scores(known, scores)


RECOMMENDERS = {"retrieval, defaults": by_recipe, "EASE": ease, "most popular": popular}
