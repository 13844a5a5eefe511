"""What docs/security.md says that no other test holds."""

import io
import json
import pickle
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dphybrid
from dphybrid.config.settings import load_settings
from dphybrid.recipes.configs import load_config
from dphybrid.run.train import run_job
from dphybrid.util.digests import SUMS, value_digest
from tests.conftest import REPOSITORY
from tests.reliability.trials import SMALL, TABLE, write_clicks

ROWS = {"age": [20, 45, 80], "city": ["a", "b", "elsewhere"]}


class Bomb:
    """What unpickling runs."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def saved(bomb: Bomb) -> bytes:
    stream = io.BytesIO()
    torch.save({"weight": bomb}, stream)
    return stream.getvalue()


def array(bomb: Bomb) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array([bomb], object), allow_pickle=True)
    return stream.getvalue()


def test_no_file_of_a_checkpoint_is_unpickled(unrecorded: None, tmp_path: Path) -> None:
    write_clicks(tmp_path)
    config = load_config(None, [*TABLE, *SMALL, "train.epochs=1", f"data.path={tmp_path}/clicks.csv"])
    whole = Path(run_job(config, load_settings()).best_checkpoint)
    assert len(dphybrid.load(str(whole)).predict(ROWS)) == 3
    names = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
    assert {"blocks.safetensors", "tables/table.safetensors"} < {name.as_posix() for name in names}
    ways: list[Callable[[Bomb], bytes]] = [pickle.dumps, saved, array]
    for content in (way(Bomb(tmp_path / "exploded")) for way in ways):
        for name in names:
            given = tmp_path / "given"
            shutil.copytree(whole, given)
            (given / name).write_bytes(content)
            page = json.loads((whole / "state.json").read_bytes())
            for kind, digest in SUMS.items():
                page[kind] = {each: digest(given / each) for each in page[kind]}
            page.pop("page_sha256")
            if name.name != "state.json":
                (given / "state.json").write_text(json.dumps(page | {"page_sha256": value_digest(page)}))
            with suppress(Exception):  # of whichever library reads the file, where one does
                dphybrid.load(str(given)).predict(ROWS)
            shutil.rmtree(given)
    assert not (tmp_path / "exploded").exists()


def test_each_exception_from_the_rules_of_security_has_its_reason() -> None:
    files = [path for part in ("dphybrid", "flows", "infra") for path in (REPOSITORY / part).rglob("*.py")]
    told = [line for file in files for line in file.read_text("utf-8").splitlines()]
    found = [line for line in told if re.search(r"# noqa: .*\bS\d{3}", line)]
    assert found
    assert [line for line in found if not re.search(r"\bS\d{3} - \w", line)] == []


def test_the_page_names_tests_that_are_there() -> None:
    page = (REPOSITORY / "docs" / "security.md").read_text("utf-8")
    named = re.findall(r"`(tests/[\w/.]+)`", page)
    assert len(named) > 15
    assert [name for name in named if not (REPOSITORY / name).exists()] == []
