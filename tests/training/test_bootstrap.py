"""Intervals by the bootstrap."""

import math

import pytest
import torch

from dphybrid.training.bootstrap import interval, resampled
from dphybrid.training.metrics import BINARY


def test_resamples_take_the_same_rows_of_all_models_and_leave_out_those_without_a_metric() -> None:
    outputs = {"labels_B": torch.tensor([0.0, 1.0, 1.0]), "logits": torch.tensor([-1.0, 1.0, 2.0])}
    found = resampled(BINARY, [outputs, outputs], 100, seed=0)
    assert 0 < len(found) < 100  # of three rows, often all have one label
    assert all(first == second for first, second in found)


def test_rows_of_weight_zero_do_not_spoil_an_interval() -> None:
    low, high = interval([math.nan, *(number / 100 for number in range(101))])
    assert (low, high) == pytest.approx((0.025, 0.975))
    assert all(map(math.isnan, interval([math.nan])))
