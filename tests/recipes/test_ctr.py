"""Recipe ctr: numbers against the paper's formula, ids replaced by the unknown one, and the best constant
prediction, with which each run is compared."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from dphybrid.data.batches import ArrayDataset, DrawnDataset, batches
from dphybrid.data.table.values import UNKNOWN_ID
from dphybrid.recipes.configs import build_config
from dphybrid.recipes.ctr.model import some_unknown
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
from dphybrid.recipes.registry import find_recipe
from dphybrid.run.pages import MetricsPage
from dphybrid.serving.load import load_model
from dphybrid.training.label_tasks import label_task
from dphybrid.training.metrics import floor_metrics
from dphybrid.util.roc import area_under_roc
from tests.commands import run_with


@pytest.mark.parametrize("bins", [1, 2, 48])
@pytest.mark.parametrize("width", [3, 8])
def test_the_kernel_gives_bits_and_gradients_of_torchs_operations(bins: int, width: int) -> None:
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
    dense_BN, weight_BX, found = 3 * torch.randn(700, 5), torch.randn(700, 5 * (1 + width)), []
    numbers.train().table_XS = None
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


MANY = 4000


def some(share: float) -> DrawnDataset:
    ids_BF = np.full((MANY, 2), 7, np.int32)
    arrays = {"ids_BF": ids_BF, "dense_BN": np.zeros((MANY, 1), np.float32)}
    return DrawnDataset(ArrayDataset(arrays, np.arange(MANY)), some_unknown({"num_ids": [10, 10]}, share))


def test_a_share_of_each_column_is_replaced_anew_in_each_epoch() -> None:
    seen = [some(0.3).at_epoch(5, epoch).fetch(np.arange(MANY))["ids_BF"] for epoch in (0, 1)]
    for ids_BF in seen:
        for column in range(2):
            replaced_B = ids_BF[:, column] == UNKNOWN_ID
            assert replaced_B.float().mean().item() == pytest.approx(0.3, abs=0.03)
            assert bool((ids_BF[~replaced_B, column] == 7).all())
    together = ((seen[0] != 7).all(1)).float().mean().item()
    assert together == pytest.approx(0.09, abs=0.02)  # the columns are drawn apart
    assert not torch.equal(*seen)


def test_replacements_do_not_depend_on_the_batch_or_its_reader() -> None:
    def ids(**how: object) -> torch.Tensor:
        found = batches(some(0.3), 64, seed=1, epoch=2, shuffle=True, **how)  # type: ignore[arg-type]
        return torch.cat([batch["ids_BF"] for batch in found])

    whole = ids()
    assert torch.equal(ids(start_batch=3), whole[192:])
    halves = [ids(part=(rank, 2)) for rank in (0, 1)]
    assert torch.equal(torch.cat([halves[0][:32], halves[1][:32]]), whole[:64])


ROWS = 600


def table() -> pl.DataFrame:
    random = np.random.default_rng(3)
    price_B, shop_B = random.normal(size=ROWS), random.integers(0, 3, ROWS)
    score_B = price_B + 0.8 * (shop_B == 1) + 0.7 * random.normal(size=ROWS)
    columns = {"price": price_B.round(4), "shop": [f"shop {n}" for n in shop_B], "score": score_B}
    return pl.DataFrame({**columns, "clicked": (score_B > 0).astype(int)})


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("label", ["clicked", "kind", "score"])
def test_the_floor_is_the_best_constant(label: str, weighted: bool, tmp_path: Path) -> None:
    frame = table()
    thirds = np.array(["low", "middle", "high"])[np.digitize(frame["price"], [-0.5, 0.5])]
    frame = frame.with_columns(kind=pl.Series(thirds), w=pl.int_range(ROWS) % 3 + 1)
    ignore = [name for name in ("clicked", "kind", "score") if name != label]
    frame.drop(ignore).write_csv(file := tmp_path / "table.csv")
    values = {"path": str(file), "label": label} | ({"weight": "w"} if weighted else {})
    config = build_config({"recipe": "ctr", "data": values})
    data = find_recipe("ctr").prepare(config.data, tmp_path / "prepared", 0)
    task, places_B = label_task(data.info), data.arrays["valid_rows"]
    batch = data.dataset("valid").fetch(np.arange(len(places_B)))
    logits = torch.zeros(len(places_B), *(3,) * (label == "kind"))
    weights_B = batch.get("weights_B", torch.ones(len(places_B)))
    outputs = {"labels_B": batch["labels_B"], "logits": logits, "weight": weights_B, "loss": weights_B}
    found, labels_B, weights_B = floor_metrics(task, outputs), frame[label][places_B], weights_B.numpy()
    if label == "score":
        mean = np.average(labels_B, weights=weights_B)
        expected = np.sqrt(np.average((labels_B - mean) ** 2, weights=weights_B))
        assert found["rmse"] == pytest.approx(expected, rel=1e-4)
        assert found["r2"] == pytest.approx(0, abs=1e-6)
        return
    names, classes = labels_B.cast(pl.String).to_numpy(), list(data.info["label"]["classes"])
    shares_C = np.array([weights_B[names == name].sum() for name in classes]) / weights_B.sum()
    predicted = np.tile(shares_C, (len(names), 1))
    expected = log_loss(names, predicted, sample_weight=weights_B, labels=classes)
    assert found["log_loss"] == pytest.approx(expected, rel=1e-4)


def test_a_run_says_what_it_adds(data_dir: Path, tmp_path: Path, unrecorded: None) -> None:
    file = tmp_path / "table.csv"
    table().write_csv(file)
    values = ["recipe=ctr", f"data.path={file}", "data.label=clicked", "train.epochs=2"]
    report = run_with(*values)
    assert report.beside.startswith("constant prediction auc 0.5000 (this run is 0.")
    assert f"Baseline: {report.beside}" in " ".join(report.text.split())  # which wraps at 80 columns
    found = MetricsPage.read(data_dir / "runs" / report.run_name / "metrics.json").floor
    assert found["auc"] == 0.5


def test_the_area_under_the_curve_is_scikit_learns() -> None:
    random = np.random.default_rng(0)
    labels_B, scores_B = random.integers(0, 2, 500), random.normal(size=500).round(1)  # with equal scores
    for weights_B in (None, random.random(500)):
        expected = roc_auc_score(labels_B, scores_B, sample_weight=weights_B)
        assert area_under_roc(labels_B, scores_B, weights_B) == pytest.approx(expected, rel=1e-12)
    assert np.isnan(area_under_roc(np.ones(3), scores_B[:3]))
    assert np.isnan(area_under_roc(labels_B[:2], np.array([0.0, np.nan])))
