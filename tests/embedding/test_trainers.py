"""A table in the loops of Lightning, accelerate and transformers: the same losses as in one's own, their
checkpoints, and what they do that rows would not survive."""

import copy
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from dphybrid.embedding import (
    CombinedOptimizer,
    HostEmbedding,
    clip_grad_norm_,
    dense_parameters,
    find_tables,
    row_optimizer,
)
from examples.trainers import clicks

IDS = torch.tensor([1, 2, 2, 7])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = HostEmbedding(10, 4, seed=1, dtype=torch.float64)
        self.head = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.table(ids)).square().mean()
        return out


def pair(model: Model, rule: str = "lazy-adam") -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(dense_parameters(model), lr=0.01), row_optimizer(rule, model.table, lr=0.1)]


def rows_of(model: nn.Module) -> torch.Tensor:
    (table,) = find_tables(model).values()
    return table.weight.clone()


def test_several_as_one_train_as_they_would_by_themselves() -> None:
    apart, together = Model(), Model()
    together.load_state_dict(apart.state_dict())
    both, one = pair(apart), CombinedOptimizer(*pair(together))
    schedules = [OneCycleLR(each, max_lr=0.2, total_steps=9) for each in both]
    schedule = OneCycleLR(one, max_lr=0.2, total_steps=9)  # which sets betas, too: both Adams have them

    def closure() -> torch.Tensor:
        one.zero_grad()
        loss = together(IDS)
        loss.backward()
        return loss

    for _ in range(5):
        expected = apart(IDS)
        expected.backward()
        for each in (*both, *schedules):
            each.step()
        for each in both:
            each.zero_grad()
        assert torch.equal(one.step(closure), expected)
        schedule.step()
    assert torch.equal(rows_of(together), rows_of(apart))
    assert set(one.state) == set(together.parameters())
    assert one.state[together.table.weight] is one.optimizers[1].state[together.table.weight]
    assert not hasattr(one.param_groups, "append"), "a group belongs to one of the optimizers"
    mixed = CombinedOptimizer(torch.optim.SGD(dense_parameters(apart), 0.1, momentum=0.9), both[1])
    with pytest.raises(ValueError, match="momentum or beta1"):  # SGD's momentum is not Adam's beta
        OneCycleLR(mixed, max_lr=0.1, total_steps=9)


@pytest.mark.parametrize("way", ["states", "file", "pickle", "copy"])
def test_the_states_of_several_go_together(way: str, tmp_path: Path) -> None:
    model = Model()
    one = CombinedOptimizer(*pair(model))
    schedule = LambdaLR(one, lambda step: 0.5**step)
    for _ in range(2):
        one.zero_grad()
        model(IDS).backward()
        one.step()
        schedule.step()
    if way in ("pickle", "copy"):
        both = (model, one)
        other, two = copy.deepcopy(both) if way == "copy" else pickle.loads(pickle.dumps(both))
    else:
        other = copy.deepcopy(model)
        two, state = CombinedOptimizer(*pair(other)), one.state_dict()
        if way == "file":
            torch.save(state, tmp_path / "state.pt")
            state = torch.load(tmp_path / "state.pt", weights_only=True)
        two.load_state_dict(state)
    assert [group["lr"] for group in two.param_groups] == pytest.approx([0.0025, 0.025])
    for each, optimizer in ((model, one), (other, two)):
        optimizer.zero_grad()
        each(IDS).backward()
        optimizer.step()
    assert torch.equal(rows_of(other), rows_of(model))
    with pytest.raises(ValueError, match="the state holds 1 optimizers, expected 2"):
        one.load_state_dict({"optimizers": [{}]})
    ReduceLROnPlateau(one, patience=0).step(1.0)


@pytest.mark.parametrize("together", [True, False])
def test_a_scaler_skips_and_unscales_rows_and_blocks(together: bool) -> None:
    scaled, plain = Model(), Model()
    plain.load_state_dict(scaled.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    ours, theirs = pair(scaled, "adagrad"), pair(plain, "adagrad")
    if together:
        ours = [CombinedOptimizer(*ours)]
    for step in range(4):
        for each in (*ours, *theirs):
            each.zero_grad()
        plain(IDS).backward()
        scaler.scale(scaled(IDS) * (math.inf if step == 1 else 1.0)).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if step == 2:
                for each in ours:
                    scaler.unscale_(each)
                for model in (scaled, plain):
                    clip_grad_norm_(model.parameters(), 1e-3)
            for each in ours:
                scaler.step(each)
        scaler.update()
        for each in theirs if step != 1 else ():
            each.step()
    torch.testing.assert_close(rows_of(scaled), rows_of(plain), rtol=1e-12, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_states_that_a_trainer_moved_return_to_the_host() -> None:
    model = Model()
    one = CombinedOptimizer(*pair(model))
    for each in (one, one.optimizers[1]):
        for states in each.state.values():
            for name, state in states.items():
                states[name] = state.to("cuda")
    model(IDS).backward()
    one.step()
    assert all(state.device.type == "cpu" for state in one.optimizers[1].states().values())


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], clicks.Clicks]:
    return clicks.main()


@pytest.fixture(scope="module")
def accumulated() -> torch.Tensor:
    return rows_of(clicks.main(accumulate=2)[1])


@pytest.mark.nightly
def test_lightning(plain: Any, accumulated: torch.Tensor, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from examples.trainers import with_lightning

    # It clips with torch's function, whose factor is rounded to float32.
    module = with_lightning.main(default_root_dir=tmp_path)
    assert module.losses == pytest.approx(plain[0], rel=1e-6)
    torch.testing.assert_close(rows_of(module), rows_of(plain[1]))
    saved = tmp_path / "half.ckpt"
    with_lightning.main(save=saved, max_epochs=1)
    resumed = with_lightning.main(resume=saved)
    assert resumed.losses == module.losses[6:]
    assert torch.equal(rows_of(resumed), rows_of(module))
    torch.testing.assert_close(rows_of(with_lightning.main(accumulate_grad_batches=2)), accumulated)

    class Two(with_lightning.LitClicks):
        def configure_optimizers(self) -> Any:
            return [*super().configure_optimizers()["optimizer"].optimizers]

    with pytest.raises(RuntimeError, match="multiple optimizers is only supported with manual"):
        with_lightning.main(module=Two())


@pytest.mark.nightly
def test_accelerate(plain: Any, accumulated: torch.Tensor, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from examples.trainers import with_accelerate

    losses, model = with_accelerate.main()
    assert losses == plain[0]
    assert torch.equal(rows_of(model), rows_of(plain[1]))
    with_accelerate.main(save=str(tmp_path), epochs=1)
    losses, model = with_accelerate.main(resume=str(tmp_path), epochs=1)
    assert losses == plain[0][6:]
    assert torch.equal(rows_of(model), rows_of(plain[1]))
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    assert torch.equal(rows_of(with_accelerate.main(gradient_accumulation_steps=2)[1]), accumulated)

    # A loop that ended within an accumulation leaves its state behind; a plain loop does not look at it.
    accelerate.state.GradientState._reset_state()
    accelerator, own = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2), Model()
    with accelerator.accumulate(own):
        own(IDS).backward()
    row_optimizer("adagrad", own.table, lr=0.1).step()
    accelerate.state.GradientState._reset_state()
    accelerator, own = accelerate.Accelerator(cpu=True), Model()
    rows = accelerator.prepare(row_optimizer("adagrad", own.table, lr=0.1))  # by itself, too
    own(IDS).backward()
    with pytest.raises(NotImplementedError, match="SparseCPU"):  # torch's own
        accelerator.clip_grad_norm_(own.parameters(), 1.0)
    rows.step()


@pytest.mark.nightly
def test_transformers(plain: Any, accumulated: torch.Tensor, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from examples.trainers import with_transformers
    from examples.trainers.with_transformers import losses_of, make_trainer

    trainer = make_trainer(str(tmp_path))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="table ")
        trainer.train()
    assert losses_of(trainer) == plain[0]
    assert torch.equal(rows_of(trainer.model), rows_of(plain[1]))
    resumed = make_trainer(str(tmp_path / "again"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert losses_of(resumed)[-6:] == plain[0][6:]
    assert torch.equal(rows_of(resumed.model), rows_of(plain[1]))
    trainer = make_trainer(str(tmp_path), gradient_accumulation_steps=2, save_strategy="no")
    trainer.train()
    assert torch.equal(rows_of(trainer.model), accumulated)

    alone = make_trainer(str(tmp_path), optimizers=(None, None), max_steps=2, save_strategy="no")
    with pytest.raises(RuntimeError, match="Adam does not support sparse gradients"):
        alone.train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(with_transformers, "clip_rows_too", lambda *_: None)
        unclipped = make_trainer(str(tmp_path), max_steps=1, save_strategy="no")
    with pytest.raises(NotImplementedError, match="SparseCPU"):
        unclipped.train()
