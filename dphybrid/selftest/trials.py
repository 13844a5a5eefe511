"""`dphybrid selftest`: kill, power loss, full disk and damaged files, tried on the user's own disk.

Everything happens in a folder of its own inside the data folder, which is removed afterwards.
"""

import math
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dphybrid.config.settings import Settings
from dphybrid.selftest.damages import DAMAGES, damage
from dphybrid.selftest.faults import ERRORS, KILLED
from dphybrid.selftest.runs import (
    LONGER,
    PREDICTS,
    RUNS,
    SHORTER,
    Ended,
    Work,
    came_to,
    run_trial,
    write_clicks,
)
from dphybrid.util.errors import UserError
from dphybrid.util.files import make_folder

_PREFIX = ".selftest-"
QUIET_S = 20.0
"""Seconds without a line, after which one says how far the selftest is."""

_Trial = Callable[[random.Random], str]
"""Breaks one run and goes on with it; returns what differs from an undisturbed one, or an empty text."""


@dataclass
class Kind:
    """One kind of fault, and its trials so far. how: where it hits. broken: a complaint a failed trial."""

    fault: str
    how: str
    trial: _Trial
    tried: int = 0
    seconds: float = 0.0
    broken: list[str] = field(default_factory=list)

    def once(self, chosen: random.Random) -> str:
        """Try it once more; return the complaint, or an empty text."""
        start = time.monotonic()
        if complaint := self.trial(chosen):
            self.broken.append(complaint)
        self.tried += 1
        self.seconds += time.monotonic() - start
        return complaint

    @property
    def shown(self) -> str:
        """What the trials show, in plain numbers."""
        if self.broken:
            return f"BROKEN {len(self.broken)} times"
        if not self.tried:
            return "nothing: not tried"
        return f"fails in at most {math.ceil(100 * (1 - 0.05 ** (1 / self.tried)))} % of cases"


def run(
    settings: Settings, trials: int, minutes: float, seed: int | None, tell: Callable[[str], None]
) -> list[Kind]:
    """Try each kind of fault at least `trials` times, and all for at least `minutes`; return their results.

    seed: which faults come; None for a random one. tell: gets a line now and then.

    Raises UserError when the data folder cannot be written.
    """
    end = time.monotonic() + 60 * minutes
    with own_folder(settings.data_dir) as root:
        write_clicks(root)
        seed = random.SystemRandom().randrange(2**32) if seed is None else seed
        chosen = random.Random(seed)
        tell(f"--seed {seed} repeats these trials")
        kinds = kinds_of(root, tell)
        told = time.monotonic()
        while (few := min(kind.tried for kind in kinds)) < trials or time.monotonic() < end:
            if time.monotonic() - told > QUIET_S:
                told = time.monotonic()
                broken = sum(len(kind.broken) for kind in kinds)
                tell(f"{sum(kind.tried for kind in kinds)} trials, {broken or 'none'} failed")
            late = [kind for kind in kinds if kind.tried == few] if few < trials else kinds
            kind = min(late, key=lambda kind: kind.seconds)
            if complaint := kind.once(chosen):
                tell(f"BROKEN {kind.fault}: {complaint}")
        return kinds


@contextmanager
def own_folder(data_dir: Path) -> Iterator[Path]:
    """Yield a new folder inside the data folder; remove it, and those of selftests that were killed."""
    try:
        make_folder(data_dir, mode=0o700)
        for left in data_dir.glob(f"{_PREFIX}*"):
            pid = left.name.removeprefix(_PREFIX).partition("-")[0]
            if pid.isdigit() and not Path("/proc", pid).exists():
                shutil.rmtree(left, ignore_errors=True)
        # without links: the layer of faults knows files by the names that the kernel gives them
        root = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=data_dir)).resolve()
    except OSError as error:
        raise UserError(
            f"{data_dir}: cannot be written ({error.strerror}); make room there, or set DPHYBRID_DATA_DIR"
        ) from error
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def kinds_of(root: Path, tell: Callable[[str], None]) -> list[Kind]:
    """Return the kinds of faults, with runs below `root`."""
    runs = _Runs(root, tell)
    return [
        Kind("killed at any moment", "SIGKILL after a random time", runs.kill),
        Kind("killed at an operation", "before one, or in the middle of a write", runs.at("kill", "torn")),
        Kind("power loss", "drops writes and names that were not fsynced", runs.at("unsynced", "lost")),
        Kind("disk full", "one operation fails", runs.at("ENOSPC")),
        Kind("damaged file", f"{', '.join(DAMAGES)}; times kept", runs.damage),
    ]


class _Runs:
    """Undisturbed runs, each made when first needed, and disturbed ones beside them."""

    def __init__(self, root: Path, tell: Callable[[str], None]) -> None:
        self._root, self._tell = root, tell
        self._options = {
            name: [text.format(folder=root) for text in overrides] for name, overrides in RUNS.items()
        }
        self._known: dict[str, tuple[dict[str, object], Ended, float]] = {}
        self._whole: dict[tuple[str, Work], tuple[Path, object]] = {}

    def kill(self, chosen: random.Random) -> str:
        """Kill a run after a random share of its time."""
        name, share = chosen.choice(list(self._options)), chosen.random()
        _, _, seconds = self._undisturbed(name)
        codes = (0, -signal.SIGKILL)
        return self._hit(name, f"killed after {share:.0%}", codes, kill_after_s=share * seconds)

    def at(self, *modes: str) -> _Trial:
        """Return a trial that breaks a random file operation of a run, in one of these ways."""

        def trial(chosen: random.Random) -> str:
            name, mode = chosen.choice(list(self._options)), chosen.choice(modes)
            _, whole, _ = self._undisturbed(name)
            if mode in ("unsynced", "lost") and whole.unsafe:
                return f"{name}: not fsynced before or after it got its name: {', '.join(whole.unsafe)}"
            target = chosen.randint(1, whole.operations)
            codes = (0, 2) if mode in ERRORS else (0, KILLED)
            return self._hit(name, f"operation {target}, {mode}", codes, target=target, mode=mode)

        return trial

    def damage(self, chosen: random.Random) -> str:
        """Damage a file of a finished run, and predict with the run or go on with it."""
        works: list[tuple[str, Work]] = [(name, "resume") for name in self._options]
        name, work = chosen.choice([*works, (PREDICTS, "predict")])
        whole, expected = self._finished(name, work)
        kind, place = chosen.choice(list(DAMAGES)), chosen.random()
        file = chosen.choice(sorted(path for path in whole.rglob("*") if path.is_file()))
        with self._folder() as data_dir:
            shutil.copytree(whole, data_dir)
            damage(data_dir / file.relative_to(whole), DAMAGES[kind](file.read_bytes(), place))
            ended = run_trial(data_dir, [*self._options[name], *LONGER], work=work)
            same = ended.code == 0 and _outcome(data_dir, ended, work) == expected
        return judged(f"{name}, {file.relative_to(whole)}: {kind} at {place:.0%}", ended, same)

    def _finished(self, name: str, work: Work) -> tuple[Path, object]:
        """Return a copy of a finished run's data folder, and what its predictions or more epochs come to."""
        if (name, work) not in self._whole:
            whole = self._root / f"whole-{len(self._whole)}"
            with self._folder() as data_dir:
                run_trial(data_dir, [*self._options[name], *SHORTER])
                shutil.copytree(data_dir, whole)
                ended = run_trial(data_dir, [*self._options[name], *LONGER], work=work)
                assert ended.code == 0, ended.output
                self._whole[name, work] = whole, _outcome(data_dir, ended, work)
        return self._whole[name, work]

    def _undisturbed(self, name: str) -> tuple[dict[str, object], Ended, float]:
        if name not in self._known:
            with self._folder() as data_dir:
                begun = time.monotonic()
                ended = run_trial(data_dir, self._options[name])
                assert ended.code == 0, ended.output
                self._known[name] = came_to(data_dir), ended, time.monotonic() - begun
            self._tell(
                f"{name}: {ended.operations} file operations, {self._known[name][2]:.1f} s undisturbed"
            )
        return self._known[name]

    def _hit(self, name: str, what: str, codes: tuple[int, ...], **fault: Any) -> str:
        """Break a run, resume it, and compare."""
        expected = self._undisturbed(name)[0]
        with self._folder() as data_dir:
            hit = run_trial(data_dir, self._options[name], **fault)
            if hit.code not in codes:
                return f"{name}, {what}: exit code {hit.code}\n{hit.output}"
            resumed = run_trial(data_dir, self._options[name])
            if resumed.code != 0:
                return f"{name}, {what}: --resume ended with exit code {resumed.code}\n{resumed.output}"
            found = came_to(data_dir)
        differing = [key for key in expected if found[key] != expected[key]]
        return f"{name}, {what}: after --resume other {', '.join(differing)}" if differing else ""

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        folder = self._root / "run"
        folder.mkdir()
        try:
            yield folder / "data"
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _outcome(data_dir: Path, ended: Ended, work: Work) -> object:
    return re.findall("^predicted .*", ended.output, re.MULTILINE) if work == "predict" else came_to(data_dir)


def judged(what: str, ended: Ended, same: bool) -> str:
    """Return the complaint about a run with a damaged file. same: did it come to the same as without?"""
    if ended.code not in (0, 2):
        return f"{what}: exit code {ended.code}\n{ended.output}"
    told = ended.code == 2 or "Note: the best checkpoint" in ended.output
    return "" if told or same else f"{what}: another outcome, without a word"


def table(kinds: list[Kind]) -> str:
    """Return the results as a table in Markdown."""
    rows = [("fault", "how", "trials", "shown, with 95 % confidence")]
    rows += [(kind.fault, kind.how, str(kind.tried), kind.shown) for kind in kinds]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
