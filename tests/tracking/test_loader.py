"""Models from elsewhere: nothing is linked outside their folder, and no code is run that was not allowed."""

import json
import shutil
import sys
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
from dphybrid.util.digests import file_digest, value_digest
from tests.commands import run_with
from tests.refusing import refused

FACTORY = """\
import pathlib
pathlib.Path("imported").touch()
from dphybrid.tutorials.model import build_toy

def make(context):
    return build_toy(context)
"""


def lacking(folder: Path, name: str) -> str:
    """Return the address of a model that lacks a file of this name, which is elsewhere."""
    root, source = folder / "model", folder / "source"
    (root / "checkpoint").mkdir(parents=True, exist_ok=True)
    source.write_text("rows")
    entry = {"name": name, "path": str(source), "bytes": 4, "sha256": file_digest(source)}
    (root / "left_out.json").write_text(json.dumps([entry]))
    return root.as_uri()


@pytest.mark.parametrize("name", ["../../escaped", "/tmp/escaped-by-dphybrid", "a/../../b", ".", ""])
def test_a_left_out_file_stays_inside_the_models_folder(tmp_path: Path, name: str) -> None:
    with refused("outside of this folder; this model is not loaded"):
        checkpoint_folder(lacking(tmp_path, name))
    assert not Path("/tmp/escaped-by-dphybrid").exists()
    whole = checkpoint_folder(lacking(tmp_path, "tables/rows.safetensors"))
    assert (whole / "tables" / "rows.safetensors").read_text() == "rows"


def test_a_folder_that_is_a_link_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    address, outside = lacking(tmp_path, "tables/x"), tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "model" / "checkpoint" / "tables").symlink_to(outside)
    with refused("tables: is a link, which this folder must not have; this model is not loaded"):
        checkpoint_folder(address)
    assert list(outside.iterdir()) == []
    assert not (tmp_path / "mlflow.db").exists()  # no store is asked, and none is made


@pytest.mark.parametrize(
    "text", ["{", "{}", "[1]", '[{"name": 1}]', '[{"name": "a", "path": "b", "bytes": "c"}]', "[" * 100_000]
)
def test_a_damaged_page_of_left_out_files_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "left_out.json").write_text(text)
    with refused(r"left_out.json: is damaged"):
        checkpoint_folder(tmp_path.as_uri())


@pytest.fixture
def factory(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module `mymodels` of the working folder, which tells when it is imported."""
    monkeypatch.delitem(sys.modules, "mymodels", raising=False)
    (tmp_path / "mymodels.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_factory_runs_for_own_runs_and_for_others_only_if_it_is_installed(
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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("recipe", "mymodels:Nothing"),
        ("model.factory", "mymodels:make"),
        ("train.callbacks", ["mymodels:tell"]),
    ],
)
@pytest.mark.parametrize("page", ["state.json", "run.json"])
def test_no_name_in_a_page_from_elsewhere_imports_code(
    factory: None, tmp_path: Path, field: str, value: object, page: str
) -> None:
    report = run_with("recipe=toy", "train.epochs=1")
    given = Path(report.best_checkpoint)
    shutil.move(given.parents[1], tmp_path / "elsewhere")
    folder = tmp_path / "elsewhere" / (given.relative_to(given.parents[1]) if page == "state.json" else ".")
    content = json.loads((folder / page).read_text())
    content.pop("page_sha256", None)
    section, _, name = field.partition(".")
    if name:
        content["config"][section][name] = value
    else:
        content["config"][section] = value
    (folder / page).write_text(json.dumps(content | {"page_sha256": value_digest(content)}))
    read = dphybrid.load if page == "state.json" else lambda name: read_run(name, load_settings()).config
    with refused(f"{page}: none of your own runs wrote it; {field} = 'mymodels:"):
        read(str(folder))
    assert not (tmp_path / "imported").exists()
