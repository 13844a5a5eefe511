"""Recipes with a step of their own: several optimizers, phases, exact resume, batches in parts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dphybrid.run.train import Report
from dphybrid.training.checkpoint import read_state
from dphybrid.util.errors import UserError
from dphybrid.util.stop import Interrupted, StopRequest
from examples import own_gan
from tests.commands import run_with
from tests.training.stopping import stopping_after

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


def trained(
    recipe: str,
    *overrides: str,
    resume: str | None = None,
    stop: StopRequest | None = None,
    name: str = "one",
) -> Report:
    values = [f"recipe={recipe}", "devices=cpu*2", "train.epochs=2", "train.schedule=cosine", *overrides]
    return run_with(*values, run_name=name, resume=resume, stop=stop)


def test_a_gan_stopped_and_resumed_equals_an_undisturbed_one(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained("examples.own_gan:Gan", "train.average=0.9", name="whole")
    with stopping_after(7) as stop, pytest.raises(Interrupted, match="step-000007"):  # within an epoch
        trained("examples.own_gan:Gan", "train.average=0.9", stop=stop)
    kept = read_state(data_dir / "runs/one/checkpoints/step-000007").optimizer
    assert [len(one["groups"]) for one in kept["optimizers"]] == [1, 1]
    resumed = trained("examples.own_gan:Gan", "train.average=0.9", resume="one", name="one")
    assert resumed.digests == whole.digests
    assert resumed.metrics == whole.metrics


def test_each_phase_is_computed_in_parts_once_one_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    few = ("train.batch_size=1000", "train.epochs=1")
    whole = trained("examples.own_gan:Gan", *few, name="whole")
    losses, sizes = own_gan.Net.critic_losses, []

    def small_device(net: own_gan.Net, batch: own_gan.Batch) -> own_gan.Batch:
        if len(batch["kind_B"]) > 500:
            raise torch.OutOfMemoryError("CUDA out of memory, as a test has it")
        sizes.append(len(batch["kind_B"]))
        return losses(net, batch)

    monkeypatch.setattr(own_gan.Net, "critic_losses", small_device)
    parts = trained("examples.own_gan:Gan", *few, name="parts")
    assert set(sizes[:4]) == {250}
    assert parts.metrics["distance"] == pytest.approx(whole.metrics["distance"], rel=1e-4)


def test_a_parameter_without_an_optimizer_is_named_before_training() -> None:
    with pytest.raises(
        UserError, match="parameter generator.module.0.weight to 0 optimizers; give it to one"
    ):
        trained(f"{__name__}:LeavesOut")


def test_an_optimizer_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match="no optimizer 'judge'; .* have critic, generator, rows"):
        trained(f"{__name__}:Misnames")


def test_several_processes_are_refused() -> None:
    with pytest.raises(UserError, match="several ranks"):
        trained("examples.own_gan:Gan", "cluster.ranks=2")
