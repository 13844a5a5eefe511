"""What a column of whole numbers is follows from its name and its values, never from the label."""

from pathlib import Path

import numpy as np
import polars as pl

from dphybrid.data import Prepared
from dphybrid.data.table.encoder import Encoder, old_rows
from tests.preparing import from_file, table_of

Array = np.ndarray
_ROWS = 3000


def _split(folder: Path, labels: Array, numbers: Array) -> Prepared:
    """A table whose validation rows are the last quarter."""
    folder.mkdir()
    rows = {"a": numbers * 7, "b": np.char.add("s", (numbers % 30).astype(str)), "y": labels}
    part = np.where(np.arange(len(labels)) < len(labels) * 3 // 4, "train", "valid")
    pl.DataFrame(rows | {"part": part}).write_csv(folder / "x.csv")
    return from_file(folder / "x.csv", split="named", split_column="part")


def test_other_labels_of_held_out_rows_change_nothing(tmp_path: Path) -> None:
    """Each value's label is that of the value in one table, drawn at random in the other."""
    random = np.random.default_rng(2)
    numbers = random.integers(0, 200, _ROWS)
    effect = random.normal(size=200).round(3)
    y, z = (np.where(of[numbers] > 0, "yes", "no") for of in (effect, random.permutation(effect)))
    z[: -_ROWS // 4] = y[: -_ROWS // 4]
    assert (y != z).any()
    one, two = (_split(tmp_path / name, labels, numbers) for name, labels in (("y", y), ("z", z)))
    for file in ("schema.toml", "encoder/encoder.json", "encoder/vocabularies.parquet"):
        assert (one.path / file).read_bytes() == (two.path / file).read_bytes()
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
