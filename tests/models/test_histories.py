"""Retrieval from histories against plain PyTorch and naive references, on any devices."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import dphybrid
from dphybrid.api.run import TrainedRun
from dphybrid.data import Prepared, batches
from dphybrid.embedding.softmax import IGNORED
from dphybrid.parallel import resolve_devices
from dphybrid.recipes import ModelContext, find_recipe
from dphybrid.recipes.configs import build_config
from dphybrid.recipes.retrieval import RetrievalDataConfig, RetrievalModelConfig
from dphybrid.recipes.retrieval.histories import HistoryModel
from dphybrid.run.pages import ResultPage
from tests.commands import run_with
from tests.models.test_retrieval import write_rows
from tests.preparing import prepare
from tests.refusing import refused
from tests.training.stopping import stopped_and_resumed

KINDS = ["bag", "transformer"]


def small(folder: Path, **values: object) -> Prepared:
    write_rows(folder / "rows.csv")
    given = {"cutoffs": (3, 8), "time": "day"} | values
    data = RetrievalDataConfig(path=str(folder / "rows.csv"), **given)  # type: ignore[arg-type]
    return prepare("retrieval", data, folder / "prepared", 0)


def options(kind: str, **values: object) -> RetrievalModelConfig:
    sizes = {"dim": 4, "dtype": "float64", "dropout": 0.0, "dropped": 0.5} | values
    return RetrievalModelConfig(kind=kind, **sizes)  # type: ignore[arg-type]


def model_for(data: Prepared, o: RetrievalModelConfig, devices: str = "cpu") -> HistoryModel:
    return find_recipe("retrieval").new_model(ModelContext(resolve_devices(devices), data.info, o, 1))


def training(data: Prepared, o: RetrievalModelConfig, size: int = 10) -> list[dict[str, Tensor]]:
    rows = find_recipe("retrieval").training_rows(data.dataset("train"), data.info, o)
    return list(batches(rows, size, seed=0, epoch=0, shuffle=True))


def in_order(data: Prepared) -> dict[int, list[int]]:
    starts, items = data.arrays["history_starts"], data.arrays["history_items"]
    return {user: items[starts[user] : starts[user + 1]].tolist() for user in range(len(starts) - 1)}


@pytest.mark.parametrize("devices", ["cpu", "cpu*3"])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_plain_torch(kind: str, devices: str, tmp_path: Path) -> None:
    """One user at a time, without padding, and nn.Embedding for the rows."""
    data, o = small(tmp_path), options(kind)
    model = model_for(data, o, devices)
    padding = data.info["num_items"]
    weight = model.inputs.weight.detach().clone().requires_grad_()
    region = model.region.module
    (batch, *_) = training(data, o)
    model.zero_grad()
    out = model(batch)
    (out["loss"].sum() / out["weight"].sum()).backward()
    losses, counts = [], []
    dense = {name: p.detach().clone().requires_grad_() for name, p in region.named_parameters()}
    for row in range(len(batch["lengths_B"])):
        # A bag's number of items is that of its sum; padding adds zeros.
        length = None if kind == "bag" else int(batch["lengths_B"][row])
        items_L = batch["history_BL"][row, :length]
        rows_LD = F.embedding(items_L, weight)
        network = {
            name.removeprefix("network."): p for name, p in dense.items() if name.startswith("network")
        }
        if kind == "bag":
            kept = (items_L != padding).sum()
            vector = torch.tanh(rows_LD.sum(0) / (max(1, int(kept)) * 0.5) ** 0.5)
        else:
            vector = torch.func.functional_call(region.network, network, (rows_LD.unsqueeze(0), None))[0]
        scores = vector @ dense["output.weight"].T + dense["output.bias"]
        targets = batch["targets_BT"][row]
        targets = targets[targets != IGNORED]
        logs = F.log_softmax(scores, -1)
        losses.append(-(logs[targets] if kind == "bag" else logs.gather(1, targets[:, None])).sum())
        counts.append(len(targets))
    torch.testing.assert_close(out["loss"].detach(), torch.stack(losses).detach(), rtol=1e-9, atol=1e-9)
    assert out["weight"].tolist() == counts
    (torch.stack(losses).sum() / sum(counts)).backward()
    for name, parameter in region.named_parameters():
        torch.testing.assert_close(parameter.grad, dense[name].grad, rtol=1e-7, atol=1e-10)
    assert weight.grad is not None
    whole = weight.grad.clone()
    whole[padding] = 0  # never trained
    torch.testing.assert_close(model.inputs.weight.grad.to_dense(), whole, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_next_item_is_the_target_and_no_later_one_is_seen(kind: str, tmp_path: Path) -> None:
    data, o = small(tmp_path), options(kind, history=5, dropped=0.0)
    lists = [items for items in in_order(data).values() if len(items) > 1]
    found = []
    for batch in training(data, o):
        for row, length in enumerate(batch["lengths_B"].tolist()):
            targets = batch["targets_BT"][row]
            found.append((length, targets[targets != IGNORED].tolist()))
    wanted = [items[-5:] if kind == "bag" else items[-6:][1:] for items in lists]
    assert sorted(targets for _, targets in found) == sorted(wanted)
    assert all(length == len(targets) for length, targets in found)
    model = model_for(data, o).eval()
    long_B7, lengths_B = torch.arange(14).view(2, 7), torch.tensor([5, 5])
    latest_BE = model.vectors(long_B7[:, 2:], lengths_B)
    torch.testing.assert_close(model.vectors(long_B7, lengths_B + 2), latest_BE)
    if kind == "bag":
        return
    network = model.region.module.network
    rows_BLD = torch.randn(2, 5, 4, dtype=torch.float64)
    changed = rows_BLD.clone()
    changed[:, 3:] += 1
    torch.testing.assert_close(network(rows_BLD, lengths_B)[:, :3], network(changed, lengths_B)[:, :3])


def test_dropped_items_are_a_function_of_the_epoch(tmp_path: Path) -> None:
    data, o = small(tmp_path), options("bag", dropped=0.7)
    rows = find_recipe("retrieval").training_rows(data.dataset("train"), data.info, o)

    def kept(epoch: int, start: int = 0) -> list[list[bool]]:
        found = batches(rows, 7, seed=0, epoch=epoch, shuffle=True, start_batch=start)
        return [(b["history_BL"] != data.info["num_items"]).flatten().tolist() for b in found]

    assert kept(1) == kept(1)
    assert kept(1, start=2) == kept(1)[2:]
    assert kept(1) != kept(2)
    shown = sum(sum(row) for row in kept(1))
    assert 0.2 < shown / sum(map(len, in_order(data).values())) < 0.4


@pytest.mark.parametrize("kind", KINDS)
def test_a_softmax_over_candidates_is_its_definition(kind: str, tmp_path: Path) -> None:
    """A sampled candidate counts as often as it was drawn, and less the more probable that was."""
    data, o = small(tmp_path, negatives=20), options(kind, softmax="sampled")
    model = model_for(data, o)
    assert model.region.module.output is None
    (batch, *_) = training(data, o)
    items_C = batch["candidates_C"]
    log_q_C = torch.tensor(data.arrays["log_q_V"]).double()[items_C]
    assert items_C.unique().tolist() == items_C.tolist()
    drawn = batch["weight_C"].double() + log_q_C
    assert int(drawn.exp().round().sum()) == 20 + int((batch["targets_BT"] != IGNORED).sum())
    assert model.items is not None
    vectors_CD, bias_C = model.items.weight.detach()[items_C].split([4, 1], dim=1)
    bias_C = bias_C[:, 0]
    rows_BLD = F.embedding(batch["history_BL"], model.inputs.weight.detach())
    vectors = model.region.module(rows_BLD, batch["lengths_B"], batch["targets_BT"])
    logs = F.log_softmax(vectors @ vectors_CD.T + bias_C + batch["weight_C"], -1)
    logs = logs.squeeze(1) if kind == "bag" else logs
    losses = []
    for row, targets in enumerate(batch["targets_BT"]):
        own = targets[targets != IGNORED]
        losses.append(
            -(logs[row, own] if kind == "bag" else logs[row, : len(own)].gather(1, own[:, None])).sum()
        )
    torch.testing.assert_close(model(batch)["loss"], torch.stack(losses))
    catalog = model.eval().catalog()[items_C]
    torch.testing.assert_close(catalog, torch.cat([vectors_CD, bias_C[:, None]], 1).float())


@pytest.mark.parametrize("split", ["last", "random", "time"])
def test_each_split_holds_out_what_it_says(split: str, tmp_path: Path) -> None:
    data = small(tmp_path, split=split)
    rows = pl.read_csv(tmp_path / "rows.csv").with_row_index()
    if split == "last":
        assert "each user's last by day" in data.describe()
        sizes = rows.group_by("user").len()
        assert len(data.arrays["train_pairs"]) == len(rows) - (sizes["len"] > 1).sum()
    else:
        assert len(data.arrays["train_pairs"]) == pytest.approx(len(rows) * 0.97, abs=0.02 * len(rows))
    for wrong, words in (
        ({"split": "last"}, "needs data.time"),
        ({"item": "user"}, "the column of users, too"),
    ):
        with pytest.raises(ValueError, match=words):
            RetrievalDataConfig(**wrong)  # type: ignore[arg-type]


def test_seen_items_may_be_found_again(tmp_path: Path) -> None:
    data = small(tmp_path, exclude_seen=False)
    assert "may be recommended again" in data.describe()
    assert not data.arrays["seen_items"].size


@pytest.mark.parametrize(("kind", "softmax"), [("bag", "full"), ("transformer", "sampled")])
def test_a_broken_run_comes_to_the_same_bits(
    kind: str, softmax: str, unrecorded: None, data_dir: Path
) -> None:
    write_rows(Path("rows.csv"))
    values = ["recipe=retrieval", "data.path=rows.csv", "data.time=day", f"model.kind={kind}", "model.dim=16"]
    values += ["devices=cpu", "train.epochs=2", "train.batch_size=5", f"model.softmax={softmax}"]
    values += [] if kind == "bag" else ["model.dropout=0"]  # whose masks depend on the number of devices
    whole = run_with(*values, run_name="whole")
    assert stopped_and_resumed(*values, at=8).metrics == whole.metrics
    first, broken = (dphybrid.load_model(name).state_dict() for name in ("whole", "broken"))
    assert all(torch.equal(first[name], broken[name]) for name in first)
    run_with(*values, "devices=cpu*8", run_name="eight")
    pages = [
        ResultPage.read(data_dir / "runs" / name / "result.json").history[0] for name in ("whole", "eight")
    ]
    for name in ("train loss", "validation loss"):
        assert pages[1][name] == pytest.approx(pages[0][name], rel=1e-4)


@pytest.fixture(scope="module", params=KINDS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    folder = tmp_path_factory.mktemp(f"histories-{request.param}")
    write_rows(folder / "rows.csv")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPHYBRID_DATA_DIR", str(folder / "data"))
        return dphybrid.train(
            folder / "rows.csv",
            recipe="retrieval",
            kind=request.param,
            time="day",
            dim=8,
            epochs=2,
            devices="cpu",
            tracking="none",
            quiet=True,
        )


def test_equal_histories_give_equal_lists(trained: TrainedRun, tmp_path: Path) -> None:
    users, items = (
        pl.read_parquet(trained.checkpoint / "encoder" / f"{n}.parquet") for n in ("users", "items")
    )
    history = items["name"].gather(users["history"][0]).to_list()
    known = trained.recommend(users["name"][0], k=5).drop("user")
    new = trained.recommend("somebody", k=5, history=history).drop("user")
    assert new["item"].to_list() == known["item"].to_list()
    np.testing.assert_allclose(new["score"], known["score"], rtol=1e-5)
    assert trained.recommend(k=5, history=history).drop("user").equals(new)
    assert not set(new["item"]) & set(history)
    both = trained.recommend(["somebody", "nobody"], k=3, history=[[*history, "unheard of"], ["unheard of"]])
    assert both["item"].to_list()[:3] == new["item"].to_list()[:3]
    assert both["score"].to_list()[3:] == [None] * 3  # nobody has met an item that training knows
    events = pl.DataFrame(
        {"user": ["somebody"] * len(history) + ["nobody"], "item": [*history, "unheard of"]}
    )
    events.write_csv(tmp_path / "events.csv")
    done = trained.predictor.predict_file(tmp_path / "events.csv", tmp_path / "top.parquet", top=5)
    assert (done.num_rows, done.unknown) == (2, 1)
    written = pl.read_parquet(tmp_path / "top.parquet")
    assert written.filter(pl.col("user") == "somebody").drop("user").equals(new)
    assert trained.predict(events).filter(pl.col("user") == "somebody").drop("user").head(5).equals(new)
    for users, items in ((["a", "b"], ["i1", "i2"]), (["a", "b"], [["i1"]]), ("a", "i1")):
        with refused("history: give each of . users? a list of items"):
            trained.recommend(users, history=items)


def test_events_that_training_has_are_not_added_and_times_order_the_others(trained: TrainedRun) -> None:
    users, items = (
        pl.read_parquet(trained.checkpoint / "encoder" / f"{n}.parquet") for n in ("users", "items")
    )
    name, met = users["name"][0], items["name"].gather(users["history"][0])
    known = pl.DataFrame({"user": [name] * len(met), "item": met})
    wanted = trained.recommend(name, k=10)
    assert trained.predict(known).equals(wanted)
    assert trained.predict(known[:0].extend(known[2:5])).equals(wanted)
    day, later = "day", items["name"].gather([5, 3, 1])
    events = pl.DataFrame({"user": ["somebody"] * 3, "item": later, day: ["900", "800", "700"]})
    in_time = trained.recommend("somebody", k=10, history=later.to_list()[::-1])
    for rows in (events, events.reverse(), events.with_columns(pl.col(day).cast(pl.Int64))):
        assert trained.predict(rows).equals(in_time)
    assert trained.predict(events.drop(day)).equals(
        trained.recommend("somebody", k=10, history=later.to_list())
    )


def test_what_cannot_be_learned_is_refused(unrecorded: None) -> None:
    once = pl.DataFrame({"user": [f"u{i}" for i in range(150)], "item": [f"i{i % 7}" for i in range(150)]})
    with refused("no user has two training rows|nothing to find"):
        dphybrid.train(once, recipe="retrieval", epochs=1, devices="cpu", valid_fraction=0.2, quiet=True)
    with pytest.raises(ValueError, match="heads=3: does not divide dim=64"):
        RetrievalModelConfig(kind="transformer", heads=3)


def test_a_transformer_learns_the_order_of_a_cycle(unrecorded: None) -> None:
    """Each user walks through the items in turn."""
    random = np.random.default_rng(0)
    rows = [
        {"user": user, "item": (start + step) % 30, "time": step}
        for user, start in enumerate(random.integers(30, size=120))
        for step in range(12)
    ]
    run = dphybrid.train(
        pl.DataFrame(rows),
        recipe="retrieval",
        kind="transformer",
        time="time",
        split="last",
        dim=32,
        epochs=15,
        average=0.9,
        exclude_seen=False,
        cutoffs="1,5",
        devices="cpu",
        quiet=True,
        train={"lr": 0.01, "weight_decay": 0.0},
        table={"lr": 0.01, "weight_decay": 0.0},
    )
    assert run.metrics["recall_at_1"] > 0.9


@pytest.mark.parametrize(("kind", "by"), [("bag", "loss"), ("transformer", "")])
def test_ranks_choose_the_epoch_of_a_network_of_next_items(kind: str, by: str) -> None:
    config = build_config({"recipe": "retrieval", "model": {"kind": kind}})
    task = find_recipe("retrieval").task_of(config, {"cutoffs": [10, 50]})
    assert (task.metric, task.higher_is_better, task.chosen_by) == ("ndcg_at_10", True, by)
