"""Whole numbers that are ids get rows of their own; counts, prices, ages and years stay numbers."""

from pathlib import Path

import numpy as np
import pytest

from dphybrid.data.table.whole import trial
from tests.preparing import table_of

Array = np.ndarray
_ROWS = 6000


def _zipf_ids(random: np.random.Generator) -> Array:
    """Ids whose frequency is not related to their number."""
    return random.permutation(1000)[(random.zipf(1.3, 20 * _ROWS) - 1).astype(np.int64) % 1000][:_ROWS]


def _noisy(score: Array, random: np.random.Generator) -> list[int]:
    score = (score - score.mean()) / score.std()
    return (score + random.normal(size=len(score)) > 0).astype(int).tolist()


@pytest.mark.parametrize("name", ["a", "column", "x7", "count"])
@pytest.mark.parametrize("offset", [0, 10**9, -1])
def test_ids_under_any_name_get_rows(name: str, offset: int, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    ids = _zipf_ids(random)
    liked = _noisy(random.normal(size=1000)[ids], random)
    prepared = table_of(tmp_path, {name: (ids * 7 + offset).tolist(), "y": liked})
    (column,) = prepared.info["columns"]
    assert column["role"] == "categorical"
    assert column["num_ids"] > 300
    assert f"check {name}, categorical: many whole numbers that are ids: single values" in prepared.describe()
    assert f"--data.numeric {name} reads amounts" in prepared.describe()
    as_number = table_of(tmp_path, {name: ids.tolist(), "y": liked}, numeric=name)
    assert [c["role"] for c in as_number.info["columns"]] == ["buckets"]


@pytest.mark.parametrize("label", ["number", "classes"])
@pytest.mark.parametrize("values", [300, 60])
def test_ids_are_found_by_any_kind_of_label(label: str, values: int, tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    ids, effect = random.integers(0, values, _ROWS), random.normal(size=values)
    score = effect[ids] + random.normal(size=_ROWS)
    y = (
        np.round(score, 3)
        if label == "number"
        else np.array(["low", "mid", "high"])[np.digitize(score, [-1, 1])]
    )
    prepared = table_of(tmp_path, {"a": ids.tolist(), "y": y.tolist()})
    assert [c["role"] for c in prepared.info["columns"]] == ["categorical"]


def _amounts() -> dict[str, Array]:
    random = np.random.default_rng(3)
    income = np.exp(random.normal(10, 1, _ROWS))
    return {
        "prices": np.round(income / 100).astype(int) * 100 + 99,
        "ages": random.integers(18, 95, _ROWS) * 12,  # in months: more than 128 values
        "years of age": random.integers(18, 95, _ROWS),  # more values than buckets, fewer than 128
        "counts": random.poisson(np.exp(random.normal(3, 1.2, _ROWS))),
        "year": random.integers(1700, 2020, _ROWS),
        "seconds": 1_500_000_000 + random.integers(0, 10**8, _ROWS),
    }


def test_a_count_that_is_mostly_zero_stays_a_number(tmp_path: Path) -> None:
    random = np.random.default_rng(6)
    counts = random.poisson(40, _ROWS) * (random.random(_ROWS) < 0.1)
    prepared = table_of(tmp_path, {"n": counts.tolist(), "y": _noisy(0.05 * counts, random)})
    assert [c["role"] for c in prepared.info["columns"]] == ["buckets"]


def test_a_count_that_says_little_stays_a_number_under_an_ids_name(tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    contacts, y = random.geometric(0.3, _ROWS).clip(max=60), random.integers(0, 2, _ROWS).tolist()
    contacts[:40] = np.arange(1, 41)  # more than 32 values
    ids = random.permutation(60)[contacts - 1]
    for numbers, role in ((contacts, "buckets"), (ids, "categorical")):
        (column,) = table_of(tmp_path, {"campaign": numbers.tolist(), "y": y}).info["columns"]
        assert column["role"] == role


@pytest.mark.parametrize("name", _amounts())
def test_amounts_stay_numbers_and_are_named(name: str, tmp_path: Path) -> None:
    numbers, random = _amounts()[name], np.random.default_rng(4)
    wave = np.sin(3 * np.argsort(np.argsort(numbers)) / len(numbers))  # not monotonic, but smooth
    prepared = table_of(tmp_path, {name: numbers.tolist(), "y": _noisy(wave, random)})
    assert [c["role"] for c in prepared.info["columns"]] == ["buckets"]
    if len(np.unique(numbers)) > 128:
        assert f"many whole numbers read as amounts: {name}; if some are ids" in prepared.describe()


def test_the_name_decides_where_the_label_does_not(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    once = random.permutation(10 * _ROWS)[:_ROWS]  # hardly any value repeats
    y = random.integers(0, 2, _ROWS).tolist()
    columns = {name: once.tolist() for name in ("user", "visits", "C14", "item:token")} | {"y": y}
    roles = {c["name"]: c["role"] for c in table_of(tmp_path, columns).info["columns"]}
    assert roles == {
        "visits": "buckets",
        "user": "categorical",
        "C14": "categorical",
        "item:token": "categorical",
    }
    # Amounts under a thing's name: the neighbourhood says more.
    spend = np.round(np.exp(random.normal(8, 1, _ROWS))).astype(int)
    prepared = table_of(tmp_path, {"ad": spend.tolist(), "y": _noisy(np.log(spend), random)})
    assert [c["role"] for c in prepared.info["columns"]] == ["buckets"]


def test_means_of_the_own_half_are_not_used() -> None:
    """Without any relation, neither side explains anything."""
    random = np.random.default_rng(6)
    found = trial(random.integers(0, 500, _ROWS), random.integers(0, 2, (_ROWS, 1)).astype(float))
    assert found is not None
    assert found.says == ""
    assert abs(found.values) < 0.005
    assert abs(found.neighbourhoods) < 0.005
    assert trial(np.arange(_ROWS), np.ones((_ROWS, 1))) is None  # all labels are equal
