"""What several ranks cannot do is refused before work starts; one process never hears of TorchRec."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from dphybrid.cluster import engine
from dphybrid.cluster.engine import ClusterEngine, check_installed
from dphybrid.config import ExperimentConfig
from dphybrid.config.tables import TableDataConfig
from dphybrid.embedding import HostEmbedding
from dphybrid.recipes.configs import load_config
from dphybrid.run.job import prepare_data
from dphybrid.util.errors import UserError
from tests.cluster.launching import settings_in
from tests.preparing import prepare
from tests.refusing import refused


def config(*values: str) -> ExperimentConfig:
    own = ["recipe=ctr", "devices=cpu", "cluster.ranks=2", "table.optimizer=adagrad"]
    return load_config(None, [*own, *values])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["table.optimizer=adam"], "table.optimizer=adam has no equal"),
        (["table.optimizer=lazy-adam"], "use adagrad or sgd"),
        (["table.optimizer=lazy-adagrad"], "use adagrad or sgd"),
        (["table.optimizer=adamw"], "use adagrad or sgd"),
        (["table.optimizer=sgd", "table.weight_decay=0.1"], "use adagrad, or 0"),
        (["table.dtype=bfloat16"], "use table.dtype=model"),
        (["model.dtype=float64"], "use model.dtype=float32"),
        (["train.callbacks=mine:tell"], "train.callbacks"),
        (["train.warm_start=x", "data.base=y"], "data.base"),
        (["train.batch_size=1"], "use at least 2"),
        (["devices=cpu*2"], "virtual"),
        *(([f"recipe={recipe}"], f"recipe {recipe} was not tried") for recipe in ("kge", "text", "digits")),
    ],
)
def test_what_has_no_counterpart_is_refused_before_data_is_prepared(
    values: list[str], words: str, tmp_path: Path
) -> None:
    with refused(r"^cluster\.ranks=2: ") as caught:
        prepare_data(config(*values), settings_in(tmp_path / "data"))
    assert words in str(caught.value)
    assert "cluster.ranks=0" in str(caught.value)
    assert not (tmp_path / "data").exists()


def test_each_rank_has_one_device_and_its_rows_in_memory(tmp_path: Path) -> None:
    settings = settings_in(tmp_path / "data")
    with refused("are 1, but each rank needs one"):
        ClusterEngine(config()).check(False, settings, "cuda:0", ())
    with refused("DPHYBRID_TABLE_STORAGE=mmap"):
        prepare_data(config(), settings.model_copy(update={"table_storage": "mmap"}))
    assert not (tmp_path / "data").exists()


def test_missing_packages_are_named_with_the_line_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"torch": "2.14.1", "fbgemm-gpu-cpu": "1.7.0"}
    monkeypatch.setattr(engine, "installed_version", lambda name: there.get(name, ""))
    with pytest.raises(UserError) as caught:
        check_installed(2)
    assert "torchrec is missing, needed 1.9.*; fbgemm-gpu 1.7.0, needed 1.9.*" in str(caught.value)
    assert "pip install 'dphybrid[cluster]'" in str(caught.value)


@pytest.mark.parametrize(
    ("tables", "words"),
    [((), "0 tables (none)"), ((8, 8), "into one HostEmbedding"), ((5,), "use 8 (model.dim)")],
)
def test_a_model_must_have_one_table_that_the_kernels_know(tables: tuple[int, ...], words: str) -> None:
    model = nn.ModuleDict({f"t{number}": HostEmbedding(4, dim) for number, dim in enumerate(tables)})
    with pytest.raises(UserError) as caught:
        ClusterEngine(config()).check_model(model)
    assert words in str(caught.value)
    ClusterEngine(config()).check_model(nn.ModuleList([HostEmbedding(4, 8)]))


@pytest.mark.parametrize(
    ("label", "weight", "words"),
    [("kind", None, "a multiclass label"), ("y", "n", "data.weight=n"), ("y", None, "")],
)
def test_labels_and_weights_that_were_not_tried_are_refused(
    label: str, weight: str | None, words: str, tmp_path: Path
) -> None:
    lines = [f"{'abc'[i % 3]},{i % 7 + 1},{i % 2}" for i in range(60)]
    (tmp_path / "x.csv").write_text("\n".join(["kind,n,y", *lines]))
    data = TableDataConfig(path=str(tmp_path / "x.csv"), label=label, weight=weight)
    prepared = prepare("ctr", data, tmp_path / "prepared", 0)
    told = refused(f"^cluster.ranks=2: {words} was not tried .* use cluster.ranks=0")
    with told if words else nullcontext():
        ClusterEngine(config("train.batch_size=32")).check_data(prepared, tabular=True)


def test_parts_of_a_table_start_with_the_bits_of_the_whole() -> None:
    whole = HostEmbedding(136_000, 4, padding_idx=70_003, std=0.5, seed=3)
    for first, last in ((0, 136_000), (0, 10), (65_000, 70_005), (131_000, 136_000)):
        part = torch.empty(last - first, 4)
        whole.start.write(part, first)
        assert torch.equal(part, whole.weight[first:last])
    assert not whole.weight[70_003].any()
