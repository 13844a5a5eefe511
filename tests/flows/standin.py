"""A rank that learns nothing: it meets the others, and goes on until the run's folder says `enough`, or one
of them is asked to stop."""

import sys
import time
from pathlib import Path

import torch

from dphybrid.cluster.launch import OUTCOME, Outcome, asked_from_outside
from dphybrid.cluster.ranks import joined
from dphybrid.util.stop import StopRequest


def main(folder: Path) -> None:
    stop = StopRequest()
    with joined(60, torch.device("cpu")) as ranks, asked_from_outside(stop, folder):
        print(f"rank {ranks.rank} of {ranks.size}", flush=True)
        asked, enough = 0.0, 0.0
        while not asked and not enough:
            time.sleep(0.1)
            mine = [stop.pending, ranks.leads and (folder / "enough").exists()]
            asked, enough = ranks.sum(torch.tensor(mine).double()).tolist()
        if ranks.leads:
            outcome = Outcome(state="stopped" if asked else "trained", words="stopped by somebody")
            outcome.write(folder / OUTCOME)
        torch.distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
