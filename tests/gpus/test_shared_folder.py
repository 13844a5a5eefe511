"""The folder of leases is everybody's, and a user's data folder their own."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dphybrid.cli.main import main
from dphybrid.config.settings import Settings, load_settings
from dphybrid.gpus.inventory import Gpu, Inventory
from dphybrid.gpus.leases import (
    ask_for,
    asked_by,
    find_holder,
    lease_folder,
    try_lease,
)
from dphybrid.recipes.configs import build_config
from dphybrid.run.job import prepare_data
from dphybrid.util.files import check_target
from tests.fake_nvml import stand_in

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to somebody else")
NOBODY = 65534


@pytest.fixture
def units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Gpu, ...]:
    """Two stand-in GPUs."""
    stand_in(monkeypatch, tmp_path, 2)
    return Inventory("tests.fake_nvml").read()


@pytest.mark.parametrize("page", [b"", b"[]", b"\xff\xfe", b"x" * 10**6, b'{"pid": "x"}'])
def test_a_locked_file_without_a_page_is_somebodys(
    page: bytes, units: tuple[Gpu, ...], tmp_path: Path
) -> None:
    folder = lease_folder(tmp_path / "leases")
    with try_lease(folder, units[:1], "mine"):
        (folder / f"gpu-{units[0].uuid}.lock").write_bytes(page)
        assert "leased to somebody's run that is starting" in str(find_holder(folder, units[0].uuid).text())
        assert try_lease(folder, units[:1], "yours") is None


def test_a_link_in_the_folder_is_not_followed(units: tuple[Gpu, ...], tmp_path: Path) -> None:
    folder, victim = lease_folder(tmp_path / "leases"), tmp_path / "victim"
    victim.write_text("precious")
    (folder / f"gpu-{units[0].uuid}.lock").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        try_lease(folder, units, "mine")
    assert victim.read_text() == "precious"


def test_a_new_data_folder_is_closed_and_doctor_tells_an_open_one(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dphybrid.cli.doctor.find_spec", lambda _: None)  # Prefect takes seconds
    for mode, told in ((0o700, f"{data_dir} is closed to others"), (0o750, f"others may enter {data_dir}")):
        prepare_data(build_config({"recipe": "toy", "devices": "cpu"}), load_settings())
        assert data_dir.stat().st_mode & 0o777 == mode
        main(["doctor"])
        assert f"data folder: {told}" in capsys.readouterr().out
        data_dir.chmod(0o750)


def as_nobody(work: Callable[[], str]) -> str:
    """Return what a function says in a process of another user."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writing, work().encode())
        except BaseException as error:  # noqa: BLE001 - told to the test, and the end of this process
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as said:
        return said.read()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user reaches."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@needs_root
def test_a_file_in_a_folder_of_another_user_is_refused(open_folder: Path) -> None:
    file = open_folder / "out.csv"
    assert "--out: you may not write in" in as_nobody(lambda: str(check_target(file, "--out")))
    check_target(file, "--out")


@needs_root
@pytest.mark.parametrize("mode", [0o1777, 0o2770])
def test_another_user_sees_a_lease_asks_for_it_and_leases_it_afterwards(
    mode: int, units: tuple[Gpu, ...], open_folder: Path
) -> None:
    folder = lease_folder(open_folder / "leases")
    os.chown(folder, 0, NOBODY)
    folder.chmod(mode)
    lease = try_lease(folder, units[:1], "mine")

    def asks() -> str:
        holder = find_holder(folder, units[0].uuid)
        assert (holder.user, holder.run) == ("root", "mine")
        assert try_lease(folder, units, "theirs") is None
        assert find_holder(folder, units[1].uuid) is None
        ask_for(folder, units[0])
        return "asked"

    def leases() -> str:
        with try_lease(lease_folder(folder), units, "theirs"):
            return find_holder(folder, units[0].uuid).name()

    with lease:
        assert asked_by(lease) is None
        assert as_nobody(asks) == "asked"
        assert asked_by(lease) == "nobody asked for GPU 0"
    assert "nobody's run theirs" in as_nobody(leases)
    with try_lease(folder, units[:1], "again") as later:
        assert asked_by(later) is None


@needs_root
def test_another_user_reads_nothing_of_a_new_data_folder(open_folder: Path) -> None:
    settings = Settings(data_dir=open_folder / "theirs")
    prepared = prepare_data(build_config({"recipe": "toy", "devices": "cpu"}), settings).data.path
    assert (prepared / "manifest.json").is_file()
    assert as_nobody((prepared / "manifest.json").read_text).startswith("PermissionError")
