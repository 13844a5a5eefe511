"""`dphybrid selftest`: kill, power loss and full disk, tried on the user's own disk.

Everything happens in a folder of its own inside the data folder, which is removed afterwards.
"""

import math
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dphybrid.config.settings import Settings
from dphybrid.selftest.faults import ERRORS, KILLED
from dphybrid.selftest.runs import RUNS, Ended, came_to, run_trial, write_clicks
from dphybrid.util.files import scratch_folder

QUIET_S = 20.0
"""Seconds without a line, after which one says how far the selftest is."""


@dataclass
class Kind:
    """One kind of fault, and its trials so far. modes: of `faults.MODES`, none to kill it from outside.
    broken: a complaint a failed trial."""

    fault: str
    how: str
    modes: tuple[str, ...] = ()
    tried: int = 0
    broken: list[str] = field(default_factory=list)

    @property
    def shown(self) -> str:
        """What the trials show, in plain numbers."""
        if self.broken:
            return f"BROKEN {len(self.broken)} times"
        # Were the share of failures larger, that many trials would all pass in fewer than 5 % of cases.
        return f"fails in at most {math.ceil(100 * (1 - 0.05 ** (1 / self.tried)))} % of cases"


def run(
    settings: Settings, trials: int, minutes: float, seed: int | None, tell: Callable[[str], None]
) -> list[Kind]:
    """Try each kind of fault at least `trials` times, and go on for at least `minutes`; return their results.

    seed: which faults come; None for a random one. tell: gets a line now and then.

    Raises UserError when the data folder cannot be written.
    """
    kinds = [
        Kind("killed at any moment", "SIGKILL after a random time"),
        Kind("killed at an operation", "before one, or in the middle of a write", ("kill", "torn")),
        Kind("power loss", "drops writes and names that were not fsynced", ("unsynced", "lost")),
        Kind("disk full", "one operation fails", ("ENOSPC",)),
    ]
    end = told = time.monotonic()
    end += 60 * minutes
    with scratch_folder(settings.data_dir, ".selftest-") as root:
        write_clicks(root)
        seed = random.SystemRandom().randrange(2**32) if seed is None else seed
        chosen, runs = random.Random(seed), Trials(root, tell)
        tell(f"--seed {seed} repeats these trials")
        while kinds[-1].tried < trials or time.monotonic() < end:
            for kind in kinds:
                if complaint := runs.once(kind.modes, chosen):
                    kind.broken.append(complaint)
                    tell(f"BROKEN {kind.fault}: {complaint}")
                kind.tried += 1
                if time.monotonic() - told > QUIET_S:
                    told = time.monotonic()
                    broken = sum(len(kind.broken) for kind in kinds)
                    tell(f"{sum(kind.tried for kind in kinds)} trials, {broken or 'none'} failed")
    return kinds


class Trials:
    """Runs below `root`, each broken once, resumed, and compared with an undisturbed one."""

    def __init__(self, root: Path, tell: Callable[[str], None]) -> None:
        self._root, self._tell = root, tell
        self._known: dict[str, tuple[dict[str, object], Ended, float]] = {}

    def once(self, modes: tuple[str, ...], chosen: random.Random) -> str:
        """Break a random run at a random place, in one of these ways, and resume it; return what differs from
        an undisturbed one, or an empty text. modes: none to kill it after a random time."""
        name = chosen.choice(list(RUNS))
        _, whole, seconds = self._undisturbed(name)
        fault: dict[str, Any]
        if not modes:
            share, codes = chosen.random(), (0, -signal.SIGKILL)
            what, fault = f"killed after {share:.0%}", {"kill_after_s": share * seconds}
        else:
            mode, target = chosen.choice(modes), chosen.randint(1, whole.operations)
            if mode in ("unsynced", "lost") and whole.unsafe:
                return f"{name}: not fsynced before or after it got its name: {', '.join(whole.unsafe)}"
            codes = (0, 2) if mode in ERRORS else (0, KILLED)
            what, fault = f"operation {target}, {mode}", {"target": target, "mode": mode}
        expected = self._undisturbed(name)[0]
        with self._folder() as data_dir:
            hit = self._run(name, data_dir, **fault)
            if hit.code not in codes:
                return f"{name}, {what}: exit code {hit.code}\n{hit.output}"
            resumed = self._run(name, data_dir)
            if resumed.code != 0:
                return f"{name}, {what}: --resume ended with exit code {resumed.code}\n{resumed.output}"
            found = came_to(data_dir)
        differing = [key for key in expected if found[key] != expected[key]]
        return f"{name}, {what}: after --resume other {', '.join(differing)}" if differing else ""

    def _undisturbed(self, name: str) -> tuple[dict[str, object], Ended, float]:
        if name not in self._known:
            with self._folder() as data_dir:
                begun = time.monotonic()
                ended = self._run(name, data_dir)
                assert ended.code == 0, ended.output
                self._known[name] = came_to(data_dir), ended, time.monotonic() - begun
            seconds = self._known[name][2]
            self._tell(f"{name}: {ended.operations} file operations, {seconds:.1f} s undisturbed")
        return self._known[name]

    def _run(self, name: str, data_dir: Path, **fault: Any) -> Ended:
        return run_trial(data_dir, [text.format(folder=self._root) for text in RUNS[name]], **fault)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        # Everywhere the same one: a run's record holds the paths of its data.
        folder = self._root / "run"
        folder.mkdir()
        try:
            yield folder / "data"
        finally:
            shutil.rmtree(folder, ignore_errors=True)


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
