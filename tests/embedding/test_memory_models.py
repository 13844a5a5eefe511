"""Gemma 4's per-layer rows and Qwen4-Exp's hashed n-grams as host tables: losses as with resident tables, on
several devices, fetched ahead or not, and resumed after a kill."""

import copy
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dphybrid.embedding import RowPipeline, dense_parameters, find_tables, host_tables, row_optimizer
from dphybrid.parallel import DataParallel
from tests.conftest import REPOSITORY

pytest.importorskip("transformers")
STEPS, KILLED_AT, SAVED_AT = 20, 13, 10
MODELS = ("gemma", "qwen")


class Losses(nn.Module):
    """Each sample's loss: a region joins values by sample."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = self.model(input_ids=tokens, use_cache=False).logits[:, :-1]
        return nn.functional.cross_entropy(scores.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


def make(name: str) -> tuple[nn.Module, str]:
    from examples.memory import with_transformers

    torch.manual_seed(0)
    model = getattr(with_transformers, name)()
    (table,) = host_tables(copy.deepcopy(model), 300e3)
    return model, table


def train(
    model: Any,
    rows: torch.optim.Optimizer,
    table: nn.Parameter,
    steps: range = range(STEPS),
    ahead: bool = False,
    state: Path | None = None,
    die: bool = False,
) -> list[float]:
    """Return the losses. state: where to save after SAVED_AT steps, or to continue from."""
    dense = torch.optim.SGD([p for p in model.parameters() if p is not table], lr=0.005)
    if state is not None and state.exists():
        saved = torch.load(state)
        model.load_state_dict(saved["model"])
        rows.load_state_dict(saved["rows"])
    tokens = torch.randint(3, 1024, (STEPS, 4, 16), generator=torch.Generator().manual_seed(1))
    losses = []
    # Gemma looks the tokens themselves up; Qwen computes its ids inside of its forward.
    is_known = isinstance(model, DataParallel) and "Gemma" in str(type(model.module.model))
    ids_of = (lambda batch: dict.fromkeys(find_tables(model), batch)) if is_known else None
    with RowPipeline(model, mode="exact" if ahead else "off", on_cpu=True) as pipeline:
        batches = pipeline.prefetch(list(tokens[steps.start : steps.stop]), ids_of)
        for step, batch in enumerate(batches, steps.start):
            loss = model(batch).mean()
            loss.backward()
            for optimizer in (dense, rows):
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if state is not None and step + 1 == SAVED_AT:
                torch.save({"model": model.state_dict(), "rows": rows.state_dict()}, state)
            if die and step + 1 == KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)
        if ahead and len(model.devices) > 1:  # one device on the CPU reads the table itself
            assert (pipeline.counters()["prepared"] > 0) == is_known
    return losses


def hosted(name: str, devices: str) -> tuple[nn.Module, torch.optim.Optimizer, nn.Parameter]:
    model, table = make(name)
    host_tables(model, 300e3)
    region = DataParallel(Losses(model), devices)
    weight = model.get_submodule(table).weight
    return region, row_optimizer("lazy-adagrad", region, lr=0.01), weight


@cache
def resident(name: str) -> list[float]:
    model, table = make(name)
    embedding: Any = model.get_submodule(table)
    embedding.sparse = True
    rows = torch.optim.Adagrad([embedding.weight], lr=0.01)
    return train(Losses(model), rows, embedding.weight)


@pytest.mark.parametrize(("name", "devices"), [("gemma", "cpu*2"), ("qwen", "cpu")])
def test_losses_are_those_of_resident_tables_resumed_and_fetched_ahead(
    name: str, devices: str, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    code = (
        f"from pathlib import Path; from tests.embedding.test_memory_models import hosted, train; "
        f"train(*hosted({name!r}, {devices!r}), state=Path({str(state)!r}), die=True)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False)
    assert ended.returncode == -signal.SIGKILL
    losses = train(*hosted(name, devices))
    assert losses == pytest.approx(resident(name), rel=1e-5)
    assert losses == train(*hosted(name, devices), ahead=True)
    resumed = train(*hosted(name, devices), steps=range(SAVED_AT, STEPS), state=state)
    assert losses[SAVED_AT:] == resumed


def test_what_transformers_does_with_the_model_goes_on_working(tmp_path: Path) -> None:
    for name in MODELS:
        model: Any
        model, table = make(name)
        prompt = torch.randint(3, 1024, (1, 5))
        wanted = model.generate(prompt, max_new_tokens=6, do_sample=False)
        host_tables(model, 300e3)
        assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), wanted)
        model.save_pretrained(tmp_path / name)
        again = type(model).from_pretrained(tmp_path / name)
        assert torch.equal(again.get_submodule(table).weight, model.get_submodule(table).weight)
        model.gradient_checkpointing_enable()
        model.train()(input_ids=prompt, labels=prompt, use_cache=False).loss.backward()
        assert model.get_submodule(table).weight.grad.is_sparse
        assert next(dense_parameters(model)) is not None


def test_the_trainer_trains_rows_over_a_published_table_as_resident_ones(tmp_path: Path) -> None:
    from examples.memory.with_transformers import make_trainer
    from examples.trainers.with_transformers import losses_of

    model, table = make("qwen")
    rows = model.get_submodule(table).weight.detach()
    stored, scale = (rows / 0.01).to(torch.float8_e4m3fn), torch.tensor(0.01)
    tensors = {f"{table}.shard_{number}.weight": part.clone() for number, part in enumerate(stored.chunk(4))}
    save_file({**tensors, f"{table}.weight_scale": scale}, tmp_path / "model.safetensors")
    rows.copy_(stored.float() * scale)
    adapted = copy.deepcopy(model)
    host_tables(model, 300e3)
    assert host_tables(adapted, 300e3, mapped=tmp_path, train="rows") == [table]
    losses = []
    for each in (model, adapted):
        trainer = make_trainer(each, row_optimizer("adam", each, lr=0.01), str(tmp_path / "run"))
        trainer.train()
        losses.append(losses_of(trainer))
    assert losses[0] == losses[1]
    with torch.no_grad():
        ids = torch.arange(len(rows))
        assert torch.equal(adapted.get_submodule(table)(ids), model.get_submodule(table)(ids))
