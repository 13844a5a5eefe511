"""A recipe with its own training step: a conditional GAN with two optimizers, a gradient penalty, and a host
table with the generator's conditions.

    dphybrid train --recipe examples.own_gan:Gan --devices 'cpu*2'

Letters: B samples, Z noise, K kinds of points, 2 coordinates of a point.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from dphybrid.parallel import DataParallel
from dphybrid.recipes import ModelConfig, ModelContext, Recipe, Step, Task

NOISE, DIM, KINDS, CRITIC_STEPS = 4, 4, 2, 2
Batch = dict[str, Tensor]


def layers(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs))


class Net(nn.Module):
    """Generator and critic, each a region, and a table with a row for each kind of point."""

    def __init__(self, context: ModelContext[ModelConfig]) -> None:
        super().__init__()
        self.kinds = context.table(context.num_ids("kind_B"), DIM, name="kinds")
        self.generator = DataParallel(layers(NOISE + DIM, 2), context.devices)
        self.critic = DataParallel(layers(2 + KINDS, 1), context.devices)

    def made(self, batch: Batch) -> Tensor:
        made_B2: Tensor = self.generator(torch.cat([self.kinds(batch["kind_B"]), batch["noise_BZ"]], 1))
        return made_B2

    def judged(self, points_B2: Tensor, batch: Batch) -> Tensor:
        kinds_BK = nn.functional.one_hot(batch["kind_B"], KINDS).to(points_B2)
        logits_B: Tensor = self.critic(torch.cat([points_B2, kinds_BK], 1)).squeeze(1)
        return logits_B

    def critic_losses(self, batch: Batch) -> Batch:
        """Return the critic's losses: cross-entropy on real and made points, and a penalty on its gradient at
        the real points."""
        # The penalty is a gradient by the inputs, of which the loss takes a gradient again: create_graph.
        real_B2 = batch["point_B2"].requires_grad_()
        real_B = self.judged(real_B2, batch)
        (slope_B2,) = torch.autograd.grad(real_B.sum(), real_B2, create_graph=True)
        # detach: this loss trains the critic alone.
        made_B = self.judged(self.made(batch).detach(), batch)
        loss_B = softplus(-real_B) + softplus(made_B) + 0.05 * slope_B2.square().sum(1)
        return {"loss": loss_B, "weight": torch.ones_like(loss_B)}

    def forward(self, batch: Batch) -> Batch:
        """Return the generator's losses and its points."""
        # Only `step` adds noise; evaluation gets here without, and takes the same noise each time.
        if "noise_BZ" not in batch:
            random = torch.Generator().manual_seed(0)
            batch = batch | {"noise_BZ": torch.randn(len(batch["kind_B"]), NOISE, generator=random)}
        made_B2 = self.made(batch)
        loss_B = softplus(-self.judged(made_B2, batch))
        return {"loss": loss_B, "weight": torch.ones_like(loss_B), "made_B2": made_B2}


def distance(outputs: Batch) -> dict[str, float]:
    """Return the distance between the means of made and real points, for the worst kind."""
    kind_B, made_B2, real_B2 = outputs["kind_B"], outputs["made_B2"], outputs["point_B2"]
    away = [(made_B2[kind_B == k].mean(0) - real_B2[kind_B == k].mean(0)).norm() for k in range(KINDS)]
    return {"distance": float(max(away))}


class Gan(Recipe):
    name = "gan"
    summary = "Made-up points of two kinds, and a network that learns to make such points."
    train = {"epochs": 8, "batch_size": 128, "lr": 0.005, "clip_norm": 5.0}

    def rows(self, data: Any, seed: int) -> tuple[Any, Any]:
        random = np.random.default_rng(seed)
        kind = random.integers(0, KINDS, 5000)
        points = random.normal(np.stack([2.0 - 4 * kind, np.ones(5000)], 1), 0.5).astype(np.float32)
        columns: dict[str, Any] = {"kind_B": kind, "point_B2": points}
        return {k: v[:4000] for k, v in columns.items()}, {k: v[4000:] for k, v in columns.items()}

    def build(self, context: ModelContext[ModelConfig]) -> nn.Module:
        return Net(context)

    def optimizers(self, model: Any, config: Any) -> Mapping[str, torch.optim.Optimizer]:
        return {
            "critic": torch.optim.Adam(model.critic.parameters(), config.train.lr, betas=(0.5, 0.9)),
            "generator": torch.optim.RMSprop(model.generator.parameters(), config.train.lr / 4),
        }

    # [start:step]
    def step(self, step: Step, batch: Batch) -> tuple[Tensor, Tensor]:
        net: Any = step.model
        # Seeded by the run and the step number: a resumed run draws the same noise.
        noise_BZ = torch.randn(len(batch["kind_B"]), NOISE, generator=step.generator())
        batch = batch | {"noise_BZ": noise_BZ}
        # Each update uses only the optimizers named by `of`.
        shown = step.update(batch, net.critic_losses, of="critic")
        # The critic takes CRITIC_STEPS steps for each one of the generator.
        if step.number % CRITIC_STEPS == 0:
            step.update(batch, of=("generator", "rows"))  # "rows": the tables' optimizer
        return shown

    # [end:step]

    def task(self, info: Mapping[str, Any]) -> Task:
        return Task("distance", False, distance, reads=("made_B2", "kind_B", "point_B2"))
