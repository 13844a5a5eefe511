"""Cells that are no texts mean what their texts do; times, buckets and bags beside their own libraries."""

import numpy as np
import polars as pl
import pytest

from dphybrid.data.table.cells import bag_ids, bucket_ids, by_column, clean, read_numbers, time_parts


def test_typed_numbers_mean_what_their_text_does() -> None:
    for dtype, values in (
        (pl.Float32, [0.1, 0.7, None]),
        (pl.Float64, [0.1, 9.5, float("nan"), float("inf")]),
        (pl.Int64, [999, 3, None]),
        (pl.UInt8, [1, 255]),
    ):
        cells = pl.Series(values, dtype=dtype)
        typed, text = (
            read_numbers(clean([each], ["999", "9.5", "NaN"])[0]) for each in (cells, cells.cast(pl.String))
        )
        assert typed.equals(text, null_equal=True)


def test_few_rows_are_read_as_many_are() -> None:
    texts = ["a", " a", "a\u2003", "\x1ca", "", " ", "NA", "-9 ", "b c", None]
    columns = [
        *(pl.Series([text], dtype=pl.String) for text in texts),
        *(pl.Series([number]) for number in (1, -9, 2.5, -9.0, 1e16, float("nan"), float("inf"), True)),
        pl.Series([None], dtype=pl.Null),
        pl.Series([0.1], dtype=pl.Float32),
    ]
    for missing in (["NA"], ["-9", "NA", "inf"]):
        many = clean([column.new_from_index(0, 1000) for column in columns], missing)
        for one, repeated in zip(clean(columns, missing), many, strict=True):
            assert repeated.unique().cast(one.dtype).equals(one, null_equal=True), one
    numbers, edges = np.array([np.nan, -1.0, 0.0, 0.5, 1.0, np.inf]), (0.0, 1.0)
    np.testing.assert_array_equal(bucket_ids(numbers, edges), bucket_ids(np.tile(numbers, 100), edges)[:6])


def test_parts_of_times_are_polars_own() -> None:
    random = np.random.default_rng(0)
    texts = pl.Series(random.integers(-(10**17), 10**17, 500)).cast(pl.Datetime("us"))
    times = pl.concat([texts, pl.Series([None], dtype=pl.Datetime("us"))])
    wanted = [times.dt.hour(), times.dt.weekday(), times.dt.epoch("d")]
    for part_B, expected in zip(time_parts(times), wanted, strict=True):
        np.testing.assert_array_equal(part_B, expected.cast(pl.Float64).to_numpy())


def test_buckets_and_bags() -> None:
    numbers = np.array([np.nan, -1.0, 0.0, 0.5, 1.0, 7.0])
    assert bucket_ids(numbers, (0.0, 1.0)).tolist() == [0, 1, 2, 2, 3, 3]
    lists = pl.Series([["a", "bb"], [], None, ["ccc"]], dtype=pl.List(pl.String))

    def lengths(items: pl.Series) -> np.ndarray:
        return items.str.len_bytes().to_numpy().astype(np.int32)

    assert bag_ids(lists, lengths).tolist() == [[1, 2], [0, -1], [0, -1], [3, -1]]
    assert bag_ids(lists[1:2], lengths).tolist() == [[0]]


@pytest.mark.parametrize("rows", [[], [{}], [{"b": 1, "a": "x"}, {"b": None, "a": "y"}]])
def test_records_of_one_form_become_columns_like_those_of_several(rows: list[dict[str, object]]) -> None:
    names = ["b", "a"] if len(rows) > 1 else []
    assert by_column(rows) == {name: [row[name] for row in rows] for name in names}
    assert list(by_column(rows)) == names
    more = [*rows, {"a": "z", "c": 2}]
    assert by_column(more) == {n: [row.get(n) for row in more] for n in dict.fromkeys([*names, "a", "c"])}
