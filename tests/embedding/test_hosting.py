"""`host_tables`: the large embeddings of any model become tables in host memory, in place."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dphybrid.embedding import dense_parameters, find_tables, host_tables, row_optimizer
from dphybrid.parallel import DataParallel
from dphybrid.util.errors import UserError


class Scaled(nn.Embedding):
    """As the per-layer rows of language models."""

    def __init__(self, *shape: int, factor: float = 3.0, **options: object) -> None:
        super().__init__(*shape, **options)  # type: ignore[arg-type]
        self.factor = nn.Buffer(torch.tensor(factor), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.factor.to(self.weight.dtype)


class Model(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"rows": Scaled(100, 6, padding_idx=3, sparse=sparse)})
        self.small = nn.Embedding(100, 2)
        self.out = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (
            self.out(torch.cat([self.layers["rows"](ids), self.small(ids)], -1)).square().mean(1)
        )
        return out


IDS = torch.tensor([[1, 2, 3], [1, 1, 99], [0, 4, 5], [3, 3, 7]])
LARGE = 2000


def trained(model: nn.Module, rows: torch.optim.Optimizer, blocks: list[nn.Parameter]) -> list[float]:
    dense, losses = torch.optim.SGD(blocks, lr=0.1), []
    for _ in range(5):
        loss = model(IDS).mean()
        loss.backward()
        for optimizer in (dense, rows):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("devices", ["cpu", "cpu*2", "cpu*3"])
def test_a_hosted_table_trains_as_a_resident_one(devices: str) -> None:
    torch.manual_seed(0)
    resident = Model(sparse=True).double()
    hosted = copy.deepcopy(resident)
    assert host_tables(hosted, LARGE) == ["layers.rows"]
    weight = resident.layers["rows"].weight
    wanted = trained(
        resident, torch.optim.SGD([weight], lr=0.1), [p for p in resident.parameters() if p is not weight]
    )
    region = DataParallel(hosted, devices)
    got = trained(region, row_optimizer("sgd", region, lr=0.1), list(dense_parameters(region)))
    assert got == pytest.approx(wanted, rel=1e-12)
    torch.testing.assert_close(hosted.layers["rows"].weight, weight, rtol=1e-12, atol=0)


def test_weight_names_and_forward_stay() -> None:
    model = Model()
    weight, wanted, names = model.layers["rows"].weight, model(IDS), list(model.state_dict())
    host_tables(model, LARGE)
    assert model.layers["rows"].weight is weight  # without a second copy
    assert list(find_tables(model)) == ["layers.rows"]
    assert list(model.state_dict()) == names
    assert torch.equal(model(IDS), wanted)
    again = copy.deepcopy(model)
    assert torch.equal(again(IDS), wanted)
    assert list(find_tables(again)) == ["layers.rows"]
    assert isinstance(model.layers["rows"], Scaled)  # and an nn.Embedding
    assert host_tables(model, LARGE) == []


def test_casts_leave_the_weight_and_its_rows_follow() -> None:
    model = Model()
    host_tables(model, LARGE)
    model.bfloat16()
    table = model.layers["rows"]
    assert table.weight.dtype is torch.float32
    assert table.factor.dtype is torch.bfloat16
    assert model(IDS).dtype is torch.bfloat16
    rounded = Model().bfloat16()
    wanted = rounded(IDS)
    host_tables(rounded, 1000)
    assert torch.equal(rounded(IDS), wanted)


def test_refuses_a_tied_output_before_it_changes_anything() -> None:
    model = nn.ModuleDict(
        {"other": nn.Embedding(100, 8), "rows": nn.Embedding(100, 8), "out": nn.Linear(8, 100)}
    )
    model["alias"] = model["other"]  # the same lookup by another name shares nothing
    model["out"].weight = model["rows"].weight
    with pytest.raises(UserError, match=r"rows .* shares its weight with out.weight.*larger_than=3200"):
        host_tables(model, 100)
    assert not find_tables(model)
    assert host_tables(nn.ModuleList([model["other"], model["alias"]]), 100) == ["0"]
    model["rows"].requires_grad_(False)
    assert host_tables(model["rows"], 100) == [""]


def test_embeddings_that_share_a_weight_go_on_sharing_it() -> None:
    model = nn.ModuleDict({"encoder": nn.Embedding(100, 8), "decoder": nn.Embedding(100, 8)})
    weight = model["decoder"].weight = model["encoder"].weight
    assert host_tables(model, 100) == ["encoder", "decoder"]
    (model["encoder"](IDS).sum() + model["decoder"](IDS).sum()).backward()
    assert model["encoder"].weight is model["decoder"].weight is weight
    assert weight.grad is not None
    assert weight.grad.is_sparse
    assert weight.grad.to_dense()[1, 0] == 2 * (IDS == 1).sum()


def test_refuses_what_tables_do_not_do() -> None:
    for option in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        with pytest.raises(UserError, match=min(option)):
            host_tables(nn.Sequential(nn.Embedding(100, 8, **option)), 100)
    with pytest.raises(UserError, match="float16"):
        host_tables(nn.Sequential(nn.Embedding(100, 8).half()), 100)
    with pytest.raises(UserError, match="meta"):
        host_tables(nn.Sequential(nn.Embedding(100, 8, device="meta")), 100)


def test_a_mapped_table_is_frozen_and_reads_the_file(tmp_path: Path) -> None:
    saved = Model()
    rest = {name: value.contiguous() for name, value in saved.state_dict().items()}
    rows = {"layers.rows.weight": rest.pop("layers.rows.weight")}
    for file, tensors in (("a", rows), ("b", rest)):
        save_file(tensors, tmp_path / f"{file}.safetensors")
    with torch.device("meta"):
        model = Model()
    host_tables(model, LARGE, mapped=tmp_path)
    model.load_state_dict(rest, strict=False, assign=True)
    model.layers["rows"].factor = saved.layers["rows"].factor  # not in the checkpoint
    assert torch.equal(model(IDS), saved(IDS))
    model(IDS).sum().backward()
    assert model.layers["rows"].weight.grad is None
    assert model.small.weight.grad is not None


def test_refuses_checkpoints_that_do_not_hold_the_table(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"

    def refused(told: str) -> None:
        model = Model()
        with pytest.raises(UserError, match=told):
            host_tables(model, LARGE, mapped=tmp_path)
        assert not find_tables(model)

    refused("has no safetensors files")
    save_file({"model.layers.rows.weight": torch.zeros(100, 6)}, file)
    refused("did you mean 'model.layers.rows.weight'")
    save_file({"layers.rows.weight": torch.zeros(50, 6)}, file)
    refused(r"\(50, 6\), but the model's is \(100, 6\)")
    save_file({"layers.rows.weight": torch.zeros(100, 6)}, tmp_path / "again.safetensors")
    refused("model.safetensors: has 'layers.rows.weight', as again.safetensors")
    file.write_bytes(file.read_bytes()[:-8])
    refused("cannot be read as safetensors")
