"""A value has one form, whatever holds it and whatever it is for: cell, label, key, user, item or name."""

import datetime
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow
import pytest

from dphybrid.data.table.cells import clean
from dphybrid.data.table.encoder import Encoder
from dphybrid.data.table.files import read_files
from dphybrid.data.table.frames import as_frame
from dphybrid.data.table.kinds import Time
from dphybrid.data.table.order import positions_in_time
from dphybrid.data.table.schema import names_column
from dphybrid.recipes import find_recipe
from tests.preparing import TableDataConfig, from_file, prepare, table_of
from tests.refusing import refused

_FORMS: dict[str, tuple[Callable[[int], object], list[Callable[[int], object]]]] = {
    "whole": (
        str,
        [
            int,
            float,
            Decimal,
            np.int8,
            str,
            "{}.0".format,
            " {} ".format,
            "+{}".format,
            "{}.00".format,
            "{}E0".format,
        ],
    ),
    "large": (
        lambda n: str(10**20 + n),
        [lambda n: Decimal(10**20 + n), lambda n: f"{10**20 + n}.0", lambda n: f" {10**20 + n}"],
    ),
    "zeros": (lambda n: f"{n:05d}", [lambda n: f" {n:05d} "]),
    "versions": (lambda n: f"1.{n}", [lambda n: f"1.{n} "]),
    "flag": (
        lambda n: ("no", "yes")[n % 2],
        [
            lambda n: n % 2 == 1,
            lambda n: n % 2,
            lambda n: float(n % 2),
            lambda n: str(n % 2),
            lambda n: ("False", "True")[n % 2],
            lambda n: ("NO", "Yes")[n % 2],
            lambda n: ("0.0", "1.0")[n % 2],
        ],
    ),
}
"""How training writes a column of whole numbers, and other ways to write the same values."""
_NUMBERS = [*range(1, 30), 10, 20]


def _containers(folder: Path, cells: list[object]) -> list[tuple[str, pl.Series]]:
    """The cells as each container gives them that can hold them, before anything else looks at them."""
    found = []
    for name, table in {
        "records": [{"x": cell} for cell in cells],
        "columns": {"x": cells},
        "pandas": pd.DataFrame({"x": cells}),
        "objects": pd.DataFrame({"x": pd.Series(cells, dtype=object)}),
        "category": pd.DataFrame({"x": pd.Categorical(cells)}),
    }.items():
        found.append((name, pl.DataFrame(as_frame(table, "x").lazy().collect())["x"]))
    plain = [cell.item() if isinstance(cell, np.generic) else cell for cell in cells]
    frame = pl.DataFrame({"x": pl.Series(plain, strict=False), "other": ["a"] * len(cells)})
    frame.write_csv(folder / "x.csv")
    frame.write_parquet(folder / "x.parquet")
    for file in (folder / "x.csv", folder / "x.parquet"):
        (rows,) = read_files([file], TableDataConfig(path=str(file), header="yes"), [])
        found.append((file.name, rows.cells["x"]))
    return found


@pytest.mark.parametrize("role", ["cell", "label", "key", "name"])
@pytest.mark.parametrize("form", _FORMS)
def test_a_value_is_one_in_every_container_and_role(form: str, role: str, tmp_path: Path) -> None:
    write, others = _FORMS[form]
    texts = [str(write(number)) for number in _NUMBERS] * 4
    if role == "cell":
        table = {"x": texts, "y": [n % 2 for n in range(len(texts))]}
        encoder = Encoder.load(table_of(tmp_path, table, categorical=["x"]).path / "encoder")
        read = lambda cells: encoder.encode({"x": cells})[0]["ids_BF"][:, 0].tolist()  # noqa: E731
    elif role == "label":
        table = {"x": [n % 7 for n in range(len(texts))], "y": texts}
        encoder = Encoder.load(table_of(tmp_path, table, task="multiclass").path / "encoder")
        read = lambda cells: encoder.answers(cells).tolist()  # noqa: E731
    elif role == "key":
        rows = "x,y\n" + "".join(f"{text},{n % 2}\n" for n, text in enumerate(texts))
        # Other spellings of the known keys in the same file: no key may be on both sides.
        for number, other in enumerate(others):
            folder = tmp_path / str(number)
            folder.mkdir()
            more = [str(other(number)) for number in _NUMBERS]
            (folder / "x.csv").write_text(rows + "".join(f"{text},1\n" for text in more))
            prepared = from_file(
                folder / "x.csv", split="key", split_column="x", valid_fraction=0.4, header="yes"
            )
            keys = np.array([*_NUMBERS * 4, *_NUMBERS]) % (2 if form == "flag" else 10**9)
            sides = [{*keys[prepared.arrays[f"{part}_rows"]].tolist()} for part in ("train", "valid")]
            assert sides[0].isdisjoint(sides[1]), more
        return
    else:
        column = names_column("x", pl.Series(texts), TableDataConfig())
        read = lambda cells: column.values(cells).to_list()  # noqa: E731
    wanted = read(pl.Series(texts[: len(_NUMBERS)]))
    assert len({*wanted}) == len({*texts})
    for other in others:
        for name, cells in _containers(tmp_path, [other(number) for number in _NUMBERS]):
            assert read(clean([cells], [])[0]) == wanted, (name, cells)


def test_marks_of_thousands_that_training_lacks_are_told(tmp_path: Path) -> None:
    table = {"user_id": [10_000 + n % 30 for n in range(60)], "y": [n % 2 for n in range(60)]}
    encoder = Encoder.load(table_of(tmp_path, table).path / "encoder")
    (said,) = encoder.doubts({"user_id": pl.Series(["10003", "10,017"])})
    assert "holds '10,017', but training had numbers without such marks; data.thousands" in said
    assert not encoder.doubts({"user_id": pl.Series([" 10003", "10003.0", "NA", "new", None])})


@pytest.mark.parametrize("marks", ["CHF ", ""])
def test_a_typographic_apostrophe_separates_thousands(marks: str, tmp_path: Path) -> None:
    amounts = [f"{marks}{n % 9 + 1}\u2019{n:03d}.50" for n in range(60)]
    encoder = Encoder.load(table_of(tmp_path, {"x": amounts, "y": [0, 1] * 30}).path / "encoder")
    (column,) = encoder.numbers
    assert column.values(pl.Series(["1\u2019234.5", "1'234.5"])).to_list() == [1234.5, 1234.5]


@pytest.mark.parametrize("container", ["csv", "parquet"])
@pytest.mark.parametrize("recipe", ["retrieval", "kge"])
def test_users_items_and_names_beside_a_missing_one_are_those_without(
    recipe: str, container: str, tmp_path: Path
) -> None:
    """7 in one table is 7.0 in another, as pandas writes it beside a missing value."""
    random = np.random.default_rng(0)
    rows = pd.DataFrame({name: random.integers(1, 60, 400) for name in ("user", "item")})
    if recipe == "kge":
        rows = pd.DataFrame({"head": rows.user, "relation": rows.item % 3, "tail": rows.item})
    first, more = rows[:300], rows[300:]
    counts = []
    for name, frames in {"one": [first, more], "other": [first, more.astype(float)]}.items():
        folder = tmp_path / name
        folder.mkdir()
        for part, frame in zip(("train", "valid"), frames, strict=True):
            if container == "csv":
                if name == "other":  # a dash among numbers is no name
                    frame = pd.concat([frame, frame[:1].assign(**{frame.columns[0]: "-"})])
                frame.to_csv(folder / f"{part}.csv", index=False)
            else:
                frame.to_parquet(folder / f"{part}.parquet")

        info = prepare(recipe, find_recipe(recipe).data(path=str(folder)), tmp_path / "prepared", 0).info
        counts.append(
            [info[key] for key in (("num_entities",) if recipe == "kge" else ("user_ids", "item_ids"))]
        )
    assert counts[0] == counts[1]


_LISTS = [["a, b", "it's"], ['say "x"', "é"], ["c|d"], ["back\\slash", "a, b"], []]


@pytest.mark.parametrize("trained", ["json", "ascii", "python", "tuple", "lists"])
def test_lists_are_one_as_text_and_as_values(trained: str, tmp_path: Path) -> None:
    ways: dict[str, Callable[[list[str]], Any]] = {
        "json": lambda items: json.dumps(items, ensure_ascii=False),
        "ascii": json.dumps,
        "python": repr,
        "tuple": lambda items: repr(tuple(items)) if items else "[]",
        "lists": list,
    }
    cells = [ways[trained](items) for items in _LISTS * 20]
    pl.DataFrame({"x": cells, "y": [n % 2 for n in range(100)]}).write_parquet(tmp_path / "x.parquet")
    prepared = from_file(tmp_path / "x.parquet")
    (bag,) = Encoder.load(prepared.path / "encoder").bags
    assert sorted(bag.learned) == sorted({item for items in _LISTS for item in items})
    for way in ways.values():
        read = bag.values(pl.Series([way(items) for items in _LISTS])).to_list()
        assert [items or [] for items in read] == _LISTS


def test_texts_beside_lists_are_lists() -> None:
    cells = [["a", "b"], "c", '["x", "y"]', "[]", (1, 2.5), None]
    for table in ([{"x": cell} for cell in cells], pd.DataFrame({"x": pd.Series(cells, dtype=object)})):
        found = as_frame(table, "x").lazy().collect()["x"]
        assert found.to_list() == [["a", "b"], ["c"], ["x", "y"], [], ["1", "2.5"], None]


@pytest.mark.parametrize("writer", ["pandas", "feather", "polars", "arrow"])
def test_declared_categories_keep_their_texts(writer: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    versions = random.choice(["1.1", "1.10", "1.2"], 100)
    frame = pd.DataFrame({"x": pd.Categorical(versions), "n": pd.Categorical(random.integers(0, 5, 100))})
    frame["y"] = random.integers(0, 2, 100)
    if writer == "arrow":
        numbers = pyarrow.array(frame["n"].to_list()).dictionary_encode()
        frame["n"] = pd.Series(numbers, dtype=pd.ArrowDtype(numbers.type))
    if writer == "pandas":
        frame.to_parquet(tmp_path / "x.parquet")
    else:
        as_frame(frame, "x").lazy().collect().write_parquet(tmp_path / "x.parquet")
    if writer == "feather":
        frame.to_feather(tmp_path / "x.parquet")
    encoder = Encoder.load(from_file(tmp_path / "x.parquet").path / "encoder")
    assert [column.role for column in encoder.columns] == ["categorical", "categorical"]
    assert sorted(encoder.categories[0].learned) == ["1.1", "1.10", "1.2"]
    cells = {"x": pl.Series(["1.1", "1.10"]), "n": pl.Series([3.0, 4.0])}
    ids_BF = encoder.encode(cells)[0]["ids_BF"]
    assert (ids_BF > 1).all()
    assert ids_BF[0, 0] != ids_BF[1, 0]


def test_a_time_is_that_of_its_zone_in_every_container() -> None:
    zone = datetime.timezone(datetime.timedelta(hours=-8))
    time = datetime.datetime(2024, 1, 1, 23, 30, tzinfo=zone)
    column = Time(name="x")
    for cells in (
        as_frame([{"x": time}], "x").lazy().collect()["x"],
        as_frame({"x": [time, None]}, "x").lazy().collect()["x"],
        as_frame(pd.DataFrame({"x": [time]}), "x").lazy().collect()["x"],
        as_frame(pd.DataFrame({"x": pd.Series([time], dtype=object)}), "x").lazy().collect()["x"],
        pl.Series(["2024-01-01T23:30:00-08:00"]),
    ):
        assert column.values(cells)[0] == datetime.datetime(2024, 1, 1, 23, 30)


@pytest.mark.parametrize("none", [None, float("nan"), pd.NA])
def test_large_ids_beside_no_value_keep_their_digits(none: object) -> None:
    for table in ({"x": [2**60 + 1, none]}, pd.DataFrame({"x": pd.Series([2**60 + 1, none], dtype=object)})):
        assert as_frame(table, "x").lazy().collect()["x"].to_list() == [2**60 + 1, None]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_of_numpy_may_have_any_unit(unit: str) -> None:
    time = np.array(["2024-01-01T23:30:05"], f"datetime64[{unit}]")
    length = np.array([5], "timedelta64[s]").astype(f"timedelta64[{unit}]")
    assert as_frame({"x": time, "length": length}, "x").lazy().collect().rows() == [
        (datetime.datetime(2024, 1, 1, 23, 30, 5), datetime.timedelta(seconds=5))
    ]


@pytest.mark.parametrize("container", ["csv", "parquet"])
@pytest.mark.parametrize("numbers", [[0, 1], [0.0, 1.0, 2.0], [0.25, 1.5, 2.75, -3.125]])
def test_a_row_with_an_infinite_label_has_none(container: str, numbers: list[float], tmp_path: Path) -> None:
    labels = pl.Series([*numbers * 25, float("inf"), float("-inf")], dtype=pl.Float64, strict=False)
    frame = pl.DataFrame({"x": np.arange(len(labels)) % 7, "y": labels})
    file = tmp_path / f"x.{container}"
    frame.write_csv(file) if container == "csv" else frame.write_parquet(file)
    prepared = from_file(file)
    assert "2 rows without a value of 'y' are left out" in prepared.describe()
    assert np.isfinite(prepared.arrays["labels_B"]).all()
    classes = [f"{number:g}" for number in numbers] if len(numbers) < 4 else []
    assert prepared.info["label"]["classes"] == classes


@pytest.mark.parametrize(
    "labels", [["0", "1", "-"], ["0", "1", "inf"], ["0", "1", "no", "yes"], ["no", "yes", "0.0", "TRUE"]]
)
def test_two_classes_are_two_in_any_notation(labels: list[str], tmp_path: Path) -> None:
    ids = ["-", "inf", *map(str, range(100, 138))]
    prepared = table_of(tmp_path, {"user_id": ids * 3, "y": labels * (120 // len(labels))})
    found = prepared.arrays["labels_B"]
    assert found.tolist() == [0, 1] * (len(found) // 2)
    (column,) = Encoder.load(prepared.path / "encoder").categories
    assert 10 < len({*column.learned} & {*ids[2:]}) == len(column.learned)


@pytest.mark.parametrize("mark", ["-200", "-200.0"])
def test_a_missing_number_is_missing_in_every_notation(mark: str, tmp_path: Path) -> None:
    for texts in (["-200", "7,5"], ["-200,0", "7,5"], ["-200.0", "7.5"], ["-200.00", "7.5"]):
        prepared = table_of(tmp_path, {"x": texts * 20, "y": [0, 1, 1, 0] * 10}, missing=[mark])
        (column,) = Encoder.load(prepared.path / "encoder").numbers
        assert column.learned.mean == pytest.approx(7.5), texts
        assert column.learned.indicator


@pytest.mark.parametrize(
    ("cells", "given", "said"),
    [
        (
            ["02134", "10001"],
            pl.Series([2134, 10001]),
            "'x' holds numbers, but training had texts such as '02134'",
        ),
        (["02134", "10001"], pl.Series(["02134"]), ""),
        ([str(10**17), str(10**17 + 2)], pl.Series([1e17]), "'x' holds floats beyond 2^53, which merge ids"),
        (["1", "2"], pl.Series([1.0, float("nan")]), ""),
        (['["a", "b"]', '["c"]'], pl.Series(["a;b", "c"]), "'x' holds 'a;b', but training had lists"),
        (['["a", "b"]', '["c"]'], pl.Series(["['a']", "c"]), ""),
        (['["a", "b"]', '["c"]'], pl.Series([["a", "b"]]), ""),
        (['["a;b", "b"]', '["c"]'], pl.Series(["a;b", "c"]), ""),
    ],
)
def test_what_may_mean_something_else_is_said(
    cells: list[str], given: pl.Series, said: str, tmp_path: Path
) -> None:
    prepared = table_of(tmp_path, {"x": cells * 20, "y": [0, 1, 1, 0] * 10})
    doubts = Encoder.load(prepared.path / "encoder").doubts({"x": given})
    assert len(doubts) == bool(said)
    assert said in "".join(doubts)


def test_validation_rows_that_are_training_rows_are_said(tmp_path: Path) -> None:
    rows = {"x": [f"a{n}" for n in range(90)], "y": [n % 2 for n in range(90)]}
    assert "check the split" not in table_of(tmp_path, rows).describe()
    for name, last in (("valid", 90), ("other", 95)):
        text = "x,y\n" + "".join(f"a{n},{n % 2}\n" for n in range(last - 10, last))
        (tmp_path / f"{name}.csv").write_text(text)
    for name, number in (("valid", 10), ("other", 5)):
        described = table_of(tmp_path, rows, valid_path=str(tmp_path / f"{name}.csv")).describe()
        assert f"check the split: {number} of 10 validation rows equal a training row" in described


@pytest.mark.parametrize(
    ("texts", "in_order"),
    [
        (["25042003", "01052003", "13122004"], True),
        (["04252003", "12132004"], True),
        (["2010.2", "2010.10"], True),
        (["2010.02", "2010.1"], True),
        (["12.2009", "2.2010", "10.2010"], True),
        (["12/2009", "02/2010"], True),
        (["201012", "201101"], True),
        (["250602", "130701"], False),
        (["-", "30.12.2023", "2.1.2024"], True),
        ([None, "30.12.2023", "2.1.2024"], True),
        (["2024-01-02T01:00:00+09:00", "2024-01-01T23:00:00-08:00", "2024-01-02 08:00Z"], True),
        (["20240131", "20240201"], True),
        (["1", "2", "10"], True),
        (["2024-01-01 08:00 XYZ", "2024-01-02 08:00 XYZ"], False),
        (["01022003", "02012003"], False),
    ],
)
def test_times_are_ordered_by_instant(texts: list[str], in_order: bool) -> None:
    if not in_order:
        with refused("data.time"):
            positions_in_time(pl.Series(texts), "data.time", TableDataConfig())
        return
    places, _ = positions_in_time(pl.Series(texts), "data.time", TableDataConfig())
    assert (np.diff(places) > 0).all()


def test_a_comma_in_one_column_decides_for_the_others_and_the_label(tmp_path: Path) -> None:
    cells = {
        "big": ["1.500", "870", "12.000"],
        "cost": ["31,97", "4,5", "8"],
        "y": ["0,567", "2,527", "1,25"],
    }
    prepared = table_of(tmp_path, {name: texts * 50 for name, texts in cells.items()})
    encoder = Encoder.load(prepared.path / "encoder")
    assert encoder.label.offset == pytest.approx(np.mean([0.567, 2.527, 1.25]), abs=0.2)
    assert encoder.answers(pl.Series(["0,567", "1,25"])).tolist() == [0.567, 1.25]
    assert encoder.answers(pl.Series([0.567])).tolist() == [0.567]
    numbers = {
        column.name: column.values(pl.Series(cells[column.name])).to_list() for column in encoder.numbers
    }
    assert numbers == {"big": [1500, 870, 12000], "cost": [31.97, 4.5, 8]}
