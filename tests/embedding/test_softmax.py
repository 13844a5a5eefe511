"""The chunked cross entropy of a linear layer, against torch's own on whole scores."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dphybrid.embedding import softmax
from dphybrid.embedding.softmax import IGNORED, linear_cross_entropy
from dphybrid.util.errors import UserError


@pytest.fixture(params=[1000, 4], ids=["one chunk", "chunks of 4 rows"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "CACHED", {"cpu": 2 * 7})
    monkeypatch.setattr(softmax, "HELD", 7 * request.param)


def case(dtype: torch.dtype, bias: bool = True) -> tuple[list[Tensor], Tensor]:
    """Rows (10, 5), weights (7, 5), perhaps a bias, and targets, two of them ignored."""
    torch.manual_seed(0)
    drawn = [3 * torch.randn(10, 5, dtype=dtype), torch.randn(7, 5, dtype=dtype)]
    if bias:
        drawn.append(torch.randn(7, dtype=dtype))
    targets_X = torch.randint(0, 7, (10,))
    targets_X[[0, 6]] = IGNORED
    return [tensor.requires_grad_() for tensor in drawn], targets_X


def whole(given: list[Tensor], targets_X: Tensor) -> Tensor:
    scores_XV = F.linear(given[0], given[1], *given[2:])
    return F.cross_entropy(scores_XV, targets_X, ignore_index=IGNORED, reduction="none")


def chunked(given: list[Tensor], targets_X: Tensor) -> Tensor:
    return linear_cross_entropy(given[0], given[1], targets_X, *given[2:])


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_and_gradients_are_torch_s(dtype: torch.dtype, bias: bool, weighted: bool) -> None:
    given, targets_X = case(dtype, bias)
    weight_X = torch.rand(10, dtype=dtype) if weighted else torch.full((10,), 0.1, dtype=dtype)
    loss_X, expected_X = chunked(given, targets_X), whole(given, targets_X)
    torch.testing.assert_close(loss_X, expected_X)
    assert loss_X[[0, 6]].tolist() == [0, 0]
    torch.testing.assert_close(
        torch.autograd.grad((weight_X * loss_X).sum(), given),
        torch.autograd.grad((weight_X * expected_X).sum(), given),
    )
    with torch.no_grad():
        torch.testing.assert_close(chunked(given, targets_X), expected_X)


@pytest.mark.usefixtures("chunks")
def test_bfloat16_multiplies_in_it_and_sums_in_float32() -> None:
    given, targets_X = case(torch.float32)
    expected_X = whole(given, targets_X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss_X = chunked(given, targets_X)
    assert loss_X.dtype == torch.float32
    assert not torch.equal(loss_X, expected_X)
    torch.testing.assert_close(loss_X, expected_X, rtol=0.02, atol=0.05)
    found = torch.autograd.grad(loss_X.mean(), given)
    assert {grad.dtype for grad in found} == {torch.float32}
    torch.testing.assert_close(found, torch.autograd.grad(expected_X.mean(), given), rtol=0.05, atol=0.005)


def test_its_derivative_is_the_numerical_one_and_there_is_no_second() -> None:
    given, targets_X = case(torch.float64)
    assert torch.autograd.gradcheck(lambda *inputs: chunked(list(inputs), targets_X), given)
    (grad_XH,) = torch.autograd.grad(chunked(given, targets_X).sum(), given[0], create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        grad_XH.sum().backward()


@pytest.mark.usefixtures("chunks")
def test_scores_of_large_numbers_and_unlikely_answers_stay_finite() -> None:
    rows_XH = torch.tensor([[200.0], [-200.0]], requires_grad=True)
    loss_X = linear_cross_entropy(rows_XH, torch.tensor([[1.0], [-1.0], [0.5]]), torch.tensor([1, 1]))
    assert loss_X.tolist() == [400, 0]
    loss_X.sum().backward()
    assert rows_XH.grad is not None
    assert rows_XH.grad.tolist() == [[2], [0]]


def test_no_scores_are_held_for_the_backward() -> None:
    held: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        held.append(tensor.numel())
        return tensor

    rows_XH, weights_VH = torch.randn(60, 2, requires_grad=True), torch.randn(50, 2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        linear_cross_entropy(rows_XH, weights_VH, torch.zeros(60, dtype=torch.long))
    assert 0 < max(held) < 60 * 50 / 10


def test_torch_compile_follows_it_in_one_graph() -> None:
    given, targets_X = case(torch.float64)
    compiled = torch.compile(linear_cross_entropy, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(given[0], given[1], targets_X, given[2]), chunked(given, targets_X))


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ([0, 1, 2, 0], r"targets of shape \(4,\) of torch.int64 for rows of shape \(3, 5\)"),
        ([0, 1], r"targets of shape \(2,\)"),
        ([0.0, 1.0, 2.0], "of torch.float32"),
        ([0, -1, 2], "target -1 at position 1 is not a class; classes are 0 to 6, and -100 means no class"),
        ([0, 1, 7], "target 7 at position 2"),
    ],
)
def test_targets_that_are_no_classes_are_refused(targets: list[float], words: str) -> None:
    given, _ = case(torch.float64)
    with pytest.raises(UserError, match=words):
        linear_cross_entropy(given[0][:3], given[1], torch.tensor(targets))
