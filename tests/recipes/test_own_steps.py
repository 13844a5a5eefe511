"""Recipes with a step of their own: several optimizers, phases, exact resume."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from dphybrid.parallel import DataParallel
from dphybrid.recipes import ModelContext, Recipe, Task
from dphybrid.training.checkpoint import read_state
from tests.commands import run_with
from tests.refusing import refused
from tests.training.stopping import stopped_and_resumed

pytestmark = pytest.mark.usefixtures("unrecorded")


class Net(nn.Module):
    """A generator whose conditions are rows of a table, and a critic."""

    def __init__(self, context: ModelContext[Any]) -> None:
        super().__init__()
        self.kinds = context.table(context.num_ids("kind_B"), 4, name="kinds")
        self.generator = DataParallel(nn.Linear(8, 2), context.devices)
        self.critic = DataParallel(
            nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)), context.devices
        )

    def made(self, batch: dict[str, Tensor]) -> Tensor:
        noise_BZ = batch.get("noise_BZ", torch.zeros(len(batch["kind_B"]), 4))
        return self.generator(torch.cat([self.kinds(batch["kind_B"]), noise_BZ], 1))

    def critic_losses(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The penalty is a gradient by the inputs, of which the loss takes a gradient again."""
        real_B2 = batch["point_B2"].requires_grad_()
        real_B = self.critic(real_B2).squeeze(1)
        (slope_B2,) = torch.autograd.grad(real_B.sum(), real_B2, create_graph=True)
        made_B = self.critic(self.made(batch).detach()).squeeze(1)
        loss_B = softplus(-real_B) + softplus(made_B) + 0.05 * slope_B2.square().sum(1)
        return {"loss": loss_B, "weight": torch.ones_like(loss_B)}

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        made_B2 = self.made(batch)
        loss_B = softplus(-self.critic(made_B2).squeeze(1))
        return {"loss": loss_B, "weight": torch.ones_like(loss_B), "made_B2": made_B2}


class Gan(Recipe):
    """Two optimizers; the critic takes two steps for each one of the generator."""

    name = "gan"
    train = {"batch_size": 128, "lr": 0.005, "clip_norm": 5.0}

    def rows(self, data: Any, seed: int) -> tuple[Any, Any]:
        random = np.random.default_rng(seed)
        rows = {"kind_B": random.integers(0, 2, 1500), "point_B2": random.normal(2, 0.5, (1500, 2))}
        return {k: v[:1200] for k, v in rows.items()}, {k: v[1200:] for k, v in rows.items()}

    def build(self, context: ModelContext[Any]) -> nn.Module:
        return Net(context)

    def optimizers(self, model: Any, config: Any) -> Mapping[str, torch.optim.Optimizer]:
        return {
            "critic": torch.optim.Adam(model.critic.parameters(), config.train.lr, betas=(0.5, 0.9)),
            "generator": torch.optim.RMSprop(model.generator.parameters(), config.train.lr / 4),
        }

    def step(self, step: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        noise_BZ = torch.randn(len(batch["kind_B"]), 4, generator=step.generator())
        batch = batch | {"noise_BZ": noise_BZ}
        shown = step.update(batch, step.model.critic_losses, of="critic")
        if step.number % 2 == 0:
            step.update(batch, of=("generator", "rows"))
        return shown

    def task(self, info: Mapping[str, Any]) -> Task:
        def distance(outputs: dict[str, Tensor]) -> dict[str, float]:
            return {"distance": float((outputs["made_B2"].mean(0) - 2).norm())}

        return Task("distance", False, distance, reads=("made_B2",))


class LeavesOut(Gan):
    """Its generator has no optimizer."""

    name = "leaves-out"

    def optimizers(self, model: Any, config: Any) -> Mapping[str, torch.optim.Optimizer]:
        return {"critic": super().optimizers(model, config)["critic"]}


class Misnames(Gan):
    """Its step names an optimizer that is not there."""

    name = "misnames"

    def step(self, step: Any, batch: Any) -> Any:
        return step.update(batch, step.model.critic_losses, of="judge")


class TrainsTablesTwice(Gan):
    """One of its optimizers has all parameters of the model, those of the tables, too."""

    name = "trains-tables-twice"

    def optimizers(self, model: Any, config: Any) -> Mapping[str, torch.optim.Optimizer]:
        return {"all": torch.optim.SGD(model.parameters(), lr=0.1)}


class CallsOneRows(Gan):
    """Its critic's optimizer has the name of the tables' optimizer."""

    name = "calls-one-rows"

    def optimizers(self, model: Any, config: Any) -> Mapping[str, torch.optim.Optimizer]:
        own = super().optimizers(model, config)
        return {"generator": own["generator"], "rows": own["critic"]}


def values_of(recipe: str, *overrides: str) -> list[str]:
    return [f"recipe={recipe}", "devices=cpu*2", "train.epochs=2", "train.schedule=cosine", *overrides]


def test_a_gan_stopped_and_resumed_equals_an_undisturbed_one(data_dir: Path) -> None:
    values = values_of(f"{__name__}:Gan", "train.average=0.9")
    whole = run_with(*values, run_name="whole")
    resumed = stopped_and_resumed(*values, at=7)  # within an epoch
    kept = read_state(Path(resumed.latest_checkpoint)).optimizer
    assert [len(one["groups"]) for one in kept["optimizers"]] == [1, 1]
    assert resumed.digests == whole.digests
    assert resumed.metrics == whole.metrics


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([f"{__name__}:LeavesOut"], "parameter generator.module.weight to 0 optimizers; give it to one"),
        ([f"{__name__}:TrainsTablesTwice"], "has table .*, which would be updated twice in each step"),
        ([f"{__name__}:CallsOneRows"], "calls one `rows`, .* choose another name"),
        ([f"{__name__}:Misnames"], "no optimizer 'judge'; .* have critic, generator, rows"),
        ([f"{__name__}:Gan", "cluster.ranks=2"], "several ranks"),
    ],
)
def test_what_cannot_train_is_told(values: list[str], words: str) -> None:
    with refused(words):
        run_with(*values_of(*values))
