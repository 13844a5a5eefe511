"""One table in every container that holds it gives the same schema, the same arrays and the same ids."""

import datetime as dt
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow
import pytest
from pyarrow import feather, parquet

from dphybrid.data.table.encoder import Encoder
from dphybrid.data.table.files import read_rows
from dphybrid.data.table.frames import as_frame, save_frame
from dphybrid.data.table.kinds import Column, encoded
from dphybrid.data.table.values import Form, in_time, typed
from tests.preparing import TableDataConfig, from_file
from tests.refusing import refused

SIZE = 600


def _table() -> pl.DataFrame:
    random = np.random.default_rng(0)
    start = dt.datetime(2024, 1, 1)
    cities = random.choice(["Oslo", "New York, NY", 'the "Old" Town', "Zürich"], SIZE).tolist()
    return pl.DataFrame(
        {
            "user_id": random.integers(0, 90, SIZE),
            "big_id": random.integers(0, 50, SIZE) + 2**60,
            "zip": [f"{z:05d}" for z in random.integers(0, 40, SIZE)],
            "x": random.normal(size=SIZE).round(3),
            "amount": random.integers(0, 200, SIZE),
            "flag": random.random(SIZE) < 0.5,
            "at": [start + dt.timedelta(minutes=int(m)) for m in random.integers(0, 500_000, SIZE)],
            "city": [None if number % 9 == 0 else city for number, city in enumerate(cities)],
            "tags": [list(random.choice(["new", "old", "a, b"], 1 + n % 2)) for n in range(SIZE)],
            "y": random.integers(0, 2, SIZE),
        }
    )


def _texts(table: pl.DataFrame) -> pl.DataFrame:
    return table.with_columns(pl.col("tags").list.join("|"))


def _forms(table: pl.DataFrame) -> dict[str, object]:
    """The table in containers of memory."""
    floats = pl.col("user_id", "amount", "flag").cast(pl.Float64)
    decimals = pl.Series([Decimal(v) for v in table["big_id"]], dtype=pl.Decimal(38, 0))
    return {
        "polars": table,
        "lazy": table.lazy(),
        "pandas": table.to_pandas(),
        "nullable": table.to_pandas().convert_dtypes(),
        "arrow": table.to_arrow(),
        "columns": table.to_dict(as_series=False),
        "records": table.to_dicts(),
        "floats": table.with_columns(floats),
        "decimals": table.with_columns(big_id=decimals),
        "categories": table.with_columns(pl.col("city").cast(pl.Categorical)),
        "texts": _texts(table).select(pl.all().cast(pl.String)),
        "unsigned": table.with_columns(pl.col("user_id", "big_id").cast(pl.UInt64)),
    }


def test_files_of_any_format_are_prepared_alike(tmp_path: Path) -> None:
    table = _table()
    table.write_parquet(tmp_path / "x.parquet")
    wanted = from_file(tmp_path / "x.parquet")
    roles = {c["name"]: c["role"] for c in wanted.manifest.facts["columns"]}
    assert [*roles.values()] == [
        *("categorical", "categorical", "categorical", "numeric", "whole", "categorical"),
        *("time", "categorical", "bag"),
    ]
    files = {kind: tmp_path / f"x.{kind}" for kind in ("csv", "tsv", "arrow", "jsonl")}
    _texts(table).write_csv(files["csv"])
    _texts(table).write_csv(files["tsv"], separator="\t")
    table.write_ipc(files["arrow"])
    table.write_ndjson(files["jsonl"])
    files["saved"] = save_frame(table, tmp_path / "frames", "x")
    files["groups"] = tmp_path / "groups.parquet"
    table.write_parquet(files["groups"], row_group_size=7)
    for kind, file in files.items():
        bags = ("tags:|",) if kind in ("csv", "tsv") else ()
        found = from_file(tmp_path / "there", path=str(file), bags=bags)
        assert {c["name"]: c["role"] for c in found.manifest.facts["columns"]} == roles, kind
        for name in wanted.arrays:
            assert np.array_equal(found.arrays[name], wanted.arrays[name]), (kind, name)


def test_memory_gives_the_arrays_of_the_file(tmp_path: Path) -> None:
    table = _table()
    _texts(table).write_csv(tmp_path / "x.csv")
    prepared = from_file(tmp_path / "x.csv", bags=("tags:|",))
    encoder, data = Encoder.load(prepared.path / "encoder"), TableDataConfig()
    wanted = encoder.encode(table, data.no_value)
    for name in ("ids_BF", "dense_BN", "bags_BFL"):
        assert np.array_equal(wanted[name], prepared.arrays[name])
    for form, rows in _forms(table).items():
        found = encoder.encode(as_frame(rows, form).lazy().collect(), data.no_value)
        for name, array in wanted.items():
            assert np.array_equal(found[name], array), (form, name)
        answers = encoder.label.read(as_frame(rows, form).lazy().collect()["y"], data.no_value)
        assert answers.tolist() == table["y"].to_list()


@pytest.mark.parametrize(
    ("form", "cells", "values"),
    [
        ("whole", ["7", "7.0", " 7 ", "007", "x", ""], [7, 7, 7, 7, None, None]),
        ("whole", [7.0, 7.5, float("nan"), float("inf")], [7, None, None, None]),
        ("number", ["1.5", " 2", "inf", "$3", "NA"], [1.5, 2.0, None, None, None]),
        ("text", [7.0, None, 8.0], ["7", None, "8"]),
        ("text", ["007", "7", "NA"], ["007", "7", None]),
        ("flag", ["True", "0", "FALSE", "yes"], ["true", "false", "false", None]),
        ("flag", [True, False, None], ["true", "false", None]),
        ("flag", [1, 0, 2], ["true", "false", None]),
    ],
)
def test_a_value_has_the_form_of_its_column(form: str, cells: list[object], values: list[object]) -> None:
    column = pl.Series(cells, strict=False)
    assert typed(column, Form.model_validate({"type": form}), ["NA"]).to_list() == values


def test_columns_that_are_read_together_are_read_as_each_alone() -> None:
    cells = {
        "whole": pl.Series(["7", "7.0", "x", ""]),
        "flag": pl.Series(["True", "0", "7", None]),
        "text": pl.Series([" 7 ", "NA", "7.0", "7"]),
        "other text": pl.Series(["7.0", "7", "NA", "x"]),
        "floats": pl.Series([7.0, None, 8.0, 7.0]),
        "fractions": pl.Series([7.5, float("nan"), 8.0, 7.0]),
    }
    known = pl.Series("value", ["7", "7.0", "true", "8.0"])
    columns = [
        Column(name=name, role="categorical", form=Form.model_validate({"type": kind}), learned=known)
        for name, kind in zip(cells, ["whole", "flag", "text", "text", "text", "text"], strict=True)
    ]
    columns += [Column(name=name, role="numeric", form=Form(type="number")) for name in ("a", "b")]
    series = [*cells.values(), cells["whole"], cells["text"]]
    together = encoded(columns, series, ["NA"])
    assert [found.ids.tolist() for found in together[:4]] == [
        [2, 2, 1, 0],
        [4, 1, 1, 0],
        [2, 0, 3, 2],
        [3, 2, 0, 1],
    ]
    for column, values, found in zip(columns, series, together, strict=True):
        (alone,) = encoded([column], [values], ["NA"])
        assert np.array_equal(found.ids, alone.ids)
        assert found.values.equals(alone.values, null_equal=True)
        assert np.array_equal(found.numbers, alone.numbers, equal_nan=True)


@pytest.mark.parametrize("text", ["2024-03-12 08:30:00", "2024-03-12T08:30:00Z", "2024-03-12 10:30:00+02:00"])
def test_times_in_texts_are_instants(text: str) -> None:
    found = typed(pl.Series([text, "12", None]), Form(type="time", zone="UTC"), ())
    assert found.to_list() == [dt.datetime(2024, 3, 12, 8, 30), None, None]


def test_an_instant_has_the_clock_of_the_zone_of_training(tmp_path: Path) -> None:
    """Also in frames, and written as UTC, as pandas does in JSON."""
    at = pd.date_range("2024-01-01", periods=200, freq="37min", tz="America/New_York")
    frame = pd.DataFrame({"at": at, "y": (at.hour < 12).astype(int)})
    prepared = from_file(tmp_path / "x", path=str(save_frame(as_frame(frame, "x"), tmp_path, "x")))
    encoder, data = Encoder.load(prepared.path / "encoder"), TableDataConfig()
    assert encoder.columns[0].form.zone == "America/New_York"
    frame.to_json(tmp_path / "x.jsonl", orient="records", lines=True, date_format="iso")
    frame.to_csv(tmp_path / "x.csv", index=False)
    wanted = encoder.encode(as_frame(frame, "x").lazy().collect(), data.no_value)["dense_BN"]
    others = [as_frame(frame.assign(at=at.tz_convert("UTC")), "x").lazy().collect()]
    for kind in ("jsonl", "csv"):
        file = tmp_path / f"x.{kind}"
        others.append(read_rows([file], data, tmp_path / kind, as_text=True).frame.collect())
    for other in others:
        assert np.array_equal(encoder.encode(other, data.no_value)["dense_BN"], wanted)


@pytest.mark.parametrize("writer", ["parquet", "feather", "frame"])
def test_dictionaries_are_categories_in_any_container(writer: str, tmp_path: Path) -> None:
    keys = np.random.default_rng(0).integers(0, 40, 400) * 7 + 1
    table = pyarrow.table({"k": pyarrow.array(keys).dictionary_encode(), "y": keys % 2})
    if writer == "parquet":
        parquet.write_table(table, tmp_path / "x.parquet")
        path = tmp_path / "x.parquet"
    elif writer == "feather":
        feather.write_feather(table, tmp_path / "x.feather", compression="uncompressed")
        path = tmp_path / "x.feather"
    else:
        path = save_frame(as_frame(table, "x"), tmp_path, "x")
    prepared = from_file(tmp_path / "there", path=str(path))
    (column,) = prepared.manifest.facts["columns"]
    assert column["role"] == "categorical"
    (known,) = Encoder.load(prepared.path / "encoder").columns
    assert {*known.learned} <= {*map(str, keys)}


def test_the_index_of_a_pandas_frame_is_no_feature(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": ["u", "v"] * 50, "y": [0, 1] * 50}).sample(frac=1, random_state=0)
    frame.to_parquet(tmp_path / "x.parquet")
    roles = {c["name"]: c["role"] for c in from_file(tmp_path / "x.parquet").manifest.facts["columns"]}
    assert roles == {"a": "categorical", "__index_level_0__": "ignore"}


@pytest.mark.parametrize("none", [None, float("nan"), pd.NA])
def test_large_ids_beside_no_value_keep_their_digits(none: object) -> None:
    ids = [2**60 + 1, none, 2**60 + 3, 2**64 - 1]
    wanted = [None if each is none else str(each) for each in ids]
    for container in ([{"h": each} for each in ids], {"h": ids}):
        frame = as_frame(container, "x").lazy().collect()
        assert typed(frame["h"], Form(), ()).to_list() == wanted


def test_columns_without_an_order_in_time_are_refused() -> None:
    with refused("where: 'May' was not read as a number, date or time"):
        in_time(pl.Series(["May", "June"]), "where")
    with refused("where: the column has no values"):
        in_time(pl.Series([None, None], dtype=pl.Float64), "where")
