"""A kind of column from outside of the package: a class and an entry of a list."""

import re
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from dphybrid.data.table.encoder import Encoder
from dphybrid.data.table.kinds import KINDS
from dphybrid.recipes.ctr import Ctr
from tests.conftest import REPOSITORY
from tests.refusing import refused


@pytest.fixture
def recipe() -> Iterator[Ctr]:
    """The recipe with the page's kind of column: minutes, written like 1h30m."""
    page, before = (REPOSITORY / "docs/columns.md").read_text(encoding="utf-8"), list(KINDS)
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    exec(code, {"__name__": "page"})
    yield Ctr()
    KINDS[:] = before


def test_a_kind_is_a_class_and_an_entry(recipe: Ctr, tmp_path: Path) -> None:
    texts = [f"{i % 3}h{i % 60}m" for i in range(100)]
    rows = "took,y\n" + "".join(f"{text},{i % 2}\n" for i, text in enumerate(texts))
    (tmp_path / "x.csv").write_text(rows)
    data = recipe.data(path=str(tmp_path / "x.csv"), label="y")
    prepared = recipe.prepare(data, tmp_path / "prepared", 0)
    assert "took    duration" in prepared.describe()
    encoder = Encoder.load(prepared.path / "encoder")
    (column,) = encoder.numbers
    assert column.role == "duration"
    assert column.learned.edges
    arrays, wrong = encoder.encode({"took": pl.Series(texts)})
    assert wrong == 0
    for name, array in arrays.items():
        assert (array == prepared.arrays[name]).all()
    assert encoder.encode({"took": pl.Series(["soon", None])})[1] == 1

    schema = (prepared.path / "schema.toml").read_text()
    assert 'role = "duration"' in schema
    (tmp_path / "s.toml").write_text(schema.replace("# buckets = 32", "buckets = 2"))
    again = {"path": str(tmp_path / "x.csv"), "label": "y", "schema_file": str(tmp_path / "s.toml")}
    assert recipe.prepare(recipe.data(**again), tmp_path / "prepared", 0).info["num_ids"] == [3]

    (tmp_path / "x.csv").write_text(rows + "soon,1\n")
    with refused(r"data.durations: column 'took' holds 'soon', not a duration"):
        recipe.prepare(recipe.data(**again | {"durations": "took"}), tmp_path / "prepared", 0)
    grown = recipe.data(path=str(tmp_path / "x.csv"), label="y", base=str(prepared.path), missing=("soon",))
    assert recipe.prepare(grown, tmp_path / "prepared", 0).info["num_ids"] == prepared.info["num_ids"]
