"""Wrong input of every kind: it works, or it is told as a UserError; no error foreign to the user, and no
hanging, which pytest's time limit ends.

A seeded few of each by default. DPHYBRID_LONG_TESTS=1 takes ten times as many, DPHYBRID_FUZZ=N takes N, with
another seed each time.
"""

import json
import os
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dphybrid.cli import train
from dphybrid.cli.main import main
from dphybrid.config.settings import load_settings
from dphybrid.orchestration.setup import check
from dphybrid.recipes.configs import field_types, load_config
from dphybrid.recipes.registry import BUILT_IN
from dphybrid.run.folder import RunPage
from dphybrid.run.job import prepare_data
from dphybrid.run.pages import MetricsPage, Report, ResultPage
from dphybrid.tracking.copier import Copier
from dphybrid.tracking.record import RecordFile, destination, of_metrics
from dphybrid.training.checkpoint import CheckpointState
from dphybrid.util.device_spec import MAX_DEVICES, parse_device_spec
from dphybrid.util.digests import value_digest
from dphybrid.util.errors import UserError
from tests.commands import run_with
from tests.conftest import LONG, REPOSITORY, own_settings
from tests.reliability.bad_input import CHANGES, CONFIG, OVERRIDES, PATHS, PIECES, edited
from tests.reliability.scenarios import options_of, write_files

COUNT = int(os.environ.get("DPHYBRID_FUZZ", "0"))


def fuzzed(few: int) -> Callable[[Any], Any]:
    """So many examples by default, the same each time."""
    return settings(
        max_examples=COUNT or (10 * few if LONG else few),
        derandomize=not (COUNT or LONG),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def told_or_done(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except UserError:
        return None


def broken(good: bytes) -> st.SearchStrategy[bytes]:
    """The bytes with one to four changes."""
    edit = st.tuples(
        st.sampled_from(CHANGES),
        st.floats(0, 1, allow_nan=False),
        st.sampled_from([1, 3, 20, 200]),
        st.sampled_from(PIECES) | st.binary(max_size=8),
    )

    def apply(edits: list[tuple[str, float, int, bytes]]) -> bytes:
        content = good
        for one in edits:
            content = edited(content, *one)
        return content

    return st.lists(edit, min_size=1, max_size=4).map(apply)


ODD_NUMBERS = ["0", "1", "-0", "true", "1_000", "²", "١", "0x10"]
NASTY = st.sampled_from([*PATHS, *(text.partition("=")[2] for text in OVERRIDES), *ODD_NUMBERS])
TEXTS = NASTY | st.text(max_size=30) | st.text(string.digits + "-+.eE_", max_size=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Good files, a folder to write the broken ones in, and settings of its own."""
    root = tmp_path_factory.mktemp("fuzz")
    write_files(root)
    pl.read_csv(root / "clicks.csv").write_parquet(root / "clicks.parquet")
    with pytest.MonkeyPatch.context() as patch:
        own_settings(patch, root / "data", TRACKING_URI="none")
        patch.chdir(root)
        yield root


@pytest.fixture(scope="module")
def finished(folder: Path) -> Path:
    """A data folder with a finished run."""
    options = options_of("ctr, cpu*2", folder)
    run_with(*options, run_name="fuzzed")
    return folder / "data"


@given(text=st.text(max_size=40) | st.text("autocpd:*,0123456789 -²", max_size=30) | TEXTS)
@fuzzed(100)
def test_device_texts(text: str) -> None:
    spec = told_or_done(lambda: parse_device_spec(text))
    assert spec is None or len(spec.names) <= MAX_DEVICES


FIELDS = sorted({name for recipe in BUILT_IN for name in field_types(recipe)})
OVERRIDE = st.tuples(st.sampled_from(FIELDS) | st.text(max_size=20), TEXTS).map("=".join) | st.sampled_from(
    OVERRIDES
)


@given(recipe=st.sampled_from(sorted(BUILT_IN)), overrides=st.lists(OVERRIDE, min_size=1, max_size=4))
@fuzzed(100)
def test_overrides(folder: Path, recipe: str, overrides: list[str]) -> None:
    told_or_done(lambda: load_config(None, [f"recipe={recipe}", *overrides]))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
SECTIONS = st.dictionaries(
    st.sampled_from(["recipe", "devices", "data", "model", "table", "train", "checkpoint"]) | TEXTS,
    st.dictionaries(st.sampled_from([name.rpartition(".")[2] for name in FIELDS]), VALUES, max_size=4)
    | VALUES,
    max_size=4,
)


@given(values=SECTIONS | VALUES)
@fuzzed(100)
def test_configs_of_odd_values(folder: Path, values: Any) -> None:
    (folder / "odd.json").write_text(json.dumps(values, default=str))
    told_or_done(lambda: load_config(folder / "odd.json", []))


def prepared(folder: Path, config: Path | None, *overrides: str) -> None:
    told_or_done(lambda: prepare_data(load_config(config, list(overrides)), load_settings()))


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["csv", "parquet"])
@given(data=st.data())
@fuzzed(15)
def test_tables(folder: Path, ending: str, data: st.DataObject) -> None:
    file = folder / f"broken.{ending}"
    file.write_bytes(data.draw(broken((folder / f"clicks.{ending}").read_bytes())))
    prepared(folder, None, "recipe=ctr", "data.label=clicked", f"data.path={file}")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["kge", "retrieval", "text"])
@given(data=st.data())
@fuzzed(25)
@pytest.mark.nightly
def test_triples_pairs_and_texts(folder: Path, recipe: str, data: st.DataObject) -> None:
    files = {"kge": "triples.txt", "retrieval": "pairs.csv", "text": "text.txt"}
    good = (folder / files[recipe]).read_bytes()
    (folder / "broken.txt").write_bytes(data.draw(broken(good)))
    prepared(folder, None, f"recipe={recipe}", f"data.path={folder}/broken.txt")


NESTED = [b"a = " + b"[" * depth + b"]" * depth for depth in (50, 5_000)]


@pytest.mark.parametrize("content", NESTED)
@pytest.mark.parametrize("name", ["deep.toml", "deep.json"])
def test_deeply_nested_files(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content.removeprefix(b"a = ") if name.endswith("json") else content)
    clicks = ["recipe=ctr", f"data.path={folder}/clicks.csv", "data.label=clicked"]
    prepared(folder, folder / name, *clicks)


@pytest.mark.slow
@given(config=broken(CONFIG))
@fuzzed(40)
@pytest.mark.nightly
def test_config_files(folder: Path, config: bytes) -> None:
    (folder / "broken.toml").write_bytes(config)
    prepared(folder, folder / "broken.toml", f"data.path={folder}/clicks.csv", "data.label=clicked")


@pytest.mark.slow
@given(path=st.sampled_from(PATHS) | st.text(max_size=20))
@fuzzed(20)
def test_paths(folder: Path, path: str) -> None:
    if Path(path).is_absolute() and len(path) < 3:
        return  # everything there is
    for recipe in ("ctr", "kge", "retrieval", "text"):
        label = ["data.label=clicked"] if recipe == "ctr" else []
        prepared(folder, None, f"recipe={recipe}", f"data.path={path}", *label)


PREFECT = (REPOSITORY / "prefect.yaml").read_bytes()


@given(text=broken(PREFECT) | VALUES.map(lambda value: yaml.safe_dump(value, allow_unicode=True).encode()))
@fuzzed(25)
def test_deployments(folder: Path, text: bytes) -> None:
    (folder / "prefect.yaml").write_bytes(text)
    told_or_done(lambda: check(folder / "prefect.yaml"))


PAGES: dict[str, Any] = {
    "run.json": RunPage,
    "result.json": ResultPage,
    "metrics.json": MetricsPage,
    "report.json": Report,
    "checkpoints/step-*/state.json": CheckpointState,
}


@pytest.mark.parametrize("name", PAGES)
@given(data=st.data())
@fuzzed(40)
def test_pages(folder: Path, finished: Path, name: str, data: st.DataObject) -> None:
    """Broken bytes, and values that are odd with a sum that is right."""
    good = next((finished / "runs" / "fuzzed").glob(name)).read_bytes()
    values = json.loads(good)
    if data.draw(st.booleans()) or not isinstance(values, dict):
        content = data.draw(broken(good))
    else:
        odd = {**values, data.draw(st.sampled_from(sorted(values))): data.draw(VALUES)}
        try:
            content = json.dumps({**odd, "page_sha256": value_digest(odd)}).encode()
        except (ValueError, TypeError):
            return
    (folder / "page.json").write_bytes(content)
    told_or_done(lambda: PAGES[name].read(folder / "page.json"))


@given(data=st.data())
@fuzzed(40)
def test_records(folder: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever the file of a record holds: sending goes on to the end."""
    record = RecordFile(tmp_path_factory.mktemp("run"))
    for step in range(5):
        record.append(of_metrics({"train/loss": 1 / (step + 1)}, step))
    record.close()
    record.path.write_bytes(data.draw(broken(record.path.read_bytes())))
    arrived: list[Any] = []
    destination(record.folder)
    record.append(of_metrics({"train/loss": 9.0}, 99))
    Copier(record.folder, arrived.extend).finish(20)
    assert any(found.get("step") == 99 for found in arrived)


COMMANDS = ["train", "prepare", "predict", "nonsense"]
FLAGS = ["--resume", "--run-name", "--tag", "--config", "--out", "--batch-size", "--help"]
FLAGS += ["--version", "--", "-x"]
FLAGS += [f"--{name.replace('_', '-')}" for name in FIELDS]


@given(
    command=st.sampled_from(COMMANDS) | st.text(max_size=8),
    flags=st.lists(st.tuples(st.sampled_from(FLAGS), TEXTS), max_size=3),
    more=st.lists(TEXTS, max_size=2),
)
@fuzzed(40)
def test_command_lines(folder: Path, command: str, flags: list[tuple[str, str]], more: list[str]) -> None:
    """Up to where training would begin, which a run to resume is checked before."""
    argv = [command, *more, *(part for flag in flags for part in flag)]
    if command in ("devices", "doctor", "sync", "worker", "deploy"):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Flags, "run", lambda flags: flags.experiment() and 0)
        patch.setenv("DPHYBRID_TRACKING_URI", "none")
        try:
            code = main(argv)
        except SystemExit as end:
            code = int(end.code or 0)
    assert code in (0, 1, 2), argv
