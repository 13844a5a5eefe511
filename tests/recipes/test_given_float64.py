"""Numbers of a recipe's own rows keep their differences."""

from types import SimpleNamespace

import numpy as np
import pytest

from dphybrid.recipes.given import GivenSource


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        (1.7e9 + 60.0 * np.arange(100), np.float64),  # times a minute apart
        (16_777_216.0 + np.arange(100), np.float64),  # whole numbers beyond those of float32
        (np.linspace(-3, 3, 100), np.float32),
        (np.full(100, 1e12), np.float32),
        (np.array([np.nan, 0.5, np.inf]), np.float32),
    ],
)
def test_float64_stays_where_float32_would_merge_values(
    numbers: np.ndarray, dtype: type[np.floating]
) -> None:
    source = GivenSource("mine", lambda *_: ({"x": numbers}, {"x": numbers}), SimpleNamespace(), 0)
    assert source.splits[0]["x"].dtype == dtype
