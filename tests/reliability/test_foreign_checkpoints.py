"""Checkpoint folders that somebody else has made, with right checksums and wrong content: they predict, or
are refused with a UserError; no other error, and little memory.

24 seeded cases by default; DPHYBRID_LONG_TESTS=1 takes 3000, DPHYBRID_FUZZ=N takes N with another seed.
"""

import io
import json
import os
import random
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dphybrid.serving.predict import load
from dphybrid.util.digests import file_crc, file_digest, value_digest
from dphybrid.util.errors import UserError
from tests.commands import run_with
from tests.conftest import LONG, own_settings
from tests.preparing import clicks
from tests.refusing import refused
from tests.reliability.scenarios import options_of, write_files

COUNT = int(os.environ.get("DPHYBRID_FUZZ", "3000" if LONG else "24"))
ROWS = {"site": ["s1", "s30", "elsewhere"], "age": [20, 45, None]}
WRONG: list[Any] = [
    None, True, -1, 0, 3, 7.5, 10**12, 2**63, 10**400, 1e308, float("nan"), float("inf"), "", "x", "s1" * 500,
    "../../x", "/dev/zero", [], [1], [[]], ["a"] * 70, [10**9] * 3, {}, {"a": 1}, {"learned": [1]},
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Whole checkpoints, by recipe."""
    root = tmp_path_factory.mktemp("foreign")
    write_files(root)
    small = ["model.dim=2", "model.hidden=4", "model.layers=1", "train.epochs=1"]
    with pytest.MonkeyPatch.context() as patch:
        own_settings(patch, root / "data", TRACKING_URI="none")
        ctr, retrieval = run_with(*clicks(root), *small), run_with(*options_of("retrieval, cpu", root))
        yield {"ctr": Path(ctr.best_checkpoint), "retrieval": Path(retrieval.best_checkpoint)}


def used(folder: Path) -> None:
    predictor = load(str(folder))
    if hasattr(predictor, "recommend"):
        predictor.recommend(["u1", "nobody"], 3)
    else:
        predictor.predict(ROWS)


def sealed(folder: Path, page: Any = None) -> None:
    """Write the page of a checkpoint with the checksums that its files have now."""
    page = page or json.loads((folder / "state.json").read_bytes())
    if not isinstance(page, dict):
        (folder / "state.json").write_text(json.dumps(page))
        return
    page.pop("page_sha256", None)
    for kind, digest in (("sha256", file_digest), ("crc32", file_crc)):
        if isinstance(page.get(kind), dict):
            there = [name for name in page[kind] if (folder / name).is_file()]
            page[kind] |= {name: digest(folder / name) for name in there}
    (folder / "state.json").write_text(json.dumps(page | {"page_sha256": value_digest(page)}))


def changed(value: Any, draw: random.Random) -> Any:
    """Return a JSON value with one wrong, missing or additional part at a random depth."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.15:
        return draw.choice(WRONG)
    made: Any = dict(value) if isinstance(value, dict) else list(value)
    key = draw.choice(list(made) if isinstance(made, dict) else range(len(made)))
    match draw.choice(["deeper"] * 6 + ["gone", "more"]):
        case "gone":
            del made[key]
        case "more" if isinstance(made, dict):
            made[draw.choice(["x", "version", "role", "../y"])] = draw.choice(WRONG)
        case "more":
            made.append(draw.choice(WRONG))
        case _:
            made[key] = changed(made[key], draw)
    return made


def page_changed(folder: Path, draw: random.Random) -> None:
    page = json.loads((folder / "state.json").read_bytes())
    part = draw.choice(
        ["info", "config", "info", "config", "progress", "optimizer", "generators", "record", ""]
    )
    sealed(folder, changed(page, draw) if not part else page | {part: changed(page[part], draw)})


def encoder_changed(folder: Path, draw: random.Random) -> None:
    file = draw.choice(sorted((folder / "encoder").glob("*.json")))
    file.write_text(json.dumps(changed(json.loads(file.read_bytes()), draw)))
    sealed(folder)


def vocabularies_changed(folder: Path, draw: random.Random) -> None:
    file = draw.choice(sorted((folder / "encoder").glob("*.parquet")))
    frame = pl.read_parquet(file)
    others: list[Any] = [
        frame[:0],
        frame[:1],
        pl.concat([frame, frame]),
        frame.drop(frame.columns[-1]),
        frame.with_columns(pl.all().reverse()),
        pl.DataFrame({"name": [7, 8]}),
        pl.DataFrame({"values": [[1, 2]]}),
        pl.DataFrame({"values": ["a", "b"]}),
        pl.DataFrame({"values": [["a", None, "a"]] * 3}),
        pl.DataFrame({"values": [None, None]}, schema={"values": pl.List(pl.String)}),
        frame.rename(lambda name: f"{name}_"),
        pl.DataFrame(),
    ]
    stream = io.BytesIO()
    draw.choice(others).write_parquet(stream)
    content = draw.choice([stream.getvalue(), broken(file.read_bytes(), draw)])
    file.write_bytes(content)
    sealed(folder)


def broken(content: bytes, draw: random.Random) -> bytes:
    at, count = draw.randrange(len(content)), draw.choice([1, 8, 100])
    made = [b"", bytes(count), b"\xff" * count, draw.randbytes(count)]
    return content[:at] + draw.choice(made) + content[at + count :]


def tensors_changed(folder: Path, draw: random.Random) -> None:
    """Change the header of a file of tensors, or any of its bytes."""
    file = draw.choice([*folder.rglob("*.safetensors")])
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, rest = json.loads(content[8 : 8 + length]), content[8 + length :]
    if draw.random() < 0.3:
        file.write_bytes(broken(content, draw))
    else:
        head = json.dumps(changed(header, draw)).encode()
        length = draw.choice([len(head)] * 5 + [0, 2**40, 2**63])
        file.write_bytes(length.to_bytes(8, "little") + head + rest)
    sealed(folder)


def memory_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def test_foreign_checkpoints_predict_or_are_refused(whole: dict[str, Path], tmp_path: Path) -> None:
    seed = random.randrange(2**32) if "DPHYBRID_FUZZ" in os.environ else 0
    faults, before = [], memory_mib()
    told = 0
    for case in range(COUNT):
        draw = random.Random(f"{seed} {case}")
        folder = tmp_path / "step-000001"
        recipe = "retrieval" if case % 4 == 3 else "ctr"
        shutil.copytree(whole[recipe], folder)
        changes = [page_changed, encoder_changed, vocabularies_changed, tensors_changed]
        change = draw.choice([each for each in changes if recipe == "ctr" or each != encoder_changed])
        change(folder, draw)
        try:
            used(folder)
        except UserError:
            told += 1
        except Exception as error:  # noqa: BLE001 - what is looked for
            faults.append(
                f"{seed} {case} {recipe} {change.__name__}: {type(error).__name__}: {str(error)[:150]}"
            )
        shutil.rmtree(folder)
    assert not faults, "\n".join(faults)
    assert told > COUNT / 3
    assert memory_mib() - before < 500


def test_a_vocabulary_that_takes_far_more_memory_than_its_file_is_refused(
    whole: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "step-000001"
    shutil.copytree(whole["ctr"], folder)
    file = folder / "encoder" / "vocabularies.parquet"
    many = pl.repeat("s1" * 50, 3_000_000, dtype=pl.String, eager=True).implode()
    pl.DataFrame({"values": many}).write_parquet(file)
    assert file.stat().st_size < 100_000
    sealed(folder)
    with refused(r"vocabularies.parquet: needs \d+ MiB in memory, [\d,]+ times its size"):
        load(str(folder))
