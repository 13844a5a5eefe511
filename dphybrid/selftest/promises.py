"""`dphybrid selftest`: what the project promises about faults, tried on the user's own disk.

Everything happens in a folder of its own inside the data folder, which is removed afterwards.
"""

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from dphybrid.config.settings import Settings
from dphybrid.selftest import bad_input
from dphybrid.selftest.damages import Damaged
from dphybrid.selftest.faults import ERRORS, KILLED, MODES
from dphybrid.selftest.scenarios import SCENARIOS, options_of, write_files
from dphybrid.selftest.trial import came_to, run_trial
from dphybrid.util.errors import UserError
from dphybrid.util.files import make_folder

Trial = Callable[[], str]
"""Tries something once; returns what was not kept, or an empty text."""

_FAULTS = {
    "kill": ("killed (SIGKILL)", "before a file operation"),
    "torn": ("killed while writing", "half of a write is done"),
    "unsynced": ("power loss", "what was not fsynced is empty or half there"),
    "lost": ("power loss, names too", "names made, moved or removed in unsynced folders come back"),
    "ENOSPC": ("disk full", "one file operation fails"),
    "EROFS": ("disk read-only", "one file operation fails"),
    "EIO": ("disk failing", "one file operation fails"),
    "EMFILE": ("too many open files", "one file cannot be opened"),
}
_SAME = "the same bits, metrics and checkpoints after --resume"
_PREFIX = ".selftest-"
QUIET_S = 20.0
"""After so long, a line tells how far it is."""


@dataclass
class Promise:
    """What is tried, and what must hold: trials are drawn until time is up."""

    fault: str
    how: str
    holds: str
    trials: Iterator[Trial]
    share: float = 1.0
    tried: int = 0
    broken: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def result(self) -> str:
        if self.broken:
            return f"BROKEN {len(self.broken)} times"
        return "kept" if self.tried else "not tried"


def run(
    settings: Settings, minutes: float, full: bool, seed: int, tell: Callable[[str], None]
) -> list[Promise]:
    """Try all promises for about `minutes`; return them with their results. full: all kinds of runs, not two.

    Raises UserError when the data folder cannot be written.
    """
    end = time.monotonic() + 60 * minutes
    if not Path("/proc/self/fd").exists():
        raise UserError("selftest: faults are placed with the help of /proc; run it on Linux")
    with own_folder(settings.data_dir) as root:
        write_files(root)
        promises = promises_of(
            root, list(SCENARIOS) if full else list(SCENARIOS)[:2], random.Random(seed), tell
        )
        waiting = list(promises)
        told = time.monotonic()
        while waiting and time.monotonic() < end:
            if time.monotonic() - told > QUIET_S:
                told = time.monotonic()
                tried, broken = (sum(numbers) for numbers in zip(*map(_counts, promises), strict=True))
                left_min = (end - told) / 60
                tell(f"{tried} tried, {broken or 'none'} broken; up to {left_min:.0f} min more")
            # The one that has had least of its share comes next: each is tried, whatever the others take.
            promise = min(waiting, key=lambda promise: promise.seconds / promise.share)
            if not _once(promise, tell):
                waiting.remove(promise)
        return promises


def _counts(promise: Promise) -> tuple[int, int]:
    return promise.tried, len(promise.broken)


def _once(promise: Promise, tell: Callable[[str], None]) -> bool:
    start = time.monotonic()
    trial = next(promise.trials, None)
    if trial is None:
        return False
    complaint = trial()
    promise.tried += 1
    promise.seconds += time.monotonic() - start
    if complaint:
        promise.broken.append(complaint)
        tell(f"BROKEN {promise.fault}: {complaint}")
    return True


@contextmanager
def own_folder(data_dir: Path) -> Iterator[Path]:
    """Yield a new folder inside the data folder; remove it, and those that killed selftests left."""
    try:
        make_folder(data_dir, mode=0o700)
        for left in data_dir.glob(f"{_PREFIX}*"):
            pid = left.name.removeprefix(_PREFIX).partition("-")[0]
            if pid.isdigit() and not Path("/proc", pid).exists():
                shutil.rmtree(left, ignore_errors=True)
        root = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=data_dir))
    except OSError as error:
        raise UserError(
            f"{data_dir}: cannot be written ({error.strerror}); make room there, or set DPHYBRID_DATA_DIR"
        ) from error
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def promises_of(
    root: Path, scenarios: list[str], chosen: random.Random, tell: Callable[[str], None]
) -> list[Promise]:
    """Return all promises, with trials below `root`."""
    runs = Runs(root, scenarios, tell)
    promises = [
        Promise(
            "bad input",
            "configs, paths, CSV, Parquet, triples, interactions, text, schema files",
            "told within 20 s, no traceback",
            _bad_input(root, chosen),
            share=2.0,
        ),
        Promise(
            "damaged files",
            "bits flipped, cut off, zeros, removed; then resumed or predicted with",
            "told by name, or the same result",
            _damages(root, chosen),
            share=2.0,
        ),
        Promise("killed at any moment", "SIGKILL after a random time", _SAME, runs.kills(seeded(chosen))),
    ]
    for mode in MODES:
        fault, how = _FAULTS.get(mode, (mode, "hits one file operation"))
        promises.append(Promise(fault, how, _SAME, runs.faults(mode, seeded(chosen))))
    return promises


def seeded(chosen: random.Random) -> random.Random:
    """Return a generator of its own, so that what one promise draws depends on no other."""
    return random.Random(chosen.random())


class Runs:
    """Undisturbed runs, each made when it is first needed, and disturbed ones beside them."""

    def __init__(self, root: Path, scenarios: list[str], tell: Callable[[str], None]) -> None:
        self._root, self._scenarios, self._tell = root, scenarios, tell
        self._known: dict[str, tuple[dict[str, Any], int, float]] = {}

    def undisturbed(self, name: str) -> tuple[dict[str, Any], int, float]:
        """Return what a scenario comes to, its number of file operations, and its seconds."""
        if name not in self._known:
            with self._folder() as data_dir:
                begun = time.monotonic()
                code, count, output = run_trial(data_dir, options_of(name, self._root))
                assert code == 0, output
                self._known[name] = came_to(data_dir), count, time.monotonic() - begun
            self._tell(f"{name}: {count} file operations, {self._known[name][2]:.1f} s undisturbed")
        return self._known[name]

    def faults(self, mode: str, chosen: random.Random) -> Iterator[Trial]:
        """Yield trials at random file operations, each scenario in turn; no operation twice."""
        seen: set[tuple[str, int]] = set()
        done: set[str] = set()
        while len(done) < len(self._scenarios):
            for name in self._scenarios:
                _, count, _ = self.undisturbed(name)
                left = [target for target in range(1, count + 1) if (name, target) not in seen]
                if not left:
                    done.add(name)
                    continue
                target = chosen.choice(left)
                seen.add((name, target))
                yield partial(self._hit, name, target, mode)

    def kills(self, chosen: random.Random) -> Iterator[Trial]:
        """Yield trials without end, each killed after a random share of its time."""
        while True:
            for name in self._scenarios:
                share = chosen.random()
                yield partial(self._kill, name, share)

    def _hit(self, name: str, target: int, mode: str) -> str:
        with self._folder() as data_dir:
            code, _, output = run_trial(data_dir, options_of(name, self._root), target, mode)
            if code not in ((0, 2) if mode in ERRORS else (0, KILLED)):
                return f"{name}, operation {target}, {mode}: exit code {code}\n{output}"
            return self._resumed(data_dir, name, f"operation {target}, {mode}")

    def _kill(self, name: str, share: float) -> str:
        _, _, seconds = self.undisturbed(name)
        with self._folder() as data_dir:
            code, _, output = run_trial(data_dir, options_of(name, self._root), kill_after_s=share * seconds)
            if code not in (0, -signal.SIGKILL):
                return f"{name}, killed after {share:.0%}: exit code {code}\n{output}"
            return self._resumed(data_dir, name, f"killed after {share:.0%}")

    def _resumed(self, data_dir: Path, name: str, what: str) -> str:
        code, _, output = run_trial(data_dir, options_of(name, self._root))
        if code != 0:
            return f"{name}, {what}: the resume ended with exit code {code}\n{output}"
        found, expected = came_to(data_dir), self.undisturbed(name)[0]
        differing = [key for key in expected if found[key] != expected[key]]
        return f"{name}, {what}: other {', '.join(differing)} after the resume\n{output}" if differing else ""

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        folder = self._root / "run"
        folder.mkdir()
        try:
            yield folder / "data"
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _damages(root: Path, chosen: random.Random) -> Iterator[Trial]:
    folder = root / "damaged"
    folder.mkdir()
    yield from Damaged(folder, options_of("ctr, cpu*2", root)).trials(seeded(chosen))


def _bad_input(root: Path, chosen: random.Random) -> Iterator[Trial]:
    folder = root / "bad"
    folder.mkdir()
    good = {
        name: (root / name).read_bytes() for name in ("clicks.csv", "text.txt", "triples.txt", "pairs.csv")
    }
    pl.read_csv(root / "clicks.csv").write_parquet(folder / "clicks.parquet")
    good["clicks.parquet"] = (folder / "clicks.parquet").read_bytes()
    yield from bad_input.trials(folder, good, seeded(chosen))


def table(promises: list[Promise]) -> str:
    """Return the results as a table in Markdown."""
    rows = [("fault", "how it is tried", "what must hold", "tried", "result")]
    rows += [(p.fault, p.how, p.holds, str(p.tried), p.result) for p in promises]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        "| " + " | ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
