"""How the cells of a column are read: dates, numbers with marks, odd texts, bags, and what prepare says."""

import datetime
from pathlib import Path

import polars as pl
import pytest

from dphybrid.config.tables import TableDataConfig
from dphybrid.data import Prepared
from dphybrid.data.table.cells import read_numbers, read_times
from dphybrid.data.table.encoder import Encoder
from dphybrid.data.table.order import positions_in_time
from tests.preparing import table_of
from tests.refusing import refused


def _time(text: str, day_first: bool = False) -> datetime.datetime | None:
    found: datetime.datetime | None = read_times(pl.Series([text]), day_first)[0]
    return found


@pytest.mark.parametrize(
    ("text", "iso"),
    [
        ("12/28/10", "2010-12-28"),
        ("1/5/06", "2006-01-05"),
        ("1/5/69", "1969-01-05"),
        ("1/5/68", "2068-01-05"),
        ("28.12.10", "2010-12-28"),
        ("12-28-2010", "2010-12-28"),
        ("5 Mar 2024", "2024-03-05"),
        ("05-Mar-2024", "2024-03-05"),
        ("05-Mar-24", "2024-03-05"),
        ("March 5th, 2024", "2024-03-05"),
        ("Tue, 05 Mar 2024 08:30:00 GMT", "2024-03-05 08:30:00"),
        ("Sept 3, 2024", "2024-09-03"),
        ("12/31/2024 8:30 PM", "2024-12-31 20:30:00"),
        ("12/31/2024 12:05:09 a.m.", "2024-12-31 00:05:09"),
        ("2024-12-31T08:30:15.123+02:00", "2024-12-31 08:30:15"),
        ("2024-12-31 08:30Z", "2024-12-31 08:30:00"),
        ("2024-12-31 08:30:00 EST", "2024-12-31 08:30:00"),
        ("20241231", "2024-12-31"),
        ("20241231T083015", "2024-12-31 08:30:15"),
        ("20241231T083015Z", "2024-12-31 08:30:15"),
    ],
)
def test_dates(text: str, iso: str) -> None:
    assert _time(text) == datetime.datetime.fromisoformat(iso)


@pytest.mark.parametrize(
    "text", ["24-01-31", "1-5-3", "1.2.3", "2024-13-01", "2024-02-30", "soon", "12:30", "7"]
)
def test_no_dates(text: str) -> None:
    assert _time(text) is None
    assert _time(text, day_first=True) is None


@pytest.mark.parametrize(
    ("text", "signs", "number"),
    [
        ("$4,417.00", (".", ","), 4417),
        ("-$3.50", (".", ""), -3.5),
        ("1.234,50 €", (",", "."), 1234.5),
        ("62%", (".", ""), 62),
        ("(0.13)", (".", ""), -0.13),
        ("($1,200)", (".", ","), -1200),
        ("\u22125.5", (".", ""), -5.5),
        ("4\u00a0534,5", (",", " "), 4534.5),
        ("4\u202f534,5", (",", " "), 4534.5),
        ("12,34,567.5", (".", ","), 1234567.5),
        ("2h20m", (".", ""), 8400),
        ("29k", (".", ""), 29000),
        ("$3.8M", (".", ""), 3.8e6),
        ("1,5 M €", (",", ""), 1.5e6),
        ("-2B", (".", ""), -2e9),
        ("1d 2h", (".", ""), 93600),
        ("1:02:30", (".", ""), 3750),
        ("1h2m30s", (".", ""), 3750),
        ("1 day, 1:02:30", (".", ""), 90150),
        ("0 days 01:02:30.5", (".", ""), 3750.5),
        ("P1DT1H2M30S", (".", ""), 90150),
        ("US$1,200", (".", ","), 1200),
        ("1,200 JPY", (".", ","), 1200),
        ("EUR7", (".", ""), None),
        ("1.5 hours", (".", ""), 5400),
        ("5m x", (".", ""), None),
        ("%", (".", ""), None),
        ("m", (".", ""), None),
    ],
)
def test_numbers_with_marks(text: str, signs: tuple[str, str], number: float | None) -> None:
    assert read_numbers(pl.Series([text]), *signs, marks=True)[0] == number


def _facts(prepared: Prepared, name: str = "x") -> tuple[str, str]:
    (found,) = [c for c in prepared.manifest.facts["columns"] if c["name"] == name]
    return found["role"], found["reason"]


def _column(folder: Path, cells: list[str], **values: object) -> Prepared:
    repeated = (cells * 200)[:200]
    return table_of(
        folder, {"x": repeated, "z": list(range(1, 400, 2)), "y": [n % 2 for n in range(200)]}, **values
    )


@pytest.mark.parametrize(
    ("cells", "role", "words"),
    [
        (["$64.48", "$1,064.10", "$3"], "numeric", "numbers without their marks"),
        (["62%", "5%", "7.5%"], "numeric", "numbers without their marks"),
        (["2h20m", "45m", "1h"], "numeric", "durations in seconds"),
        (["29k", "3.8M", "500", "1.2k"], "numeric", "numbers without their marks"),
        (["48 kg", "52 kg", "7kg"], "categorical", "numbers with the unit 'kg', read as categories"),
        (["12A", "3B", "7C"], "categorical", ""),
        (["(0.13)", "0.5", "\u22121"], "numeric", "numbers without their marks"),
        (["4\u00a0534,5", "609,5"], "numeric", "thousands separator ' ', decimal mark ','"),
        (["1,00,000", "5,000", "12"], "numeric", "thousands separator ','"),
        (["28-12-2010", "01-09-2011"], "time", "day first"),
        (["12/28/10", "09/01/11"], "time", "month first, years of two digits are 1969 to 2068"),
        (["5 Mar 2024", "28 Dec 2023"], "time", "dates or times;"),
        (["2024-12-31T08:30:15+02:00", "2024-12-30T08:30:15Z"], "time", "time zones are left out"),
        (["1/2/2024 8:30 PM", "1/13/2024 9:00 AM"], "time", "month first"),
        (["-", "1", "2.5", "7"], "numeric", "'-' counts as no value"),
        (["-", "-", "$27.44", "$1.5"], "numeric", "'-' counts as no value"),
        (["-", "1,234", "12,500"], "numeric", "'-' counts as no value"),
        (["–", "12%", "7%"], "numeric", "'–' counts as no value"),
        (["-", "2024-12-31", "2024-11-30"], "time", "'-' counts as no value"),
        (["n.a.", "2024-12-31", "2024-11-30"], "categorical", "'n.a.' in 34% of the cells is perhaps no"),
        (["870", "1.500", "12.250"], "numeric", "'1.500' is 1.5; --data.thousands . reads thousands instead"),
        (["0", "1.500", "0.250"], "numeric", ""),
        (["\\N", "1", "2.5", "7"], "categorical", r"'\\N' in 25% of the cells is perhaps no value"),
        (["Pro", "PRO", "Team", "Team "], "categorical", "'PRO' and 'Pro' differ only in case"),
        ([f"film {n} was a fine one" for n in range(190)], "text", "free text, read as its words; --"),
        (["bad good fine " * 2 + str(n % 90) for n in range(190)], "text", "free text, read as its words"),
        (['["a", "b"]', '["c"]', "[]"], "bag", "items between '[]'"),
        (["('a', 'b')", "('c',)", "[]"], "bag", "items between '[]'"),
        (["set()", "{'a', 'b'}", "{'c'}"], "bag", "items between '[]'"),
        (['{"a": "b"}', '{"a": "c"}'], "categorical", ""),
        (["Tue, 05 Mar 2024 08:30:00 GMT", "Wed, 06 Mar 2024 09:30:00 GMT"], "time", "dates or times"),
        (["5m", "3k", "1.2m"], "numeric", "'m' is read as minutes beside 'k' for thousands"),
        (["$5", "¥700"], "numeric", "amounts in $ and ¥ are read as if of one currency"),
        (["41%", "0.41", "7%"], "numeric", "percents are read without their sign, beside numbers"),
        (["a;b", "b;c", "a", "c;a;b", "c;b", "b;a", "a;c"], "categorical", "hold ';'; --data.bags x"),
        (["red", "blue"], "categorical", ""),
        (["1.2.3", "1.2.4"], "categorical", ""),
        (["True", "true", "FALSE"], "categorical", "upper and lower case count as equal"),
    ],
)  # fmt: skip
def test_what_is_chosen_and_said(cells: list[str], role: str, words: str, tmp_path: Path) -> None:
    found, reason = _facts(_column(tmp_path, cells))
    assert found == role
    assert words in reason
    assert words or not reason


@pytest.mark.parametrize(
    ("cells", "separator"),
    [
        (["mobile;api", "api", "web;mobile;api"], ";"),
        (["mobile|api", "api", "web|mobile"], "|"),
        (["mobile, api", "api", "web, mobile, api"], ","),
        (['["mobile", "api"]', '["api"]', '["web", "mobile"]'], "[]"),
        (["['mobile', 'api']", "['api']", "['web']"], "[]"),
    ],
)
def test_bags_find_their_separator(cells: list[str], separator: str, tmp_path: Path) -> None:
    prepared = _column(tmp_path, cells, bags=["x"])
    assert _facts(prepared)[1] == f"items between {separator!r}; --data.separator overrides this"
    (bag,) = Encoder.load(prepared.path / "encoder").bags
    assert sorted(bag.learned) == ["api", "mobile", "web"]
    other = Encoder.load(_column(tmp_path, cells, bags=["x"], separator="/").path / "encoder")
    assert other.bags[0].separator == "/"


def test_one_notation_for_the_file(tmp_path: Path) -> None:
    rows = {"big": ["1.500", "2.750", "12.000"] * 50, "cost": ["31,97", "4,5", "8"] * 50, "y": [0, 1] * 75}
    prepared = table_of(tmp_path, rows)
    assert "thousands separator '.', decimal mark ','" in _facts(prepared, "big")[1]
    numbers = {c.name: c.learned.mean for c in Encoder.load(prepared.path / "encoder").numbers}
    assert numbers["big"] > 1000 or numbers["big"] > 6  # in logarithms if the tail is heavy
    alone = table_of(tmp_path, {name: rows[name] for name in ("big", "y")})
    assert _facts(alone, "big")[1] == ""


def test_unreadable_dates_above_the_limit_are_an_error_that_names_one(tmp_path: Path) -> None:
    cells = ["2024-01-05"] * 190 + ["soon"] * 10
    with refused("data.times: column 'x' holds 'soon', not a date or time"):
        _column(tmp_path, cells, times=["x"])


def test_months_are_in_order() -> None:
    months = pl.Series(["2024-02", "2023-12", "2024-10"])
    places, how = positions_in_time(months, "m", TableDataConfig(path="x.csv", label="y"))
    assert (places.argsort().tolist(), how) == ([1, 0, 2], "")
