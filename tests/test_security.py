"""What docs/security.md says that no other test holds: what a run folder from elsewhere cannot do, and that
nothing is unpickled."""

import io
import json
import pickle
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlflow.tracking import MlflowClient

import dphybrid
from dphybrid.config.settings import Settings, load_settings
from dphybrid.recipes.configs import load_config
from dphybrid.run.folder import FLOW_RUN_TAG, RunPage
from dphybrid.run.job import run_job
from dphybrid.tracking.record import RecordFile, read
from dphybrid.tracking.tracker import embedded_uri
from dphybrid.util.digests import SUMS, value_digest
from tests.commands import command
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


class Server:
    """An HTTP server that keeps the headers which it is sent."""

    def __init__(self) -> None:
        asked = self.asked = list[str]()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(str(self.headers))
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            do_POST = do_GET

            def log_message(self, *_: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


def plant(folder: Path, key: Path) -> None:
    """Let the record of a run name a file outside of its folder, and a checkpoint with such files."""
    key.write_text("TOP SECRET")
    (folder / "deep").mkdir()
    (folder / "deep" / "state.json").write_text(json.dumps({"sha256": {"../../../../key": "0"}, "info": {}}))
    card = {"uid": "u", "name": "x", "step": 9, "folder": "deep", "role": "best", "metrics": {}}
    record = RecordFile(folder)
    for more in (
        {"op": "file", "path": str(key)},
        {"op": "file", "path": "../../../key"},
        {"op": "checkpoints", "kept": [card]},
        {"op": "checkpoints", "kept": [card | {"folder": "../../.."}]},
        {"op": "register", "name": "theirs", "uid": "u", "alias": "challenger"},
    ):
        record.append(more)
    record.close()


@pytest.fixture
def foreign(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A run `nice` of another data folder, copied into this one. Its pages name addresses of the server that
    is returned, a file outside of the run's folder, and a checkpoint with files outside of its own."""
    monkeypatch.setattr("dphybrid.tracking.copier._REFUSED_RETRIES_S", (0.01,))
    theirs, server = Settings(data_dir=tmp_path / "theirs"), Server()
    run_job(load_config(None, ["recipe=toy", "devices=cpu"]), theirs, run_name="nice")
    folder = theirs.runs_dir / "nice"
    plant(folder, tmp_path / "key")
    record = folder / "record.jsonl"
    lines = [
        {**line, "tracking_uri": server.address} if line["op"] == "run" else line for line, _ in read(folder)
    ]
    record.write_text("".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines))
    (folder / "record.sent").unlink()
    page = RunPage.read(folder / "run.json")
    tags = {"prefect.api_url": f"{server.address}/api", FLOW_RUN_TAG: "11111111-1111-4111-8111-111111111111"}
    page.model_copy(update={"tags": tags, "run_id": "0" * 32}).write(folder / "run.json")
    (folder / "report.json").unlink()
    shutil.copytree(folder, data_dir / "runs" / "nice")
    shutil.copytree(theirs.prepared_dir, data_dir / "prepared")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "MY TOKEN")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "admin:secret")
    yield server
    server.http.shutdown()
    server.http.server_close()


def test_a_run_from_elsewhere_is_read_and_does_not_act(foreign: Server, data_dir: Path) -> None:
    before = set(data_dir.parent.rglob("*"))
    assert dphybrid.load_model("nice").state_dict()
    (run,) = dphybrid.runs()
    assert run.checkpoint.is_relative_to(data_dir / "runs" / "nice")
    why = "nice: it was not made in this data folder; if you trust it, `dphybrid runs adopt nice`"
    assert why in command("runs", "remove", "nice", "--yes", ends=2)
    assert why in command("train", "--recipe", "toy", "--resume", "nice", ends=2)
    assert why in command("train", "--resume", "nice", ends=2)
    assert "nice: not sent: it was not made in this data folder" in command("sync", "--wait", "3")
    assert "nice" not in command("runs", "remove", "--older-than", "0", "--yes")
    assert foreign.asked == []
    assert set(data_dir.parent.rglob("*")) - before <= {data_dir / "mlflow"}


def test_an_adopted_run_acts_for_its_new_owner_alone(
    foreign: Server, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dphybrid.tracking.copier._REFUSED_RETRIES_S", (0.01,))
    command("runs", "adopt", "nice")
    assert "nice: is this data folder's own run already" in command("runs", "adopt", "nice", ends=2)
    command("sync", "--wait", "20")
    client = MlflowClient(load_settings().mlflow_uri or embedded_uri(load_settings().mlflow_dir))
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert run.info.run_name == "nice"
    assert run.data.metrics
    assert client.search_registered_models() == []
    assert not [path for path in data_dir.rglob("*") if path.is_file() and b"TOP SECRET" in path.read_bytes()]
    command("train", "--recipe", "toy", "--devices", "cpu", "--train.epochs", "2", "--resume", "nice")
    assert command("runs", "remove", "nice", "--yes") == "nice: removed\n"
    assert (data_dir.parent / "key").is_file()
    assert foreign.asked == []


def test_the_list_of_own_runs_is_its_owner_s_alone(unrecorded: None, data_dir: Path) -> None:
    run_job(load_config(None, ["recipe=toy", "devices=cpu"]), load_settings(), run_name="mine")
    assert oct((data_dir / ".own-runs").stat().st_mode & 0o777) == "0o600"
    shutil.copytree(data_dir / "runs/mine", data_dir / "runs/copy")
    command("train", "--resume", "copy", ends=2)
    command("train", "--recipe", "toy", "--devices", "cpu", "--train.epochs", "2", "--resume", "mine")
    shutil.rmtree(data_dir / "runs/mine")  # and a folder from elsewhere takes its name
    shutil.copytree(data_dir / "runs/copy", data_dir / "runs/mine")
    page = RunPage.read(data_dir / "runs/mine/run.json")
    page.model_copy(update={"uid": "0" * 16}).write(data_dir / "runs/mine/run.json")
    command("train", "--resume", "mine", ends=2)


def test_each_exception_from_the_rules_of_security_has_its_reason() -> None:
    files = [path for part in ("dphybrid", "flows", "infra") for path in (REPOSITORY / part).rglob("*.py")]
    told = [line for file in files for line in file.read_text("utf-8").splitlines()]
    found = [line for line in told if re.search(r"# noqa: .*\bS\d{3}", line)]
    assert found
    assert [line for line in found if not re.search(r"\bS\d{3} - \w", line)] == []
