"""Piecewise-linear encoding: the paper's formula, bins from training rows, kept in checkpoints."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from dphybrid.data.batches import ArrayDataset
from dphybrid.recipes.ctr.numbers import (
    BIN_ROWS,
    RUN_ROWS,
    RUNS,
    EmbeddedBins,
    OnNumbers,
    _table,
    quantile_bins,
    sample_dense,
)
from dphybrid.serving.load import load_model
from tests.commands import run_with


def test_gradients_pass_through_the_bin_that_a_number_is_in() -> None:
    torch.manual_seed(0)
    numbers = EmbeddedBins(torch.tensor([[-1.0, 0.0, 0.5, 3.0]]), 2).double()
    dense_BN = torch.tensor([[-2.0], [-0.7], [0.2], [1.0], [5.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(numbers, dense_BN)


@pytest.mark.parametrize("bins", [1, 2, 48])
@pytest.mark.parametrize("width", [3, 8])
def test_the_kernel_gives_the_bits_of_torchs_operations(bins: int, width: int) -> None:
    torch.manual_seed(0)
    dense_BN = 3 * torch.randn(700, 5)
    edges_NE = torch.from_numpy(quantile_bins(dense_BN.round(decimals=1).numpy(), bins))
    dense_BN[:5] = torch.tensor([0.0, -0.0, 1e30, -1e30, 1e-40])[:, None]
    dense_BN[5] = edges_NE[:, bins // 2]
    numbers = EmbeddedBins(edges_NE, width)
    numbers.table_XS = _table(numbers.edges_NE, numbers.weight_NED, numbers.bias_ND)
    torch.testing.assert_close(numbers.table_XS, numbers.table(), rtol=1e-5, atol=1e-6)
    for given_BN in (dense_BN, dense_BN[:0], dense_BN[::2], dense_BN[:5].T):
        trained_BX = numbers.train()(given_BN)
        assert "_Embedded" in str(trained_BX.grad_fn)
        assert torch.equal(numbers.eval()(given_BN), trained_BX)


@pytest.mark.parametrize("bins", [1, 2, 48])
@pytest.mark.parametrize("width", [3, 8])
def test_the_kernels_gradients_are_those_of_torchs_operations(bins: int, width: int) -> None:
    torch.manual_seed(0)
    dense_BN = 3 * torch.randn(700, 5)
    numbers = EmbeddedBins(torch.from_numpy(quantile_bins(dense_BN.round(decimals=1).numpy(), bins)), width)
    weight_BX, found = torch.randn(700, 5 * (1 + width)), []
    for by_torch in (False, True):  # with a gradient by the numbers themselves, torch computes all
        numbers.zero_grad()
        given_BN = dense_BN.clone().requires_grad_(by_torch)
        out_BX = numbers(given_BN)
        assert ("_Embedded" in type(out_BX.grad_fn).__name__) is not by_torch
        (out_BX * weight_BX).sum().backward()
        found.append([out_BX.detach(), *(parameter.grad.clone() for parameter in numbers.parameters())])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-4)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        numbers.zero_grad()
        (numbers(dense_BN) * weight_BX).sum().backward()
        assert all(torch.equal(p.grad, q) for p, q in zip(numbers.parameters(), found[0][1:], strict=True))
    finally:
        torch.set_num_threads(threads)


def test_the_compiler_sees_operations_without_gradients_too() -> None:
    numbers = EmbeddedBins(torch.tensor([[-1.0, 0.0, 0.5, 3.0]]), 2)
    dense_BN = torch.tensor([[-2.0], [-0.7], [0.2], [5.0]])
    with torch.no_grad():
        compiled_BX = torch.compile(numbers, backend="eager", fullgraph=True)(dense_BN)
        assert torch.equal(compiled_BX, numbers(dense_BN))
        recorded = torch.jit.trace(numbers, dense_BN)
        assert torch.equal(recorded(dense_BN + 1), numbers(dense_BN + 1))


def test_bins_are_quantiles_and_frequent_values_begin_one() -> None:
    even_B, constant_B = np.arange(101.0), np.full(101, 7.0)
    spiked_B = np.where(np.arange(101) < 90, 0.0, np.arange(101.0))
    bins_NE = quantile_bins(np.stack([even_B, constant_B, spiked_B, even_B % 2], 1).astype(np.float32), 4)
    assert bins_NE.dtype == np.float32
    assert bins_NE[0].tolist() == [0, 25, 50, 75, 100]
    assert bins_NE[1].tolist() == [7.0] * 5
    assert bins_NE[2, 0] == 0
    assert ((bins_NE[2] > 90) & (bins_NE[2] < 100)).any()  # plain quantiles would be 0, 0, 0, 0, 100
    assert bins_NE[3].tolist()[:1] + bins_NE[3].tolist()[-1:] == [0.0, 1.0]
    few = quantile_bins(even_B[:100, None], 128)  # a bin for each 8 rows
    assert len(np.unique(few)) <= 100 // BIN_ROWS + 1


def test_bins_of_long_data_come_from_runs_over_all_of_it() -> None:
    num_rows = 2 * RUNS * RUN_ROWS
    rows = ArrayDataset({"dense_BN": np.arange(num_rows, dtype=np.float32)[:, None]}, np.arange(num_rows))
    sampled_B = sample_dense(rows)[:, 0]
    assert (len(sampled_B), sampled_B[0], sampled_B[-1]) == (RUNS * RUN_ROWS, 0, num_rows - 1)
    quarters = np.array([0.25, 0.5, 0.75])
    assert np.quantile(sampled_B, quarters) == pytest.approx(quarters * num_rows, rel=0.02)


def test_bins_belong_to_the_checkpoint(data_dir: Path, tmp_path: Path, unrecorded: None) -> None:
    random = np.random.default_rng(0)
    price_B = random.gamma(2.0, 3.0, 900).round(3)
    frame = pl.DataFrame({"price": price_B, "one": 1, "shop": ["abc"[i % 3] for i in range(900)]})
    frame = frame.with_columns(
        price=pl.when(pl.int_range(900) % 11 != 0).then("price"), clicked=pl.col("price").is_between(4, 8)
    )
    frame.write_csv(tmp_path / "clicks.csv")
    values = ["recipe=ctr", f"data.path={tmp_path}/clicks.csv", "data.label=clicked"]
    values += ["data.numeric=one", "model.hidden=16", "model.dim=4", "model.bins=6", "devices=cpu*2"]
    values += ["train.schedule=constant"]
    whole = run_with(*values, "train.epochs=2", run_name="whole")
    run_with(*values, "train.epochs=1", run_name="broken")
    assert run_with(*values, "train.epochs=2", resume="broken").digests == whole.digests
    edges_NE = load_model("whole").state_dict()["region.module.network.numbers.edges_NE"]
    (prepared,) = (data_dir / "prepared").glob("ctr-*[0-9a-f]")
    dense_BN = np.load(prepared / "dense_BN.npy")
    train_BN = dense_BN[np.load(prepared / "train_rows.npy")]
    # The flag of a missing price has no bins: it is an input as it is.
    np.testing.assert_array_equal(edges_NE, quantile_bins(train_BN[:, [0, 2]], 6))
    missing_B = np.arange(900) % 11 == 0
    assert (dense_BN[missing_B, 0] == 0).all()  # without a value: the mean's pieces, and the indicator
    assert dense_BN[:, 1].tolist() == missing_B.tolist()


def test_embedded_bins_are_the_number_and_a_layer_of_each_columns_own() -> None:
    torch.manual_seed(0)
    edges_NE = torch.tensor([[0.0, 1.0, 2.0], [-1.0, 0.0, 0.0]])
    embedded = EmbeddedBins(edges_NE, 4)
    found_BO = embedded(torch.tensor([[1.5, -0.5], [300.0, -2.0]]))
    assert found_BO.shape == (2, 10)
    inputs = torch.tensor([[1.5 / (1 + 0.25) ** 0.5, 1.0, 0.5], [-0.5 / (1 + 1 / 36) ** 0.5, 0.5, 0.0]])
    for column in range(2):
        expected_D = inputs[column] @ embedded.weight_NED[column] + embedded.bias_ND[column]
        expected_P = torch.cat([inputs[column][:1], expected_D.relu()])
        torch.testing.assert_close(found_BO[0, 5 * column : 5 * column + 5], expected_P)
    far = embedded(torch.tensor([[1e6, 0.0]]))
    torch.testing.assert_close(far[:, :5], found_BO[1:, :5], rtol=0, atol=0.01)  # squashed


@pytest.mark.parametrize("by_torch", [False, True])
def test_flags_follow_the_encoded_numbers_as_they_are(by_torch: bool) -> None:
    torch.manual_seed(0)
    edges_NE = torch.randn(2, 9).sort(dim=1).values
    plain, flagged = EmbeddedBins(edges_NE, 4), EmbeddedBins(edges_NE, 4, [1, 3])
    flagged.load_state_dict(plain.state_dict())
    dense_BN, flags_BN = torch.randn(7, 2), torch.tensor([[0.0, 1.0]]).expand(7, 2)
    given_BN = torch.stack([dense_BN[:, 0], flags_BN[:, 0], dense_BN[:, 1], flags_BN[:, 1]], dim=1)
    found_BX, weight_BX = flagged(given_BN.requires_grad_(by_torch)), torch.randn(7, 12)
    wanted_BX = torch.cat([plain(dense_BN), flags_BN], dim=1)
    torch.testing.assert_close(found_BX, wanted_BX)
    for each_BX in (found_BX, wanted_BX):
        (each_BX * weight_BX).sum().backward()
    torch.testing.assert_close(flagged.weight_NED.grad, plain.weight_NED.grad)


def test_tables_made_once_give_the_same_bits() -> None:
    torch.manual_seed(0)
    embedded = EmbeddedBins(torch.randn(3, 9).sort(dim=1).values, 4).eval()
    dense_BN = torch.randn(100, 3)
    wanted = embedded(dense_BN)
    model = OnNumbers(torch.nn.Identity(), embedded)
    embedded.fix_for_predictions()
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            assert torch.equal(model.numbers(dense_BN), wanted)
    with torch.no_grad():
        embedded.weight_NED[:, 1:].zero_()
    assert torch.equal(model.numbers(dense_BN), wanted)
