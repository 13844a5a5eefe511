"""The team's files: scripts that parse, secrets that only their owner reads, units and compose file that name
what exists."""

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.conftest import REPOSITORY

INFRA = REPOSITORY / "infra"
SCRIPTS = ["make-env", "make-databases", "run", "backup"]


def make_env(folder: Path) -> dict[str, str]:
    done = subprocess.run(
        [INFRA / "make-env", "gpu-server", folder], capture_output=True, text=True, check=True
    )
    values: dict[str, str] = {"shown": done.stdout}
    for file in folder.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        values |= {
            f"{file.name}:{m[1]}": m[2]
            for m in re.finditer(r"^([A-Z_a-z]+) ?= ?(.*)$", file.read_text(), re.M)
        }
    return values


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_parse_and_may_be_run(name: str) -> None:
    assert os.access(INFRA / name, os.X_OK)
    subprocess.run(["bash", "-n", INFRA / name], check=True)


def test_environment_files_agree_and_are_made_once(tmp_path: Path) -> None:
    first, other = make_env(tmp_path / "etc"), make_env(tmp_path / "other")
    auth = first["server.env:PREFECT_SERVER_API_AUTH_STRING"]
    assert len(auth) > 30
    assert auth == first["workstation.env:PREFECT_API_AUTH_STRING"]
    assert auth != other["server.env:PREFECT_SERVER_API_AUTH_STRING"]
    assert first["workstation.env:MLFLOW_TRACKING_USERNAME"] != "admin"
    assert (
        first["server.env:MLFLOW_AUTH_ADMIN_PASSWORD"]
        not in (tmp_path / "etc" / "workstation.env").read_text()
    )
    assert first["server.env:DPHYBRID_BIND"] == "127.0.0.1"
    assert first["server.env:DPHYBRID_DB_PASSWORD"] in first["mlflow-auth.ini:database_uri"]
    assert first["workstation.env:PREFECT_API_URL"] == "http://gpu-server:4200/api"
    again = make_env(tmp_path / "etc")
    assert "kept" in again.pop("shown")
    assert {name: first[name] for name in again} == again


def test_services_refuse_secrets_that_others_can_read(tmp_path: Path) -> None:
    make_env(tmp_path)
    (tmp_path / "workstation.env").chmod(0o644)
    environment = os.environ | {"DPHYBRID_ETC": str(tmp_path)}
    done = subprocess.run(
        [INFRA / "run", "true"], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 2
    assert "chmod 600" in done.stderr
    (tmp_path / "workstation.env").chmod(0o600)
    assert subprocess.run([INFRA / "run", "true"], check=False, env=environment).returncode == 0


def test_servers_refuse_to_serve_everybody_without_a_password(tmp_path: Path) -> None:
    make_env(tmp_path)
    for name in ("prefect", "mlflow"):  # stand in for the commands
        (tmp_path / name).write_text('#!/bin/sh\necho "$@"\n')
        (tmp_path / name).chmod(0o700)
    text = (
        (tmp_path / "server.env")
        .read_text()
        .replace("DPHYBRID_STATE=/var/lib/dphybrid", f"DPHYBRID_STATE={tmp_path}/state")
    )
    environment = os.environ | {"DPHYBRID_ETC": str(tmp_path), "DPHYBRID_BIN": str(tmp_path)}
    wide = text.replace("DPHYBRID_BIND=127.0.0.1", "DPHYBRID_BIND=0.0.0.0")
    open_to_all = re.sub(r"(PREFECT_SERVER_API_AUTH_STRING|MLFLOW_AUTH_CONFIG_PATH)=.*", r"\1=", wide)
    for page, code in ((text, 0), (wide, 0), (open_to_all, 2)):
        (tmp_path / "server.env").write_text(page)
        for name in ("prefect", "mlflow"):
            done = subprocess.run(
                [INFRA / "run", name], capture_output=True, text=True, check=False, env=environment
            )
            assert done.returncode == code, done.stderr
            assert ("would serve everybody" in done.stderr) == (code == 2)
            assert code or f"--host {'0.0.0.0' if page == wide else '127.0.0.1'}" in done.stdout


def test_units_and_containers_run_the_same_script() -> None:
    for unit in (INFRA / "systemd").glob("*.service"):
        (command,) = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.M)
        script, service = command.split()
        assert script == "/opt/dphybrid/src/infra/run"
        assert (
            f"\n{service}) " in (INFRA / "run").read_text()
            or f"\n{service})\n" in (INFRA / "run").read_text()
        )
    worker = (INFRA / "systemd" / "dphybrid-worker.service").read_text()
    assert "KillMode=mixed" in worker
    services = yaml.safe_load((INFRA / "compose.yaml").read_text())["services"]
    assert [services[name]["command"] for name in ("prefect", "mlflow", "worker")] == [
        ["prefect"],
        ["mlflow"],
        ["worker"],
    ]


def test_a_workstation_takes_fewer_than_ten_commands() -> None:
    section = (INFRA / "README.md").read_text().split("## A workstation")[1]
    commands = section.split("```")[1].strip().splitlines()
    assert 1 <= len(commands) < 10
