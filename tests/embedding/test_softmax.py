"""The cross entropy of a linear layer, whole and in chunks, against the scores by hand."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dphybrid.embedding import softmax
from dphybrid.embedding.softmax import IGNORED, linear_cross_entropy


@pytest.fixture(params=["whole", "chunks of 4 rows"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "whole":
        monkeypatch.setattr(softmax, "_WHOLE", 0)
        monkeypatch.setattr(softmax, "_CHUNK", 4 * 7)


def case(dtype: torch.dtype, bias: bool = True) -> tuple[list[Tensor], Tensor]:
    """Rows (10, 5), weights (7, 5), perhaps a bias, and targets, two of them ignored."""
    torch.manual_seed(0)
    drawn = [3 * torch.randn(10, 5, dtype=dtype), torch.randn(7, 5, dtype=dtype)]
    if bias:
        drawn.append(torch.randn(7, dtype=dtype))
    targets_X = torch.randint(0, 7, (10,))
    targets_X[[0, 6]] = IGNORED
    return [tensor.requires_grad_() for tensor in drawn], targets_X


def by_hand(inputs: list[Tensor], targets_X: Tensor) -> Tensor:
    log_XV = torch.log_softmax(F.linear(inputs[0], inputs[1], *inputs[2:]), 1)
    return -log_XV[torch.arange(10), targets_X.clamp(min=0)] * (targets_X != IGNORED)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_losses_and_gradients_are_those_of_whole_scores(dtype: torch.dtype, bias: bool) -> None:
    inputs, targets_X = case(dtype, bias)
    weight_X = torch.rand(10, dtype=dtype)
    loss_X = linear_cross_entropy(inputs[0], inputs[1], targets_X, *inputs[2:])
    expected_X = by_hand(inputs, targets_X)
    torch.testing.assert_close(loss_X, expected_X)
    assert loss_X[[0, 6]].tolist() == [0, 0]
    torch.testing.assert_close(
        torch.autograd.grad((weight_X * loss_X).sum(), inputs),
        torch.autograd.grad((weight_X * expected_X).sum(), inputs),
    )


@pytest.mark.usefixtures("chunks")
def test_autocast_multiplies_in_bfloat16() -> None:
    inputs, targets_X = case(torch.float32)
    expected_X = by_hand(inputs, targets_X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss_X = linear_cross_entropy(inputs[0], inputs[1], targets_X, inputs[2])
    assert loss_X.dtype == torch.float32
    assert not torch.equal(loss_X, expected_X)
    torch.testing.assert_close(loss_X, expected_X, rtol=0.02, atol=0.05)
    gradients = torch.autograd.grad(loss_X.mean(), inputs)
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    torch.testing.assert_close(gradients, torch.autograd.grad(expected_X.mean(), inputs), rtol=0.1, atol=0.01)


@pytest.mark.usefixtures("chunks")
def test_scores_of_large_numbers_stay_finite() -> None:
    rows_XH = torch.tensor([[200.0], [-200.0]], requires_grad=True)
    loss_X = linear_cross_entropy(rows_XH, torch.tensor([[1.0], [-1.0], [0.5]]), torch.tensor([1, 1]))
    assert loss_X.tolist() == [400, 0]
    loss_X.sum().backward()
    assert rows_XH.grad is not None
    assert rows_XH.grad.tolist() == [[2], [0]]
