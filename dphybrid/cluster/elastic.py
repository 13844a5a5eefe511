"""torch's elastic launcher: `python -m dphybrid.cluster.elastic CONFIG MODULE ARG ...` runs `python -m MODULE
ARG ...` as ranks. CONFIG: fields of a LaunchConfig, as JSON.

`cluster.launch` starts it, as a process of its own: it changes the handlers of signals, and SIGTERM ends it
with its ranks wherever it waits.
"""

import json
import os
import sys
from collections.abc import Sequence

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dphybrid.util.stop import watching


def main(argv: Sequence[str]) -> int:
    """Run the ranks of this machine to their end. Return 1 if one failed after the last restart, or if the
    machines did not meet."""
    given, starter = json.loads(argv[0]), os.getppid()

    def look() -> bool:
        # The ranks end by themselves, after a checkpoint; nobody else would end this process.
        if os.getppid() != starter and not psutil.Process().children():
            os._exit(1)
        return False

    # The first rank writes where this process writes, the others into files.
    redirects = dict.fromkeys(range(1, given["nproc_per_node"]), Std.ALL)
    logs = DefaultLogsSpecs(given.pop("log_dir"), redirects)
    config = LaunchConfig(**given, rdzv_backend="c10d", role="rank", logs_specs=logs)
    try:
        with watching(look, 1.0, "dphybrid-starter"):
            elastic_launch(config, sys.executable)("-P", "-m", *argv[1:])
    except ChildFailedError as error:
        print(error.format_msg(), file=sys.stderr, flush=True)
        return 1
    except (RendezvousClosedError, RendezvousTimeoutError) as error:
        print(f"The machines of the ranks did not meet: {error}", file=sys.stderr, flush=True)
        return 1
    except SignalException as ended:
        return 128 + int(ended.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
