"""The flows as an installed package, which no other folder of the name `flows` can stand before."""

import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from dphybrid.util.asking import Answer, ask
from tests.commands import command, python
from tests.conftest import REPOSITORY
from tests.flows.servers import environment

IMPORT = """
import pathlib, sys
import dphybrid.flows.train_hybrid, dphybrid.flows.retrain_hybrid, dphybrid.flows.sweep_hybrid
from dphybrid.orchestration.setup import check
from prefect.settings import PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS
assert "flows" not in sys.modules
import flows
print(dphybrid.flows.__file__, flows.__file__, PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value())
check(None)
"""


@pytest.mark.nightly
@pytest.mark.skipif(
    int(version("setuptools").split(".")[0]) < 77,
    reason="setuptools 77 builds the wheel; the extra `test` has it",
)
def test_a_wheel_brings_the_flows_beside_a_foreign_folder_of_their_name(tmp_path: Path) -> None:
    source, site, elsewhere = tmp_path / "source", tmp_path / "site", tmp_path / "elsewhere"
    for name in ("dphybrid", "flows", "examples/tutorials"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)  # what pip does with it
    for library in (REPOSITORY / "dphybrid" / "kernels").glob("_rows-*.so"):
        shutil.copy(library, site / "dphybrid" / "kernels")  # compiling takes half a minute
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == {"dphybrid"}
    (elsewhere / "flows").mkdir(parents=True)
    (elsewhere / "flows" / "__init__.py").write_text("")
    done = python("-c", IMPORT, cwd=elsewhere, env=environment(tmp_path, PYTHONPATH=str(site)))
    first, *lines = done.stdout.splitlines()
    assert first.split() == [
        str(site / "dphybrid/flows/__init__.py"),
        str(elsewhere / "flows/__init__.py"),
        "120",
    ]
    assert all(line.endswith(": valid") for line in lines)


def test_the_doctor_tells_a_broken_prefect(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: str) -> None:
        raise TypeError("Body() got an unexpected keyword argument")

    monkeypatch.setattr("dphybrid.cli.doctor.prefect_part", broken)
    told = command("doctor", ends=1)
    assert "BAD  Prefect's server cannot be imported: TypeError: Body() got" in told
    assert "pip install 'prefect>=" in told
    assert "ok   MLflow: embedded" in told


def test_the_doctor_tells_addresses_of_other_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    from dphybrid.orchestration.doctor import checks  # imports Prefect's server, which takes two seconds

    monkeypatch.setenv("PREFECT_API_URL", "http://here:4200")
    page = {text: good for good, text in checks(lambda *_: Answer(b"<!doctype html>", 200))}
    assert [good for text, good in page.items() if "whose address ends in /api" in text] == [False]

    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            with other.accept()[0] as caller:
                caller.recv(1000)
                caller.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        said = ask(f"http://127.0.0.1:{other.getsockname()[1]}/api", None)
        thread.join()
    assert said.wrong.startswith("does not answer (")
