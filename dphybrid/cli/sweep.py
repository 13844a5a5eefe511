"""Train many combinations of values, from a grid or chosen by Optuna, without Prefect.

examples:
  %(prog)s --recipe toy --grid '{"train.batch_size": [64, 256], "train.lr": [0.01, 0.1]}'
  %(prog)s --data.path clicks.csv --data.label clicked --trials 30 --sweep clicks
      --grid '{"train.lr": {"low": 1e-4, "high": 0.1, "log": true}, "model.dim": [8, 16, 32]}'

Each run is a separate process; one runs at a time for each GPU, or one on the CPU. To continue a sweep,
repeat the command with its --sweep NAME. Its record is Optuna's study, sweeps/NAME/study.journal of the data
folder.
"""

import shlex
from datetime import datetime

from pydantic import Field

from dphybrid.cli.flags import ExperimentCommand
from dphybrid.recipes.configs import read_grid
from dphybrid.util.stop import StopRequest, stop_signals
from dphybrid.util.text import metric_text


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
        config, settings = self.experiment()
        name = f"sweep-{datetime.now():%m%d-%H%M%S}" if self.sweep is None else self.sweep
        from dphybrid.lifecycle.sweep import Sweep, run_sweep

        sweep, stop = Sweep(name, config, read_grid(self.grid), self.trials or 0), StopRequest()
        with stop_signals(stop):
            results = run_sweep(sweep, settings, stop, self.at_once)
        for result in results:
            facts = {n: metric_text(v) if isinstance(v, float) else v for n, v in result.items() if v}
            print("  ".join(f"{name}={value}" for name, value in facts.items()))
        print(f"Study: {sweep.folder(settings) / 'study.journal'}")
        # Last, so that an interrupted sweep still prints the runs that it trained.
        stop.obey(f"with runs left; continue with --sweep {shlex.quote(name)}")
        return 1 if any("failed" in result for result in results) else 0
