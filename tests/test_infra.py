"""The team's files as they are rendered: who reads which secret, what services may do."""

import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import requests

from tests.conftest import REPOSITORY
from tests.postgres import free_port
from tests.waiting import wait_until

INFRA = REPOSITORY / "infra"


def make_env(folder: Path) -> dict[str, str]:
    """Render the files; return their values as FILE:NAME, and what was printed."""
    done = script("make-env", "gpu-server", str(folder))
    assert done.returncode == 0, done.stderr
    values: dict[str, str] = {"shown": done.stdout}
    for file in folder.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        found = re.finditer(r"^([A-Z_a-z]+) ?= ?(.*)$", file.read_text(), re.M)
        values |= {f"{file.name}:{m[1]}": m[2] for m in found}
    return values


def run(service: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Call infra/run with stand-ins for the servers' commands, which print what they were given."""
    for name in ("prefect", "mlflow"):
        (folder / name).write_text('#!/bin/sh\necho "$@"; env\n')
        (folder / name).chmod(0o700)
    return script("run", service, DPHYBRID_ETC=str(folder), DPHYBRID_BIN=str(folder))


def script(name: str, *arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """Call a script of infra/ without the caller's own settings."""
    own = ("PREFECT_", "MLFLOW_", "DPHYBRID_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)} | more
    argv = [INFRA / name, *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)


def test_files_agree_are_made_once_and_hold_the_secrets_of_one_service(tmp_path: Path) -> None:
    first, other = make_env(tmp_path / "etc"), make_env(tmp_path / "other")
    auth = first["prefect.env:PREFECT_SERVER_API_AUTH_STRING"]
    assert len(auth) > 30
    assert auth == first["workstation.env:PREFECT_API_AUTH_STRING"]
    assert auth != other["prefect.env:PREFECT_SERVER_API_AUTH_STRING"]
    assert first["workstation.env:MLFLOW_TRACKING_USERNAME"] != "admin"
    assert first["server.env:DPHYBRID_BIND"] == "127.0.0.1"
    assert first["mlflow-auth.ini:default_permission"] == "NO_PERMISSIONS"
    assert first["workstation.env:PREFECT_API_URL"] == "http://gpu-server:4200/api"

    files = {file.name: file.read_text() for file in (tmp_path / "etc").iterdir()}
    every = {"database-password", "prefect.env", "mlflow.env", "mlflow-auth.ini"}
    holders = {
        files["database-password"].strip(): every,
        first["mlflow.env:MLFLOW_AUTH_ADMIN_PASSWORD"]: {"mlflow.env"},
        auth: {"prefect.env", "workstation.env"},
    }
    for secret, names in holders.items():
        assert {name for name, text in files.items() if secret in text} == names

    (tmp_path / "etc" / "workstation.env").unlink()
    again = make_env(tmp_path / "etc")
    assert "kept" in again.pop("shown")
    new = "workstation.env:MLFLOW_TRACKING_PASSWORD"
    assert {name: value for name, value in again.items() if first[name] != value}.keys() == {new}


def test_services_refuse_secrets_that_others_can_read(tmp_path: Path) -> None:
    make_env(tmp_path)
    for service, file in (("true", "workstation.env"), ("mlflow", "mlflow-auth.ini")):
        (tmp_path / file).chmod(0o644)
        done = run(service, tmp_path)
        assert done.returncode == 2
        assert f"chmod 600 {tmp_path / file}" in done.stderr
        (tmp_path / file).chmod(0o600)
    assert run("true", tmp_path).returncode == 0
    (tmp_path / "workstation.env").unlink()
    done = run("true", tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(r".*workstation\.env: does not exist, .*infra/make-env.*\n", done.stderr)


def test_setting_up_waits_for_a_server_that_was_just_started(tmp_path: Path) -> None:
    make_env(tmp_path)
    port, env = free_port(), tmp_path / "workstation.env"
    env.write_text(re.sub(r"API_URL=.*", f"API_URL=http://127.0.0.1:{port}", env.read_text()))
    (tmp_path / "python").symlink_to(sys.executable)
    command = tmp_path / "dphybrid"
    command.write_text('#!/bin/sh\n[ "$1" = deploy ] && echo "set up"\n')
    command.chmod(0o700)
    server = f"sleep 2; exec {sys.executable} -m http.server {port} --bind 127.0.0.1"
    with subprocess.Popen(["sh", "-c", server], stderr=subprocess.DEVNULL) as late:
        done = run("setup", tmp_path)
        late.kill()
    assert done.stdout == "set up\n"
    assert done.stderr == f"Waiting for http://127.0.0.1:{port}/health\n"


def test_a_backup_that_fails_leaves_nothing(tmp_path: Path) -> None:
    make_env(tmp_path / "etc")
    (tmp_path / "pg_dump").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "pg_dump").chmod(0o700)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = script("backup", str(tmp_path / "backups"), DPHYBRID_ETC=str(tmp_path / "etc"), PATH=path)
    assert done.returncode == 1
    assert not list((tmp_path / "backups").iterdir())


def test_a_service_gets_its_own_secrets_and_listens_where_it_is_told(tmp_path: Path) -> None:
    values = make_env(tmp_path)
    text = (tmp_path / "server.env").read_text()
    text = text.replace("DPHYBRID_STATE=/var/lib/dphybrid", f"DPHYBRID_STATE={tmp_path}/state")
    wide = text.replace("DPHYBRID_BIND=127.0.0.1", "DPHYBRID_BIND=0.0.0.0")
    for page, address in ((text, "127.0.0.1"), (wide, "0.0.0.0")):
        (tmp_path / "server.env").write_text(page)
        for name, other in (("prefect", "mlflow"), ("mlflow", "prefect")):
            done = run(name, tmp_path)
            assert done.returncode == 0, done.stderr
            assert f"--host {address}" in done.stdout
            assert f"{other.upper()}_S" not in done.stdout.replace("MLFLOW_SERVER_ALLOWED", "")
    assert values["mlflow.env:MLFLOW_AUTH_ADMIN_PASSWORD"] in run("mlflow", tmp_path).stdout
    assert f"MLFLOW_AUTH_CONFIG_PATH={tmp_path}/mlflow-auth.ini" in run("mlflow", tmp_path).stdout

    secret = (tmp_path / "prefect.env").read_text()
    (tmp_path / "prefect.env").write_text(re.sub(r"(SERVER_API_AUTH_STRING)=.*", r"\1=", secret))
    done = run("prefect", tmp_path)
    assert done.returncode == 2
    assert "would serve everybody" in done.stderr


@pytest.mark.parametrize("name", ["make-databases", "backup", "make-env"])
def test_scripts_of_root_run_nothing_of_the_services_files(name: str, tmp_path: Path) -> None:
    """The files belong to the services' user, who would be root by what root sources."""
    folder, ran = tmp_path / "etc", tmp_path / "ran"
    make_env(folder)
    (folder / "prefect.env").unlink()
    with (folder / "server.env").open("a") as file:
        file.write(f"touch {ran}\nDPHYBRID_STATE=$(touch {ran})\nDPHYBRID_DB=`touch {ran}`\n")
    (folder / "database-password").write_text(f"'; select pg_sleep(1); $(touch {ran})")
    arguments = {"make-env": ["gpu-server", str(folder)], "backup": [str(tmp_path)]}.get(name, [])
    done = script(name, *arguments, DPHYBRID_ETC=str(folder), DPHYBRID_PSQL="false")
    assert not ran.exists()
    if name == "make-databases":
        assert done.returncode == 2
        assert "letters, digits" in done.stderr


def commands_of(readme: str, section: str) -> list[str]:
    """Return the commands of a section's first block."""
    page = readme.partition(f"## {section}\n")[2]
    return page.split("```")[1].strip().splitlines()


def test_three_workstations_are_set_up_by_few_commands(tmp_path: Path) -> None:
    readme = (INFRA / "README.md").read_text()
    server, workstation, schedule = (
        commands_of(readme, name)
        for name in ("The server, once", "Each workstation", "The first schedule, and people")
    )
    assert len(server) + 3 * len(workstation) + len(schedule) <= 20
    printed = {}
    for role, more in (("server", ["10.0.0.0/24"]), ("workstation", [])):
        assert any(f"infra/install {role} " in line for line in (*server, *workstation))
        done = script("install", role, "10.0.0.1", *more, DPHYBRID_DRY="1")
        assert done.returncode == 0, done.stderr
        printed[role] = done.stdout
        for used in re.findall(r"(?:^|/src/|\s)(infra/[\w./-]+)", done.stdout):
            assert (REPOSITORY / used).is_file(), used
        assert "+ useradd --system --uid 850 " in done.stdout
        assert done.stdout.splitlines()[-1].endswith("infra/run dphybrid doctor")
    assert "+ env DPHYBRID_BIND=10.0.0.1 infra/make-env 10.0.0.1 /etc/dphybrid" in printed["server"]
    assert "/var/lib/dphybrid/data 10.0.0.0/24(rw" in printed["server"]
    assert "+ scp 10.0.0.1:/etc/dphybrid/workstation.env /etc/dphybrid/" in printed["workstation"]
    assert script("install", "laptop", "10.0.0.1").returncode == 2


UNITS = {"NoNewPrivileges": "yes", "PrivateTmp": "yes", "ProtectHome": "yes", "ProtectSystem": "strict"}


@pytest.mark.parametrize("service", ["prefect", "mlflow", "worker"])
def test_units_are_hardened_and_run_the_script(service: str) -> None:
    text = (INFRA / "systemd" / f"dphybrid-{service}.service").read_text()
    values = dict(line.split("=", 1) for line in text.splitlines() if re.match(r"\w+=", line))
    assert values["ExecStart"] == f"/opt/dphybrid/src/infra/run {service}"
    assert UNITS.items() <= values.items()
    assert values["CapabilityBoundingSet"] == ""
    if service == "worker":
        assert values["KillMode"] == "mixed"
        assert values["OOMPolicy"] == "continue"
        assert values["ReadWritePaths"] == "/run/lock/dphybrid"


@pytest.mark.slow
def test_users_see_their_own_and_the_team_reads_all(tmp_path: Path) -> None:
    pytest.importorskip("flask_wtf", reason="needs dphybrid[server]")
    values = make_env(tmp_path)
    port, address = free_port(), "127.0.0.2"
    for file, old, new in (
        ("server.env", "DPHYBRID_BIND=127.0.0.1", f"DPHYBRID_BIND={address}"),
        ("server.env", "DPHYBRID_MLFLOW_PORT=5000", f"DPHYBRID_MLFLOW_PORT={port}"),
        ("server.env", "DPHYBRID_STATE=/var/lib/dphybrid", f"DPHYBRID_STATE={tmp_path}/state"),
        ("mlflow.env", "URI=postgresql.*", f"URI=sqlite:///{tmp_path}/mlflow.db"),
        ("mlflow.env", "ALLOWED_HOSTS=.*", f"ALLOWED_HOSTS={address}:{port}"),
        ("mlflow-auth.ini", "database_uri = .*", f"database_uri = sqlite:///{tmp_path}/auth.db"),
    ):
        page = (tmp_path / file).read_text()
        (tmp_path / file).write_text(re.sub(old, new, page))
    own = {"DPHYBRID_ETC": str(tmp_path), "DPHYBRID_BIN": str(Path(sys.executable).parent)}
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [INFRA / "run", "mlflow"], env=os.environ | own, stdout=log, stderr=log, start_new_session=True
        )

    def users(*names: str) -> "subprocess.CompletedProcess[str]":
        command = [str(INFRA / "run"), "mlflow-user", *names]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | own)

    def asked(user: str, password: str, path: str, **page: str) -> requests.Response:
        url = f"http://{address}:{port}/api/2.0/mlflow/{path}"
        return requests.request("POST" if page else "GET", url, json=page, auth=(user, password), timeout=30)

    try:
        made = wait_until(lambda: (done := users()).returncode == 0 and done, "MLflow answers", 150)
        assert "MLflow user workstation: created" in made.stdout
        workstation = ("workstation", values["workstation.env:MLFLOW_TRACKING_PASSWORD"])
        page = asked(*workstation, "experiments/create", name="clicks").json()
        wanted = f"experiments/get?experiment_id={page['experiment_id']}"
        people = {}
        for name in ("ana", "ben"):
            done = users(name)
            assert done.returncode == 0, done.stderr
            people[name] = re.findall(r"password (\S+)$", done.stdout.strip())[0]
            assert asked(name, people[name], wanted).ok
            assert asked(name, people[name], "experiments/create", name=f"of-{name}").ok
        assert asked("ana", people["ben"], wanted).status_code == 401
        admin = ("admin", values["mlflow.env:MLFLOW_AUTH_ADMIN_PASSWORD"])
        assert asked(*admin, "users/create", username="guest", password="a-long-password").ok
        assert asked("guest", "a-long-password", wanted).status_code == 403
        assert "exists, its password is set" in users("ana").stdout
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
