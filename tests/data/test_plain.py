"""Blocks that compiled code reads: the same prepared folder as the reader of any text makes, byte for
byte."""

import random
import string
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dphybrid.config.tables import TableDataConfig
from dphybrid.data import Prepared
from dphybrid.data.table import delimited, plain
from dphybrid.data.table.encode import NumericColumn
from dphybrid.util.errors import UserError
from tests.preparing import prepare

NUMBERS = [
    "1",
    "-0",
    "0",
    "",
    "?",
    "-17",
    "000123",
    "12345678",
    "-12345678",
    "123456789.5",
    "0.1",
    "-3.25",
    " 7 ",
]
ODD_NUMBERS = ["1e-320", "1E5", ".5", "5.", "+7", "123456789012345678901", "0.12345678901234567", "NA"]
TEXTS = [
    "a",
    "",
    "?",
    "NA",
    "null",
    "12345678",
    "1234567\x01",
    "a\0",
    "a",
    "longer than eight",
    " b",
    "é",
    "éééé",
    "x" * 300,
]


def both(
    folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch, **values: object
) -> tuple[Prepared, Prepared]:
    """Return what the two readers make of a file."""
    config = TableDataConfig(path=str(file), label="y", min_count=1, **values)  # type: ignore[arg-type]
    found = []
    for limit in (2**60, 0):
        monkeypatch.setattr(plain, "KERNEL_BYTES", limit)
        found.append(prepare("ctr", config, folder / f"prepared-{limit}", 0))
    return found[0], found[1]


def content(prepared: Prepared) -> dict[str, bytes]:
    return {
        str(file.relative_to(prepared.path)): file.read_bytes()
        for file in prepared.path.rglob("*")
        if file.is_file()
    }


def count_plain(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note for each block whether compiled code could read it."""
    found: list[bool] = []

    def read(*given: object) -> object:
        block = plain.read_plain(*given)  # type: ignore[arg-type]
        found.append(block is not None)
        return block

    monkeypatch.setattr(delimited, "read_plain", read)
    return found


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("odd", [[], ODD_NUMBERS])
def test_both_readers_make_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, odd: list[str]
) -> None:
    dice = random.Random(len(odd))
    body = []
    for i in range(3000):
        word = "".join(dice.choices(string.ascii_lowercase, k=dice.choice((3, 8, 12))))
        cells = [
            dice.choice(NUMBERS + odd),
            word,
            dice.choice(TEXTS),
            f"{word[0]}|b",
            str(i % 2),
            str(i % 9 / 8),
        ]
        body.append(",".join(cells))
    for row, text in ((1500, '1,"quo,ted",a,b,1,2'), (2000, "too,few"), (2001, ""), (2900, "1,a,b,c,,3")):
        body[row] = text
    file = tmp_path / "x.csv"
    file.write_bytes(end.join(["n,word,text,bag,y,m", *body]).encode())
    monkeypatch.setattr(delimited, "BLOCK_BYTES", 20_000)
    blocks = count_plain(monkeypatch)
    one, other = both(tmp_path, file, monkeypatch, bags="bag", numeric="n", max_rejected=0.1)
    assert content(one) == content(other)
    assert one.manifest.rejected == 1
    assert one.manifest.facts["unlabelled_rows"] == 1
    assert sum(blocks) >= 3  # of those after the first; a few hold what needs a closer look


def test_a_dictionary_learns_more_texts_than_it_was_made_for() -> None:
    texts = [f"{i * 7919 % 5000}{'-' * (i % 3 * 7)}" for i in range(20_000)]
    dictionary = plain.KeyDictionary(["none", "a long word for nothing"])
    codes = dictionary.codes(pl.Series([*texts, None, "none", "a long word for nothing"]))
    assert codes[-3:].tolist() == [0, 0, 0]
    assert dictionary.values().to_list() == list(dict.fromkeys(texts))
    assert dictionary.values().gather(codes[:-3] - 1).to_list() == texts
    assert dictionary.codes(pl.Series(texts)).tolist() == codes[:-3].tolist()


def test_numbers_are_the_nearest_ones_in_float64() -> None:
    dice = random.Random(3)
    texts = []
    for _ in range(5000):
        whole, part = dice.randrange(10 ** dice.randint(1, 9)), dice.randrange(10**5)
        texts.append(f"{dice.choice(('', '-'))}{whole}.{part:0{dice.randint(1, 6)}d}")
    block = "".join(f"{text},x\n" for text in texts).encode()
    read = plain.read_plain(
        block, len(texts), ["n", "t"], ",", TableDataConfig(), plain.Wanted({"n"}, {"t"}, compiled=True)
    )
    assert read is not None
    assert read.numbers["n"].tolist() == [float(text) for text in texts]


@pytest.mark.parametrize("num_edges", [0, 1, 31, 200])
def test_ids_and_dense_numbers_are_those_of_the_columns(num_edges: int) -> None:
    dice = np.random.default_rng(num_edges)
    raw_B = np.concatenate(
        [dice.normal(size=1000) * 10.0 ** dice.integers(-3, 300, 1000), [np.nan, 0.0, -0.0, 1e308]]
    )
    edges = tuple(np.unique(raw_B[dice.integers(0, 1000, num_edges)]).tolist())
    codes_B = dice.integers(0, 5, len(raw_B)).astype(np.uint32)
    lookup = np.array([0, 7, 5, 3, 2], np.int32)
    ids_BF = plain.ids([(raw_B, edges)], [(codes_B, lookup)], len(raw_B))
    columns = [
        NumericColumn("a", log, 0.25, 3.0, indicator, edges)
        for log in (False, True)
        for indicator in (False, True)
    ]
    assert (ids_BF[:, 0] == columns[0].ids(raw_B)).all()
    assert (ids_BF[:, 1] == lookup[codes_B]).all()
    for column in columns:
        wanted_BN = np.empty((len(raw_B), column.width), np.float32)
        column.dense(raw_B, wanted_BN)
        found_BN = plain.dense([column], {"a": raw_B}, len(raw_B))
        assert found_BN.tobytes() == wanted_BN.tobytes()


def test_a_wrong_number_is_told_by_both_in_the_same_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.csv"
    body = [f"{i},{'ab'[i % 2]}" for i in range(5000)]
    body[4000] = "seven,a"
    file.write_text("\n".join(["n,y", *body]))
    monkeypatch.setattr(delimited, "BLOCK_BYTES", 8000)
    told = []
    for limit in (2**60, 0):
        monkeypatch.setattr(plain, "KERNEL_BYTES", limit)
        with pytest.raises(UserError) as error:
            prepare(
                "ctr", TableDataConfig(path=str(file), label="y", numeric="n", max_rejected=0.0), tmp_path, 0
            )  # type: ignore[arg-type]
        told.append(str(error.value))
    assert told[0] == told[1]
    assert "line 4002" in told[0]
    assert "'seven', no number" in told[0]
