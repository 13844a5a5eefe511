"""A rank without training: it runs until its folder has a file `enough` or a rank is asked to stop."""

import os
import sys
import time
from pathlib import Path

import torch

from dphybrid.cluster.launch import OUTCOME, Outcome, asked_from_outside, reason_outside
from dphybrid.cluster.ranks import LostRanks, joined
from dphybrid.util.stop import StopRequest


def main(folder: Path) -> None:
    stop = StopRequest()
    limit_s = float(os.environ.get("STANDIN_LIMIT_S", "60"))
    with asked_from_outside(stop, folder), joined(limit_s, torch.device("cpu"), folder) as ranks:
        print(f"rank {ranks.rank} of {ranks.size}", flush=True)
        asked, enough = 0.0, 0.0
        while not asked and not enough:
            time.sleep(0.1)
            mine = [stop.pending, ranks.leads and (folder / "enough").exists()]
            asked, enough = ranks.sum(torch.tensor(mine).double()).tolist()
        if ranks.leads:
            # Not `stop.reason`: another rank may have been asked to stop, and this one not.
            words = f"stopped by {reason_outside(folder)}"
            outcome = Outcome(state="stopped" if asked else "trained", words=words)
            outcome.write(folder / OUTCOME)
        torch.distributed.barrier()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except LostRanks as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
