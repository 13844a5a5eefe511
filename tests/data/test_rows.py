"""Reading of delimited text: compared with Python's csv module, and with whatever a random file may hold."""

import csv
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dphybrid.data.table import lines as text_lines
from dphybrid.data.table.files import read_files
from dphybrid.data.table.rows import Cells, Rows, check_enough, check_rejected
from dphybrid.util.errors import UserError
from tests.preparing import TableDataConfig, prepare
from tests.refusing import refused

MANY = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SIGNS = [*',;\t"\n\r01é\0 a\ufeff\x0c', '""', "\r\n", "-2.5", "007", "1e400", "nan", "inf", "yes"]
PIECES = st.sampled_from(SIGNS)
LINES = st.lists(
    st.tuples(st.sampled_from(["0", "1"]), *[st.lists(PIECES, max_size=3).map("".join)] * 2).map(",".join),
    min_size=2,
    max_size=12,
).map("\n".join)  # two in five of these can be prepared, of loose pieces hardly any


def read(folder: Path, text: str | bytes, **values: object) -> Rows:
    file = folder / "x.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    data = TableDataConfig(path=str(file), **values)  # type: ignore[arg-type]
    chunks = list(read_files([file], data, []))
    rejected = [row for chunk in chunks for row in chunk.rejected]
    whole = pl.concat([pl.DataFrame(chunk.cells) for chunk in chunks])
    check_rejected(file, rejected, len(whole) + len(rejected), data.max_rejected)
    check_enough(file, chunks[0].header, len(whole))
    lines = np.concatenate([chunk.lines for chunk in chunks])
    return replace(
        chunks[0],
        cells=Cells(dict(zip(whole.columns, whole.get_columns(), strict=True)), ()),
        lines=lines,
        rejected=rejected,
    )


@MANY
@given(
    st.lists(st.lists(st.text('ab "\n,;7', max_size=6), min_size=3, max_size=3), min_size=2, max_size=8),
    st.sampled_from(["\n", "\r\n"]),
)
def test_what_the_csv_module_writes_is_read_back(
    tmp_path: Path, table: list[list[str]], line_end: str
) -> None:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=line_end).writerows(table)
    rows = read(tmp_path, text.getvalue(), header="no", delimiter=",", quote='"')
    assert rows.rejected == []
    assert pl.DataFrame(rows.cells).rows() == [tuple(cell.strip() or None for cell in row) for row in table]


@MANY
@given(
    st.one_of(LINES, LINES, st.lists(PIECES, max_size=60).map("".join)),
    st.sampled_from(["auto", "yes", "no"]),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_any_text_is_prepared_or_refused_with_a_message(
    tmp_path: Path, text: str, header: str, max_rejected: float
) -> None:
    file, out = tmp_path / "x.csv", tmp_path / "prepared"
    file.write_text(text, newline="")
    data = TableDataConfig(path=str(file), label="0", header=header, max_rejected=max_rejected, min_count=1)  # type: ignore[arg-type]
    before = sorted(out.glob("*")) if out.is_dir() else []
    try:
        prepared = prepare("ctr", data, out, 0)
    except UserError:
        assert (sorted(out.glob("*")) if out.is_dir() else []) == before
    else:
        arrays = prepared.arrays
        assert len(arrays["train_rows"]) + len(arrays["valid_rows"]) == len(arrays["labels_B"]) >= 2
        assert (abs(arrays["dense_BN"]) <= 100).all()
        assert ((arrays["ids_BF"] >= 0) & (arrays["ids_BF"] < prepared.info["num_ids"])).all()
    assert list(out.glob(".*")) == []


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_and_a_byte_order_mark(tmp_path: Path, end: str) -> None:
    rows = read(tmp_path, b"\xef\xbb\xbf" + end.join(["n,w", "1,a\x0cb", "", "2,c\u2028d"]).encode())
    assert rows.names == ["n", "w"]
    assert pl.DataFrame(rows.cells).rows() == [("1", "a\x0cb"), ("2", "c\u2028d")]
    assert rows.lines.tolist() == [2, 4]


@pytest.mark.parametrize(
    ("text", "separator"),
    [
        ("a;b\n1,5;2\n2,5;3\n", ";"),
        ("a\tb\nx, y\tz\nx, y, z\tw\n", "\t"),
        ("a|b|c\n1|2,0|3\n4|5|6\n", "|"),
        ("a,b\n1,2\n3,4\n", ","),
    ],
)
def test_the_separator_is_the_one_that_cuts_evenly(tmp_path: Path, text: str, separator: str) -> None:
    assert read(tmp_path, text).names == text.splitlines()[0].split(separator)
    assert read(tmp_path, text, delimiter="tab" if separator == "\t" else separator).header


@pytest.mark.parametrize(
    ("text", "values", "names"),
    [
        ("age,city\n39,a\n40,b\n", {}, ["age", "city"]),
        (",age,city\n0,39,a\n1,40,b\n", {}, ["0", "age", "city"]),  # a data frame's index has no name
        ("age,age,age_2\n1,2,3\n4,5,6\n", {}, ["age", "age_3", "age_2"]),
        ("2019,2020,sold\n1,2,yes\n3,4,no\n", {"label": "sold"}, ["2019", "2020", "sold"]),
        ("39, a\n40, b\n", {}, ["0", "1"]),
        ("?,a\n40,b\n40,a\n", {}, ["0", "1"]),
        ("a,b\nb,a\na,a\n", {}, ["0", "1"]),
        ("39,a\n40,b\n", {"header": "yes"}, ["39", "a"]),
        ("age,city\n39,a\n40,b\n", {"header": "no"}, ["0", "1"]),
        ("first,last\nann,b\ncid,d\n", {}, ["first", "last"]),
    ],
)
def test_headers_are_told_from_values(
    tmp_path: Path, text: str, values: dict[str, object], names: list[str]
) -> None:
    assert read(tmp_path, text + text.splitlines()[-1] + "\n", **values).names == names


def test_a_ragged_first_row_without_header_is_the_one_rejected(tmp_path: Path) -> None:
    rows = read(tmp_path, "1,2,3\n" + "\n".join(f"{i},{i}" for i in range(30)), max_rejected=0.1)
    assert [(row["line"], row["reason"]) for row in rows.rejected] == [(1, "3 values, expected 2")]


def test_a_header_over_two_lines(tmp_path: Path) -> None:
    rows = read(tmp_path, 'n,"two\nlines"\n1,a\n2,b\n')
    assert (rows.names, rows.lines.tolist()) == (["n", "two\nlines"], [3, 4])


def test_what_is_no_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(r"has 100,000 columns, but at most 32,768 are allowed; check data\.delimiter"):
        read(tmp_path, ("1," * 99_999 + "1\n") * 3)
    monkeypatch.setattr(text_lines, "BLOCK_BYTES", 2**10)
    monkeypatch.setattr(text_lines, "_MAX_LINE_BYTES", 2**12)
    with refused("has a line of over 4,096 bytes"):
        read(tmp_path, "a,y\n1,0\n" + "," * 20_000)
