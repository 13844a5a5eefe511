"""Train many combinations of values, from a grid or chosen by Optuna, without Prefect.

examples:
  %(prog)s --recipe toy --grid '{"train.batch_size": [64, 256], "train.lr": [0.01, 0.1]}'
  %(prog)s --data.path clicks.csv --data.label clicked --trials 30 --sweep clicks
      --grid '{"train.lr": {"low": 1e-4, "high": 0.1, "log": true}, "model.dim": [8, 16, 32]}'

Each run is a separate process; one runs at a time for each GPU, or one on the CPU. To continue a sweep,
repeat the command with its --sweep NAME. Its record is Optuna's study, sweeps/NAME/study.journal of the data
folder.
"""

import json
import shlex
from datetime import datetime
from typing import Any

from pydantic import Field

from dphybrid.cli.flags import ExperimentCommand
from dphybrid.util.errors import UserError
from dphybrid.util.stop import StopRequest, stop_signals
from dphybrid.util.text import metric_text

_EXAMPLE = """'{"train.lr": [0.01, 0.1], "train.batch_size": [256, 512]}'"""


class Flags(ExperimentCommand):
    """The flags of `sweep`."""

    grid: str
    """The values of each field, such as '{"train.lr": [0.01, 0.1], "train.batch_size": [256, 512]}'."""
    trials: int | None = Field(default=None, ge=1)
    """Search with Optuna, N runs in all; a field may then have a range {low, high, log or step}."""
    sweep: str | None = None
    """Name of the sweep; an existing one is continued."""
    at_once: int = Field(default=0, ge=0)
    """Runs at the same time (0: one for each GPU, at least one)."""

    def run(self) -> int:
        """Run a sweep; return 1 when a run failed, else 0."""
        grid, stop = _grid(self.grid), StopRequest()
        config, settings = self.experiment()
        name = f"sweep-{datetime.now():%m%d-%H%M%S}" if self.sweep is None else self.sweep
        from dphybrid.lifecycle.sweep import Sweep, run_sweep

        sweep = Sweep(name, config, grid, self.trials or 0)
        with stop_signals(stop):
            results = run_sweep(sweep, settings, stop, self.at_once)
        for result in results:
            facts = {n: metric_text(v) if isinstance(v, float) else v for n, v in result.items() if v}
            print("  ".join(f"{name}={value}" for name, value in facts.items()))
        print(f"Study: {sweep.folder(settings) / 'study.journal'}")
        # Last, so that an interrupted sweep still prints the runs that it trained.
        stop.obey(f"with runs left; continue with --sweep {shlex.quote(name)}")
        return 1 if any("failed" in result for result in results) else 0


def _grid(text: str) -> dict[str, Any]:
    try:
        grid = json.loads(text, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:  # brackets by the thousand
        raise UserError(f"--grid {text[:200]}: not valid JSON ({error}); write {_EXAMPLE}") from error
    if not isinstance(grid, dict):
        raise UserError(f"--grid {text}: not a JSON object; write {_EXAMPLE}")
    return grid


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, of which Python would keep only the last value of a repeated name."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"a name is repeated: {', '.join(name for name, _ in pairs)}")
    return values
