"""Files of a finished run damaged, and then worked with: a resume, or predictions."""

import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from dphybrid.config.settings import load_settings
from dphybrid.recipes.configs import load_config
from dphybrid.run.train import run_job
from dphybrid.selftest.child import DONE, TOLD, in_child, own_settings
from dphybrid.selftest.trial import came_to
from dphybrid.serving.load import find_checkpoint
from dphybrid.serving.predict import Predictor

ROWS = {"age": [20, 45, 80], "city": ["a", "b", "elsewhere"]}
CONSTANT = "train.schedule=constant"
"""So that a run of more epochs begins with the same steps."""


def _flipped(content: bytes, place: float) -> bytes:
    at = int(place * (len(content) - 1))
    return content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :] if content else b"\x01"


DAMAGES: dict[str, Callable[[bytes, float], bytes | None]] = {
    "a flipped bit": _flipped,
    "cut off": lambda content, place: content[: int(place * len(content))],
    "zeros": lambda content, _: bytes(len(content)),
    "removed": lambda *_: None,
}
"""Kind -> what becomes of a file's content; None: the file is gone."""


def trained(data_dir: str, options: list[str]) -> None:
    """Train a run, from its start."""
    own_settings(Path(data_dir))
    run_job(load_config(None, options), load_settings(), run_name="run")


def resumed(data_dir: str, options: list[str]) -> dict[str, Any]:
    """Go on with the newest run; return what it comes to."""
    own_settings(Path(data_dir))
    run_job(load_config(None, options), load_settings(), resume="latest")
    return came_to(Path(data_dir))


def predicted(data_dir: str, _: list[str]) -> list[float]:
    """Return the run's scores of three rows."""
    own_settings(Path(data_dir))
    scores: list[float] = Predictor(find_checkpoint("run", load_settings())).predict(ROWS).tolist()
    return scores


class Damaged:
    """A data folder with a finished run of recipe ctr, which is damaged, used, and mended again.

    root: a folder that is there and empty. options: of the run, without the number of epochs.
    """

    def __init__(self, root: Path, options: list[str]) -> None:
        self._root, self._data = root, root / "data"
        options = [text for text in options if "train.epochs" not in text] + [CONSTANT]
        self._longer = [*options, "train.epochs=3"]
        done = in_child(trained, (str(self._data), [*options, "train.epochs=2"]), root)
        assert done.code == DONE, done.output
        shutil.copytree(self._data, root / "whole")
        self._expected = {work: self._work(work).value for work in (resumed, predicted)}
        self._files = [
            path.relative_to(root / "whole")
            for path in sorted((root / "whole").rglob("*"))
            if path.is_file() and path.suffix != ".verified" and path.name != ".lock"
        ]

    def trials(self, chosen: random.Random) -> Iterator[Callable[[], str]]:
        """Yield every damage of every file, in random order, each to be done: returns what was not kept, or
        an empty text."""
        every = [
            (work, file, kind, place)
            for work in (resumed, predicted)
            for file in self._files
            for kind in DAMAGES
            for place in (0.03, 0.4, 0.77)
        ]
        chosen.shuffle(every)
        for work, file, kind, place in every:
            yield partial(self._try, work, file, kind, place)

    def _try(self, work: Callable[..., Any], name: Path, kind: str, place: float) -> str:
        self._mend()
        file = self._data / name
        content = DAMAGES[kind](file.read_bytes(), place)
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        done = self._work(work)
        what = f"{name}, {kind}, then {work.__name__}"
        if done.code == TOLD:
            return ""
        if done.code != DONE:
            return f"{what}: exit code {done.code}\n{done.output}"
        return "" if done.value == self._expected[work] else f"{what}: another outcome, without a word"

    def _work(self, work: Callable[..., Any]) -> Any:
        return in_child(work, (str(self._data), self._longer), self._root)

    def _mend(self) -> None:
        shutil.rmtree(self._data)
        shutil.copytree(self._root / "whole", self._data)
