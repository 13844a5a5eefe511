"""How files are written is inferred, said, and never misread in silence: encodings, packing, separators,
quotes, headers, comments and formats that are not delimited text."""

import bz2
import gzip
import json
import lzma
import sys
from datetime import date, timedelta
from pathlib import Path

import pandas as pd
import polars as pl
import pytest

from dphybrid.data import Prepared
from dphybrid.data.table.files import read_files
from dphybrid.data.table.rows import Rows
from dphybrid.recipes.retrieval import RetrievalDataConfig
from dphybrid.util.errors import UserError
from tests.preparing import TableDataConfig, from_file, prepare
from tests.refusing import refused

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BODY = "".join(f"{i},w{i % 3},{i % 2}\n" for i in range(12))


def read(folder: Path, content: str | bytes, name: str = "x.csv", **values: object) -> list[Rows]:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    data = TableDataConfig(path=str(file), **values)  # type: ignore[arg-type]
    return list(read_files([file], data, []))


def table(chunks: list[Rows]) -> pl.DataFrame:
    return pl.concat([pl.DataFrame({name: chunk.texts(name) for name in chunk.names}) for chunk in chunks])


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, zstd.compress])
def test_packed_files_are_known_by_their_bytes(tmp_path: Path, pack: object) -> None:
    packed = pack(("n,w,y\n" + BODY).encode())  # type: ignore[operator]
    plain = table(read(tmp_path, "n,w,y\n" + BODY))
    assert table(read(tmp_path, packed, "misleading.csv")).equals(plain)
    with refused("is not a complete"):
        read(tmp_path, packed[:-9], "cut.csv")


@pytest.mark.parametrize(
    ("encoding", "given", "note"),
    [
        ("utf-8-sig", "auto", None),
        ("utf-16", "auto", "UTF-16"),
        ("utf-16-le", "auto", "UTF-16-LE"),
        ("utf-16-be", "auto", "UTF-16-BE"),
        ("utf-32", "auto", "UTF-32"),
        ("cp1252", "auto", "Latin-1"),
        ("latin-1", "latin-1", None),
        ("shift_jis", "shift_jis", None),
        ("cp1251", "cp1251", None),
    ],
)
def test_encodings(tmp_path: Path, encoding: str, given: str, note: str | None) -> None:
    word = {"shift_jis": "日本表", "cp1251": "слово"}.get(encoding, "naïve café")
    chunks = read(tmp_path, f"n,w\n1,{word}\n2,b\n".encode(encoding), encoding=given)
    assert table(chunks).rows() == [("1", word), ("2", "b")]
    assert [note in said for said in chunks[0].notes] == ([True] if note else [])


def test_bytes_of_no_sure_encoding_are_refused_with_their_line(tmp_path: Path) -> None:
    with refused(r"is not UTF-8 text \(line 3\); set data\.encoding"):
        read(tmp_path, "n,w\n1,é\n2,".encode() + b"\xe9\n")  # one sign is UTF-8, another is not
    with refused(r"is not UTF-8 or Latin-1 text \(line 2\)"):
        read(tmp_path, b"n,w\n1,\x81\x8d\n2,b\n")
    with refused(r"is not shift_jis text \(line 2\)"):
        read(tmp_path, b"n,w\n1,\xff\xff\n2,b\n", encoding="shift_jis")
    with pytest.raises(ValueError, match="encoding='nothing'"):
        TableDataConfig(encoding="nothing")


@pytest.mark.parametrize(
    ("text", "values", "names", "first", "note"),
    [
        ("1::x y::a\n2::z::b\n", {}, None, ("1", "x y", "a"), "'::'"),
        ("1::x y::a\n2::z::b\n", {"delimiter": "::"}, None, ("1", "x y", "a"), None),
        ('n::w\n1::"a::b"\n2::c\n', {"delimiter": "::"}, ["n", "w"], ("1", "a::b"), None),
        ("1 22  x\n3  4 y\n", {"delimiter": "blank"}, None, ("1", "22", "x"), "blanks"),
        (" 1\t2\n33  4\n", {"delimiter": "blank"}, None, ("1", "2"), "blanks"),
        ('"n" "w"\n"1" 5 "a  b"\n2 6 c\n', {"delimiter": "blank"}, ["0", "n", "w"], ("1", "5", "a  b"), "R"),
        ("sep=;\nn;w\n1,5;a\n2,5;b\n", {}, ["n", "w"], ("1,5", "a"), "sep=;"),
        ("# made by hand\n#\nn,w\n1,a\n2,b\n# the end\n", {}, ["n", "w"], ("1", "a"), "comments"),
        ("#n,w\n1,a\n2,b\n", {}, ["#n", "w"], ("1", "a"), None),
        ("# n,w\n1,a\n2,b\n", {}, ["n", "w"], ("1", "a"), None),
        ("# one, two, three\nn,w\n1,a\n2,b\n", {}, ["n", "w"], ("1", "a"), "comments"),
        ("sep=\t\nn\tw\n1\ta\n2\tb\n", {}, ["n", "w"], ("1", "a"), "sep="),
        ("n||w\n1||a\n2||b\n", {}, ["n", "w"], ("1", "a"), "'||'"),
        ("n,w\n1,a,\n2,b,\n", {}, ["n", "w"], ("1", "a"), None),
        ('"shop","y"\n"1","s1",1\n"2","s0",0\n', {}, ["0", "shop", "y"], ("1", "s1", "1"), "names the rows"),
        ("0,1,2\n.5,a,1\n.7,b,0\n", {}, ["0", "1", "2"], (".5", "a", "1"), "names the columns"),
        (",0,1,2\n0,.5,a,1\n1,.7,b,0\n", {}, ["index", "0", "1", "2"], ("0", ".5", "a", "1"), "names the"),
        ("who,2019,2020\nann,5,6\nbob,7,8\n", {}, ["who", "2019", "2020"], ("ann", "5", "6"), "names the"),
        ("2019,2020,2021\n2020,2021,2019\n", {}, None, ("2019", "2020", "2021"), None),
        ("0,1,2\n1,0,3\n2,2,2\n", {}, None, ("0", "1", "2"), None),
        ("n,w\n1,'a,b'\n2,'c'\n", {"quote": "'"}, ["n", "w"], ("1", "a,b"), None),
        ('n,w\n1,"a\\"b,c"\n2,"d"\n', {}, ["n", "w"], ("1", 'a"b,c'), "backslash"),
        ('n,w\n1,"C:\\"\n2,"d"\n', {}, ["n", "w"], ("1", "C:\\"), None),
        ('n\tw\n1\t"a" film\n2\tb\n', {"quote": "none"}, ["n", "w"], ("1", '"a" film'), None),
    ],
)  # fmt: skip
def test_what_is_unusual_is_read_and_said(
    tmp_path: Path,
    text: str,
    values: dict[str, object],
    names: list[str] | None,
    first: tuple[str, ...],
    note: str | None,
) -> None:
    chunks = read(tmp_path, text, **values)
    assert chunks[0].names == (names or [str(i) for i in range(len(first))])
    assert chunks[0].rejected == []
    assert table(chunks).row(0) == first
    assert [said for said in chunks[0].notes if note and note in said] or not (note or chunks[0].notes)


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("1 22  x\n3  4 y\n5 6 z\n", r"3 between blanks; set data\.delimiter=blank"),
        ('"n" "w"\n"1" 5 "a b"\n"2" 6 "c"\n', r"3 between blanks; set data\.delimiter=blank"),
        ('n\tw\n1\t"a" film\n2\tb\n', r"in line 2; set data\.quote=none"),
        ('n\tw\n1\ta\n2\t"Seven\n3\tsamurai"\n', r"in line 3; set data\.quote=none"),
        ("n,w\n" + '1,"a" film\n' * 3 + "1,b\n" * 9, r"in line 2; set data\.quote=none"),
        ("n,w\n1,'a,b'\n2,'c,d'\n3,e\n", r"single quotes seem to enclose cells; set data\.quote=\"'\""),
    ],
)  # fmt: skip
def test_what_a_file_only_looks_like_is_refused_with_its_option(
    tmp_path: Path, text: str, option: str
) -> None:
    with refused(option):
        read(tmp_path, text)


def test_plain_quotes_do_not_join_the_lines_between_them(tmp_path: Path) -> None:
    lines = [f"{i % 2}\tfilm {i}" for i in range(3000)]
    lines[100], lines[120], lines[500] = '0\t"Seven', '1\tsamurai"', '1\t"Up" again'
    text = "\n".join(["y\ttext", *lines, ""])
    chunks = read(tmp_path, text, quote="none")
    assert table(chunks)["text"].to_list() == [line.split("\t")[1] for line in lines]
    with refused(r"in line 102; set data\.quote=none if quotes are plain text"):
        read(tmp_path, text)
    # Three lines of a CSV file make quotes look plain; a single one may be a mistake, and is rejected.
    few = [f"{i % 2},film {i}" for i in range(300)]
    few[100] = '1,"Up" again'
    (chunk,) = read(tmp_path, "\n".join(["y,text", *few, ""]), max_rejected=0.01)
    assert [(row["line"], row["reason"].split(";")[0]) for row in chunk.rejected] == [
        (102, "misplaced quote")
    ]
    assert len(chunk) == 299


def test_a_bad_row_below_empty_lines_is_counted_with_its_own_line(tmp_path: Path) -> None:
    (chunk,) = read(tmp_path, "a,b,c\n1,2,3\n\n\n4,5\n\n6,7,8\n", max_rejected=0.5)
    assert [row["line"] for row in chunk.rejected] == [5]
    assert chunk.lines.tolist() == [2, 7]


def test_a_quoted_cell_of_many_lines_is_one_cell(tmp_path: Path) -> None:
    long = "\n".join(f'line {i}, of ""many""' for i in range(500))
    text = 'n,w\n1,a\n2,"' + long + '"\n\n3,"x\n\ny"\n4,b,c\n5,d\n'
    (chunk,) = read(tmp_path, text, max_rejected=0.5)
    assert table([chunk])["w"].to_list() == ["a", long.replace('""', '"'), "x\n\ny", "d"]
    assert chunk.lines.tolist() == [2, 3, 504, 508]
    assert [(row["line"], row["reason"]) for row in chunk.rejected] == [(507, "3 values, expected 2")]


def test_quotes_that_never_close_reject_their_lines_alone(tmp_path: Path) -> None:
    lines = [f'{i},"w, {i}",{i % 2}' for i in range(2000)]
    for number in (50, 51, 700, 1999):
        lines[number] = f'{number},"open,1'
    (chunk,) = read(tmp_path, "\n".join(["n,w,y", *lines, ""]), max_rejected=0.01)
    assert [row["line"] for row in chunk.rejected] == [52, 53, 702, 2001]
    assert {row["reason"].split(";")[0] for row in chunk.rejected} == {"a quote is opened and not closed"}
    assert table([chunk])["n"].to_list() == [str(i) for i in range(2000) if i not in (50, 51, 700, 1999)]


def test_many_quotes_that_do_not_close_are_told_with_the_remedy(tmp_path: Path) -> None:
    rows = [f'{i},"{i} inches,{i % 2}' for i in range(120)] + ["1,2,3,4"]
    with refused(r"has quotes that do not enclose cells, such as in line 2; set data\.quote=none"):
        read(tmp_path, "\n".join(["n,w,y", *rows, ""]))
    (chunk,) = read(tmp_path, "\n".join(["n,w,y", *rows, ""]), quote="none", max_rejected=0.1)
    assert (len(chunk), [row["line"] for row in chunk.rejected]) == (120, [122])


def test_json_lines(tmp_path: Path) -> None:
    rows = [{"n": i, "w": f"w{i % 3}", "y": i % 2 == 0} for i in range(5)]
    text = "\n".join(map(json.dumps, rows)) + '\n\n{"n": 1,\n[1]\n{"n": 1.5, "y": null}\n'
    (chunk,) = read(tmp_path, text, "x.jsonl", max_rejected=0.5)
    assert chunk.names == ["n", "w", "y"]
    assert chunk.lines.tolist() == [1, 2, 3, 4, 5, 9]
    assert [(row["line"], row["reason"]) for row in chunk.rejected] == [
        (7, "not a JSON object"),
        (8, "not a JSON object"),
    ]
    assert table([chunk]).row(5) == ("1.5", None, None)
    assert table(read(tmp_path, gzip.compress(text.encode()), "y.gz", max_rejected=0.5)).equals(
        table([chunk])
    )
    mixed = '{"a": 1}\n{"a": true}\n{"a": "x"}\n'
    assert table(read(tmp_path, mixed))["a"].to_list() == ["1", "true", "x"]
    lists = '{"a": 1, "b": "x"}\n{"a": [2, 3], "b": ["y"]}\n{"a": null}\n'
    assert table(read(tmp_path, lists))["a"].to_list() == [[1], [2, 3], None]
    with refused(r"column 'a' holds Struct.* name it in data\.ignore"):
        read(tmp_path, '{"a": {"b": 1}, "c": 1}\n' * 3)
    with refused("is one JSON value over several lines"):
        read(tmp_path, '[\n{"a": 1},\n{"a": 2}\n]\n', "x.json")


def test_arrow_files_and_streams(tmp_path: Path) -> None:
    frame = pl.DataFrame({"n": [1, 2, 3], "w": ["a", None, "c"]})
    frame.write_ipc(tmp_path / "x.feather", compression="zstd")
    frame.write_ipc_stream(tmp_path / "x.arrows")
    for name in ("x.feather", "x.arrows"):
        data = TableDataConfig(path=str(tmp_path / name))
        (chunk,) = read_files([tmp_path / name], data, [])
        assert (chunk.cells["n"].to_list(), chunk.cells["w"].to_list()) == ([1, 2, 3], ["a", None, "c"])
    (tmp_path / "x.feather").write_bytes((tmp_path / "x.feather").read_bytes()[:-40])
    with refused("cannot be read as Arrow"):
        list(read_files([tmp_path / "x.feather"], TableDataConfig(path="x"), []))


def test_the_index_of_a_data_frame_is_no_feature(tmp_path: Path) -> None:
    frame = pd.DataFrame({"n": [float(i % 9) for i in range(200)], "y": [i % 2 for i in range(200)]})
    frame = frame.sample(frac=1.0, random_state=0)
    frame.to_csv(tmp_path / "x.csv")
    frame.to_parquet(tmp_path / "x.parquet")
    for name, index in (("x.csv", "0"), ("x.parquet", "__index_level_0__")):
        prepared = from_file(tmp_path / "p", path=str(tmp_path / name), label="y")
        assert prepared.info["inputs"] == ["n"]
        facts = {column["name"]: column["reason"] for column in prepared.manifest.facts["columns"]}
        assert facts[index] == "the index of the rows"


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        (b"", "x.csv", None),
        (b"\n\n \n", "x.csv", "is empty"),
        (b"PK\x03\x04rest", "x.csv", "an Excel or zip file, which is not supported"),
        (b"\x1f\x8b\x08\0junk", "x.csv.gz", "is not a complete gzip file"),
        (b"PAR1\x15damaged", "x.csv", "cannot be read as Parquet"),
    ],
)
def test_files_that_are_no_tables_are_refused(
    tmp_path: Path, content: bytes, name: str, words: str | None
) -> None:
    with refused(words or "is empty"):
        read(tmp_path, content, name)


def test_odd_tables_are_read(tmp_path: Path) -> None:
    (chunk,) = read(tmp_path, "n\n1\n\n2\n", header="yes")
    assert (chunk.cells["n"].to_list(), chunk.lines.tolist()) == (["1", "2"], [2, 4])
    (chunk,) = read(tmp_path, 'n,w\n1,"a\0b"\n2,c\0\n')
    assert table([chunk])["w"].to_list() == ["a\0b", "c\0"]
    (chunk,) = read(tmp_path, "ORCID,PAR1\n1,a\n2,b\n")
    assert chunk.names == ["ORCID", "PAR1"]
    (chunk,) = read(tmp_path, "n,w\n")
    assert (len(chunk), chunk.names) == (0, ["n", "w"])
    wide = ",".join(f"c{i}" for i in range(10_000))
    (chunk,) = read(tmp_path, f"{wide}\n{'1,' * 9999}1\n{'2,' * 9999}2\n")
    assert len(chunk) == 2
    assert len(chunk.names) == 10_000
    for text in ("a,b\n1,2\n3\n4,5,6\n", "a,b\n1,2\n\n\n3,4", "a,b\r1,2\r3,4"):
        chunks = read(tmp_path, text, max_rejected=1.0)
        assert table(chunks).row(0) == ("1", "2")
    with refused("cannot be read, more than"):
        read(tmp_path, "a,b\n1,2\n3\n4,5,6\n")
    with pytest.raises(UserError, match="give up to 4 characters"):
        read(tmp_path, "a,b\n", delimiter='"')


def dated(folder: Path, days: list[str]) -> Path:
    rows = [f"u{i % 9}::i{i % 7}::{day}" for i, day in enumerate(days)]
    (folder / "x.dat").write_text("\n".join(["user::item::date", *rows]))
    return folder / "x.dat"


def latest(folder: Path, file: Path, **values: object) -> Prepared:
    data = RetrievalDataConfig(
        **{"path": str(file), "time": "date", "delimiter": "::", "valid_fraction": 0.1} | values
    )  # type: ignore[arg-type]
    return prepare("retrieval", data, folder / "prepared", 0)


def test_interactions_are_split_by_dates_of_a_known_order_alone(tmp_path: Path) -> None:
    # 40 days from 3 January on, as 3/1, 4/1, ... 11/2.
    known = [date(2011, 1, 3) + timedelta(i) for i in range(40)]
    prepared = latest(tmp_path, dated(tmp_path, [f"{d.day}/{d.month}/{d.year}" for d in known]))
    assert "the latest by date, dates are read day first" in prepared.describe()
    # The four latest days are the last rows.
    pairs = {(i % 9, i % 7) for i in range(36, 40)}
    assert len(prepared.arrays["train_pairs"]) == 36
    assert len(prepared.arrays["held_items"]) == len(pairs - {(i % 9, i % 7) for i in range(36)})
    both = dated(tmp_path, [f"{1 + i % 12}/{1 + i % 11}/2011" for i in range(40)])
    with refused(r"data\.time='date': dates such as '1/1/2011' can be read in two ways; set data\.dayfirst"):
        latest(tmp_path, both)
    assert "day first" in latest(tmp_path, both, dayfirst=True).describe()
    odd = dated(tmp_path, ["2011-01-01", "soon"] * 20)
    with refused("data.time='date': 'soon' is neither a number nor a date"):
        latest(tmp_path, odd)


def test_texts_are_never_sorted_as_dates(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("n,at,y\n" + "".join(f"{i},week {i},{i % 2}\n" for i in range(30)))
    with refused("data.split_column=at: 'week 0' is neither a number nor a date"):
        from_file(tmp_path / "p", path=str(tmp_path / "x.csv"), label="y", split="time", split_column="at")
