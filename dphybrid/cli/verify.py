"""Read prepared folders and checkpoints in full, and name damaged files.

Every file is compared with the checksum that was written with it. Each folder gets a line; the exit code is 1
when one is damaged. Training, prediction and registration check the files that they use; this command is for
all others, after a power failure or on an old disk.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from dphybrid.cli.parser import Parser
from dphybrid.config.settings import Settings, load_settings
from dphybrid.util.errors import UserError
from dphybrid.util.files import given_path


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    places = "run name, prepared folder or checkpoint folder (default: all in DPHYBRID_DATA_DIR)"
    parser.add_argument("places", nargs="*", metavar="PLACE", help=places)


def run(args: argparse.Namespace) -> int:
    """Print a line for each folder; return 1 when one is damaged, else 0."""
    damaged = 0
    for line, good in verify_places(args.places, load_settings()):
        damaged += not good
        print(f"{'ok ' if good else 'BAD'} {line}", flush=True)
    return 1 if damaged else 0


def verify_places(places: Sequence[str], settings: Settings) -> Iterator[tuple[str, bool]]:
    """Yield (line to print, whether it is whole) for each prepared folder and checkpoint. Reads every byte.

    places: names of runs, prepared folders or checkpoint folders; empty: all in the data folder. Raises
    UserError for anything else.
    """
    from dphybrid.data import verify_prepared
    from dphybrid.training.checkpoint import complete_checkpoints, verify_checkpoint

    runs = [path for path in sorted(settings.runs_dir.glob("*")) if path.is_dir()]
    prepared = [path.parent for path in sorted(settings.prepared_dir.glob("*/manifest.json"))]
    found: list[Path] = []
    for place in places or map(str, prepared + runs):
        folder = given_path(place, "place")
        if (folder / "state.json").is_file() or (folder / "manifest.json").is_file():
            found.append(folder)
            continue
        # A folder here may have a run's name by chance, so look for its checkpoints in both.
        found_in = (complete_checkpoints(run / "checkpoints") for run in (folder, settings.runs_dir / place))
        of_run = next(filter(None, found_in), [])
        # A run without checkpoints is an error only when the user named it.
        if not of_run and places:
            known = ", ".join(path.name for path in runs) or "none"
            raise UserError(f"{place}: no prepared folder, checkpoint or run with checkpoints; runs: {known}")
        found += of_run
    for folder in found:
        check = verify_checkpoint if (folder / "state.json").is_file() else verify_prepared
        try:
            check(folder)
        except UserError as error:
            yield str(error), False
        else:
            yield f"{folder}: whole", True
