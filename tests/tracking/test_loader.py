"""Models from elsewhere: nothing is linked outside their folder, and no code is run that was not allowed."""

import json
import shutil
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

import dphybrid
from dphybrid.api.run import TrainedRun
from dphybrid.config.settings import Settings, load_settings
from dphybrid.recipes.configs import load_config
from dphybrid.run.folder import read_run
from dphybrid.run.job import run_job
from dphybrid.tracking.loader import checkpoint_folder
from dphybrid.util.digests import value_digest
from tests.commands import run_with
from tests.refusing import refused

FACTORY = """\
import pathlib
pathlib.Path("imported").touch()
from dphybrid.tutorials.model import build_toy

def make(context):
    return build_toy(context)
"""


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A model in MLflow whose checkpoint, which is beside it, was too large to upload."""
    for folder in (tmp_path / "model" / "checkpoint", tmp_path / "step-000001"):
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
    (tmp_path / "model" / "checkpoint_folder.txt").write_text(str(tmp_path / "step-000001"))
    return tmp_path / "model"


def test_a_model_without_its_files_is_its_checkpoint_and_no_other_one(large: Path) -> None:
    kept = large.parent / "step-000001"
    assert checkpoint_folder(large.as_uri()) == kept
    (kept / "state.json").write_text("{ }")
    with refused("step-000001: is not the checkpoint that was recorded as this model"):
        checkpoint_folder(large.as_uri())
    shutil.rmtree(kept)
    for text in (str(kept), "", "\0", "x" * 100_000):
        (large / "checkpoint_folder.txt").write_text(text)
        with refused("is missing, and this checkpoint was too large to upload; load the model on"):
            checkpoint_folder(large.as_uri())


def test_a_folder_that_is_a_link_leads_nowhere(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(large)
    (large / "checkpoint" / "tables").symlink_to(large.parent)
    with refused("tables: is a link, which this folder must not have; this model is not loaded"):
        checkpoint_folder(large.as_uri())
    assert not (large / "mlflow.db").exists()  # no store is asked, and none is made


@pytest.fixture
def factory(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module `mymodels` of the working folder, which tells when it is imported."""
    monkeypatch.delitem(sys.modules, "mymodels", raising=False)
    (tmp_path / "mymodels.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_factory_runs_for_own_runs_or_if_it_is_installed(
    factory: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = run_with("recipe=toy", "model.factory=mymodels:make", "checkpoint.register_as=mine")
    own = dphybrid.load_model(report.run_name)
    # the model name is one of the embedded store
    assert own.state_dict().keys() == dphybrid.load_model("models:/mine@challenger").state_dict().keys()
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(report.best_checkpoint, elsewhere)
    del sys.modules["mymodels"]
    (tmp_path / "imported").unlink()
    with refused("model.factory = 'mymodels:make' is code of no installed package; install mymodels first"):
        dphybrid.load_model(str(elsewhere))
    link = load_settings().runs_dir / "link"
    link.symlink_to(elsewhere)
    with refused("is code of no installed package"):
        dphybrid.load_model(str(link))
    assert not (tmp_path / "imported").exists()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for key, value in dphybrid.load_model(str(elsewhere)).state_dict().items():
        assert torch.equal(value, own.state_dict()[key])


def test_a_run_of_settings_that_were_passed_is_the_users_own(factory: None, tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "other", tracking_uri="none")
    config = load_config(None, ["recipe=toy", "model.factory=mymodels:make", "train.epochs=1"])
    run = TrainedRun(settings.runs_dir / run_job(config, settings).run_name, settings)
    assert run.config == config
    assert run.model.state_dict()
    del sys.modules["mymodels"]
    with refused("is code of no installed package"):
        TrainedRun(run.folder).model  # noqa: B018 - of the data folder in force


def test_no_name_in_a_page_from_elsewhere_imports_code(factory: None, tmp_path: Path) -> None:
    report = run_with("recipe=toy", "train.epochs=1")
    checkpoint = Path(report.best_checkpoint)
    elsewhere = Path(shutil.move(checkpoint.parents[1], tmp_path / "elsewhere"))
    ways: dict[Path, Callable[[str], object]] = {
        elsewhere / "checkpoints" / checkpoint.name / "state.json": dphybrid.load,
        elsewhere / "run.json": lambda folder: read_run(folder, load_settings()).config,
    }
    changes: list[dict[str, object]] = [
        {"recipe": "mymodels:Nothing"},
        {"model": {"factory": "mymodels:make"}},
        {"train": {"callbacks": ["mymodels:tell"]}},
    ]
    for (page, read), change in product(ways.items(), changes):
        content = json.loads(page.read_text())
        del content["page_sha256"]
        content["config"] |= {
            name: content["config"][name] | new if isinstance(new, dict) else new
            for name, new in change.items()
        }
        whole = page.read_bytes()
        page.write_text(json.dumps(content | {"page_sha256": value_digest(content)}))
        with refused(f"{page.name}: none of your own runs wrote it; .* = 'mymodels:"):
            read(str(page.parent))
        page.write_bytes(whole)
    assert not (tmp_path / "imported").exists()
