"""Prepared data: made once, the same everywhere, and every unusable input told with its place and remedy."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dphybrid.data import batches, open_prepared
from dphybrid.recipes import find_recipe
from dphybrid.recipes.text import TextDataConfig
from tests.conftest import SHARED
from tests.preparing import from_file, prepare, table_of
from tests.refusing import refused_with

CLICKS = "age,city,job,clicked\n" + "\n".join(
    f"{20 + i % 40},{'abc'[i % 3]},{'x' if i % 2 else '?'},{'yes' if i % 5 == 0 else 'no'}"
    for i in range(200)
)


ctr = partial(table_of, label="clicked", valid_fraction=0.2)


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("prepared/*"))


@pytest.mark.parametrize("recipe", ["toy", "text"])
def test_the_second_call_reuses_the_first_ones_work(recipe: str, tmp_path: Path) -> None:
    first = prepare(recipe, None, tmp_path, 0)
    second = prepare(recipe, None, tmp_path, 0)
    assert (first.reused, second.reused) == (False, True)
    assert first.manifest == second.manifest == open_prepared(first.path).manifest
    assert prepare(recipe, None, tmp_path, 1).path != first.path
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_the_same_bytes_give_the_same_digest_wherever_they_lie(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = ctr(tmp_path / "one", CLICKS), ctr(tmp_path / "two", CLICKS)
    assert one.digest == two.digest
    assert one.manifest.arrays == two.manifest.arrays
    assert ctr(tmp_path / "one", CLICKS + "\n30,a,x,yes").digest != one.digest


@pytest.mark.parametrize(
    ("text", "values", "words"),
    [
        (CLICKS, {"label": "clickd"}, ["data.label='clickd'", "did you mean 'clicked'"]),
        (CLICKS, {"numeric": ("city",)}, ["data.numeric", "'city'", "not a number", "data.categorical"]),
        (CLICKS, {"numeric": ("aeg",)}, ["data.numeric='aeg'", "did you mean 'age'"]),
        (CLICKS, {"numeric": ("age",), "ignore": ("age",)}, ["'age'", "already named as numeric"]),
        (CLICKS, {"ignore": ("age", "city", "job")}, ["no column is left"]),
        (CLICKS.replace("\n25", "\n25,1,2"), {}, ["cannot be read", "line 7: Expected Number of Columns: 4"]),
        ("a,clicked\n1,1\n", {"header": "yes"}, ["has 1 row;"]),
    ],
)
def test_unusable_tables_are_told_and_leave_nothing(
    tmp_path: Path, text: str, values: dict[str, object], words: list[str]
) -> None:
    with refused_with(words):
        ctr(tmp_path, text, **values)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("recipe", "make", "words"),
    [
        ("ctr", lambda p: None, ["no such file"]),
        ("ctr", lambda p: p.mkdir(), ["is a folder"]),
        ("text", lambda p: None, ["no such file"]),
        ("text", lambda p: p.mkdir(), ["holds neither text", ".txt"]),
        ("text", lambda p: p.write_text(""), ["is empty"]),
        ("text", lambda p: p.write_text("one line of words"), ["found 1 document"]),
        ("text", lambda p: p.write_text("few words\n\nand more"), ["fewer than data.window=64"]),
        ("text", lambda p: p.write_bytes(b"\xff\xfe\x00"), ["not UTF-16 text (line 1)"]),
    ],
)
def test_unusable_paths_are_told(tmp_path: Path, recipe: str, make: object, words: list[str]) -> None:
    path = tmp_path / "source.csv"
    make(path)  # type: ignore[operator]
    label = {"label": "clicked"} if recipe == "ctr" else {}
    with refused_with([str(path), *words]):
        prepare(recipe, find_recipe(recipe).data(path=str(path), **label), tmp_path / "prepared", 0)
    assert leftovers(tmp_path) == []


def test_text_windows_cover_every_token_once(tmp_path: Path) -> None:
    prepared = prepare("text", TextDataConfig(window=50), tmp_path, 0)
    tokens = prepared.arrays["train_tokens"]
    for epoch in (0, 3):
        drawn = batches(prepared.dataset("train"), 64, seed=0, epoch=epoch, shuffle=True)
        seen = np.concatenate([batch["targets_BT"].numpy().ravel() for batch in drawn])
        counts = np.bincount(seen[seen >= 0], minlength=prepared.info["num_words"])
        expected = np.bincount(tokens, minlength=prepared.info["num_words"])
        assert np.abs(counts - expected).sum() == 1  # one token of the ring is nobody's target
    first = next(batches(prepared.dataset("valid"), 2, seed=0, epoch=0, shuffle=False))
    assert first["ids_BT"][0, 1:].tolist() == first["targets_BT"][0, :-1].tolist()


@pytest.mark.skipif(not SHARED.is_dir(), reason="the data set is not here")
def test_a_sample_of_criteo_has_its_columns(tmp_path: Path) -> None:
    criteo = from_file(tmp_path / "x", path=str(SHARED / "data/criteo/criteo_sample.csv"), label="label")
    assert [c["role"] for c in criteo.manifest.facts["columns"]] == ["numeric"] * 13 + ["categorical"] * 26


def test_equal_rows_are_counted_when_a_base_is_extended(tmp_path: Path) -> None:
    """With few columns, most new rows equal known ones, and are new all the same."""

    def rows(num: int, seed: int) -> list[str]:
        random = np.random.default_rng(seed)
        return [f"p{random.integers(4)},r{random.integers(4)},{random.integers(2)}" for _ in range(num)]

    first, later = rows(400, 0), rows(1000, 1)
    (tmp_path / "1.csv").write_text("\n".join(["plan,region,y", *first]))
    base = from_file(tmp_path / "1.csv")
    (tmp_path / "2.csv").write_text("\n".join(["plan,region,y", *first, *later]))
    extended = from_file(tmp_path / "2.csv", base=str(base.path))
    assert len(extended.arrays["new_rows"]) == 1000
    assert len(extended.arrays["train_rows"]) + len(extended.arrays["valid_rows"]) == 1400
    assert len(extended.arrays["valid_rows"]) == pytest.approx(280, abs=40)
