"""What fuzzing found: each ended in a traceback, or never, and is told now with exit code 2."""

import re
import socket
from pathlib import Path

import pytest

from dphybrid.cli.main import main
from dphybrid.config.settings import load_settings
from dphybrid.data.table.schema import read_schema
from dphybrid.orchestration.validate import check_prefect_yaml
from dphybrid.util.errors import UserError

LONG = "x" * 300


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    return text


@pytest.mark.parametrize("path", [LONG, "~nosuchuser/x", "a\0b", "a**b*.csv"])
@pytest.mark.parametrize("recipe", ["ctr", "kge", "retrieval", "text"])
def test_data_paths(path: str, recipe: str, data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--data.label", "y"] if recipe == "ctr" else []
    assert "data.path=" in told(capsys, "prepare", "--recipe", recipe, "--data.path", path, *more)


@pytest.mark.parametrize("path", [LONG, "~nosuchuser/x", "a\0b"])
def test_other_paths(
    path: str, data_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told(capsys, "predict", path, "--data.path", "x.csv", "--out", "y.csv")
    told(capsys, "verify", path)
    told(capsys, "train", "--config", path)
    if "\0" not in path:  # the environment takes none
        monkeypatch.setenv("DPHYBRID_DATA_DIR", path)
        with pytest.raises(UserError, match="DPHYBRID_DATA_DIR = "):
            load_settings()


@pytest.mark.parametrize("content", ["[" * 50_000, None])
def test_schema_files(content: str | None, tmp_path: Path) -> None:
    file = Path("/dev/zero")
    if content is not None:
        file = tmp_path / "schema.toml"
        file.write_text(f"a = {content}")
    with pytest.raises(UserError, match=r"^data.schema_file=.*cannot be read"):
        read_schema(file)


@pytest.mark.parametrize("number", ["1e23", "9" * 23, "0"])
def test_numbers_that_no_column_has(number: str, tmp_path: Path) -> None:
    file = tmp_path / "schema.toml"
    file.write_text(f'label = "y"\n[columns.a]\nrole = "categorical"\ntop = {number}\n')
    with pytest.raises(UserError, match=r"schema\.toml.*top[^\n]*$"):
        read_schema(file)


FLOW = "entrypoint: dphybrid.flows.train_hybrid:train_hybrid"


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("entrypoint: ''", "entrypoint : "),
        ("entrypoint: .train:f", "entrypoint .train:f: "),
        (f"{FLOW}, schedules: [{{parameters: [1]}}]", "parameters"),
        (f"{FLOW}, schedules: [{{cron: 5, timezone: 7}}]", "cron 5 with timezone 7"),
        (f"{FLOW}, schedules: [{{cron: '* * *', timezone: UTC}}]", "with timezone 'UTC'"),
    ],
)
def test_deployments(page: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "prefect.yaml"
    file.write_text(f"deployments: [{{name: a, {page}}}]")
    with pytest.raises(UserError, match=message):
        check_prefect_yaml(file)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train --recipe toy --tracking http://a_b?", "MLflow server http://a b: does not answer"),
        (
            "train --recipe toy --tracking mysql+none://x",
            "URI='mysql.none://x': cannot be used",
        ),
        (
            "train --recipe toy --tracking postgresql://u:secret@127.0.0.1:9/x",
            "MLFLOW_TRACKING_URI='postgresql://[*]{3}@127.0.0.1:9/x': no connection .*refused",
        ),
        ("check torch.nn:Linear", "is no factory of a model .missing a required argument: 'out_features'"),
        ("check builtins:int", "is no factory of a model .no signature"),
    ],
)
def test_odd_servers_and_factories_are_told_in_a_line(
    command: str, words: str, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.replace("a_b?", "a b") for word in command.split()]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert re.search(words, line), line


def test_a_database_that_accepts_and_says_nothing_is_told(
    data_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dphybrid.tracking.opening._REACH_SECONDS", 2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"postgresql://u:secret@127.0.0.1:{mute.getsockname()[1]}/x"
        assert main(["train", "--recipe", "toy", "--tracking", address]) == 2
    told = capsys.readouterr().err
    assert "no connection to the database" in told
    assert "timeout expired" in told
    assert "secret" not in told
