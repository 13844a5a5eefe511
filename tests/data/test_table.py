"""Roles, labels and encodings of tables."""

from datetime import date, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dphybrid.data import Prepared
from dphybrid.data.table.encoder import Encoder, old_rows
from dphybrid.data.table.kinds import Column, column_of, encoded
from dphybrid.data.table.numbers import fit_scale
from dphybrid.data.table.values import Form
from tests.preparing import TableDataConfig, from_file, table_of
from tests.refusing import refused

table = partial(table_of, header="yes", valid_fraction=0.25)


@pytest.mark.parametrize(
    ("name", "values", "role"),
    [
        ("age", [str(i % 50) for i in range(60)], "numeric"),
        ("level", [str(i % 3) for i in range(60)], "numeric"),
        ("price", ["1.5", "2", "-3e2"] * 20, "numeric"),
        ("user_id", [str(i * 31 % 37) for i in range(60)], "categorical"),
        ("itemId", ["4", "5"] * 30, "categorical"),
        ("ZIP", ["12345", "23456"] * 30, "categorical"),
        ("paid", ["1", "2"] * 30, "numeric"),
        ("valid", ["1", "2"] * 30, "numeric"),
        ("user_id", ["0.5", "1.5"] * 30, "numeric"),
        ("share", ["0.25", "-0.5"] * 30, "numeric"),
        ("hash", [str(2**60 + i % 7) for i in range(60)], "categorical"),
        ("", [str(i) for i in range(60)], "ignore"),
        ("n", [str(100 + i + (i > 30)) for i in range(60)], "ignore"),  # a row was left out
        ("year", [str(1950 + i) for i in range(60)], "numeric"),
        ("dose", [str(i) for i in range(60)], "numeric"),
        ("No", [str(i) for i in range(60)], "ignore"),
        ("day", [str(i * 7) for i in range(60)], "numeric"),
        ("word", ["a", "1"] * 30, "categorical"),
        ("nothing", [], "ignore"),
    ],
)
def test_roles(name: str, values: list[str], role: str) -> None:
    texts = pl.Series(name, values, dtype=pl.String)
    numbers = [texts.cast(dtype, strict=False) for dtype in (pl.Int64, pl.Float64)]
    cells = next((each for each in numbers if not each.null_count() and values), texts)
    assert column_of(name, cells, cells, {}, TableDataConfig(), Form())[0].role == role


WHOLE = [
    ("a", 128, "numeric"),
    ("a", 400, "whole"),
    ("user", 400, "whole"),
    *((name, 400, "categorical") for name in ("user_id", "zip code")),
    *((name, 40, "categorical") for name in ("house_no", "House No.", "Key", "itemNr", "id_client")),
    *((name, 40, "numeric") for name in ("paid", "piano")),
    ("a", 10**6, "numeric"),  # hardly any repeats
]


@pytest.mark.parametrize("offset", [0, -70])
@pytest.mark.parametrize(("name", "values", "role"), WHOLE)
def test_roles_of_whole_numbers(name: str, values: int, role: str, offset: int) -> None:
    numbers = np.random.default_rng(1).integers(0, values, 3000) * 7 + offset
    numbers[:128] = np.arange(128) % values * 7 + offset
    cells, data = pl.Series(numbers), TableDataConfig()
    assert column_of(name, cells, cells, {}, data, Form())[0].role == role
    for given in ("numeric", "categorical", "whole"):
        assert column_of(name, cells, cells, {"role": given}, data, Form())[0].role == given


@pytest.mark.parametrize(
    ("values", "classes"),
    [
        (["0", "1"], ["0", "1"]),
        (["10", "9"], ["9", "10"]),
        (["yes", "no"], ["no", "yes"]),
        (["True", "False"], ["false", "true"]),
        (["1.0", "0.0"], ["0", "1"]),
    ],
)
def test_which_label_is_one_does_not_depend_on_the_order_of_rows(
    tmp_path: Path, values: list[str], classes: list[str]
) -> None:
    for labels in (values * 10, values[::-1] * 10):
        prepared = table(tmp_path, {"n": [i * i for i in range(20)], "y": labels})
        assert prepared.info["label"]["classes"] == classes
        ones = [float(label.split(".")[0].lower() == classes[1]) for label in labels]
        assert prepared.arrays["labels_B"].tolist() == ones
        assert f"{classes[1]!r} is 1, {classes[0]!r} is 0" in prepared.describe()


def test_each_class_gives_its_share_of_the_validation_rows(tmp_path: Path) -> None:
    labels: list[object] = ["often"] * 80 + ["seldom"] * 8 + ["twice"] * 2 + ["once"]
    prepared = table(tmp_path, {"n": [i * i for i in range(91)], "y": labels})
    held = np.bincount(prepared.arrays["labels_B"][prepared.arrays["valid_rows"]].astype(int), minlength=4)
    counts = dict(zip(prepared.info["label"]["classes"], held.tolist(), strict=True))
    assert counts == {"often": 20, "once": 0, "seldom": 2, "twice": 1}


@pytest.mark.parametrize("values", [{}, {"split": "time", "split_column": "n"}])
def test_a_class_that_one_part_lacks_is_told(tmp_path: Path, values: dict[str, object]) -> None:
    columns: dict[str, list[object]] = {"n": [i * i for i in range(40)], "y": ["yes"] + ["no"] * 39}
    with refused(r"data\.label=y: all 10 rows to validate are 'no'; add rows of the other value"):
        table(tmp_path, columns, **values)


def test_names_that_mean_something_to_polars(tmp_path: Path) -> None:
    names = ["count", "*", "^x$", "value", "rows", "len", "literal", " n ", "A", "a", "b|c"]
    columns: dict[str, list[object]] = {name: [f"{'abc'[i % 3]}" for i in range(40)] for name in names}
    prepared = table(
        tmp_path, columns | {"y": [i % 2 for i in range(40)]}, categorical=("*", "count"), ignore=("^x$",)
    )
    assert [c["name"] for c in prepared.info["columns"]] == [name.strip() for name in names if name != "^x$"]
    assert prepared.info["num_ids"] == [5] * 10
    assert parquet(tmp_path, columns).info["num_ids"] == [5] * 11


def test_a_wrong_column_of_a_headerless_file_says_how_columns_are_named(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text("\n".join(f"{i * i},{i % 2}" for i in range(30)))
    with refused(r"data\.label='clicked'.*known: 0, 1; its first line was read as values: data\.header=yes"):
        from_file(file, label="clicked")


def parquet(folder: Path, columns: dict[str, list[object]], **values: object) -> Prepared:
    pl.DataFrame(columns | {"y": [i % 2 for i in range(40)]}).write_parquet(folder / "x.parquet")
    return from_file(folder / "x.parquet", **values)


def test_parquet_types_become_text_as_a_file_would_hold_them(tmp_path: Path) -> None:
    columns: dict[str, list[object]] = {
        "real": [1.5, None, float("nan"), 2.0] * 10,
        "word": ["a", "b", None, " c "] * 10,
        "day": [date(2024, 1, 1), date(2024, 1, 2)] * 20,
        "cost": [Decimal("1.50"), Decimal("2")] * 20,
        "big": [2**60, 2**60 + 1] * 20,
        "flag": [True, False] * 20,
        "none": [None] * 40,
    }
    prepared = parquet(tmp_path, columns)
    roles = {
        role: [column["name"] for column in prepared.manifest.facts["columns"] if column["role"] == role]
        for role in ("numeric", "categorical", "time", "ignore")
    }
    assert list(roles.values()) == [["real", "cost"], ["word", "big", "flag"], ["day"], ["none"]]
    assert prepared.arrays["dense_BN"][:4, 1].tolist() == [0, 1, 1, 0]
    (word,) = [c for c in Encoder.load(prepared.path / "encoder").columns if c.name == "word"]
    assert sorted(word.learned) == ["a", "b", "c"]


@pytest.mark.parametrize("odd", [[1.5, 2.5], [[1], [2]], {"a": 1}, b"\xff", timedelta(1)])
def test_parquet_columns_of_other_things_are_left_out_and_said(tmp_path: Path, odd: object) -> None:
    columns: dict[str, list[object]] = {"odd": [odd] * 40, "n": [i * i for i in range(40)]}
    prepared = parquet(tmp_path, columns)
    assert prepared.info["inputs"] == ["n"]
    assert "is no single value; " in prepared.describe()


def test_statistics_do_not_look_at_held_out_rows(tmp_path: Path) -> None:
    def encoder(folder: str, held_out: list[object]) -> tuple[Prepared, Encoder]:
        (tmp_path / folder).mkdir()
        for part, n, w in (
            ("train", [str(i) for i in range(50)], ["a", "b"] * 25),
            ("held", held_out, ["new"] * 4),
        ):
            rows = "".join(f"{x},{y},{i % 2}\n" for i, (x, y) in enumerate(zip(n, w, strict=True)))
            (tmp_path / folder / f"{part}.csv").write_text("n,w,y\n" + rows)
        held = str(tmp_path / folder / "held.csv")
        prepared = from_file(tmp_path / folder / "train.csv", numeric=("n",), valid_path=held)
        return prepared, Encoder.load(prepared.path / "encoder")

    (one, its) = encoder("one", ["1000000", "", "7", "8"])
    (other, others) = encoder("other", ["3", "4", "5", "6"])
    for mine, theirs in zip(its.columns, others.columns, strict=True):
        assert (mine.scales, mine.learned.to_list()) == (theirs.scales, theirs.learned.to_list())
    assert [c.learned.to_list() for c in its.columns] == [[], ["a", "b"]]
    assert one.arrays["dense_BN"][:50].mean() == pytest.approx(0, abs=1e-6)
    assert one.arrays["dense_BN"][50:52, 0].tolist() == [100, 0]  # cut off; no value
    assert one.info["num_dense"] == 1  # no training row misses a value
    assert one.arrays["ids_BF"][50:52].tolist() == [[1], [1]]
    assert other.arrays["train_rows"].tolist() == one.arrays["train_rows"].tolist() == list(range(50))


def test_categories_by_count() -> None:
    train = pl.Series(["a", "b", "b", "c", None, "d", "d", "d"])

    def ids(texts: list[str | None], least: int) -> list[int]:
        column = Column(name="c", role="categorical").fitted(train, TableDataConfig(min_count=least))
        return encoded([column], [pl.Series(texts, dtype=pl.String)])[0].ids.tolist()

    texts = ["d", "b", "a", "c", None]
    assert ids(texts, 1) == [2, 3, 4, 5, 0]  # by count, then by name
    assert ids(texts, 2) == [2, 3, 1, 1, 0]


def test_numbers_of_any_size_come_out_finite() -> None:
    for numbers in ([1e308, -1e308], [1e-300, 1e300], [5.0, 5.0], [0.0, 1e16]):
        scale = fit_scale(np.array(numbers * 10)[:15])
        out = scale.standardized(np.array(numbers * 10))
        assert np.isfinite(out).all()
        assert np.abs(out).max() <= 100


def test_a_whole_number_has_a_row_and_its_number(tmp_path: Path) -> None:
    numbers = np.arange(3000) * 7 % 300
    rows = {"a": numbers.tolist(), "b": [f"b{i}" for i in range(3000)], "y": (numbers % 2).tolist()}
    prepared = table_of(tmp_path, rows)
    encoder = Encoder.load(prepared.path / "encoder")
    texts = pl.Series(["7", "7.0", " 7 ", "+7", "299", "1000", None], dtype=pl.String)
    arrays = encoder.encode(pl.DataFrame({"a": texts, "b": texts}), ())
    ids_B, dense_B = arrays["ids_BF"][:, 0], arrays["dense_BN"][:, 0]
    assert len(set(ids_B[:4].tolist())) == 1
    assert len(set(ids_B[[0, 4]].tolist())) == 2
    assert ids_B[5:].tolist() == [1, 0]
    assert dense_B[0] < dense_B[4] < dense_B[5]
    typed = encoder.encode(pl.DataFrame({"a": [7.0, 299.0, 1000.0, None], "b": texts[:4]}), ())
    assert typed["ids_BF"][:, 0].tolist() == ids_B[3:].tolist()
    # New values follow the known ones, whose rows stay.
    more = {"a": [*rows["a"], *[-5] * 99], "b": [*rows["b"], *range(99)], "y": [*rows["y"], *[0, 1, 1] * 33]}
    grown = Encoder.load(table_of(tmp_path, more, base=str(prepared.path)).path / "encoder")
    assert grown.columns[0].learned.to_list() == [*encoder.columns[0].learned.to_list(), "-5"]
    assert old_rows(encoder, grown).tolist()[:303] == [*range(302), 1]


def test_prepared_arrays_are_those_of_the_encoder_block_by_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of rows are smaller than the table, and cut it elsewhere than bags are longest."""
    monkeypatch.setattr("dphybrid.data.table.source.BLOCK", 7)
    monkeypatch.setattr("dphybrid.data.table.labels.BLOCK", 6)
    monkeypatch.setattr("dphybrid.data.store._BLOCK_ROWS", 5)
    random = np.random.default_rng(0)
    tags = [["a"] * int(length) for length in random.integers(0, 4, 60)]
    frame = pl.DataFrame(
        {
            "price": [None if row % 9 == 4 else row / 7 for row in range(60)],
            "shop_id": random.integers(1, 9, 60),
            "day": [date(2026, 1, 1) + timedelta(int(row)) for row in random.permutation(60)],
            "short": [items[:1] for items in tags],
            "long": [items * 3 for items in tags],
            "y": [f"c{row % 3}" for row in range(60)],
        }
    )
    frame.write_parquet(tmp_path / "x.parquet")
    prepared = from_file(tmp_path / "x.parquet", min_count=1, max_items=8)
    wanted = Encoder.load(prepared.path / "encoder").encode(frame)
    for name, array in wanted.items():
        assert np.array_equal(prepared.arrays[name], array), name
    assert wanted["bags_BFL"].shape == (60, 2, 8)
    assert prepared.arrays["labels_B"].tolist() == [row % 3 for row in range(60)]


def test_values_that_are_no_numbers_are_counted_among_the_held_out_rows(tmp_path: Path) -> None:
    prices = ["oops" if row % 150 == 7 else str(row / 8) for row in range(3000)]
    rows = {"price": prices, "y": [str(row % 2) for row in range(3000)]}
    prepared = table_of(tmp_path, rows, numeric=["price"], max_rejected=0.05)
    valid = [prices[row] for row in prepared.arrays["valid_rows"]]
    share = valid.count("oops") / len(valid)
    assert share > 0
    assert Encoder.load(prepared.path / "encoder").columns[0].unseen == share
    assert f"price {share:.1%}" in prepared.describe()
