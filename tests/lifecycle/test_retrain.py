"""The registry that a retraining needs, the champion that it continues, and the stopped one."""

from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

from dphybrid.config.settings import load_settings
from dphybrid.lifecycle import champion as deciding
from dphybrid.lifecycle import retrain
from dphybrid.lifecycle.champion import open_registry
from dphybrid.lifecycle.retrain import stopped_retraining
from dphybrid.recipes.configs import build_config, load_config
from dphybrid.tracking.models import Version
from dphybrid.tracking.record import RecordFile
from tests.commands import run_with
from tests.refusing import refused


@pytest.mark.parametrize("place", ["none", "files"])
def test_retraining_needs_a_registry(place: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPHYBRID_TRACKING_URI", place)
    with refused(f"needs MLflow's model registry, and the tracking URI is {place}; name a server"):
        open_registry(load_settings())


@pytest.mark.usefixtures("unrecorded")
def test_a_champion_of_another_registry_is_not_mistaken_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = rows_of(tmp_path, monkeypatch)
    config = load_config(None, [*values, "checkpoint.register_as=clicks"])
    for seed in (1, 2):
        checkpoint = champion_of(monkeypatch, *values, f"train.seed={seed}")
        kept = retrain.plan_retraining(config, load_settings()).config.train.warm_start
        assert (Path(kept) / "state.json").read_bytes() == (checkpoint / "state.json").read_bytes()


def rows_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(folder)
    Path("rows.csv").write_text("a,y\n" + "".join(f"{n % 7},{n % 2}\n" for n in range(80)))
    columns = ["data.path=rows.csv", "data.label=y", "data.numeric=a"]
    return [*columns, "train.epochs=1", "devices=cpu"]


def champion_of(monkeypatch: pytest.MonkeyPatch, *values: str) -> Path:
    """Train, and let the registry's champion be this run; return its checkpoint."""
    checkpoint = Path(run_with(*values).best_checkpoint)
    champion = Version("clicks", "1", uuid4().hex, {}, "promoted")
    registry = SimpleNamespace(uri="", newest=lambda _: champion, champion=lambda _: champion)
    monkeypatch.setattr(retrain, "open_registry", lambda _: registry)
    monkeypatch.setattr(deciding, "checkpoint_folder", lambda *_: checkpoint)
    return checkpoint


@pytest.mark.parametrize(("status", "goes_on"), [("RUNNING", True), ("KILLED", True), ("FAILED", False)])
def test_a_retraining_that_failed_is_not_continued_by_the_next_one(
    status: str, goes_on: bool, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = data_dir / "runs" / "night"
    folder.mkdir(parents=True)
    record = RecordFile(folder)
    for each in ("RUNNING", status):
        record.append({"op": "status", "status": each})
    record.close()
    config = build_config({"recipe": "ctr", "data": {"label": "y"}, "checkpoint": {"register_as": "m"}})
    run = SimpleNamespace(status="stopped", folder=folder, config=config, page=SimpleNamespace(prepared=""))
    monkeypatch.setattr(retrain, "retrainings", lambda *_: [run])
    monkeypatch.setattr(retrain.Experiment, "open", lambda *_: SimpleNamespace(config=config))
    assert (stopped_retraining(config, load_settings()) is run) == goes_on
