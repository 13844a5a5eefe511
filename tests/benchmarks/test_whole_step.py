"""Whole steps: every way trains the same losses, which the benchmark checks before it measures."""

import json

import pytest

from benchmarks import ways
from benchmarks.racing import plain
from benchmarks.whole_step import OWN, RECIPE, run, text


@pytest.mark.nightly
def test_all_ways_are_measured_and_named() -> None:
    results = run(rounds=1, rows=1000, click_batches=(200,), text_batches=(16,))
    clicks = results["DLRM, 26 columns, batch 200"]
    assert list(clicks)[:2] == [RECIPE, OWN]
    assert {*ways.CLICKS} < clicks.keys()
    assert {RECIPE, OWN, *ways.TEXTS} < results["text, batch 16"].keys()
    assert all(results[name] for name in ("processor", "cores", "torch"))
    assert text(results).startswith("Milliseconds per training step")
    json.dumps(plain(results))
