"""Prepare small data sets for tests of single parts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from dphybrid.config import DataConfig
from dphybrid.config.tables import TableDataConfig
from dphybrid.data import Prepared
from dphybrid.data.store import Progress
from dphybrid.recipes import find_recipe


def table_of(folder: Path, content: str | Mapping[str, Sequence[object]], **values: object) -> Prepared:
    """Prepare a table with label y. content: its text, or column -> cells."""
    if not isinstance(content, str):
        rows = [tuple(content), *zip(*content.values(), strict=True)]
        content = "".join("\t".join(map(str, row)) + "\n" for row in rows)
    (folder / "x.csv").write_text(content)
    return from_file(folder / "x.csv", **values)


def from_file(file: Path, on_progress: Progress | None = None, **values: object) -> Prepared:
    """Prepare a table with label y into the folder `prepared` beside it."""
    config = TableDataConfig.model_validate({"path": str(file), "label": "y"} | values)
    return prepare("ctr", config, file.parent / "prepared", 0, on_progress)


def clicks(folder: Path, num_rows: int = 400) -> list[str]:
    """Write a table of clicks that depend on the site alone; return the overrides to train on it."""
    rows = [f"{i * 7 % 31 < 11:d},s{i * 7 % 31},{i % 50}" for i in range(num_rows)]
    (folder / "clicks.csv").write_text("\n".join(["clicked,site,age", *rows]))
    return ["recipe=ctr", f"data.path={folder / 'clicks.csv'}", "data.label=clicked"]


def names_of(triples: Prepared, kind: str) -> list[str]:
    """Return the names of a graph's "entities" or "relations", by number."""
    return pl.read_parquet(triples.path / "encoder" / f"{kind}.parquet")["name"].to_list()


def prepare(
    recipe: str, data: DataConfig | None, folder: Path, seed: int, on_progress: Progress | None = None
) -> Prepared:
    """Prepare a recipe's data. data: None for the recipe's defaults."""
    found = find_recipe(recipe)
    return found.prepare(found.data() if data is None else data, folder, seed, on_progress)
