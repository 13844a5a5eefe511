"""Columns that leak the label are named before training: by their values, or by having one."""

from pathlib import Path

import numpy as np
import pytest

from dphybrid.recipes.ctr.leaks import leaks
from tests.preparing import table_of

_ROWS = 2000


def _warnings(folder: Path, cells: list[object], label: list[object], **values: object) -> list[str]:
    return leaks(table_of(folder, {"x": cells, "z": list(range(7, 7 + 3 * _ROWS, 3)), "y": label}, **values))


@pytest.mark.parametrize("kind", ["texts", "numbers"])
@pytest.mark.parametrize("positives", [0.2, 0.5])
def test_a_column_filled_for_most_positives_alone(kind: str, positives: float, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    y = random.random(_ROWS) < positives
    filled = y & (random.random(_ROWS) < 0.8)
    value = [f"reason {n}" if kind == "texts" else n / 7 for n in random.integers(1, 9, _ROWS)]
    cells = [v if f else "" for v, f in zip(value, filled, strict=True)]
    (warning,) = _warnings(tmp_path, cells, y.astype(int).tolist())
    assert "column 'x'" in warning
    assert "rows with a value are '1', " in warning
    assert "--data.ignore x" in warning


def test_one_value_and_missingness_leak(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    y = random.integers(0, 3, _ROWS)
    closed = np.where((y == 2) & (random.random(_ROWS) < 0.5), "closed", random.choice(["a", "b"], _ROWS))
    (warning,) = _warnings(tmp_path, closed.tolist(), [f"k{n}" for n in y])
    assert "rows with one of its values are 'k2'" in warning
    absent = ["" if n == 2 and draw < 0.5 else "v" for n, draw in zip(y, random.random(_ROWS), strict=True)]
    (warning,) = _warnings(tmp_path, absent, [f"k{n}" for n in y])
    assert "rows without a value are 'k2'" in warning


@pytest.mark.parametrize("case", ["strong", "rare positives", "small part", "missing at random"])
def test_what_is_no_leak_is_not_named(case: str, tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    y = random.random(_ROWS) < (0.01 if case == "rare positives" else 0.4)
    cells = random.choice(["a", "b", "c"], _ROWS).astype(object)
    if case == "strong":  # 97 % of these rows are of one class
        cells[y] = np.where(random.random(y.sum()) < 0.97, "a", "b")
        cells[~y] = np.where(random.random((~y).sum()) < 0.03, "a", "b")
    elif case == "small part":  # pure, but few of the class
        cells[np.flatnonzero(y)[:80]] = "d"
    elif case == "missing at random":
        cells[random.random(_ROWS) < 0.5] = ""
    assert _warnings(tmp_path, cells.tolist(), y.astype(int).tolist()) == []
