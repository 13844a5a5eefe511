"""What the reader of files types, rejects, says and refuses; and what must never be lost or merged."""

import gzip
from contextlib import suppress
from datetime import date, datetime
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from dphybrid.data import Prepared
from dphybrid.data.table.encoder import Encoder, Unknown
from dphybrid.data.table.files import Rows, find_files, read_rows
from dphybrid.util.errors import UserError
from tests.preparing import TableDataConfig, from_file
from tests.refusing import refused


def rows_of(
    folder: Path, content: str | bytes, name: str = "x.csv", named: tuple[str, ...] = (), **values: object
) -> Rows:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    data = TableDataConfig.model_validate({"path": str(file)} | values)
    return read_rows([file], data, folder / "scratch", named)


def roles_of(prepared: Prepared) -> dict[str, str]:
    return {c["name"]: c["role"] for c in prepared.manifest.facts["columns"]}


def known_of(prepared: Prepared, name: str) -> set[str]:
    (column,) = [c for c in Encoder.load(prepared.path / "encoder").columns if c.name == name]
    return {*column.learned}


DAY = date(2024, 2, 3)
LATE = 21_000
"""Rows before a surprise: more than those from which the reader infers types."""


@pytest.mark.parametrize(
    ("name", "late", "values"),
    [
        ("a", ["8.5"], [1.0, 8.5]),
        *(
            ("a", [*map(str, ids)], ["1", *map(str, ids)])
            for ids in ([2**60, 2**60 + 1], [2**63 + 5], [10**25])
        ),
        ("shop_id", ["007"], ["1", "007"]),
        ("shop_id", ["8.0"], ["1", "8.0"]),
        ("at", ["2024-02-03 10:00:00"], [datetime(2024, 2, 3, 10)]),
    ],
)
def test_late_values_are_neither_rounded_nor_merged(
    name: str, late: list[str], values: list[object], tmp_path: Path
) -> None:
    first = "2024-02-02" if name == "at" else "1"
    rows = rows_of(tmp_path, f"{name},b\n" + f"{first},u\n" * LATE + "".join(f"{each},u\n" for each in late))
    cells = rows.column(name)[-len(values) :]
    assert (cells.cast(pl.String) if values[0] == "1" else cells).to_list() == values


def test_late_texts_make_a_column_of_texts_only_if_they_are_many(tmp_path: Path) -> None:
    few = rows_of(tmp_path, "a,b\n" + "1,u\n" * LATE + "x,u\n")
    assert few.column("a").dtype == pl.Float64
    ((line, reason),) = [(row["line"], row["reason"]) for row in few.rejected]
    assert (line, "'a'" in reason, '"x"' in reason) == (LATE + 2, True, True)
    many = rows_of(tmp_path, "a,b\n" + "1,u\n" * LATE + "007,u\nx,u\n" * 40)
    assert many.column("a").dtype == pl.String
    assert many.column("a")[-2:].to_list() == ["007", "x"]


def test_an_empty_name_above_an_index_keeps_the_header(tmp_path: Path) -> None:
    prepared = from_file_of(tmp_path, ",a,y\n" + "".join(f"{i},{'uv'[i % 2]},{i % 2}\n" for i in range(60)))
    assert roles_of(prepared) == {"": "ignore", "a": "categorical"}


def from_file_of(folder: Path, content: str, name: str = "x.csv", **values: object) -> Prepared:
    (folder / name).write_text(content)
    return from_file(folder / name, **values)


def test_texts_for_no_value_may_hold_the_separator(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path, "a;n\n" + "u;1\nv;none;no\n" * 9, delimiter=";", missing=("none;no", "-9"), max_rejected=1
    )
    assert rows.column("n").to_list() == [1.0] * 9


def test_mixed_line_ends_and_marks_are_read(tmp_path: Path) -> None:
    assert len(rows_of(tmp_path, "a,b\r\n1,2\r\n3,4\n5,6\r\n" * 1)) == 3
    assert rows_of(tmp_path, "\ufeffa,b\n1,2\n").names == ["a", "b"]
    assert rows_of(tmp_path, "a,b\n1,é\n2,z\n".encode("utf-16")).column("b").to_list() == ["é", "z"]
    assert rows_of(tmp_path, gzip.compress(b"a,b\n1,2\n3,4\n"), "x.csv.gz").column("b").to_list() == [2, 4]


def test_decimal_commas_are_taken_where_the_comma_separates_nothing(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "w;n\n" + "a;1,5\nb;2,7\n" * 20)
    assert rows.column("n").head(2).to_list() == [1.5, 2.7]
    assert "decimals are written with a comma" in rows.notes[-1]
    assert rows.form.comma


def test_quotes_may_appear_late(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "a,b\n" + "u,v\n" * 400_000 + '"x, y",v\n')
    assert rows.column("a")[-1] == "x, y"


def test_a_name_that_occurs_twice_is_refused_if_it_is_used(tmp_path: Path) -> None:
    assert rows_of(tmp_path, "a,b,b\n1,2,3\n").names == ["a", "b", "b_1"]
    with refused("has two columns named 'b'; rename one"):
        rows_of(tmp_path, "a,b,b\n1,2,3\n", named=("b",))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.csv", b"", "is empty"),
        ("x.csv", b"\n\n", "is empty"),
        ("x.csv", b"a,b\n" + b"1,\xe9\n" * 30, "not utf-8 encoded.*set data.delimiter or data.encoding"),
        ("x.csv.gz", gzip.compress(b"a,b\n1,2\n" * 3000, mtime=0)[:-9], "not a complete gzip file"),
        (
            "x.csv.gz",
            gzip.compress(b"a,b\n1,2\n" * 9, mtime=0)[:12] + b"\xff" * 30,
            "not a complete gzip file",
        ),
        ("x.jsonl", b'{"a": 1}\n{"a": }\n', "cannot be read as JSON lines"),
        ("x.jsonl", b'{"a": "\xe9"}\n', "cannot be read as JSON lines: .*invalid UTF-8"),
        ("x.parquet", b"PAR1 and no table", "cannot be read as Parquet"),
        ("x.csv", b"PK\x03\x04\x14\x00", "is no text, Parquet or Arrow file"),
    ],
)
def test_what_is_no_table_is_refused_with_a_sentence(
    name: str, content: bytes, words: str, tmp_path: Path
) -> None:
    with refused(words):
        rows_of(tmp_path, content, name)


@pytest.mark.parametrize("path", ["s3://bucket/x.csv", "https://host/x.csv"])
def test_addresses_are_no_files(path: str) -> None:
    with refused(f"data.path={path}: is no file of this machine; download it"):
        find_files(path, "data.path")


def test_types_that_polars_lacks_are_refused_with_a_sentence(tmp_path: Path) -> None:
    wide = pyarrow.array(range(60)).cast(pyarrow.decimal256(60, 0))
    parquet.write_table(pyarrow.table({"a": wide, "y": [0, 1] * 30}), tmp_path / "x.parquet")
    with refused("cannot be read as Parquet: .*precision"):
        from_file(tmp_path / "x.parquet")


def test_damage_behind_the_metadata_is_refused_with_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "x.arrow"
    pl.DataFrame({"a": [f"a long text {i}" for i in range(60)], "y": [0, 1] * 30}).write_ipc(file)
    starts = file.read_bytes().split(b"a lo")
    file.write_bytes(b"a lo".join(starts[:50]) + b"b lo" + b"a lo".join(starts[50:]))
    with refused(r"data.path=.*x.arrow: cannot be read: .*; write it again"):
        from_file(file)


def test_columns_come_and_go_between_files(tmp_path: Path) -> None:
    days = tmp_path / "days"
    days.mkdir()
    body = [f"s{i % 9},{i % 2}" for i in range(200)]
    (days / "1.csv").write_text("site,clicked\n" + "\n".join(body))
    (days / "2.csv").write_text(
        "site,campaign,clicked\n" + "\n".join(row.replace(",", ",c,") for row in body)
    )
    (days / "3.csv").write_text("clicked\n" + "\n".join(row[-1] for row in body))
    prepared = from_file(tmp_path / "x", path=str(days), label="clicked", ignore=("campaign",))
    assert "2.csv has more columns than 1.csv, which are left out: campaign" in prepared.describe()
    assert "3.csv has no column site: no value in its rows" in prepared.describe()
    assert (prepared.arrays["ids_BF"][400:] == 0).all()
    assert len(prepared.arrays["labels_B"]) == 600


def test_a_column_empty_in_one_file_has_the_others_type(tmp_path: Path) -> None:
    types = {
        "int": pl.Series([7]),
        "text": pl.Series(["x"]),
        "list": pl.Series([["x"]]),
        "day": pl.Series([DAY]),
    }
    files = [tmp_path / f"{number}.parquet" for number in range(3)]
    more = pl.Series([1]), pl.Series([["x"]])  # which the first file lacks
    tables = types, dict.fromkeys(types) | {"more": more[0]}, types | {"more": more[1]}
    for file, cells in zip(files, tables, strict=True):
        pl.DataFrame(cells).write_parquet(file)
    rows = read_rows(files, TableDataConfig(path=str(tmp_path)), tmp_path / "scratch")
    assert [*rows.frame.collect_schema().values()] == [cells.dtype for cells in types.values()]
    assert rows.column("list").to_list() == [["x"], None, ["x"]]


def test_a_base_goes_on_when_columns_come_and_go(tmp_path: Path) -> None:
    first = "".join(f"s{i % 9},{i % 7 / 4},{i % 2}\n" for i in range(200))
    later = "".join(f"s{i % 11},c{i % 3},{i % 2}\n" for i in range(200, 500))
    base = from_file_of(tmp_path, "site,n,y\n" + first, "1.csv")
    more = {"base": str(base.path), "numeric": ("n",)}  # a schedule repeats the first training's flags
    grown = from_file_of(tmp_path, "site,campaign,y\n" + later, "2.csv", **more)
    assert "columns that the earlier table lacks are left out: campaign" in grown.describe()
    assert "columns of the earlier table that are missing have no values: n" in grown.describe()
    assert grown.info["inputs"] == base.info["inputs"]
    assert {"s9", "s10"} <= known_of(grown, "site")


def test_keys_stay_on_their_side_when_a_model_is_retrained(tmp_path: Path) -> None:
    random = np.random.default_rng(0)

    def rows(count: int, users: int) -> list[str]:
        return [f"u{random.integers(users)},{random.normal():.6f},{i % 2}" for i in range(count)]

    old, new = rows(600, 30), rows(600, 45)
    given = {"split": "key", "split_column": "user", "valid_fraction": 0.3, "categorical": ("user",)}
    base = from_file_of(tmp_path, "\n".join(["user,x,y", *old]), "1.csv", **given)
    grown = from_file_of(tmp_path, "\n".join(["user,x,y", *old, *new]), "2.csv", base=str(base.path), **given)
    users = np.array([row.split(",")[0] for row in (*old, *new)])
    train, valid = ({*users[grown.arrays[f"{part}_rows"]]} for part in ("train", "valid"))
    assert train.isdisjoint(valid)
    before = {*users[base.arrays["valid_rows"]]}
    assert before <= valid


def test_a_few_different_rows_can_be_retrained_on(tmp_path: Path) -> None:
    def table(name: str) -> str:
        return "a,y\n" + "".join(f"{'uv'[i % 2]},{i // 2 % 2}\n" for i in range(400))

    base = from_file_of(tmp_path, table("1"), "1.csv")
    grown = from_file_of(tmp_path, table("2") + "u,1\n", "2.csv", base=str(base.path))
    assert len(grown.arrays["valid_rows"])


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_whole_numbers_since_1970_are_times(kind: str, tmp_path: Path) -> None:
    units = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
    seconds = 1_252_800_000 + np.random.default_rng(0).integers(0, 900, 400) * 86_400 + 3 * 3600
    columns = {f"{unit}_ReviewTime": seconds * one for unit, one in units.items()}
    columns |= {f"other{unit}": seconds * one for unit, one in units.items()}
    table = pl.DataFrame(columns | {"y": seconds // 86_400 % 2})
    file = tmp_path / f"x.{kind}"
    table.write_csv(file) if kind == "csv" else table.write_parquet(file)
    prepared = from_file(file, times=tuple(f"other{unit}" for unit in units))
    assert {*roles_of(prepared).values()} == {"time"}
    for column in Encoder.load(prepared.path / "encoder").columns:
        hours, _, days = column.numbers(column.read(table[column.name].cast(pl.String)))
        assert ({*hours.tolist()}, int(days[0])) == ({3.0}, int(seconds[0] // 86_400))
        if "Time" in column.name:
            unit = column.name.partition("_")[0]
            said = f"check {column.name}, time: whole numbers of {unit} since 1970; "
            assert said in prepared.describe()


def test_ids_that_appear_late_are_not_merged(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    ids = np.r_[random.integers(1, 500, 22_000), 2**55 + random.integers(1, 60, 8_000)]
    table = pl.DataFrame({"shop": ids, "y": random.integers(0, 2, 30_000)})
    for kind in ("csv", "parquet", "jsonl"):
        file = tmp_path / f"x.{kind}"
        {"csv": table.write_csv, "parquet": table.write_parquet, "jsonl": table.write_ndjson}[kind](file)
        prepared = from_file(file, min_count=1)
        assert known_of(prepared, "shop") == {*map(str, ids[np.sort(prepared.arrays["train_rows"])].tolist())}


def test_floats_that_have_merged_ids_are_refused_as_ids(tmp_path: Path) -> None:
    keys = np.random.default_rng(0).integers(0, 50, 2000)
    ids = [None if i % 97 == 5 else float(2**60 + int(key) * 3) for i, key in enumerate(keys)]
    pl.DataFrame({"h": ids, "a": keys, "y": keys % 2}).write_parquet(tmp_path / "x.parquet")
    prepared = from_file(tmp_path / "x.parquet")
    assert roles_of(prepared)["h"] == "ignore"
    assert (
        "check h, ignore: floats beyond 2^53 have merged ids; write them as whole numbers"
        in prepared.describe()
    )
    alone = pl.read_parquet(tmp_path / "x.parquet").drop("a")
    alone.write_parquet(tmp_path / "alone.parquet")
    with refused(r"no column is left .*; h: floats beyond 2\^53 have merged ids"):
        from_file(tmp_path / "alone.parquet")
    with refused(r"data.categorical: column 'h': floats beyond 2\^53 have merged ids"):
        from_file(tmp_path / "x.parquet", categorical=("h",))


def test_columns_of_unknown_values_are_said(tmp_path: Path) -> None:
    """Zeros lost, another sign, blanks instead of bars, and a currency."""
    span, zeros = range(2000), [f"{i % 60:05d}" for i in range(2000)]
    rows = [(zeros[i], str(i % 60 + 2**63), f"{i % 9}|{i % 7}", f"{i % 5 / 4}") for i in span]
    names = ("zeros", "hash", "tags", "n")
    old = pl.DataFrame(rows, names, orient="row")
    body = old.with_columns(y=pl.Series([0, 1] * 1000)).write_csv()
    encoder = Encoder.load(from_file_of(tmp_path, body, bags=("tags:|",)).path / "encoder")
    new = [(str(i % 60), str(i % 60 - 2**63), f"{i % 9} {i % 7}", "$1") for i in span]
    for frame, said in ((old, 0), (pl.DataFrame(new, names, orient="row"), 4)):
        unknown = Unknown()
        encoder.encode(frame, (), unknown)
        lines = sorted(unknown.lines(encoder.columns))
        assert len(lines) == said
    assert lines[1] == "Column 'n': 2,000 of 2,000 values cannot be read as numbers and became missing"
    for line in (lines[0], *lines[2:]):
        assert "2,000 of 2,000 values are unknown to the model; of the validation rows, 0.0% were" in line


def test_words_that_count_as_missing_are_said_and_kept_on_demand(tmp_path: Path) -> None:
    body = "country,y\n" + "".join(f"{('NA', 'DE', 'FR')[i % 3]},{i % 2}\n" for i in range(300))
    prepared = from_file_of(tmp_path, body)
    assert (
        "NA count as no value (in the first rows: 100 of country); --data.missing ''" in prepared.describe()
    )
    assert "NA" in known_of(from_file_of(tmp_path, body, missing=None), "country")
    assert TableDataConfig(missing="-200,-9999").no_value[-2:] == ("-200", "-9999")


def test_words_for_no_value_may_come_late(tmp_path: Path) -> None:
    lines = [f"{i % 97},{i / 2},x{i % 5},1" for i in range(LATE)] + ["NA, NA,NA,1", "5,null, x1 ,0"]
    rows = rows_of(tmp_path, "shop_id,price,kind,y\n" + "\n".join(lines))
    assert rows.table(rows.names).tail(2).rows() == [(None, None, None, 1), (5, None, "x1", 0)]
    assert not rows.rejected


def test_numbers_that_mean_no_value_in_any_notation(tmp_path: Path) -> None:
    body = "n,y\n" + "".join(f"{-200 if i % 4 == 0 else i * 3 % 50 + 0.5},{i % 2}\n" for i in range(200))
    prepared = from_file_of(tmp_path, body.replace("-200,", "-200.0,"), missing="-200")
    (column,) = Encoder.load(prepared.path / "encoder").columns
    assert (prepared.arrays["dense_BN"][:, 1] == [i % 4 == 0 for i in range(200)]).all()
    assert column.scales[0].mean > 0


REMEDIES = {
    "sign": (["$5.10", "$7.25"], '.str.replace_all(r"[^\\d.-]", "").cast(pl.Float64'),
    "share": (["63%", "7%"], '.str.replace_all(r"[^\\d.-]", "").cast(pl.Float64'),
    "groups": (["1,234.5", "27,000.1"], '.str.replace_all(r"[^\\d.-]", "").cast(pl.Float64'),
    "commas": (["2,6", "3,75"], "--data.decimal ,"),
    "dates": (["3/14/24", "12/25/23"], ".str.to_datetime(FORMAT, strict=False)"),
    "odd": (["1.5"] * 30 + ["unknown"], "--data.missing unknown if that is no value"),
    "bars": (["a|b", "b|c", "c|a|b"], "--data.bags 'bars:|' reads the items between the marks"),
    "lists": (['["a", "b"]', "[]"], ".str.json_decode(pl.List(pl.String))"),
}
PLAIN = {
    "zeros": ["00123", "00456"],
    "addresses": ["10.0.0.1", "10.0.0.2"],
    "letters": ["a1", "b2"],
    "dashes": ["A-1", "B-2"],
    "units": ["19M", "512k"],
}


def test_texts_that_look_like_something_else_are_said_with_their_line(tmp_path: Path) -> None:
    cells = {name: cells for name, (cells, _) in REMEDIES.items()} | PLAIN
    table = {name: (values * 200)[:400] for name, values in cells.items()} | {"y": [0, 1] * 200}
    pl.DataFrame(table).write_parquet(tmp_path / "x.parquet")
    prepared = from_file(tmp_path / "x.parquet")
    assert {*roles_of(prepared).values()} == {"categorical"}
    said = {
        line.split()[1].rstrip(","): line for line in prepared.describe().splitlines() if "  check " in line
    }
    assert {*said} == {*REMEDIES}
    for name, (_, line) in REMEDIES.items():
        assert line in said[name]


def test_a_sign_of_two_colons_inside_cells_splits_nothing(tmp_path: Path) -> None:
    body = "".join(f"{i % 2}\tfe80::{i % 9:x}\tGET\t{i % 50}\n" for i in range(600))
    prepared = from_file_of(tmp_path, body, "x.tsv", label="0")
    assert [*roles_of(prepared)] == ["1", "2", "3"]
    rows = rows_of(tmp_path, "a::b::c\n" + "1::2::3\n" * 30)
    assert "--data.delimiter :: splits it" in rows.notes[-1]
    assert rows_of(tmp_path, "a::b::c\n" + "1::2::3\n" * 30, delimiter="::").names == ["a", "b", "c"]


def test_dates_of_unknown_order_are_texts_until_their_format_is_given(tmp_path: Path) -> None:
    body = "at,y\n" + "".join(f"{1 + i % 9:02d}/{1 + i % 11:02d}/2024,{i % 2}\n" for i in range(240))
    prepared = from_file_of(tmp_path, body)
    assert roles_of(prepared) == {"at": "categorical"}
    assert "dates such as '02/02/2024'; --data.dateformat FORMAT" in prepared.describe()
    given = {"split": "time", "split_column": "at"}
    with refused(
        "was not read as a number, date or time, so rows cannot be ordered by it; set data.dateformat"
    ):
        from_file_of(tmp_path, body, **given)
    assert roles_of(from_file_of(tmp_path, body, dateformat="%m/%d/%Y", **given)) == {"at": "time"}


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.sampled_from(list("ab01.,;\t\"' \n\r|\\é")), max_size=120), st.sampled_from([0.001, 1.0]))
def test_any_text_is_read_or_refused_with_a_sentence(tmp_path: Path, text: str, most: float) -> None:
    file = tmp_path / "x.csv"
    file.write_text("a,b,y\n1,u,0\n2,v,1\n" + text, newline="")
    rows = None
    with suppress(UserError):
        rows = read_rows([file], TableDataConfig(path=str(file), max_rejected=most), tmp_path / "scratch")
    if rows is None:
        return
    assert len(rows.frame.collect()) == len(rows)
    of_file, lines = rows.lines()
    assert len(of_file) == len(lines) == len(rows)
