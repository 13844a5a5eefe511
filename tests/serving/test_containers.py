"""One value means the same in every container: a column of each type is predicted from frames, records and
files with equal bits, or refused by its name."""

import datetime
import enum
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

import dphybrid
from dphybrid.serving.predict import open_predictor
from tests.refusing import refused

_ROWS = 130
COLUMNS = ("user_id", "amount", "member", "size", "shop", "day", "tags", "grade")


def _table() -> pl.DataFrame:
    random = np.random.default_rng(0)
    users = random.integers(0, 9, _ROWS)
    return pl.DataFrame(
        {
            "user_id": [None if n == 8 else int(n) for n in users],
            "amount": [None if n > 0.95 else round(float(n), 2) for n in random.random(_ROWS)],
            "member": [bool(n % 2) for n in users],
            "size": random.choice([7.0, 7.5, 8.0], _ROWS),
            "shop": random.choice(["07", "north", "x"], _ROWS),
            "day": [datetime.date(2024, 1 + n % 12, 5) for n in users.tolist()],
            "tags": [["a", "b"][: n % 3] for n in users.tolist()],
            "grade": pl.Series([str(n % 3) for n in users], dtype=pl.Categorical),
            "y": (users + random.integers(0, 4, _ROWS) > 6).astype(int),
        }
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("containers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPHYBRID_DATA_DIR", str(folder / "data"))
        patch.setenv("DPHYBRID_TRACKING_URI", "none")
        given: dict[str, Any] = {"devices": "cpu", "epochs": 1, "dim": 4, "hidden": 8, "quiet": True}
        values = {"categorical": ["size"], "missing": ["-999"], "min_count": 1}
        run = dphybrid.train(_table(), label="y", run_name="containers", **given, **values)
        page = json.loads((run.checkpoint / "encoder" / "encoder.json").read_text())
    assert {c["name"]: c["role"] for c in page["columns"]} == {
        "user_id": "categorical",
        "amount": "numeric",
        "member": "categorical",
        "size": "categorical",
        "shop": "categorical",
        "day": "time",
        "tags": "bag",
        "grade": "categorical",
    }
    rows = _table().drop("y")
    return run, rows, run.predict(rows)


def _pandas(rows: pl.DataFrame, **types: str) -> pd.DataFrame:
    frame = pd.DataFrame(rows.to_dict(as_series=False))
    return frame.astype(types)


def _texts(rows: pl.DataFrame) -> pl.DataFrame:
    lists = pl.col("tags").list.join("|")
    return rows.with_columns(lists).with_columns(pl.all().cast(pl.String))


WAYS: dict[str, Callable[[pl.DataFrame], object]] = {
    "polars": lambda rows: rows,
    "arrow": lambda rows: rows.to_arrow(),
    "columns": lambda rows: rows.to_dict(as_series=False),
    "records": lambda rows: rows.to_dicts(),
    "pandas": _pandas,
    "pandas arrow": lambda rows: rows.to_pandas(use_pyarrow_extension_array=True),
    "pandas objects": lambda rows: _pandas(rows).astype(object),
    "nullable": lambda rows: _pandas(rows, user_id="Int64", member="boolean", amount="Float64"),
    "pd.NA": lambda rows: _pandas(rows, user_id="Int64", amount="Float64").astype(object),
    "text of numbers": lambda rows: rows.with_columns(pl.col("user_id", "amount", "size").cast(pl.String)),
    "7.0": lambda rows: rows.with_columns(pl.col("user_id").cast(pl.Float64).cast(pl.String)),
    "float ids": lambda rows: rows.with_columns(pl.col("user_id").cast(pl.Float64)),
    "decimal": lambda rows: rows.with_columns(pl.col("amount", "size").cast(pl.Decimal(10, 2))),
    "True": lambda rows: rows.with_columns(pl.col("member").cast(pl.String).str.to_titlecase()),
    "bits": lambda rows: rows.with_columns(pl.col("member").cast(pl.Int8)),
    "datetime": lambda rows: rows.with_columns(pl.col("day").cast(pl.Datetime("ns"))),
    "zone": lambda rows: rows.with_columns(
        pl.col("day").cast(pl.Datetime("us")).dt.replace_time_zone("Asia/Tokyo")
    ),
    "categories": lambda rows: rows.with_columns(pl.col("shop").cast(pl.Categorical)),
    "whole categories": lambda rows: _pandas(rows, user_id="Int64", grade="int").astype(
        {"user_id": "category", "grade": "category"}
    ),
    "arrays": lambda rows: _pandas(rows).assign(
        tags=[np.array(cell, object) for cell in rows["tags"].to_list()]
    ),
    "joined": lambda rows: rows.with_columns(pl.col("tags").list.join("|")),
    "numpy scalars": lambda rows: [
        {**row, "size": np.float32(row["size"]), "member": np.bool_(row["member"])} for row in rows.to_dicts()
    ],
    "-999": lambda rows: rows.with_columns(pl.col("user_id", "amount").fill_null(-999)),
    "text -999.0": lambda rows: rows.with_columns(
        pl.col("user_id", "amount").cast(pl.String).fill_null("-999.0")
    ),
    "texts": _texts,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_value_is_itself_in_every_container(way: str, trained: Any) -> None:
    run, rows, wanted = trained
    for part in (rows, rows[7:8]):
        given = WAYS[way](part)
        expected = wanted if len(part) == _ROWS else run.predict(part)
        assert np.array_equal(run.predict(given), expected)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize(
    "way", ["polars", "7.0", "True", "bits", "datetime", "categories", "text -999.0", "texts", "zone"]
)
def test_files_hold_what_frames_hold(ending: str, way: str, trained: Any, tmp_path: Path) -> None:
    run, rows, wanted = trained
    frame: Any = WAYS[way](rows)
    file = tmp_path / f"x.{ending}"
    if ending == "csv":
        lists = pl.col("tags").list.join("|") if frame.schema["tags"] == pl.List else pl.col("tags")
        frame.with_columns(lists).write_csv(file)
    else:
        frame.write_parquet(file)
    open_predictor(run.checkpoint).predict_file(file, tmp_path / "out.parquet")
    assert np.array_equal(pl.read_parquet(tmp_path / "out.parquet")["probability"].to_numpy(), wanted)


class _Color(enum.Enum):
    red = 1


ODD: dict[str, Callable[[int], Any]] = {
    "period": lambda n: pd.Series(pd.period_range("2024-01", periods=n, freq="M")),
    "interval": lambda n: pd.Series(pd.IntervalIndex.from_breaks(range(n + 1))),
    "cut": lambda n: pd.Series(pd.cut(np.arange(n), 3)),
    "enum": lambda n: pd.Series([_Color.red] * n),
    "sets": lambda n: pd.Series([{"a"}] * n),
    "dicts": lambda n: pd.Series([{"a": 1}] * n),
    "objects": lambda n: pd.Series([object()] * n),
    "bytes": lambda n: pd.Series([b"a"] * n),
}


@pytest.mark.parametrize("odd", ODD)
def test_other_things_are_refused_by_name(odd: str, trained: Any) -> None:
    run, rows, _ = trained
    frame = _pandas(rows[:3]).assign(shop=ODD[odd](3))
    with refused("shop|Unsupported numpy type"):
        run.predict(frame)
