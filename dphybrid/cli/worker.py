"""Start a worker that takes runs from a Prefect work pool, and can be stopped without losing a training.

On Ctrl-C or SIGTERM it takes no more runs; those that it has write checkpoints and return to the queue. With
--wait they finish first, unless a second signal comes. A third signal kills them.
"""

import argparse
import socket

from dphybrid.cli.parser import Parser, at_least_one, prefect_part
from dphybrid.config.settings import load_settings
from dphybrid.gpus.inventory import Inventory, visible


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    add = parser.add_argument
    add("--pool", default="gpu", help="work pool (default: gpu)")
    name = "name of this worker and of its own queue (default: the host's)"
    add("--name", default=socket.gethostname().split(".")[0], help=name)
    limit = "runs at once (default: one per GPU, at least one)"
    add("--limit", type=at_least_one, default=0, metavar="N", help=limit)
    queues = "queue to take runs from; may be repeated (default: its own, urgent, any, night)"
    add("--queue", action="append", metavar="NAME", help=queues)
    add("--wait", action="store_true", help="on the first signal, let runs finish")


def run(args: argparse.Namespace) -> int:
    """Run the worker until signals stop it."""
    # No more runs than GPUs: the rest would wait here, and be ahead of an urgent run that comes later.
    gpus = visible(Inventory(load_settings().nvml).read())
    limit = args.limit or max(1, len(gpus))
    code: int = prefect_part("worker").run(args.pool, args.name, limit, args.queue, args.wait)
    return code
