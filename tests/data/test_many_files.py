"""Many, packed or partitioned files give the arrays of one plain file; splits by time, key and file."""

import gzip
import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dphybrid.data import Prepared
from dphybrid.data.table.encoder import Encoder
from tests.commands import python
from tests.preparing import TableDataConfig, from_file, prepare
from tests.refusing import refused

NUM_ROWS = 240


def lines(num_rows: int = NUM_ROWS, first: int = 0) -> list[str]:
    return [
        f"{i % 7 / 4},{'abcde'[i % 5]},u{i % 12},2024-01-{1 + i // 10:02d},{int(i % 3 == 0)}"
        for i in range(first, first + num_rows)
    ]


HEADER = "n,word,user_id,day,y"


def ctr(folder: Path, path: str | Path, **values: object) -> Prepared:
    return from_file(folder / "x", **{"path": str(path), "min_count": 1} | values)


def write(folder: Path, name: str, body: list[str], header: str = HEADER) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    raw = ("\n".join([header, *body]) + "\n").encode()
    file.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return file


def same(one: Prepared, other: Prepared) -> bool:
    return bool(one.manifest.arrays == other.manifest.arrays)


def test_a_folder_a_pattern_and_packed_files_are_one_table(tmp_path: Path) -> None:
    body = lines()
    one = ctr(tmp_path, write(tmp_path, "one.csv", body))
    for kind, pattern in ((".csv.gz", ""), (".tsv", "part-*.tsv")):
        for number in range(3):
            end = "\t" if kind == ".tsv" else ","
            part = [line.replace(",", end) for line in body[number * 80 : number * 80 + 80]]
            write(tmp_path / kind, f"part-{number}{kind}", part, HEADER.replace(",", end))
        (tmp_path / kind / "_SUCCESS").touch()
        assert same(ctr(tmp_path, tmp_path / kind / pattern), one), kind


def test_files_whose_columns_stand_in_another_order_are_put_in_order(tmp_path: Path) -> None:
    one = ctr(tmp_path, write(tmp_path, "one.csv", lines()))
    write(tmp_path, "two/a.csv", lines()[:100])
    header, *turned = (",".join(reversed(line.split(","))) for line in [HEADER, *lines()[100:]])
    write(tmp_path, "two/b.csv", turned, header)
    assert same(ctr(tmp_path, tmp_path / "two"), one)
    write(tmp_path, "two/c.csv", lines(), "p,q,r,s,t")
    with refused(r"c\.csv has none of the columns of .*a\.csv"):
        ctr(tmp_path, tmp_path / "two")


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_folders_of_partitions_are_columns_of_any_format(tmp_path: Path, kind: str) -> None:
    frame = pl.read_csv("\n".join([HEADER, *lines()]).encode(), infer_schema=False)
    for word in "abcde":
        folder = tmp_path / "lake" / f"word={'a%20z' if word == 'a' else word}"
        folder.mkdir(parents=True)
        part = frame.filter(pl.col("word") == word).drop("word")
        write_to = {"parquet": part.write_parquet, "csv": part.write_csv, "jsonl": part.write_ndjson}[kind]
        write_to(folder / f"0.{kind}")
    prepared = ctr(tmp_path, tmp_path / "lake")
    assert {c["name"]: c["role"] for c in prepared.manifest.facts["columns"]}["word"] == "categorical"
    assert sorted(vocabulary(prepared, "word")) == ["a z", *"bcde"]
    assert len(prepared.arrays["labels_B"]) == NUM_ROWS


def test_folders_further_up_are_no_partitions_and_brackets_no_patterns(tmp_path: Path) -> None:
    frame = pl.read_csv("\n".join([HEADER, *lines()]).encode(), try_parse_dates=True)
    folder = tmp_path / "seed=3" / "mine [a]"
    folder.mkdir(parents=True)
    frame.write_parquet(folder / "x[1].parquet")
    prepared = ctr(folder, folder / "x[1].parquet")
    assert prepared.info["inputs"] == ["n", "day", "word", "user_id"]
    assert sorted(vocabulary(prepared, "word")) == list("abcde")


def vocabulary(prepared: Prepared, name: str) -> list[str]:
    (column,) = [c for c in Encoder.load(prepared.path / "encoder").columns if c.name == name]
    return column.learned.to_list()


def test_any_number_of_threads_comes_to_the_same_bytes(tmp_path: Path) -> None:
    body = [f"{i * 7 % 1000},v{i * i % 701},w{i % 13},{int(i % 5 == 0)}" for i in range(5000)]
    file = write(tmp_path, "x.csv", body, "n,v,w,y")
    code = (
        "import sys, json; from pathlib import Path; "
        "from tests.preparing import TableDataConfig, prepare;"
        f"p = prepare('ctr', TableDataConfig(path={str(file)!r}, label='y'), Path(sys.argv[1]), 0);"
        "print(json.dumps([p.digest, {n: a.crc32 for n, a in p.manifest.arrays.items()}]))"
    )
    env = {"POLARS_MAX_THREADS": str(1 + (pl.thread_pool_size() == 1)), "OMP_NUM_THREADS": "1", "PATH": ""}
    there = json.loads(python("-c", code, tmp_path / "there", env=env).stdout)
    here = prepare("ctr", TableDataConfig(path=str(file), label="y"), tmp_path / "here", 0)
    assert there == [here.digest, {name: facts.crc32 for name, facts in here.manifest.arrays.items()}]


def test_the_latest_rows_are_held_out_by_time(tmp_path: Path) -> None:
    body = lines()
    np.random.default_rng(0).shuffle(body)
    file = write(tmp_path, "x.csv", body)
    prepared = ctr(tmp_path, file, split="time", split_column="day", valid_fraction=0.25)
    days = [line.split(",")[3] for line in body]
    held = {days[i] for i in prepared.arrays["valid_rows"]}
    assert min(held) > max(days[i] for i in prepared.arrays["train_rows"])
    assert len(held) == 6
    assert "validation split: day from '2024-01-19 00:00:00' on" in prepared.describe()


def test_no_key_is_in_both_parts(tmp_path: Path) -> None:
    file = write(tmp_path, "x.csv", lines())
    prepared = ctr(tmp_path, file, split="key", split_column="user_id", valid_fraction=0.4)
    users = [line.split(",")[2] for line in lines()]
    train, held = ({users[i] for i in prepared.arrays[f"{part}_rows"]} for part in ("train", "valid"))
    assert train.isdisjoint(held)
    assert len(held) == 5
    assert "validation split: all rows of 5 of 12 values of user_id" in prepared.describe()
    assert "values without a training row: user_id 100.0%" in prepared.describe()


def test_a_file_in_both_parts_is_refused(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        write(tmp_path / "clicks", name, lines())
    with refused(r"b\.csv: is a file of two of data\.path, data\.valid_path"):
        ctr(tmp_path, tmp_path / "clicks", valid_path=str(tmp_path / "clicks/b*"))
    with refused("data.path='': is empty; give a path"):
        ctr(tmp_path, "")


def test_dirty_rows_are_rejected_with_file_line_and_reason(tmp_path: Path) -> None:
    body = lines()
    body[3], body[90] = "1,a", "1,a,u1,d,1,2"
    body[70:75] = ['1,"two\nlines",u1,2024-01-02,1'] * 5  # which are read
    file = write(tmp_path, "x.csv", body)
    prepared = ctr(tmp_path, file, max_rejected=0.05)
    rejected = [json.loads(line) for line in (prepared.path / "rejected.jsonl").read_text().splitlines()]
    assert [(row["line"], row["reason"]) for row in rejected] == [
        (5, "Expected Number of Columns: 5 Found: 2"),
        (92, "Expected Number of Columns: 5 Found: 6"),
    ]
    assert "two\nlines" in vocabulary(prepared, "word")
    assert {row["file"] for row in rejected} == {str(file)}
    assert len(prepared.arrays["labels_B"]) == NUM_ROWS - 2
    assert "2 rows rejected" in prepared.describe()
    with refused(r"2 of 240 rows cannot be read.*the first is line 5"):
        ctr(tmp_path, file)
