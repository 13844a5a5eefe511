"""The recipes' networks are their papers' formulas, the same on several devices, and learn."""

import itertools
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dphybrid.data.batches import ArrayDataset
from dphybrid.parallel import find_data_parallel, resolve_devices
from dphybrid.parallel.comparison import notes_on
from dphybrid.recipes import ModelContext, find_recipe
from dphybrid.recipes.ctr.model import DCN, DLRM, SideBySide, Sizes
from dphybrid.recipes.ctr.pairs import Pairs
from dphybrid.recipes.text.model import IGNORED
from tests.commands import run_with

INFO = {"ctr": {"num_ids": [5, 7, 4], "num_dense": 2}, "text": {"num_words": 60}}
CONFIGS = {recipe: find_recipe(recipe).model for recipe in INFO}
KINDS = {recipe: get_args(model.model_fields["kind"].annotation) for recipe, model in CONFIGS.items()}
RECIPES = [(recipe, kind) for recipe in INFO for kind in KINDS[recipe]]
ROWS = ArrayDataset({"dense_BN": np.random.default_rng(0).normal(size=(50, 2))}, np.arange(50))
"""What bins of numbers are made from."""


def batch_of(recipe: str, size: int = 7) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    if recipe == "ctr":
        ids = [torch.randint(n, (size,), generator=draw) for n in (5, 7, 4)]
        dense = torch.randn(size, 2, generator=draw)
        labels = torch.randint(2, (size,), generator=draw).float()
        return {"ids_BF": torch.stack(ids, 1), "dense_BN": dense, "labels_B": labels}
    ids = torch.randint(60, (size, 9), generator=draw)
    return {"ids_BT": ids, "targets_BT": torch.cat([ids[:, 1:], torch.full((size, 1), IGNORED)], 1)}


def model_of(recipe: str, kind: str, devices: str = "cpu", **values: object) -> nn.Module:
    options = find_recipe(recipe).model
    sizes = {"dim": 6, "hidden": 8, "layers": 1, "dropout": 0.0, "dtype": "float64"} | values
    sizes = {name: value for name, value in (sizes | {"kind": kind}).items() if name in options.model_fields}
    context = ModelContext(resolve_devices(devices), INFO[recipe], options(**sizes), 3, rows=ROWS)
    return find_recipe(recipe).new_model(context)


@pytest.mark.parametrize(
    ("recipe", "kind", "bins"),
    [*((*each, 128) for each in RECIPES), *(("ctr", kind, 3) for kind in KINDS["ctr"])],
)
def test_several_devices_give_one_devices_losses_and_gradients(recipe: str, kind: str, bins: int) -> None:
    found = []
    for devices in ("cpu", "cpu*3"):
        model = model_of(recipe, kind, devices, bins=bins)
        assert [notes_on(block.module) for block in find_data_parallel(model).values()] == [[]]
        outputs = model(batch_of(recipe))
        (outputs["loss"].sum() / outputs["weight"].sum()).backward()
        gradients = {name: p.grad.to_dense() for name, p in model.named_parameters()}
        found.append({"loss": outputs["loss"].detach(), **gradients})
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("num_dense", [0, 2])
def test_dlrm_sees_the_product_of_each_pair_once(num_dense: int) -> None:
    torch.manual_seed(0)
    network = DLRM(Sizes(3, 5, num_dense, 8, 1, 0.0))
    rows_BFD, dense_BN = torch.randn(1, 3, 5), torch.randn(1, num_dense)
    seen: list[Tensor] = []
    network.top.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    network(rows_BFD, dense_BN)
    other = network.bottom(dense_BN)[0] if network.bottom is not None else rows_BFD[0].flatten()
    vectors = ([other] if num_dense else []) + list(rows_BFD[0])
    products = torch.stack([one @ two for one, two in itertools.combinations(vectors, 2)])
    torch.testing.assert_close(seen[0][: len(other)], other)
    torch.testing.assert_close(seen[0][len(other) :].sort().values, products.sort().values)


def test_a_cross_layer_multiplies_the_input_with_a_map_of_itself() -> None:
    torch.manual_seed(0)
    network = DCN(Sizes(3, 5, 2, 8, 1, 0.0, cross_layers=2)).double()
    rows_BFD, dense_BN = torch.randn(4, 3, 5, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    for b in range(4):
        x0 = x = torch.cat([rows_BFD[b].flatten(), dense_BN[b]])
        for layer in network.cross:
            x = x0 * (layer.weight @ x + layer.bias) + x
        expected = network.linear.weight[0] @ x + network.deep(x0)[0]
        torch.testing.assert_close(network(rows_BFD, dense_BN)[b], expected)


BAGS = {"num_ids": [5, 7, 6, 4], "num_dense": 2, "num_bags": 2}


@pytest.mark.parametrize("devices", ["cpu", "cpu*3"])
@pytest.mark.parametrize("kind", KINDS["ctr"])
def test_a_bag_is_the_mean_of_its_items_rows(kind: str, devices: str) -> None:
    """One row at a time, without padding."""
    options = CONFIGS["ctr"](kind=kind, dim=6, hidden=8, dropout=0.0, dtype="float64")
    model = find_recipe("ctr").new_model(ModelContext(resolve_devices(devices), BAGS, options, 3, rows=ROWS))
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 4, (7, 2, 1), generator=draw)
    items_BGL = torch.stack([torch.randint(n, (7, 3), generator=draw) for n in (6, 4)], 1)
    batch = {
        "ids_BF": torch.stack([torch.randint(n, (7,), generator=draw) for n in (5, 7)], 1),
        "bags_BFL": torch.where(torch.arange(3) < lengths, items_BGL, -1),
        "dense_BN": torch.randn(7, 2, generator=draw),
        "labels_B": torch.randint(2, (7,), generator=draw).float(),
    }
    item, day, *bags = model.table.weight.detach().split([5, 7, 6, 4])
    losses = []
    for b in range(7):
        one, two = batch["ids_BF"][b]
        means = [rows[ids[ids >= 0]].mean(0) for rows, ids in zip(bags, batch["bags_BFL"][b], strict=True)]
        rows = torch.stack([item[one], day[two], *means])
        logit = model.region.module.network(rows[None], batch["dense_BN"][b : b + 1].double())
        losses.append(F.binary_cross_entropy_with_logits(logit, batch["labels_B"][b : b + 1].double()))
    torch.testing.assert_close(model(batch)["loss"], torch.stack(losses))


def test_clicks_are_learnt(unrecorded: None, tmp_path: Path) -> None:
    body = "\n".join(
        f"{'abcd'[i % 4]},{'xyz'[i % 3]},{i * 7 % 10},{int(i % 4 == 0 or i % 3 == 1)}" for i in range(1200)
    )
    (tmp_path / "clicks.csv").write_text("one,two,n,clicked\n" + body)
    values = ["recipe=ctr", f"data.path={tmp_path / 'clicks.csv'}", "data.label=clicked"]
    values += ["model.kind=dlrm", "model.dim=4", "model.hidden=16"]
    report = run_with(*values, "train.epochs=8", "train.lr=0.01", "table.lr=0.02")
    assert report.metrics["auc"] > 0.98


def test_a_layer_of_inputs_side_by_side_is_that_of_their_cat() -> None:
    torch.manual_seed(0)
    layer = SideBySide(7, 3)
    inputs = torch.randn(5, 4, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    weights, found = torch.randn(5, 3), []
    for out in (layer(*inputs), nn.functional.linear(torch.cat(inputs, 1), layer.weight, layer.bias)):
        grads = torch.autograd.grad((out * weights).sum(), [*inputs, *layer.parameters()])
        found.append([out, *grads])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("columns", [1, 4, 39])
@pytest.mark.parametrize("dim", [3, 16, 20])
@pytest.mark.parametrize("with_first", [False, True])
def test_the_kernel_multiplies_the_pairs_that_torchs_operations_multiply(
    columns: int, dim: int, with_first: bool
) -> None:
    torch.manual_seed(0)
    pairs, found = Pairs(columns + with_first), []
    rows_BFD, first_BD = torch.randn(300, columns, dim), torch.randn(300, dim)
    for dtype in (torch.float32, torch.float64):  # the kernel is for float32
        given = [each.to(dtype).requires_grad_() for each in (rows_BFD, first_BD)[: 1 + with_first]]
        out_BX = pairs(*given)
        assert ("_Pairs" in str(out_BX.grad_fn)) is (dtype is torch.float32)
        weight_BX = torch.linspace(-1, 1, out_BX.numel(), dtype=dtype).view_as(out_BX)
        grads = torch.autograd.grad((out_BX * weight_BX).sum(), given, create_graph=True, allow_unused=True)
        again = torch.autograd.grad((out_BX * weight_BX).sum(), given)
        torch.testing.assert_close(again, grads, rtol=1e-4, atol=1e-4)
        found.append([each.detach().float() for each in (out_BX, *grads)])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    torch.set_num_threads(3)
    assert torch.equal(pairs(rows_BFD.requires_grad_(), *[first_BD] * with_first), found[0][0])
    torch.set_num_threads(1)
