"""Whole training steps of a recipe's loop, compared with a user's own loop and plain PyTorch: the same
network, batches and optimizer of the blocks.

Before each race all ways take a few steps by themselves, with SGD on the rows, no clipping and no dropout.
Their losses must be equal; those of the recipe's loop and the own loop, to the last bit. Plain PyTorch uses
torch's operations in the blocks.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from benchmarks.clicks import write_clicks
from benchmarks.command import flags, processor, show
from benchmarks.racing import Taken, plain, table_text, taken, timing
from benchmarks.ways import CLICKS, TEXTS, Batch, Make, own
from dphybrid.config.settings import Settings, load_settings
from dphybrid.data import batches, num_batches
from dphybrid.embedding import RowPipeline, clip_grad_norm_
from dphybrid.recipes.configs import load_config
from dphybrid.run.experiment import Experiment
from dphybrid.run.job import build_run, prepare_data, train_run
from dphybrid.training.engine import Engine, TakeStep
from dphybrid.training.optimizers import keep_average
from dphybrid.training.step import Step
from dphybrid.util.stop import StopRequest

LEGEND = """\
Milliseconds per training step, including batches and their random draws. Medians of interleaved rounds; in
brackets the 10th and 90th percentile, and the CPU time of all threads. Ratios are of CPU time, medians over
the rounds. The first two ways clip the gradients of blocks and rows by one norm; the others clip those of the
blocks only, because torch's sparse gradients allow no more.
"""
CHECKED_STEPS, WARM_UP = 3, 2
"""Steps whose losses are compared, and turns before those that are measured."""
RECIPE, OWN = "the recipe's loop", "an own loop"


class _Ended(Exception):
    """Ends the training after the last round."""


class Turns(Engine):
    """The engine of a run that gives other loops their turns between its own steps.

    steps: steps of a turn. rounds: turns of each way, including those to warm up. losses: those of the run's
    own steps, when there are no other loops.
    """

    def __init__(
        self, experiment: Experiment, others: Mapping[str, Iterator[Tensor]], steps: int, rounds: int
    ) -> None:
        super().__init__(experiment.config)
        self.others, self.steps, self.rounds = others, steps, rounds
        self.found: dict[str, list[Taken]] = {name: [] for name in (RECIPE, *others)}
        self.losses: list[float] = []

    def take(self, own: TakeStep) -> TakeStep:
        def step(step: Step, batch: Batch) -> tuple[Tensor, Tensor]:
            # Each epoch starts a new turn, so that no turn contains the evaluation at an epoch's end.
            if step.session.trained.progress.batch == 0:
                self._left, self._since = self.steps, taken()
            loss, weight = own(step, batch)
            if not self.others:
                self.losses.append(float(loss / weight))
            return loss, weight

        return step

    def asked(self, stop: StopRequest) -> bool:
        # Called by the training loop after each step: the place to hand the turn to the other loops.
        self._left -= 1
        if not self._left:
            self.found[RECIPE].append(taken(self._since))
            for name, loop in self.others.items():
                before = taken()
                for _ in range(self.steps):
                    next(loop)
                self.found[name].append(taken(before))
            if len(self.found[RECIPE]) == self.rounds:
                raise _Ended
            self._left, self._since = self.steps, taken()
        return False


def _trained(
    experiment: Experiment, others: Mapping[str, Iterator[Tensor]], steps: int, rounds: int
) -> Turns:
    """Train with the recipe's loop until all rounds are over; return its engine."""
    engine = Turns(experiment, others, steps, rounds)
    mine = replace(experiment, engine=engine, devices="cpu")
    with suppress(_Ended), build_run(mine) as built:
        train_run(built, StopRequest())
    return engine


def _batches(experiment: Experiment) -> Iterator[Batch]:
    config, data = experiment.config, experiment.data
    rows, epoch = experiment.recipe.training_rows(data.dataset("train"), data.info, config.model), 0
    while True:
        yield from batches(rows, config.train.batch_size, seed=config.train.seed, epoch=epoch, shuffle=True)
        epoch += 1


def _loop(experiment: Experiment, make: Make) -> Iterator[Tensor]:
    """Train with a plain loop; yield each step's mean loss."""
    config, way = experiment.config, make(experiment)
    dense = list(experiment.recipe.optimizers(way.blocks, config).values())
    for optimizer in dense if config.train.average else ():
        keep_average(optimizer, config.train.average)
    optimizers = [*dense, way.rows]
    clipped = optimizers if way.one_norm else dense
    parameters = [p for one in clipped for group in one.param_groups for p in group["params"]]
    clip = clip_grad_norm_ if way.one_norm else nn.utils.clip_grad_norm_
    torch.manual_seed(config.train.seed)
    # Plain PyTorch has no HostEmbedding, so the pipeline passes its batches through.
    with RowPipeline(way.blocks) as pipeline:
        for batch in pipeline.prefetch(_batches(experiment), getattr(way.blocks, "table_ids", None)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            outputs = way.losses(batch)
            loss = outputs["loss"].sum() / outputs["weight"].sum()
            loss.backward()
            if config.train.clip_norm:
                clip(parameters, config.train.clip_norm)
            for optimizer in optimizers:
                optimizer.step()
            yield loss.detach()


@dataclass(frozen=True)
class Case:
    """A race on one recipe. options: values that differ from the defaults. ways: besides the recipe's loop
    and the own loop. steps: of a turn."""

    options: list[str]
    ways: Mapping[str, Make]
    steps: int


def cases(clicks: Path, click_batches: Sequence[int], text_batches: Sequence[int]) -> dict[str, Case]:
    """Return name -> case, one for each batch size. clicks: the CSV file for recipe ctr."""
    # `_Ended` ends a race before its epochs do. The other loops have no schedule and no decay of rows.
    every = ["train.epochs=1000", "train.schedule=constant", "table.weight_decay=0"]
    dlrm = [f"data.path={clicks}", "data.label=label", "model.kind=dlrm", "table.optimizer=adagrad"]
    kinds: list[tuple[str, str, list[str], Mapping[str, Make], Sequence[int], int]] = [
        ("ctr", "DLRM, 26 columns", dlrm, CLICKS, click_batches, 4096),
        ("text", "text", ["table.optimizer=adam"], TEXTS, text_batches, 32),
    ]
    return {
        f"{name}, batch {size}": Case(
            [f"recipe={recipe}", f"train.batch_size={size}", *every, *options],
            ways,
            max(1, samples // size),
        )
        for recipe, name, options, ways, sizes, samples in kinds
        for size in sizes
    }


def measured(case: Case, settings: Settings, rounds: int) -> dict[str, Any]:
    """Check that all ways have equal losses, race them, and return their timings. Raises RuntimeError when
    losses differ."""
    ways = {OWN: own, **case.ways}
    experiment = prepare_data(load_config(None, case.options), settings)
    alike = [*case.options, "table.optimizer=sgd", "train.clip_norm=0"]
    # Not every recipe has dropout.
    alike += ["model.dropout=0"] * hasattr(experiment.config.model, "dropout")
    _check(prepare_data(load_config(None, alike), settings), ways)
    loops = {name: _loop(experiment, make) for name, make in ways.items()}
    in_an_epoch = num_batches(experiment.data.dataset("train"), experiment.config.train.batch_size)
    steps = min(case.steps, in_an_epoch)  # a turn must fit into an epoch, see `Turns.step`
    turns = _trained(experiment, loops, steps, WARM_UP + rounds)
    found = {name: taken[WARM_UP:] for name, taken in turns.found.items()}
    timings = {name: timing(taken, steps) for name, taken in found.items()}
    mine = [cpu_s for _, cpu_s in found.pop(OWN)]
    ratios = {
        f"{name} / {OWN}": statistics.median(one[1] / cpu_s for one, cpu_s in zip(taken, mine, strict=True))
        for name, taken in found.items()
    }
    return {**timings, "ratios": ratios}


def _check(experiment: Experiment, ways: Mapping[str, Make]) -> None:
    wanted = _trained(experiment, {}, CHECKED_STEPS, 1).losses
    for name, make in ways.items():
        loop = _loop(experiment, make)
        losses = [float(next(loop)) for _ in wanted]
        # Plain PyTorch adds up in another order; the own loop calls the same code as the recipe's.
        if not torch.allclose(
            torch.tensor(losses), torch.tensor(wanted), rtol=0 if make is own else 1e-4, atol=0
        ):
            raise RuntimeError(f"{name}: the losses are {losses}; {RECIPE} has {wanted}")


def run(
    threads: int = 1,
    rounds: int = 9,
    rows: int = 400_000,
    click_batches: Sequence[int] = (128, 2048, 8192),
    text_batches: Sequence[int] = (16,),
    log: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """Measure all cases; return nested dicts of timings and ratios. rows: of the file of clicks. log: called
    with a case's name when it starts."""
    before = torch.get_num_threads()
    found: dict[str, Any] = {"processor": processor(), "cores": os.cpu_count(), "threads": threads}
    found |= {"torch": torch.__version__, "load before": psutil.getloadavg()[0]}
    torch.set_num_threads(threads)
    try:
        # torch's sparse Adagrad warns unless this is set; True would slow it down.
        with tempfile.TemporaryDirectory() as folder, torch.sparse.check_sparse_tensor_invariants(False):
            clicks = Path(folder) / "clicks.csv"
            write_clicks(clicks, rows)
            values = {"data_dir": Path(folder), "tracking_uri": "none"}
            settings = load_settings().model_copy(update=values)
            for name, case in cases(clicks, click_batches, text_batches).items():
                log(name)
                with redirect_stdout(StringIO()):  # hides what the trainings print
                    found[name] = measured(case, settings, rounds)
    finally:
        torch.set_num_threads(before)
    return found | {"load after": psutil.getloadavg()[0]}


def text(results: Mapping[str, Any]) -> str:
    """Return the figures as text to print."""
    return f"{LEGEND}\n{table_text(results)}"


def main() -> None:
    parser = flags(__doc__, repeats=9)
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads (default: 1)")
    options = parser.parse_args()
    results = run(options.threads, options.repeats, log=partial(print, file=sys.stderr, flush=True))
    show(plain(results), lambda _: text(results), options.out)


if __name__ == "__main__":
    main()
