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


def _add_kind(old: str = "", new: str = "") -> None:
    """Run the page's code, which adds a kind of column, with `old` replaced by `new`."""
    page = (REPOSITORY / "docs/columns.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    exec(code.replace(old, new) if old else code, {"__name__": "page"})


@pytest.fixture
def recipe() -> Iterator[Ctr]:
    """The recipe with the page's kind of column: minutes, written like 1h30m."""
    before = list(KINDS)
    _add_kind()
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


def test_another_code_of_a_kind_prepares_again(recipe: Ctr, tmp_path: Path) -> None:
    rows = "took,y\n" + "".join(f"{i % 3}h{i % 60}m,{i % 2}\n" for i in range(100))
    (tmp_path / "x.csv").write_text(rows)

    def digest() -> str:
        data = recipe.data(path=str(tmp_path / "x.csv"), label="y")
        return recipe.prepare(data, tmp_path / "prepared", 0).digest

    found = {digest()}
    for old, new, same in (
        ("", "", True),
        ("hours * 60", "hours * 61", False),
        (
            "claims(cls, sample: Sample) -> str | None:",
            "claims(cls, sample: Sample) -> str | None:  # why",
            True,
        ),
        ("import polars as pl\n", "import polars as pl\n\n\n", True),
        ("cast(pl.Float64)", "cast(pl.Float32)", False),
    ):
        KINDS.pop(0)
        _add_kind(old, new)
        assert (digest() in found) == same
        found.add(digest())
    assert len(found) == 3


@pytest.mark.parametrize("content", ["float", "whole", "boolean", "date", "lists"])
def test_the_kind_of_the_page_meets_typed_columns(recipe: Ctr, content: str, tmp_path: Path) -> None:
    cells = {
        "float": pl.Series([i / 7 for i in range(200)]),
        "whole": pl.Series([i % 5 for i in range(200)]),
        "boolean": pl.Series([i % 3 == 0 for i in range(200)]),
        "date": pl.Series(range(200)).cast(pl.Date),
        "lists": pl.Series([[f"a{i % 4}"] for i in range(200)]),
    }[content]
    pl.DataFrame({"x": cells, "y": [i % 2 for i in range(200)]}).write_parquet(tmp_path / "x.parquet")
    data = recipe.data(path=str(tmp_path / "x.parquet"), label="y")
    assert recipe.prepare(data, tmp_path / "prepared", 0).info["num_ids"]
