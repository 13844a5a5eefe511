"""What a column of whole numbers is follows from its name and its values, never from the label."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dphybrid.data import Prepared
from dphybrid.data.table.encoder import Encoder, old_rows
from tests.preparing import from_file, table_of

Array = np.ndarray
_ROWS = 3000


def _role(folder: Path, name: str, numbers: Array, **values: object) -> str:
    labels = np.random.default_rng(0).integers(0, 2, len(numbers)).tolist()
    prepared = table_of(folder, {name: numbers.tolist(), "y": labels}, **values)
    (found,) = [c for c in prepared.manifest.facts["columns"] if c["name"] == name]
    return str(found["role"])


@pytest.mark.parametrize(
    ("name", "values", "role"),
    [
        ("a", 128, "numeric"),
        ("a", 400, "whole"),
        ("user", 400, "whole"),
        ("user_id", 400, "categorical"),
        ("zip code", 400, "categorical"),
        ("house_no", 40, "categorical"),
        ("House No.", 40, "categorical"),
        ("Key", 40, "categorical"),
        ("itemNr", 40, "categorical"),
        ("id_client", 40, "categorical"),
        ("paid", 40, "numeric"),
        ("piano", 40, "numeric"),
        ("a", 10**6, "numeric"),  # hardly any repeats
    ],
)
@pytest.mark.parametrize("offset", [0, 10**9, -70])
def test_values_and_names_decide(name: str, values: int, role: str, offset: int, tmp_path: Path) -> None:
    numbers = np.random.default_rng(1).integers(0, values, _ROWS) * 7 + offset
    numbers[:128] = np.arange(128) % values * 7 + offset
    assert _role(tmp_path, name, numbers) == role


def test_flags_decide_before_values(tmp_path: Path) -> None:
    numbers = np.random.default_rng(1).integers(0, 400, _ROWS)
    for flag, role in (("numeric", "numeric"), ("categorical", "categorical"), ("whole", "whole")):
        assert _role(tmp_path, "a", numbers, **{flag: ["a"]}) == role
    assert _role(tmp_path, "a", numbers % 5, whole=["a"]) == "whole"


def _split(folder: Path, labels: Array, numbers: Array, kind: str) -> Prepared:
    """A table whose validation rows are the last quarter, by a column or by a file of their own."""
    folder.mkdir()
    held = len(labels) // 4
    rows = {"a": numbers * 7, "b": np.char.add("s", (numbers % 30).astype(str)), "y": labels}
    if kind == "file":
        pl.DataFrame({name: cells[-held:] for name, cells in rows.items()}).write_csv(folder / "valid.csv")
        pl.DataFrame({name: cells[:-held] for name, cells in rows.items()}).write_csv(folder / "x.csv")
        return from_file(folder / "x.csv", valid_path=str(folder / "valid.csv"))
    part = np.where(np.arange(len(labels)) < len(labels) - held, "train", "valid")
    pl.DataFrame(rows | {"part": part}).write_csv(folder / "x.csv")
    return from_file(folder / "x.csv", split="named", split_column="part")


@pytest.mark.parametrize("kind", ["column", "file"])
@pytest.mark.parametrize("label", ["classes", "number"])
def test_other_labels_of_held_out_rows_change_nothing(label: str, kind: str, tmp_path: Path) -> None:
    """Each value's label is that of the value in one table, drawn at random in the other."""
    random = np.random.default_rng(2)
    numbers = random.integers(0, 200, _ROWS)
    effect = random.normal(size=200).round(3)
    y, z = effect[numbers], random.permutation(effect)[numbers]
    if label == "classes":
        y, z = np.where(y > 0, "yes", "no"), np.where(z > 0, "yes", "no")
    z[: -_ROWS // 4] = y[: -_ROWS // 4]
    assert (y != z).any()
    one, two = (_split(tmp_path / name, labels, numbers, kind) for name, labels in (("y", y), ("z", z)))
    assert (one.path / "schema.toml").read_text() == (two.path / "schema.toml").read_text()
    for file in ("encoder.json", "vocabularies.parquet"):
        assert (one.path / "encoder" / file).read_bytes() == (two.path / "encoder" / file).read_bytes()
    for name in ("ids_BF", "dense_BN", "train_rows", "valid_rows"):
        assert (one.arrays[name] == two.arrays[name]).all(), name


def test_a_whole_number_has_a_row_and_its_number(tmp_path: Path) -> None:
    numbers = np.arange(_ROWS) * 7 % 300
    rows = {"a": numbers.tolist(), "b": [f"b{i}" for i in range(_ROWS)], "y": (numbers % 2).tolist()}
    prepared = table_of(tmp_path, rows)
    encoder = Encoder.load(prepared.path / "encoder")
    texts = pl.Series(["7", "7.0", " 7 ", "+7", "299", "1000", None], dtype=pl.String)
    arrays = encoder.encode(pl.DataFrame({"a": texts, "b": texts}), ())
    ids_B, dense_B = arrays["ids_BF"][:, 0], arrays["dense_BN"][:, 0]
    assert len(set(ids_B[:4].tolist())) == 1
    assert len(set(ids_B[[0, 4]].tolist())) == 2
    assert ids_B[5:].tolist() == [1, 0]
    assert dense_B[0] < dense_B[4] < dense_B[5]
    typed = encoder.encode(pl.DataFrame({"a": [7.0, 299.0, 1000.0, None], "b": texts[:4]}), ())
    assert typed["ids_BF"][:, 0].tolist() == ids_B[3:].tolist()
    # New values follow the known ones, whose rows stay.
    more = {"a": [*rows["a"], *[-5] * 99], "b": [*rows["b"], *range(99)], "y": [*rows["y"], *[0, 1, 1] * 33]}
    grown = Encoder.load(table_of(tmp_path, more, base=str(prepared.path)).path / "encoder")
    assert grown.numbers[0].learned.to_list() == [*encoder.numbers[0].learned.to_list(), "-5"]
    assert old_rows(encoder, grown).tolist()[:303] == [*range(302), 1]
    assert grown.covers(encoder)
    assert not encoder.covers(grown)
