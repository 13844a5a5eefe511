"""Files that no table is: refused within seconds, with the limit that they break and how to raise it."""

import gzip
import resource
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dphybrid.data.table import delimited
from tests.preparing import from_file
from tests.refusing import refused


def hundred_thousand_columns(file: Path) -> None:
    names = ",".join(f"c{i}" for i in range(100_000))
    file.write_text(f"{names}\n" + ("1," * 99_999 + "1\n") * 3)


def a_line_of_commas(file: Path) -> None:
    file.write_text("a,y\n1,0\n" + "," * 20_000_000 + "\n2,1\n")


def a_first_line_of_commas(file: Path) -> None:
    file.write_text("," * 20_000_000)


def one_packed_value(file: Path) -> None:
    with gzip.open(file, "wb", compresslevel=1) as stream:
        stream.write(b"a,y\n")
        for _ in range(20):
            stream.write(b"0,0\n" * 2**18)


def a_wide_parquet_file(file: Path) -> None:
    pl.DataFrame({f"c{i}": [0, 1] for i in range(600)}).write_parquet(file)


@pytest.mark.parametrize(
    ("name", "make", "values", "told"),
    [
        ("x.csv", hundred_thousand_columns, {}, "has 100,000 columns, more than data.max_columns=32768"),
        ("x.csv", a_line_of_commas, {}, "line 3 is longer than data.max_line_mib=16"),
        ("x.csv", a_first_line_of_commas, {}, "line 1 is longer than data.max_line_mib=16"),
        ("x.csv.gz", one_packed_value, {}, "more than data.max_expansion=200 times its size"),
        (
            "x.parquet",
            a_wide_parquet_file,
            {"max_columns": 500},
            "600 columns, more than data.max_columns=500",
        ),
    ],
)
def test_what_is_no_table_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, make: Any, values: dict[str, int], told: str
) -> None:
    make(tmp_path / name)
    monkeypatch.setattr(delimited, "UNPACKED_BYTES", 2**22)
    with refused("Mend the file|Raise data") as error:
        from_file(tmp_path / name, **values)
    assert told in str(error.value)


def test_a_line_as_long_as_allowed_is_read(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text("t,y\n" + "".join(f"{'x' * (2**20 - 10)}{i},{i % 2}\n" for i in range(5)))
    assert from_file(file, max_line_mib=1).manifest.split["train_rows"] == 3
    assert from_file(file, max_line_mib=3, max_columns=5, max_expansion=7).reused
    file.write_text(file.read_text() + "x" * (2**20 + 1) + ",1\n")
    with refused("line 7 is longer than data.max_line_mib=1"):
        from_file(file, max_line_mib=1)


def test_more_columns_than_file_handles(tmp_path: Path) -> None:
    num = 300
    names = [*(f"c{i}" for i in range(num)), "y"]
    rows = [",".join([*(str((i * j) % 7) for j in range(num)), str(i % 2)]) for i in range(30)]
    file = tmp_path / "x.csv"
    file.write_text("\n".join([",".join(names), *rows]) + "\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        prepared = from_file(file, min_count=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(prepared.manifest.facts["columns"]) == num
