"""Recipes with a step of their own: several optimizers, phases, exact resume."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dphybrid.training.checkpoint import read_state
from examples import own_gan
from tests.commands import run_with
from tests.refusing import refused
from tests.training.stopping import stopped_and_resumed

pytestmark = pytest.mark.usefixtures("unrecorded")


class LeavesOut(own_gan.Gan):
    """Its generator has no optimizer."""

    name = "leaves-out"

    def optimizers(self, model: Any, config: Any) -> Mapping[str, torch.optim.Optimizer]:
        return {"critic": super().optimizers(model, config)["critic"]}


class Misnames(own_gan.Gan):
    """Its step names an optimizer that is not there."""

    name = "misnames"

    def step(self, step: Any, batch: Any) -> Any:
        return step.update(batch, step.model.critic_losses, of="judge")


class TrainsTablesTwice(own_gan.Gan):
    """One of its optimizers has all parameters of the model, those of the tables, too."""

    name = "trains-tables-twice"

    def optimizers(self, model: Any, config: Any) -> Mapping[str, torch.optim.Optimizer]:
        return {"all": torch.optim.SGD(model.parameters(), lr=0.1)}


class CallsOneRows(own_gan.Gan):
    """Its critic's optimizer has the name of the tables' optimizer."""

    name = "calls-one-rows"

    def optimizers(self, model: Any, config: Any) -> Mapping[str, torch.optim.Optimizer]:
        own = super().optimizers(model, config)
        return {"generator": own["generator"], "rows": own["critic"]}


def values_of(recipe: str, *overrides: str) -> list[str]:
    return [f"recipe={recipe}", "devices=cpu*2", "train.epochs=2", "train.schedule=cosine", *overrides]


def test_a_gan_stopped_and_resumed_equals_an_undisturbed_one(data_dir: Path) -> None:
    values = values_of("examples.own_gan:Gan", "train.average=0.9")
    whole = run_with(*values, run_name="whole")
    resumed = stopped_and_resumed(*values, at=7)  # within an epoch
    kept = read_state(Path(resumed.latest_checkpoint)).optimizer
    assert [len(one["groups"]) for one in kept["optimizers"]] == [1, 1]
    assert resumed.digests == whole.digests
    assert resumed.metrics == whole.metrics


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([f"{__name__}:LeavesOut"], "parameter generator.module.0.weight to 0 optimizers; give it to one"),
        ([f"{__name__}:TrainsTablesTwice"], "has table .*, which would be updated twice in each step"),
        ([f"{__name__}:CallsOneRows"], "calls one `rows`, .* choose another name"),
        ([f"{__name__}:Misnames"], "no optimizer 'judge'; .* have critic, generator, rows"),
        (["examples.own_gan:Gan", "cluster.ranks=2"], "several ranks"),
    ],
)
def test_what_cannot_train_is_told(values: list[str], words: str) -> None:
    with refused(words):
        run_with(*values_of(*values))
