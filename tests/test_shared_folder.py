"""The folder of leases is everybody's: nothing that another user puts there stops, misleads or uses a run."""

import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dphybrid.cli.main import main
from dphybrid.config.settings import Settings, load_settings
from dphybrid.gpus.inventory import Inventory
from dphybrid.gpus.leases import (
    ask_for,
    asked_by,
    find_holder,
    lease_folder,
    try_lease,
)
from dphybrid.gpus.waiting import Wanted, acquire
from dphybrid.recipes.configs import build_config
from dphybrid.run.train import prepare_data
from dphybrid.util.alive import LOCK, holding
from dphybrid.util.files import check_target, own_folder
from tests.fake_nvml import stand_in
from tests.refusing import refused

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to somebody else")
NOBODY = 65534


ODD: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "link": lambda path: path.symlink_to(path.parent.parent / "victim"),
    "second name": lambda path: path.hardlink_to(path.parent.parent / "victim"),
    "folder": Path.mkdir,
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
}
"""What may be where a file is expected -> what makes it."""
LOCKED_PAGES = [b"", b"{", b"\xff\xfe", b"[]", b"7", b'{"pid": "x"}', b'{"uuids": 3}', b"x" * 10**6]
LOCKED_PAGES.append(b'{"pid": 1, "user": "\\u001b[2J", "run": 3}')


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shared folder, beside a file of the victim's; two GPUs."""
    (tmp_path / "victim").write_text("precious")
    stand_in(monkeypatch, tmp_path, 2)
    return lease_folder(tmp_path / "leases")


def take(folder: Path, count: int) -> list[str]:
    soon = Settings(lease_dir=folder, gpu_window_s=0, gpu_poll_s=0.01)
    fake = Inventory("tests.fake_nvml")
    with acquire(Wanted(count=count), fake, soon, run="mine", on_wait=print) as lease:
        return [unit.label for unit in lease.gpus]


@pytest.mark.parametrize("kind", ODD)
def test_odd_files_stop_nobody(kind: str, folder: Path) -> None:
    units = Inventory("tests.fake_nvml").read()
    for name in (
        "00000000000000000001-1.ticket",
        f"gpu-{units[0].uuid}.lock",
        f"gpu-{units[0].uuid}.00000000000000000001-1.lock",
        f"gpu-{units[1].uuid}.asked",
        f"gpu-{units[1].uuid}.x.asked",
    ):
        ODD[kind](folder / name)
    assert find_holder(folder, units[0].uuid) is None
    assert take(folder, 2) == ["GPU 0", "GPU 1"]
    lease = try_lease(folder, units, "mine")
    with lease:
        assert asked_by(lease) is None
        ask_for(folder, units[1])
        assert str(asked_by(lease)).endswith(" asked for GPU 1")
    assert (folder.parent / "victim").read_text() == "precious"


@pytest.mark.parametrize("page", LOCKED_PAGES)
def test_odd_pages_of_locked_files_crash_nobody(page: bytes, folder: Path) -> None:
    import fcntl

    units = Inventory("tests.fake_nvml").read()
    handles = []
    for name in ("00000000000000000001-1.ticket", f"gpu-{units[0].uuid}.1-1.lock"):
        (folder / name).write_bytes(page)
        handles.append(os.open(folder / name, os.O_RDWR))
        fcntl.flock(handles[-1], fcntl.LOCK_EX)
    try:
        assert take(folder, 1) == ["GPU 1"]
        holder = find_holder(folder, units[0].uuid)
        assert holder.text().isprintable()
    finally:
        for handle in handles:
            os.close(handle)


def test_a_lease_whose_file_was_removed_is_noticed(folder: Path) -> None:
    units = Inventory("tests.fake_nvml").read()
    lease = try_lease(folder, units, "mine")
    with lease:
        assert lease.lost() is None
        next(folder.glob(f"gpu-{units[1].uuid}.*.lock")).unlink()
        assert lease.lost() == "GPU 1: its lock file was removed, so another run may lease it"


def test_folders_that_are_not_safe_are_told(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with refused("not sticky"):
        lease_folder(tmp_path / "open")
    (tmp_path / "link").symlink_to(tmp_path)
    with refused("is not a folder"):
        lease_folder(tmp_path / "link")
    own = own_folder(tmp_path / "own")
    own.chmod(0o755)
    assert own_folder(own).stat().st_mode & 0o777 == 0o700


@needs_root
def test_what_belongs_to_somebody_else_is_not_ones_own(tmp_path: Path) -> None:
    os.chown(tmp_path, NOBODY, NOBODY)
    with refused("another user's; remove it"):
        own_folder(tmp_path)


def test_a_data_folder_is_its_owners_unless_it_was_made_otherwise_which_doctor_tells(
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
@pytest.mark.usefixtures("folder")
def test_a_lock_file_that_is_closed_stops_nobody(open_folder: Path) -> None:
    folder = lease_folder(open_folder / "leases")
    units = Inventory("tests.fake_nvml").read()
    for name in (f"gpu-{units[0].uuid}.lock", f"gpu-{units[0].uuid}.0-1.lock"):
        (folder / name).touch()
        (folder / name).chmod(0)

    def work() -> str:
        assert find_holder(folder, units[0].uuid) is None
        lease = try_lease(folder, units[:2], "theirs")
        return str(lease and [unit.label for unit in lease.gpus])

    assert as_nobody(work) == "['GPU 0', 'GPU 1']"


@needs_root
@pytest.mark.usefixtures("folder")
def test_a_folder_of_another_account_is_refused_and_a_groups_is_not(open_folder: Path) -> None:
    folder = open_folder / "leases"
    folder.mkdir()

    def outcome(uid: int, gid: int, mode: int) -> str:
        os.chown(folder, uid, gid)
        folder.chmod(mode)
        return as_nobody(lambda: str(lease_folder(folder) == folder))

    assert outcome(0, 0, 0o1777) == "True"
    assert outcome(NOBODY, NOBODY, 0o1777) == "True"
    said = outcome(1, NOBODY, 0o1777)
    remedy = r"as root, run `rm -rf \S+; install -d -m 1777 -o root \S+`"
    assert re.search(rf"belongs to user \w+, who can remove .* {remedy}", said)
    assert outcome(1, NOBODY, 0o1770) == "True"
    assert "belongs to user" in outcome(1, 1, 0o1775)
    assert "is not sticky" in outcome(0, NOBODY, 0o770)


@needs_root
def test_a_file_in_a_folder_of_another_user_is_refused_before_the_training(open_folder: Path) -> None:
    file = open_folder / "report.json"
    assert "--report: you may not write in" in as_nobody(lambda: str(check_target(file, "--report")))
    check_target(file, "--report")


@needs_root
@pytest.mark.usefixtures("folder")
def test_another_user_sees_a_lease_and_asks_for_it_but_takes_nothing(open_folder: Path) -> None:
    folder = lease_folder(open_folder / "leases")
    units = Inventory("tests.fake_nvml").read()
    lease = try_lease(folder, units[:1], "mine")
    page = next(folder.glob(f"gpu-{units[0].uuid}.*.lock"))

    def work() -> str:
        holder = find_holder(folder, units[0].uuid)
        assert (holder.user, holder.run) == ("root", "mine")
        assert try_lease(folder, units[:1], "theirs") is None
        for attack in (page.unlink, lambda: page.rename(folder / "away")):
            with pytest.raises(PermissionError):
                attack()
        ask_for(folder, units[0])
        with pytest.raises(PermissionError):
            page.write_text("{}")
        assert try_lease(folder, units[:1], "theirs") is None
        return "asked"

    with lease:
        assert asked_by(lease) is None
        assert as_nobody(work) == "asked"
        assert "nobody" in str(asked_by(lease))
        assert lease.lost() is None


@needs_root
def test_another_user_reads_nothing_of_a_new_data_folder(open_folder: Path) -> None:
    settings = Settings(data_dir=open_folder / "theirs")
    prepared = prepare_data(build_config({"recipe": "toy", "devices": "cpu"}), settings).data.path
    assert (prepared / "manifest.json").is_file()
    assert as_nobody((prepared / "manifest.json").read_text).startswith("PermissionError")


@needs_root
def test_resuming_another_users_run_tells_what_to_do(open_folder: Path) -> None:
    run = open_folder / "theirs"
    run.mkdir()
    (run / LOCK).touch()
    (run / LOCK).chmod(0o600)

    def work() -> str:
        with holding(run):
            return "taken"

    said = as_nobody(work)
    assert said.startswith("UserError: run theirs belongs to user 0, ")
    assert "a copy in your own DPHYBRID_DATA_DIR" in said
