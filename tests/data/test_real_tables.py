"""Tables as people have them: no answer, no value, other notations of numbers, dates."""

import re
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from pandas._libs.parsers import STR_NA_VALUES

from dphybrid.config.tables import NO_VALUE
from dphybrid.data.table import lines
from dphybrid.data.table.cells import read_numbers
from dphybrid.data.table.column import Sample
from dphybrid.data.table.encoder import Encoder
from dphybrid.data.table.kinds import KINDS, Time
from dphybrid.data.table.numbers import notation_of
from dphybrid.data.table.schema import read_schema
from tests.preparing import TableDataConfig, from_file, table_of

table = partial(table_of, min_count=1)


def test_rows_without_a_label_are_dropped_counted_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 500)
    body = [f"{i % 9},{'' if i % 10 == 0 else 'NULL' if i % 10 == 1 else i % 2}" for i in range(1000)]
    prepared = table(tmp_path, "\n".join(["a,y", *body]), max_rejected=0.0)
    assert prepared.manifest.facts["left_out"] == {"label": 200}
    assert prepared.manifest.rejected == 0
    assert "200 rows without a value of 'y' are left out" in prepared.describe()
    assert prepared.arrays["labels_B"].tolist() == [i % 2 for i in range(1000) if i % 10 > 1]


def test_what_pandas_takes_for_no_value_is_none_here() -> None:
    assert set(NO_VALUE) == STR_NA_VALUES - {""} | {"?"}


def test_given_texts_for_no_value_are_added(tmp_path: Path) -> None:
    words = [*NO_VALUE, "none given", "-999", "real"]
    size = len(words)
    body = [f"{words[i % size]},{i % 7 if i % 5 else words[i % (size - 1)]},{i % 2}" for i in range(220)]
    prepared = table(tmp_path, "\n".join(["word,n,y", *body]), missing="none given,-999", numeric="n")
    assert prepared.manifest.rejected == 0
    ids = prepared.arrays["ids_BF"][:, 1]
    assert ((ids == 0) == [i % size != size - 1 for i in range(220)]).all()


@pytest.mark.parametrize(
    ("decimal", "thousands", "numbers", "others"),
    [
        (
            ",",
            ".",
            ["1.206,73", "-12,5", "7", "1.000.000", "1206,73", "1,5e3", ",5"],
            ["1.5", "1.20", "a,b", "1,2,3"],
        ),
        (
            ".",
            ",",
            ["1,206.73", "-12.5", "7", "1,000,000", "1206.73", "1.5e3", ".5"],
            ["1,5", "12,34", "1,2"],
        ),
        (".", " ", ["1 206.73", "7"], ["1 2", "a b"]),
        (",", "", ["1206,73", "7"], ["1206.73"]),
    ],
)
def test_numbers_in_other_notations(
    decimal: str, thousands: str, numbers: list[str], others: list[str]
) -> None:
    data = TableDataConfig(decimal=decimal, thousands=thousands)  # type: ignore[arg-type]
    plainly = [text.replace(thousands, "").replace(decimal, ".") for text in numbers]
    for texts, expected in ((numbers, [float(text) for text in plainly]), (others, [None] * len(others))):
        sample = Sample("n", pl.Series(texts), len(texts), whole=True, data=data)
        assert read_numbers(sample.cells, *notation_of(sample)[0]).to_list() == expected


def test_the_schema_shows_every_option_and_reads_back(tmp_path: Path) -> None:
    text = "\n".join(["n,word,tags,y", *(f"{i},{'ab'[i % 2]},a|b,{i % 3 % 2}" for i in range(40))])
    prepared = table(tmp_path, text, bags="tags", numeric="n")
    file = prepared.path / "schema.toml"
    before = read_schema(file)
    shown = file.read_text()
    columns = ("n", "word", "tags")
    kinds = [kind for kind in KINDS if f'role = "{kind.role}"' in shown]
    assert len(kinds) == len(columns)
    assert all(f"# {key} = " in shown for kind in kinds for key in kind.options())
    file.write_text(
        "\n".join(line.removeprefix("# ") if " = " in line else line for line in shown.splitlines())
    )
    after = read_schema(file)  # every example is a value that its option takes
    assert after.columns["n"]["buckets"] == 32
    assert after.columns["tags"]["separator"] == "|"
    assert "top" not in before.columns["word"]
    assert after.columns["word"]["top"] == 10000


@pytest.mark.parametrize(
    ("text", "day_first", "wanted"),
    [
        ("2024-12-31", False, "2024-12-31T00:00:00"),
        ("2024-12-31 23:59", False, "2024-12-31T23:59:00"),
        ("2024-12-31T23:59:58.25Z", False, "2024-12-31T23:59:58"),
        ("2024-12-31 01:02:03.123456+02:00", False, "2024-12-31T01:02:03"),
        ("31.12.2024 7:05", False, "2024-12-31T07:05:00"),
        ("12/31/2024", False, "2024-12-31T00:00:00"),
        ("3/12/2024", True, "2024-12-03T00:00:00"),
        ("3/12/2024", False, "2024-03-12T00:00:00"),
        ("20241231", False, "2024-12-31T00:00:00"),
        ("1965-02-01 10:00", False, "1965-02-01T10:00:00"),
        ("2024-02-30", False, None),
        ("31/12/2024", False, None),
        ("7", False, None),
        ("a day", False, None),
    ],
)
def test_dates_and_times(text: str, day_first: bool, wanted: str | None) -> None:
    column = Time(name="at", dayfirst=day_first)
    found = column.read(pl.Series([text, None]))
    moment = wanted and datetime.fromisoformat(wanted)
    assert found.to_list() == [moment, None]
    if moment:
        day = moment.replace(tzinfo=UTC).timestamp() // 86_400
        assert [part[0] for part in column.numbers(found)] == [moment.hour, moment.isoweekday(), day]


def test_a_time_becomes_numbers_that_new_rows_get_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 2000)
    start = datetime(2024, 1, 1, tzinfo=UTC)
    moments = [start + timedelta(hours=7 * i) for i in range(600)]
    texts = ["" if i % 50 == 49 else f"{moment:%d.%m.%Y %H:%M}" for i, moment in enumerate(moments)]
    body = [f"{text},{'ab'[i % 2]},{i % 3 % 2}" for i, text in enumerate(texts)]
    body[300] = "yesterday,a,1"
    prepared = table(tmp_path, "\n".join(["at,w,y", *body]), times="at", max_rejected=0.01)
    assert prepared.manifest.rejected == 1
    rejected = (prepared.path / "rejected.jsonl").read_text()
    assert "column 'at' holds 'yesterday', not a date or time" in rejected
    assert prepared.info["columns"][:3] == [
        {"name": f"at ({part})", "role": "buckets", "num_ids": num_ids}
        for part, num_ids in zip(("hour", "weekday", "day"), prepared.info["num_ids"], strict=False)
    ]
    shown = (prepared.path / "schema.toml").read_text()
    assert 'role = "time"' in shown
    assert "hour" not in shown
    encoder = Encoder.load(prepared.path / "encoder")
    assert encoder.names == ["at", "w"]
    kept = [i for i in range(600) if i != 300]
    words, times = (["ab"[i % 2] for i in kept], [texts[i] or None for i in kept])
    found, wrong = encoder.encode({"w": pl.Series(words), "at": pl.Series(times)})
    assert wrong == 0
    assert (found["ids_BF"] == prepared.arrays["ids_BF"]).all()
    assert (found["dense_BN"] == prepared.arrays["dense_BN"]).all()
    assert encoder.encode({"w": pl.Series(["a"]), "at": pl.Series(["soon"])})[1] == 1


def test_cells_with_line_ends_are_printed_on_one_line(tmp_path: Path) -> None:
    text = "word,y\n" + "".join(f'"first\nsecond\x1b[31m {"ab"[i % 2]}",{i % 2}\n' for i in range(40))
    told = table(tmp_path, text).describe()
    assert r"first\nsecond\x1b[31m a" in told
    assert "\x1b" not in told


@pytest.mark.parametrize(
    ("cells", "role", "told"),
    [
        (["98,000", "1,250,000", "7"], "numeric", "thousands separator ','; --data.decimal"),
        (["98,5", "1,25", "7"], "numeric", "decimal mark ','; --data.decimal"),
        (["1.206,73", "7"], "numeric", "thousands separator '.', decimal mark ','"),
        (["1.5", "inf", "7"], "numeric", "20 infinite numbers count as no value"),
        (["TRUE", "true", "False"], "categorical", "upper and lower case count as equal"),
        (["06/11/1996", "14/03/2000"], "time", "dates or times, day first; --data.categorical"),
        (["31.12.2024", "1.2.2024"], "time", "dates or times, day first; --data.categorical"),
        (["1/1/2024", "2/3/2024", "12/9/2024"], "categorical", "--data.times reads hour, weekday and day"),
        ([f"o{i}" for i in range(60)], "categorical", "x: hardly any value occurs twice.*--data.ignore x"),
        ([str(2**60 + i % 7) for i in range(60)], "categorical", "whole numbers beyond 2\\^53"),
        (
            ["7.97E+17", *(str(2**60 + i % 7) for i in range(59))],
            "categorical",
            "whole numbers beyond 2\\^53",
        ),
        ([f"{2**60 * (i + 1):.3e}" for i in range(60)], "numeric", ""),
        ([f"{2**54 + 2**30 * i}.0" for i in range(60)], "numeric", ""),
    ],
)
def test_how_cells_are_read_is_said_with_how_to_change_it(
    tmp_path: Path, cells: list[str], role: str, told: str
) -> None:
    rows = [f"{cells[i % len(cells)]}\t{i % 2}" for i in range(60)]
    prepared = table(tmp_path, "\n".join(["x\ty", *rows]), min_count=2)
    assert prepared.manifest.facts["columns"][0]["role"] == role
    assert re.search(told, prepared.describe()), prepared.describe()
    assert prepared.manifest.rejected == 0


@pytest.mark.parametrize("decimal", [",", "auto"])
def test_typed_numbers_are_numbers_in_any_notation(tmp_path: Path, decimal: str) -> None:
    """As features, as a weight and as the label, which is one from the first rows on, or by the last one."""
    rows = 120
    numbers = {"n": [i / 8 for i in range(rows)], "w": [1 + i % 3 / 4 for i in range(rows)]}
    texts = {"c": [f"{i % 4}.5" for i in range(rows)]}
    for name, label in (
        ("many", [i * i / 16 for i in range(rows)]),
        ("late", [*(float(i % 5) for i in range(rows - 1)), 0.25]),
    ):
        frame = pl.DataFrame({**numbers, **texts, "y": label})
        file = tmp_path / f"{name}.parquet"
        frame.write_parquet(file)
        frame.with_columns(
            pl.col("n", "w", "y").cast(pl.String).str.replace(".", ",", literal=True)
        ).write_csv(tmp_path / f"{name}.csv", separator=";")
        given = {"weight": "w", "thousands": "", "categorical": "c"}
        found = from_file(file, decimal=decimal, **given)
        wanted = from_file(tmp_path / f"{name}.csv", decimal=",", **given)
        assert found.info["label"] == wanted.info["label"]
        assert found.info["label"]["task"] == "regression"
        for array in ("ids_BF", "dense_BN", "labels_B", "weights_B"):
            np.testing.assert_array_equal(found.arrays[array], wanted.arrays[array])


def test_whole_numbers_beyond_float64_are_categories_of_any_type(tmp_path: Path) -> None:
    large = pl.Series([2**64 - 1 - i % 5 for i in range(60)], dtype=pl.UInt64)
    small = pl.Series([-(2**63) if i % 2 else i for i in range(60)])
    pl.DataFrame({"a": large, "b": small, "y": [0, 1] * 30}).write_parquet(tmp_path / "x.parquet")
    columns = from_file(tmp_path / "x.parquet").manifest.facts["columns"]
    assert [column["reason"] for column in columns] == ["whole numbers beyond 2^53"] * 2


def test_typed_numbers_that_mean_no_value(tmp_path: Path) -> None:
    """As their texts do: nan and what data.missing names; infinite numbers count as no value."""
    n = [0.5, float("nan"), -999.0, float("inf"), None, 2.5] * 20
    frame = pl.DataFrame({"n": n, "y": [0.5, 1.5, float("nan"), 2.5, 3.5, -999.0] * 20})
    frame.write_parquet(tmp_path / "x.parquet")
    frame.write_csv(tmp_path / "x.csv")
    files = (tmp_path / "x.parquet", tmp_path / "x.csv")
    found, wanted = (from_file(file, missing="-999.0", buckets=2) for file in files)
    assert found.manifest.facts["left_out"] == wanted.manifest.facts["left_out"] == {"label": 40}
    for array in ("ids_BF", "dense_BN", "labels_B"):
        np.testing.assert_array_equal(found.arrays[array], wanted.arrays[array])
