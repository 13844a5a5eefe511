"""Input that is wrong: configs, paths and files, some of them known to have hurt, the others made by breaking
good ones."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dphybrid.config.settings import load_settings
from dphybrid.recipes.configs import load_config
from dphybrid.run.build import prepare_data
from dphybrid.selftest.child import DONE, TOLD, in_child, own_settings

TIMEOUT_S = 20.0
"""Nothing may take longer than that without a word."""

CONFIG = b"""recipe = "ctr"
devices = "cpu*2"
[data]
path = "clicks.csv"
label = "clicked"
[train]
epochs = 2
lr = 0.01
"""
SCHEMA = b"""label = "clicked"
[columns.age]
role = "numeric"
buckets = 4
[columns.city]
role = "categorical"
min_count = 2
"""
PIECES = [b"\x00", b"\xff\xfe", b'"', b"'", b",", b"\n", b"\r", b"\t", b"[", b"]", b"{", b"=", b"-1", b"\\"]
PIECES += [b"nan", b"1e400", b"9" * 30, b"\xe2\x80\xae", b"a" * 300, b"[[" * 50, b".", b"~", b"*", b"#"]

PATHS = ["", " ", "~nosuchuser/x", "a**b*.csv", "x" * 300, "no/such/file.csv", "/dev/null", "/proc/self/mem"]
PATHS += [
    "a\x00b",
    "[",
    "*",
    "{folder}/clicks.csv/x",
    "\udcff",
    "-",
    "{}",
    "clicks.csv.gz",
    "/root/../etc/shadow",
]
OVERRIDES = [
    "=",
    "",
    "a=b",
    "train=1",
    "train.lr=nan",
    "train.lr=1e400",
    "train.batch_size=0",
    "train.batch_size=1e3",
    "train.epochs=" + "9" * 5000,
    "train.seed=-1",
    "devices=",
    "devices=cpu*0",
    "devices=cpu,cuda:0",
    "devices=cuda:99",
    "devices=cpu*" + "9" * 5000,
    "recipe=",
    "recipe=os:system",
    "recipe=builtins:int",
    "model.factory=os:system",
    "model.dim=1e99",
    "data.label=absent",
    "data.buckets=-1",
]


@dataclass(frozen=True)
class Case:
    """files: put into a folder first, content by name. config: read from there. overrides: over it."""

    name: str
    files: dict[str, bytes]
    overrides: list[str]
    config: str | None = None


def known_cases(good: dict[str, bytes]) -> Iterator[Case]:
    """Yield what is known to be wrong. good: contents of files that are right, by name."""
    clicks = ["data.path={folder}/clicks.csv", "recipe=ctr", "data.label=clicked"]
    for path in PATHS:
        for recipe in ("ctr", "text", "kge", "retrieval"):
            more = ["data.label=clicked"] if recipe == "ctr" else []
            yield Case(f"path {path!r}", good, [f"recipe={recipe}", f"data.path={path}", *more])
    for override in OVERRIDES:
        yield Case(f"override {override[:40]!r}", good, [*clicks, override])
    for depth in (50, 5_000):
        nested = b"a = " + b"[" * depth + b"]" * depth
        yield Case("deep TOML", {**good, "config.toml": nested}, clicks, "config.toml")
        yield Case("deep JSON", {**good, "config.json": b"[" * depth + b"]" * depth}, clicks, "config.json")
        yield Case(
            "deep schema", {**good, "schema.toml": nested}, [*clicks, "data.schema_file={folder}/schema.toml"]
        )
    for name in ("/dev/zero", "/dev/null", "/", "~nosuchuser/x", "\x00"):
        yield Case(f"schema {name!r}", good, [*clicks, f"data.schema_file={name}"])


def broken_cases(good: dict[str, bytes], chosen: random.Random) -> Iterator[Case]:
    """Yield, without end, good files with something wrong put in."""
    kinds = [
        ("clicks.csv", ["recipe=ctr", "data.label=clicked", "data.path={folder}/clicks.csv"], None),
        ("clicks.parquet", ["recipe=ctr", "data.label=clicked", "data.path={folder}/clicks.parquet"], None),
        ("triples.txt", ["recipe=kge", "data.path={folder}/triples.txt"], None),
        ("pairs.csv", ["recipe=retrieval", "data.path={folder}/pairs.csv"], None),
        ("text.txt", ["recipe=text", "data.path={folder}/text.txt"], None),
        ("config.toml", ["data.path={folder}/clicks.csv"], "config.toml"),
        (
            "schema.toml",
            ["recipe=ctr", "data.path={folder}/clicks.csv", "data.schema_file={folder}/schema.toml"],
            None,
        ),
    ]
    good = {"config.toml": CONFIG, "schema.toml": SCHEMA, **good}
    while True:
        name, overrides, config = chosen.choice(kinds)
        if name in good:
            yield Case(f"broken {name}", {**good, name: broken(good[name], chosen)}, overrides, config)


def broken(content: bytes, chosen: random.Random) -> bytes:
    """Return content with one to four changes."""
    for _ in range(chosen.randint(1, 4)):
        change = chosen.choice(CHANGES)
        content = edited(
            content, change, chosen.random(), chosen.choice([1, 3, 20, 200]), chosen.choice(PIECES)
        )
    return content


def edited(content: bytes, change: str, place: float, length: int, piece: bytes) -> bytes:
    """Return content with one change (see `CHANGES`) at a place from 0 to 1."""
    start = int(place * len(content))
    stop = min(len(content), start + length)
    before, part, behind = content[:start], content[start:stop], content[stop:]
    return {
        "put in": before + piece + part + behind,
        "replace": before + piece + behind,
        "take out": before + behind,
        "repeat": before + part * 3 + behind,
        "flip": before + bytes(byte ^ 1 << byte % 8 for byte in part) + behind,
        "cut off": before,
    }[change]


CHANGES = ("put in", "replace", "take out", "repeat", "flip", "cut off")


def try_case(data_dir: str, folder: str, overrides: list[str], config: str | None) -> str:
    """Read a config and prepare its data in `folder`; return the prepared folder."""
    own_settings(Path(data_dir))
    file = Path(folder, config) if config else None
    settings = load_settings()
    return prepare_data(load_config(file, [text.replace("{folder}", folder) for text in overrides]), settings)


def trials(root: Path, good: dict[str, bytes], chosen: random.Random) -> Iterator[Callable[[], str]]:
    """Yield cases without end, each to be tried: returns what was not kept, or an empty text."""
    known = list(known_cases(good))
    chosen.shuffle(known)
    endless = broken_cases(good, chosen)
    while True:
        for case in (known.pop() if known else next(endless), next(endless)):
            yield partial(_try, root, case)


def _try(root: Path, case: Case) -> str:
    for name, content in case.files.items():
        (root / name).write_bytes(content)
    done = in_child(try_case, (str(root / "data"), str(root), case.overrides, case.config), root, TIMEOUT_S)
    if done.code in (DONE, TOLD) and "Traceback" not in done.output:
        return ""
    wrong = "took longer than 20 s" if done.code is None else f"exit code {done.code}"
    return f"{case.name} {case.overrides}: {wrong}\n{done.output[-3000:]}"
