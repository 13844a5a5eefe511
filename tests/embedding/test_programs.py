"""Random programs: what people do between the steps of a training, drawn from a seed, and the claims of
exactness that hold whatever they do. `DPHYBRID_PROGRAMS=300` runs as many of each; a failure names the seed.

Letters: B samples, F ids a sample, N ids of a lookup, D width.
"""

import copy
import io
import os
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dphybrid.embedding import (
    CombinedOptimizer,
    HostEmbedding,
    RowPipeline,
    clip_grad_norm_,
    dense_parameters,
    row_optimizer,
)
from dphybrid.parallel import DataParallel
from dphybrid.util.row_rules import RULES
from tests.embedding.test_kernels import threads

PROGRAMS = int(os.environ.get("DPHYBRID_PROGRAMS") or 6)
ROWS, PLACES, COLUMNS = 60, 12, 3
DEEDS = {
    "evaluate": 2, "save": 1, "edit": 1, "load": 1, "lr": 2, "freeze": 1, "thaw": 2, "deepcopy": 1,
    "raise early": 1, "raise late": 1, "skip": 1, "accumulate": 3, "clip": 4, "penalty": 1,
    "two backwards": 1, "unannounced": 1, "clear": 1, "leave": 1, "average": 2, "exchange": 1, "grow": 1,
    "tie": 1, "untie": 1,
}  # fmt: skip
"""What may happen at a step, and how often beside the others."""


@dataclass(frozen=True)
class Program:
    """deeds: of each step, each with a number between 0 and 1."""

    seed: int
    rule: str
    dtype: torch.dtype
    dim: int
    lookups: int
    deeds: list[dict[str, float]] = field(repr=False)

    @classmethod
    def drawn(cls, seed: int, *, without: tuple[str, ...] = ()) -> "Program":
        draw = random.Random(seed)
        weights = {deed: weight for deed, weight in DEEDS.items() if deed not in without}
        deeds = []
        for _ in range(draw.randint(6, 14)):
            chosen = draw.choices(list(weights), list(weights.values()), k=draw.randint(0, 3))
            deeds.append({deed: draw.random() for deed in chosen})
        dtype = draw.choice([torch.float32, torch.float64, torch.bfloat16])
        rule = list(RULES)[seed % len(RULES)]  # not drawn: few programs, too, use each
        return cls(seed, rule, dtype, draw.choice([1, 8, 16, 17]), draw.randint(1, 3), deeds)

    def ids(self, step: int) -> Tensor:
        """ids_BF of a step, frequent ones again and again."""
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        chance_BF = torch.rand(9 - step % 3, COLUMNS, generator=generator)
        return (chance_BF.square() * ROWS).long()


class Model(nn.Module):
    def __init__(self, program: Program, devices: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        options: dict[str, Any] = {"dtype": program.dtype, "seed": seed}
        self.words = HostEmbedding(ROWS, program.dim, padding_idx=program.seed % ROWS, **options)
        self.places = HostEmbedding(PLACES, program.dim, name="places", **options)
        self.others = HostEmbedding(ROWS, program.dim, padding_idx=(program.seed + 1) % ROWS, **options)
        layers = nn.Sequential(nn.Linear(COLUMNS * program.dim, 5), nn.Tanh(), nn.Linear(5, 1))
        self.region = DataParallel(Summed(layers.to(self.words.out_dtype)), devices)
        self.lookups = program.lookups

    def table_ids(self, ids_BF: Tensor) -> dict[str, Any]:
        words = [self.of_words(ids_BF)] * self.lookups
        return {"words": words, "places": ids_BF % PLACES, "others": ids_BF}

    def of_words(self, ids_BF: Tensor) -> Tensor:
        """Ids over all rows, of which there may be more since."""
        return ids_BF * self.words.num_rows // ROWS

    def forward(self, ids_BF: Tensor) -> Tensor:
        words = [self.region.rows(self.words, self.of_words(ids_BF)) for _ in range(self.lookups)]
        words.append(self.region.rows(self.others, ids_BF))
        losses_B: Tensor = self.region(self.region.rows(self.places, ids_BF % PLACES), *words)
        return losses_B.mean()


class Summed(nn.Module):
    """Rows of several lookups, added up, into a loss a sample."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, *rows: Tensor) -> Tensor:
        scores_B: Tensor = self.layers(sum(rows).flatten(1)).squeeze(1)  # type: ignore[union-attr]
        return (scores_B - 1).square()


class Trained:
    """A model and its optimizers, and what has been seen of them."""

    def __init__(self, program: Program, devices: str, seed: int = 1) -> None:
        self.program, self.devices = program, devices
        self.model = Model(program, devices, seed)
        self._optimize()

    def _optimize(self) -> None:
        self.rows = row_optimizer(self.program.rule, self.model, lr=0.05, weight_decay=0.01)
        self.dense = torch.optim.Adam(dense_parameters(self.model), lr=0.01)
        self.both = CombinedOptimizer(self.dense, self.rows)

    def restarted(self) -> "Trained":
        """What another process has after loading a checkpoint."""
        file = io.BytesIO()
        frozen = {name: not p.requires_grad for name, p in self.model.named_parameters()}
        page = {"model": self.model.state_dict(), "both": self.both.state_dict(), "frozen": frozen}
        torch.save(page, file)
        file.seek(0)
        saved, new = torch.load(file), Trained(self.program, self.devices, seed=2)
        new.exchange(nn.Parameter(saved["model"]["words.weight"].clone()))
        new.model.load_state_dict(saved["model"])
        new.both.load_state_dict(saved["both"])
        for name, parameter in new.model.named_parameters():
            parameter.requires_grad_(not saved["frozen"][name])
        return new

    def copied(self) -> "Trained":
        new = copy.copy(self)
        new.model = copy.deepcopy(self.model)
        new._optimize()
        new.both.load_state_dict(self.both.state_dict())
        return new

    def exchange(self, weight: nn.Parameter) -> None:
        """Train another weight from now on, by new optimizers."""
        self.both.zero_grad()
        self.model.words.weight = weight
        self._optimize()

    @property
    def is_tied(self) -> bool:
        return self.model.words.weight is self.model.others.weight

    def tensors(self) -> list[Tensor]:
        held = [*self.model.state_dict().values(), *self.rows.states().values()]
        return [tensor.detach().clone() for tensor in held]


class Planned(Exception):
    """Raised by a program."""


def run(
    program: Program,
    mode: str = "off",
    devices: str = "cpu*3",
    *,
    restarts: frozenset[int] = frozenset(),
) -> list[Tensor]:
    """Return all that a program shows. restarts: steps before which everything is saved and made anew."""
    trained, seen, step = Trained(program, devices), list[Tensor](), 0
    left: list[tuple[Tensor, Tensor]] = []
    while step < len(program.deeds):
        clear = all(p.grad is None for p in trained.model.parameters())
        if step in restarts and clear and not trained.is_tied:
            trained = trained.restarted()
        try:
            batches = (program.ids(number) for number in range(step, len(program.deeds)))
            with RowPipeline(trained.model, mode=mode, on_cpu=True) as pipeline:
                for ids_BF in pipeline.prefetch(batches, trained.model.table_ids):
                    assert torch.equal(ids_BF, program.ids(step)), f"{program}: another batch at {step}"
                    deeds, step = program.deeds[step], step + 1
                    take(trained, ids_BF, deeds, seen, step)
                    if "deepcopy" in deeds:
                        left.append((trained.model.words.weight, trained.model.words.weight.detach().clone()))
                        trained.both.zero_grad()
                        trained = trained.copied()
                        break
                    if step in restarts or "leave" in deeds:
                        break
        except Planned:
            trained.both.zero_grad()
    for weight, before in left:
        assert torch.equal(weight, before), "a copied table follows its copy"
    return seen + trained.tensors()


def take(trained: Trained, ids_BF: Tensor, deeds: dict[str, float], seen: list[Tensor], step: int) -> None:
    """One step, with what happens before, in and after it."""
    model, words = trained.model, trained.model.words
    if "lr" in deeds:
        trained.rows.param_groups[0]["lr"] = deeds["lr"] / 5
        trained.dense.param_groups[0]["lr"] = deeds["lr"] / 50
    for deed in ("freeze", "thaw"):
        if deed in deeds:
            words.weight.requires_grad_(deed == "thaw")
    if "unannounced" in deeds:
        ids_BF = ids_BF.flip(0)
    loss = model(ids_BF)
    if "penalty" in deeds:
        loss = loss + words.weight.to(words.out_dtype).square().sum() * 1e-3
    seen.append(loss.detach().clone())
    if "raise early" in deeds:
        raise Planned
    loss.backward()
    if "two backwards" in deeds:
        model(ids_BF % 7).backward()
    if "raise late" in deeds:
        raise Planned
    if "clip" in deeds:
        seen.append(clip_grad_norm_(model.parameters(), deeds["clip"] / 4))
    if "accumulate" not in deeds:
        if "skip" not in deeds:
            trained.both.step()
        (model if "clear" in deeds else trained.both).zero_grad()  # type: ignore[operator]
    with torch.no_grad():
        if "edit" in deeds:
            words.weight[int(ROWS * deeds["edit"])] = 0.25
        if "evaluate" in deeds:
            seen.append(model(trained.program.ids(step if deeds["evaluate"] < 0.5 else 500 + step)))
        if "average" in deeds:
            live, values = words.weight, words.weight.data
            if deeds["average"] < 0.7:
                words.weight = nn.Parameter(values * 0.5)
            else:
                live.data = values * 0.5
            seen.append(model(trained.program.ids(step if deeds["average"] < 0.8 else 500 + step)))
            words.weight, live.data = live, values
    if "load" in deeds:
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    rows_VD = words.weight.detach().clone()
    if "exchange" in deeds or ("untie" in deeds and trained.is_tied):
        trained.exchange(nn.Parameter(rows_VD * 0.5))
    if "grow" in deeds:
        trained.exchange(nn.Parameter(torch.cat([rows_VD, rows_VD[:7]])))
    if "tie" in deeds:
        trained.exchange(model.others.weight)
    if "save" in deeds:
        seen += trained.tensors()


def same_bits(program: Program, one: list[Tensor], two: list[Tensor]) -> None:
    assert len(one) == len(two), program
    for place, (a, b) in enumerate(zip(one, two, strict=True)):
        assert torch.equal(a, b), f"{program}: tensor {place} of {len(one)}: {a} and {b}"


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_prefetching_changes_no_bit(seed: int) -> None:
    program, draw = Program.drawn(seed), random.Random(seed)
    devices = draw.choice(["cpu*2", "cpu*3", "cpu*8"])
    ahead = run(program, "exact", devices)
    same_bits(program, run(program, "off", devices), ahead)


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_a_restart_changes_no_bit(seed: int) -> None:
    program, draw = Program.drawn(10_000 + seed), random.Random(seed)
    restarts = frozenset(draw.sample(range(len(program.deeds)), 2))
    mode = draw.choice(["off", "exact"])
    same_bits(program, run(program, mode), run(program, mode, restarts=restarts))


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_eight_devices_compute_what_one_does(seed: int) -> None:
    program = Program.drawn(20_000 + seed)
    program = replace(program, dtype=torch.float64)
    for place, (a, b) in enumerate(
        zip(run(program, devices="cpu"), run(program, devices="cpu*8"), strict=True)
    ):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9, msg=f"{program}: tensor {place}")


def large(program: Program, count: int) -> list[Tensor]:
    """A program on a table alone, whose batches are large enough for a team of threads."""
    dtype, real = program.dtype, torch.float64 if program.dtype == torch.float64 else torch.float32
    with threads(count):
        table = HostEmbedding(5000, 16 + program.dim, dtype=dtype, padding_idx=3, seed=1)
        rows = row_optimizer(program.rule, nn.ModuleDict({"t": table}), lr=0.05, weight_decay=0.01)
        for step, deeds in enumerate(program.deeds[:3]):
            draw = torch.Generator().manual_seed(step)
            ids_N = (torch.rand(6000, generator=draw).square() * 5000).long()
            grads_ND = torch.randn(6000, table.dim, generator=draw, dtype=real)
            for _ in range(1 + ("two backwards" in deeds)):
                for _ in range(program.lookups):
                    table(ids_N).backward(grads_ND)
            if "clip" in deeds:
                clip_grad_norm_(table.parameters(), deeds["clip"])
            if "accumulate" not in deeds:
                rows.step()
                rows.zero_grad()
        return [table.weight.detach(), *rows.states().values()]


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_the_number_of_threads_changes_no_bit(seed: int) -> None:
    program = Program.drawn(30_000 + seed)
    same_bits(program, large(program, 1), large(program, (2, 3, 8)[seed % 3]))
