"""Triples: parts, known answers, and lines that are none."""

import gzip
import json
import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dphybrid.data import Prepared, batches
from dphybrid.recipes.kge import KgeDataConfig
from tests.preparing import names_of, prepare
from tests.refusing import refused


def from_file(folder: Path, text: str | bytes, **values: object) -> Prepared:
    file = folder / "triples.tsv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return prepare("kge", KgeDataConfig(path=str(file), **values), folder / "prepared", 0)  # type: ignore[arg-type]


LINES = "".join(f"a{i}\tlikes\tb{i % 7}\n" for i in range(50))


def test_one_file_is_split_by_seed(tmp_path: Path) -> None:
    data = from_file(tmp_path, LINES)
    train, valid = data.arrays["train_triples"], data.arrays["valid_triples"]
    assert (len(train), len(valid)) == (45, 5)
    assert len(np.unique(np.concatenate([train, valid]), axis=0)) == 50
    names = names_of(data, "entities")
    assert {(names[h], names[t]) for h, _, t in np.concatenate([train, valid])} == {
        (f"a{i}", f"b{i % 7}") for i in range(50)
    }


def test_other_separators_line_ends_marks_and_headers_read_the_same(tmp_path: Path) -> None:
    texts = [
        LINES,
        LINES.replace("\t", ","),
        "\ufeff" + LINES.replace("\n", "\r\n"),
        LINES + "\n \n",
        "head,relation,tail\n" + LINES.replace("\t", ","),
        re.sub(r"(.*)\t(.*)\t(.*)", r'"\1","\2","\3"', LINES),
        "tail,head,relation\n" + re.sub(r"(.*)\t(.*)\t(.*)", r"\3,\1,\2", LINES),
        LINES.encode("utf-16"),
        gzip.compress(LINES.encode(), mtime=0),
    ]
    found = []
    for number, text in enumerate(texts):
        (folder := tmp_path / str(number)).mkdir()
        data = from_file(folder, text)
        found.append((data.manifest.arrays, names_of(data, "entities")))
    assert found == found[:1] * len(texts)


def test_parquet_files_and_names_such_as_na(tmp_path: Path) -> None:
    frame = pl.DataFrame({"s": ["NA", "null", "x"] * 9, "p": "is", "o": [f"o{i % 7}" for i in range(27)]})
    frame.write_parquet(tmp_path / "triples.parquet")
    config = KgeDataConfig(path=str(tmp_path / "triples.parquet"), head="s", relation="p", tail="o")
    data = prepare("kge", config, tmp_path / "prepared", 0)
    assert names_of(data, "entities")[:5] == ["NA", "o0", "null", "o1", "x"]
    assert names_of(data, "relations") == ["is"]


def test_a_column_that_is_not_used_is_named(tmp_path: Path) -> None:
    rows = "".join(f"e{i % 9},is,e{i % 7},0.{i}\n" for i in range(40))
    data = from_file(tmp_path, "head,relation,tail,weight\n" + rows)
    assert "reading: not used: weight" in data.describe()


def test_known_answers_are_those_of_all_parts(tmp_path: Path) -> None:
    data = from_file(tmp_path, LINES)
    everything = np.concatenate([data.arrays["train_triples"], data.arrays["valid_triples"]])
    (batch,) = batches(data.dataset("valid"), 100, seed=0, epoch=0, shuffle=False)
    for i, (head, relation, tail) in enumerate(data.arrays["valid_triples"]):
        tails, heads = (sorted(set(batch["known_B2M"][i, side].tolist()) - {-1}) for side in (0, 1))
        assert tails == sorted({t for h, r, t in everything.tolist() if (h, r) == (head, relation)})
        assert heads == sorted({h for h, r, t in everything.tolist() if (r, t) == (relation, tail)})


def test_lines_that_are_no_triples_are_rejected_with_line_and_reason(tmp_path: Path) -> None:
    data = from_file(tmp_path, LINES + "alone\nx\t\ty\n" + LINES.replace("a", "c"), max_rejected=0.1)
    rejected = [json.loads(line) for line in (data.path / "rejected.jsonl").read_text().splitlines()]
    assert [(row["line"], row["reason"]) for row in rejected] == [
        (51, "Expected Number of Columns: 3 Found: 1"),
        (52, "no value in 'relation'"),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LINES + "alone\n", "line 51: Expected Number of Columns: 3 Found: 1.*max_rejected"),
        ("", "is empty"),
        ("a\tb\tc\n", "no triples"),
        ("é\tb\tc\n".encode() + b"a\tb\t\xff\n", "utf-8"),
        (LINES.replace("\n", "\t1\n"), "has no column 'head'.*without a header"),
    ],
)
def test_unusable_files_are_told(text: str | bytes, words: str, tmp_path: Path) -> None:
    with refused(words):
        from_file(tmp_path, text)
    assert not list(tmp_path.glob("prepared/*"))


def test_folders_without_train_and_with_two_of_a_kind_are_told(tmp_path: Path) -> None:
    with refused(r"no train\.txt"):
        prepare("kge", KgeDataConfig(path=str(tmp_path)), tmp_path / "prepared", 0)
    for name in ("train.txt", "train.tsv"):
        (tmp_path / name).write_text(LINES)
    with refused("keep only one"):
        prepare("kge", KgeDataConfig(path=str(tmp_path)), tmp_path / "prepared", 0)
    with refused("no such file"):
        prepare("kge", KgeDataConfig(path=str(tmp_path / "nowhere")), tmp_path / "prepared", 0)
