"""Entry point of a rank: `torchrun ... -m dphybrid.run.joined RUN_FOLDER` trains a built run together with
other ranks. `cluster.launch` starts it on one machine."""

import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace

import torch

from dphybrid.cluster.launch import OUTCOME, Outcome, asked_from_outside
from dphybrid.cluster.rank_engine import RankEngine
from dphybrid.cluster.ranks import LostRanks, joined
from dphybrid.config.settings import load_settings
from dphybrid.run.experiment import Experiment
from dphybrid.run.folder import Run, read_run
from dphybrid.run.trainer import train_here
from dphybrid.util.device_spec import parse_device_spec
from dphybrid.util.errors import UserError
from dphybrid.util.stop import Interrupted, StopRequest


def _be_a_rank(run: Run) -> None:
    """Train as the rank given by the environment variables RANK and LOCAL_RANK; write how training ended."""
    stop, settings, names = StopRequest(), run.settings, parse_device_spec(run.page.devices).names
    # the CPU, or the run's GPU with this rank's local number
    device = torch.device("cpu" if names == ("cpu",) else names[int(os.environ["LOCAL_RANK"])])
    with (
        asked_from_outside(stop, run.folder),
        joined(settings.cluster_timeout_s, device, run.folder) as ranks,
    ):
        outcome = Outcome(state="trained")
        try:
            if ranks.size != (wanted := run.config.cluster.ranks):
                raise UserError(
                    f"torchrun started {ranks.size} ranks, but run {run.folder.name} has "
                    f"cluster.ranks={wanted}; set --nnodes and --nproc-per-node accordingly"
                )
            train_here(replace(Experiment.of(run), engine=RankEngine(run.config, ranks)), stop)
        except UserError as error:
            outcome = Outcome(state="refused", words=str(error))
        except Interrupted as interruption:
            outcome = Outcome(state="stopped", words=str(interruption))
        # A rank that refuses the run must write the outcome itself: the other ranks only see it end.
        if ranks.leads or outcome.state == "refused":
            outcome.write(run.folder / OUTCOME)
        if outcome.state != "refused":
            torch.distributed.barrier()


def main(argv: Sequence[str]) -> int:
    """Run one rank of the run in a folder. A failure, or SIGTERM, ends only this process, and at once; the
    launcher ends the others."""
    run = read_run(argv[0], load_settings())
    # Restarted after training had ended, because another rank failed before it knew: nothing is left to do.
    if (run.folder / OUTCOME).is_file():
        return 0
    try:
        _be_a_rank(run)
    except LostRanks as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    except BaseException:  # noqa: BLE001 - printed, and the end of this process
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: torch's own clean-up takes long, and the other ranks wait
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
