"""What the README promises is what the code does."""

import re
from pathlib import Path

import pytest

from dphybrid.config.settings import Settings, load_settings
from dphybrid.config.tables import TableDataConfig
from dphybrid.jobs.train import run_job
from dphybrid.recipes.configs import load_config

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_the_files_it_lists_are_the_files_there_are() -> None:
    tree = README.partition("## Files")[2]
    listed = set(re.findall(r"^ {2}(\w+(?:\.py|/))", tree, flags=re.MULTILINE))
    there = {
        path.name + ("/" if path.is_dir() else "") for folder in ("flows", "dphybrid") for path in (REPOSITORY / folder).iterdir()
    }
    assert listed == {name for name in there if not name.startswith("__") and name != "py.typed"}


def test_its_model_trains(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    (tmp_path / "readme_model.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = "\n".join(f"{'abcd'[i % 4]},{'xyz'[i % 3]},{int(i % 4 == 0)}" for i in range(400))
    (tmp_path / "clicks.csv").write_text("one,two,clicked\n" + rows)
    overrides = [
        "recipe=ctr",
        f"data.path={tmp_path / 'clicks.csv'}",
        "data.label=clicked",
        "model.factory=readme_model:Bilinear",
    ]
    report = run_job(load_config(None, [*overrides, "devices=cpu*2", "train.batch_size=32", "train.epochs=5"]), load_settings())
    assert report.metrics["auc"] > 0.95


def test_it_names_settings_and_values_that_exist() -> None:
    for name in re.findall(r"`DPHYBRID_(\w+)`", README):
        assert name.lower() in Settings.model_fields
    for name in re.findall(r"--data\.([\w-]+)", README):
        assert name.replace("-", "_") in TableDataConfig.model_fields
