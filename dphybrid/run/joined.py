"""This process as one of several ranks that train a run: `python -m dphybrid.run.joined RUN_FOLDER`, as
`cluster.launch` starts it."""

import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace

import torch

from dphybrid.cluster.launch import OUTCOME, Outcome, asked_from_outside
from dphybrid.cluster.rank_engine import RankEngine
from dphybrid.cluster.ranks import LostRanks, Ranks, joined
from dphybrid.config.settings import load_settings
from dphybrid.run.folder import Run, read_run
from dphybrid.run.trainer import train_here
from dphybrid.util.device_spec import parse_device_spec
from dphybrid.util.errors import UserError
from dphybrid.util.stop import Interrupted, StopRequest, stop_signals


def _be_a_rank(run: Run) -> None:
    """Train as the rank that this process's variables say, and write how it ended."""
    stop, settings, names = StopRequest(), run.settings, parse_device_spec(run.page.devices).names
    # the CPU, or this rank's own among the GPUs that the run has
    device = torch.device("cpu" if names == ("cpu",) else names[int(os.environ["LOCAL_RANK"])])
    with (
        stop_signals(stop),
        asked_from_outside(stop),
        joined(settings.cluster_timeout_s, device, settings.cluster_wait_s, stop.obey) as ranks,
    ):
        outcome = _train(run, stop, ranks)
        # what one rank alone refuses, the others see as its end
        if ranks.leads or outcome.state == "refused":
            outcome.write(run.folder / OUTCOME)
        if outcome.state != "refused":
            torch.distributed.barrier()


def _train(run: Run, stop: StopRequest, ranks: Ranks) -> Outcome:
    try:
        train_here(run, replace(run.experiment(), engine=RankEngine(run.config, ranks)), stop)
    except UserError as error:
        return Outcome(state="refused", words=str(error))
    except Interrupted as interruption:
        return Outcome(state="stopped", words=str(interruption))
    return Outcome(state="trained")


def main(argv: Sequence[str]) -> int:
    """Be a rank of the run of a folder. A failure ends this process alone; the agent sees to the others."""
    run = read_run(argv[0], load_settings())
    if (run.folder / OUTCOME).is_file():  # started again for the ranks that did not know the end
        return 0
    try:
        _be_a_rank(run)
    except Interrupted as interruption:  # before all ranks were here
        Outcome(state="stopped", words=str(interruption)).write(run.folder / OUTCOME)
    except LostRanks as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    except BaseException:  # noqa: BLE001 - printed, and the end of this process
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # not in torch's good time: the others wait
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
