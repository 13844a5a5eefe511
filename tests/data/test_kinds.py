"""A kind of column from outside of the package: a class and an entry of a list."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dphybrid.data.table.column import Claim, Sample
from dphybrid.data.table.encoder import Encoder
from dphybrid.data.table.kinds import KINDS, Numeric
from dphybrid.recipes.ctr.recipe import Ctr
from dphybrid.util.errors import UserError


class Duration(Numeric):
    """Minutes, written like 1h30m."""

    role = "duration"
    flag = "durations"
    flag_help = "Columns to read as durations such as 1h30m, separated by commas."
    noun = "duration"

    @classmethod
    def claims(cls, sample: Sample) -> Claim | None:
        is_one = len(sample.cells) and sample.cells.str.contains(r"^\d+h\d+m$").all()
        return Claim("durations", {}) if is_one else None

    def read(self, cells: pl.Series) -> pl.Series:
        hours, minutes = (cells.str.extract(r"^(\d+)h(\d+)m$", k).cast(pl.Float64) for k in (1, 2))
        return hours * 60 + minutes


@pytest.fixture
def recipe() -> Iterator[Ctr]:
    KINDS.insert(0, Duration)
    try:
        yield Ctr()
    finally:
        KINDS.remove(Duration)


def test_a_kind_is_a_class_and_an_entry(recipe: Ctr, tmp_path: Path) -> None:
    texts = [f"{i % 3}h{i % 60}m" for i in range(100)]
    (tmp_path / "x.csv").write_text("took,y\n" + "".join(f"{text},{i % 2}\n" for i, text in enumerate(texts)))
    data = recipe.data(path=str(tmp_path / "x.csv"), label="y")
    prepared = recipe.prepare(data, tmp_path / "prepared", 0)
    assert "took    duration" in prepared.describe()
    encoder = Encoder.load(prepared.path / "encoder")
    (column,) = encoder.numbers
    assert isinstance(column, Duration)
    assert column.learned.edges
    arrays, wrong = encoder.encode({"took": pl.Series(texts)})
    assert wrong == 0
    for name, array in arrays.items():
        assert (array == prepared.arrays[name]).all()
    assert encoder.encode({"took": pl.Series(["soon", None])})[1] == 1

    schema = (prepared.path / "schema.toml").read_text()
    assert 'role = "duration"' in schema
    (tmp_path / "s.toml").write_text(schema.replace("# buckets = 32", "buckets = 2"))
    again: dict[str, Any] = {
        "path": str(tmp_path / "x.csv"),
        "label": "y",
        "schema_file": str(tmp_path / "s.toml"),
    }
    assert recipe.prepare(recipe.data(**again), tmp_path / "prepared", 0).info["num_ids"] == [3]

    (tmp_path / "x.csv").write_text(
        "took,y\n" + "".join(f"{text},{i % 2}\n" for i, text in enumerate(texts)) + "soon,1\n"
    )
    with pytest.raises(UserError, match=r"data.durations: column 'took' holds 'soon', no duration"):
        recipe.prepare(recipe.data(**again | {"durations": "took"}), tmp_path / "prepared", 0)
    grown = recipe.data(path=str(tmp_path / "x.csv"), label="y", base=str(prepared.path), missing=("soon",))
    assert recipe.prepare(grown, tmp_path / "prepared", 0).info["num_ids"] == prepared.info["num_ids"]
