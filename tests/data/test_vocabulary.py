"""Vocabularies that a reader fits: rows of values, of unknown ones and of none, and their file."""

from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest

from dphybrid.data import Vocabulary, read_vocabularies
from dphybrid.data.vocabulary import write_vocabularies
from tests.refusing import refused


def test_frequent_values_come_first_and_rare_ones_share_rows() -> None:
    words = Vocabulary.fit(["b", "a", "b", None, "c", "a", "b", ""], least=2, unknown_rows=3)
    assert words.values == ["b", "a"]
    assert len(words) == 1 + 3 + 2
    ids = words.ids([["b", "a"], [None, ""], ["c", "never met"]])
    assert ids.shape == (3, 2)
    assert ids.dtype == np.int64
    assert ids[:2].tolist() == [[4, 5], [0, 0]]
    assert set(ids[2].tolist()) <= {1, 2, 3}
    assert [words.value(int(row)) for row in (4, 5, 0, 2)] == ["b", "a", None, None]


def test_numbers_and_their_texts_are_the_same_value() -> None:
    ids = Vocabulary.fit(np.array([30, 20, 30]))
    assert ids.ids(pl.Series(["30", "20", "7"])).tolist() == [2, 3, 1]
    assert ids.ids([30, 20]).tolist() == [2, 3]


@pytest.mark.parametrize("nothing", [None, "", float("nan"), np.float64("nan"), pd.NA, pd.NaT])
def test_what_pandas_takes_for_no_value_is_none(nothing: object) -> None:
    words = Vocabulary.fit(["a", nothing, "b", "a"])
    assert words.values == ["a", "b"]
    assert words.ids(np.array(["a", nothing], object)).tolist() == [2, 0]


def test_without_values_all_are_hashed_alike_in_each_process() -> None:
    hashed = Vocabulary([], unknown_rows=1000)
    rows = hashed.ids([f"user {n}" for n in range(5000)])
    assert hashed.ids("123456789") == 1 + 0xCBF43926 % 1000  # the check value of CRC-32, which has no seed
    assert rows.min() >= 1
    assert rows.max() < len(hashed) == 1001
    assert len(np.unique(rows)) > 900


def test_its_file_gives_the_same_back(tmp_path: Path) -> None:
    words = {"word": Vocabulary.fit(["é", "line\nbreak", '"'], unknown_rows=2), "none": Vocabulary()}
    write_vocabularies(words, tmp_path)
    found = read_vocabularies(tmp_path)
    assert {name: one.page() for name, one in found.items()} == {n: one.page() for n, one in words.items()}
    assert read_vocabularies(tmp_path / "nowhere") == {}


def test_unknown_values_need_a_row() -> None:
    with refused("unknown_rows=0; reserve at least 1"):
        Vocabulary(["a"], unknown_rows=0)
