"""Train many combinations of values, from a grid or chosen by Optuna, without Prefect.

examples:
  %(prog)s --recipe toy --grid '{"train.batch_size": [64, 256], "train.lr": [0.01, 0.1]}'
  %(prog)s --data.path clicks.csv --data.label clicked --trials 30 --sweep clicks
      --grid '{"train.lr": {"low": 1e-4, "high": 0.1, "log": true}, "model.dim": [8, 16, 32]}'

Each run is a separate process; as many run at once as the GPUs allow, or one on the CPU. To continue a sweep,
repeat the command with its --sweep NAME. Its record is Optuna's study, sweeps/NAME/study.journal of the data
folder; `dphybrid compare --sweep NAME` compares the runs.
"""

import argparse
import json
import shlex
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from dphybrid.cli.flags import add_experiment_flags, config_from_args
from dphybrid.cli.parser import Parser, at_least_one
from dphybrid.util.errors import UserError
from dphybrid.util.stop import StopRequest, stop_signals

_EXAMPLE = """'{"train.lr": [0.01, 0.1], "train.batch_size": [256, 512]}'"""


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    add = parser.add_argument
    add("--grid", type=_grid, metavar="JSON", help=f"the values of each field: {_EXAMPLE}")
    trials = "search with Optuna, N runs in all; a field may then have a range {low, high, log or step}"
    add("--trials", type=at_least_one, default=0, metavar="N", help=trials)
    add("--no-prune", action="store_true", help="train each run of a search to its end")
    add("--sweep", metavar="NAME", help="name of the sweep; an existing one is continued")
    at_once = "runs at the same time (default: 0, as many as the GPUs allow)"
    add("--at-once", type=int, default=0, metavar="N", help=at_once)
    add_experiment_flags(parser)


def _grid(text: str) -> dict[str, Any]:
    try:
        grid = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: not valid JSON ({error}); write {_EXAMPLE}") from error
    if not isinstance(grid, dict):
        raise argparse.ArgumentTypeError(f"{text}: not a JSON object; write {_EXAMPLE}")
    return grid


def _line(row: Mapping[str, object], served: bool) -> str:
    """Return the line that reports one run. served: a server shows the run's page, so print its address."""
    facts = {name: value for name, value in row.items() if name not in ("cell", "failed", "run")}
    # In a row of the results, metrics are floats and the grid's values are strings.
    metrics = ", ".join(f"{key} {value:.4f}" for key, value in facts.items() if isinstance(value, float))
    values = ", ".join(f"{key}={value}" for key, value in facts.items() if not isinstance(value, float))
    address = f"  {row['run']}" if served and row.get("run") else ""
    return f"{row['cell']}  {values}: {row.get('failed') or metrics}{address}"


def run(args: argparse.Namespace) -> int:
    """Run a sweep; return 1 when a run failed, else 0."""
    if args.grid is None:
        raise UserError(f"a sweep needs fields and their values; give --grid {_EXAMPLE}")
    stop = StopRequest()
    config, settings = config_from_args(args)
    name = args.sweep or f"sweep-{datetime.now():%m%d-%H%M%S}"
    from dphybrid.lifecycle.cells import failures, in_mlflow
    from dphybrid.lifecycle.sweep import Sweep, run_sweep

    sweep = Sweep(name, config, args.grid, args.trials, not args.no_prune)
    with stop_signals(stop):
        results = run_sweep(sweep, settings, stop, args.at_once)
    for result in results:
        print(_line(result.row, f"{settings.mlflow_uri}".startswith("http")))
    print(f"Study: {sweep.folder(settings) / 'study.journal'}")
    if len(in_mlflow(results)) > 1:
        print(f"Compare: dphybrid compare --sweep {shlex.quote(name)}")
    # Last, so that an interrupted sweep still prints the runs that it trained.
    stop.obey(f"with runs left; continue with --sweep {shlex.quote(name)}")
    return 1 if failures(results) else 0
