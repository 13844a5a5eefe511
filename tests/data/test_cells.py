"""Few cells, which Python reads, have the values of many, which polars reads."""

from collections.abc import Callable

import numpy as np
import polars as pl
import pytest

from dphybrid.data.table.cells import (
    bag_ids,
    bucket_ids,
    clean,
    items_of,
    read_numbers,
    read_times,
    time_parts,
    words_of,
)

MANY = 100
NUMBERS = [
    *("0", "-0", "+5", "007", "1.", ".5", "-.5", "1.25", "1e5", "1E-400", "1e400", "9" * 15, "9" * 30, "0.1"),
    *(
        "1_000",
        "1,000",
        "0x10",
        "inf",
        "-Infinity",
        "nan",
        "NaN",
        "１２",
        "٣",
        "--1",
        "1 2",
        "",
        "abc",
        "1.2.3",
    ),
    *("123456789012345.123456789012345", "true", "+-1", "1e", "e1", "5e-324", "1.7976931348623157e308"),
]
TIMES = [
    *(
        "2024-02-29",
        "2023-02-29",
        "2024-12-31T23:59",
        "2024-12-31 24:00",
        "0000-01-01",
        "1960-05-05 05:05:05",
    ),
    *(
        "2024-2-3",
        "12/31/2024",
        "31/12/2024 7:05",
        "31.12.2024",
        "20241231",
        "2024/12/31",
        "2024-12-31 23:59:60",
    ),
    *("2024-12-31T23:59:59.123Z", "2024-12-31 23:59:59+02:00", "2024-13-01", "-2024-01-01", "", "9999-12-31"),
    *(
        "1969-12-31 23:59:59",
        "1970-01-01",
        "0001-01-01",
        "12024-01-01",
        "2024-12-31  10:00",
        "２０２４-01-01",
    ),
]
TEXTS = [
    *(
        "a|b",
        "|",
        "",
        " a | b ",
        "a||b",
        "\u3000x\u00a0|y\u2009",
        "\x1ca|b\x1f",
        "ABC",
        "İ|ß",
        "don't do",
        "e\u0301",
    ),
    *("one", "1|2|3|4|5|6", "नमस्ते दुनिया", "a\tb|c\n", "\u200bz\u200b|\ufeffq"),
]


def many(read: Callable[[pl.Series], pl.Series], cells: pl.Series) -> pl.Series:
    return read(pl.concat([cells] * MANY))[: len(cells)]


@pytest.mark.parametrize(
    ("read", "texts"),
    [
        (read_numbers, NUMBERS),
        (lambda cells: read_numbers(cells, ",", "."), NUMBERS),
        (lambda cells: read_times(cells, True), TIMES),
        (lambda cells: read_times(cells, False), TIMES),
        (lambda cells: items_of(cells, "|"), TEXTS),
        (lambda cells: items_of(cells, "|", 2), TEXTS),
        (lambda cells: words_of(cells, 1), TEXTS),
        (lambda cells: clean([cells], ["abc", "1.25"])[0], NUMBERS + TIMES + TEXTS),
    ],
)
def test_texts(read: Callable[[pl.Series], pl.Series], texts: list[str]) -> None:
    for text in texts:
        for cells in (pl.Series([text, None], dtype=pl.String), pl.Series([text])):
            found, wanted = read(cells), many(read, cells)
            assert found.dtype == wanted.dtype
            assert found.equals(wanted, null_equal=True), text


@pytest.mark.parametrize(
    "values",
    [
        pl.Series([1, None, -5]),
        pl.Series([1.5, float("nan"), float("inf"), None]),
        pl.Series([2**63 - 1, -(2**63)]),
        pl.Series([True, None]),
        pl.Series([1, 255], dtype=pl.UInt8),
        pl.Series([0.1, 3.4e38], dtype=pl.Float32),
    ],
)
def test_values_that_are_no_texts(values: pl.Series) -> None:
    for read in (read_numbers, lambda cells: clean([cells], ["1"], numbers=True)[0]):
        found, wanted = read(values), many(read, values)
        assert found.dtype == wanted.dtype
        assert found.equals(wanted, null_equal=True)


@pytest.mark.parametrize("copies", [1, 100])
def test_typed_numbers_mean_what_their_text_does(copies: int) -> None:
    for dtype, values in (
        (pl.Float32, [0.1, 0.7, None]),
        (pl.Float64, [0.1, 9.5]),
        (pl.Int64, [999, 3, None]),
    ):
        cells = pl.Series(values * copies, dtype=dtype)
        typed = read_numbers(clean([cells], ["999", "9.5"], numbers=True)[0])
        text = read_numbers(clean([cells.cast(pl.String)], ["999", "9.5"])[0])
        assert typed.equals(text, null_equal=True)


def test_parts_of_times_are_polars_own() -> None:
    random = np.random.default_rng(0)
    texts = pl.Series(random.integers(-(10**17), 10**17, 500)).cast(pl.Datetime("us"))
    times = pl.concat([texts, pl.Series([None], dtype=pl.Datetime("us"))])
    wanted = [times.dt.hour(), times.dt.weekday(), times.dt.epoch("d")]
    for part_B, expected in zip(time_parts(times), wanted, strict=True):
        np.testing.assert_array_equal(part_B, expected.cast(pl.Float64).to_numpy())


def test_buckets_and_bags() -> None:
    numbers = np.array([np.nan, -1.0, 0.0, 0.5, 1.0, 7.0])
    wanted = bucket_ids(np.tile(numbers, MANY), (0.0, 1.0))[: len(numbers)]
    np.testing.assert_array_equal(bucket_ids(numbers, (0.0, 1.0)), wanted)

    def lengths(items: pl.Series) -> np.ndarray:
        return items.str.len_bytes().to_numpy().astype(np.int32)

    lists = pl.Series([["a", "bb"], [], None, ["ccc"]], dtype=pl.List(pl.String))
    ids_BL = bag_ids(lists, lengths)
    assert ids_BL.tolist() == [[1, 2], [0, -1], [0, -1], [3, -1]]
    np.testing.assert_array_equal(bag_ids(pl.concat([lists] * MANY), lengths)[:4], ids_BL)
    assert bag_ids(lists[1:2], lengths).tolist() == [[0]]
