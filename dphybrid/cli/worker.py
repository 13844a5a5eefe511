"""Take training runs from a Prefect work pool, politely.

At Ctrl-C or SIGTERM it takes no more runs, and its runs write checkpoints and go back to the queue; with
--wait they end first, unless a second signal comes. A third one kills them.
"""

import argparse
import socket

from dphybrid.cli.parser import Parser, prefect_part
from dphybrid.config.settings import load_settings
from dphybrid.gpus.inventory import Inventory, visible


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    add = parser.add_argument
    add("--pool", default="gpu", help="work pool (gpu)")
    name = "name of this worker and its own queue (the host's)"
    add("--name", default=socket.gethostname().split(".")[0], help=name)
    add("--limit", type=int, default=0, metavar="N", help="runs at once (as many as GPUs)")
    queues = "queues to work off (its own, urgent, any, night)"
    add("--queue", action="append", metavar="NAME", help=queues)
    add("--wait", action="store_true", help="let runs end at the first SIGTERM")


def run(args: argparse.Namespace) -> int:
    """Run the worker until signals stop it."""
    # One run for each GPU, or one on the CPU: more would wait here before an urgent one.
    gpus = visible(Inventory(load_settings().nvml).read())
    limit = args.limit or max(1, len(gpus))
    code: int = prefect_part("worker").run(args.pool, args.name, limit, args.queue, args.wait)
    return code
