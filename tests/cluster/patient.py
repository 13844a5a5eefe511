"""A rank that waits to be asked to stop, and says by whom."""

import os
import sys
import time
from pathlib import Path

from dphybrid.cluster.launch import asked_from_outside
from dphybrid.util.stop import StopRequest

stop, folder = StopRequest(), Path(sys.argv[1])
(folder / "begun").write_text(str(os.getpid()))
with asked_from_outside(stop):
    while not stop.pending:
        time.sleep(0.05)
print(f"asked by {stop.reason}", flush=True)
