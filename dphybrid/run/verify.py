"""Reading folders whole: are the prepared data and the checkpoints of this machine what was written?"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from dphybrid.config.settings import Settings
from dphybrid.data import verify_prepared
from dphybrid.training.checkpoint import complete_checkpoints, verify_checkpoint
from dphybrid.util.errors import UserError
from dphybrid.util.files import given_path


def verify_places(places: Sequence[str], settings: Settings) -> Iterator[tuple[str, bool]]:
    """Yield (what was found, is it whole) for each prepared folder and checkpoint.

    places: names of runs, prepared folders or checkpoint folders; none: everything below the data folder.
    Every byte is read. Raises UserError for any other place.
    """
    for folder in _folders(places, settings):
        check = verify_checkpoint if (folder / "state.json").is_file() else verify_prepared
        try:
            check(folder)
        except UserError as error:
            yield str(error), False
        else:
            yield f"{folder}: whole", True


def _folders(places: Sequence[str], settings: Settings) -> list[Path]:
    runs = [path for path in sorted(settings.runs_dir.glob("*")) if path.is_dir()]
    if not places:
        prepared = [path.parent for path in sorted(settings.prepared_dir.glob("*/manifest.json"))]
        return prepared + [
            checkpoint for run in runs for checkpoint in complete_checkpoints(run / "checkpoints")
        ]
    found: list[Path] = []
    for place in places:
        folder = given_path(place, "place")
        if (folder / "state.json").is_file() or (folder / "manifest.json").is_file():
            found.append(folder)
            continue
        of_run = complete_checkpoints(
            (folder if folder.is_dir() else settings.runs_dir / place) / "checkpoints"
        )
        if not of_run:
            there = ", ".join(path.name for path in runs) or "none"
            raise UserError(
                f"{place}: no prepared folder, no checkpoint and no run with checkpoints; runs: {there}"
            )
        found += of_run
    return found
