"""Whole steps: every way trains the same losses, which the benchmark checks before it measures."""

import json

import pytest
import torch

from benchmarks import ways
from benchmarks.racing import plain
from benchmarks.whole_step import OWN, RECIPE, run, text


def test_all_ways_are_measured_and_named() -> None:
    results = run(rounds=1, rows=1000, click_batches=(200,), text_batches=(16,), pair_batches=(512,))
    clicks = results["DLRM, 26 columns, batch 200"]
    assert list(clicks)[:2] == [RECIPE, OWN]
    assert {*ways.CLICKS} < clicks.keys()
    assert results["text, batch 16"]["tokens a CPU second"].keys() == {RECIPE, OWN, *ways.TEXTS}
    pairs = results["retrieval, batch 512"]["ratios"]
    assert pairs.keys() == {f"{name} / {OWN}" for name in (RECIPE, *ways.PAIRS)}
    assert all(results[name] for name in ("processor", "cores", "torch"))
    assert "faults)" in text(results)
    json.dumps(plain(results))


def test_a_way_with_other_losses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(experiment: ways.Experiment) -> ways.Way:
        way = ways.plain_retrieval(experiment)
        return ways.Way(lambda batch: {**way.losses(batch), "weight": torch.full((64,), 1.01)}, way.blocks)

    monkeypatch.setitem(ways.PAIRS, "sparse nn.Embedding", other)
    with pytest.raises(RuntimeError, match=r"^sparse nn.Embedding: the losses are .* the recipe's loop has"):
        run(rounds=1, rows=1000, click_batches=(), text_batches=(), pair_batches=(64,))
