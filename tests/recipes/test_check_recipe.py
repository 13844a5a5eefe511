"""`check_recipe` finds what breaks, one recipe for each way, and says what to do."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

from dphybrid.recipes import Recipe, Task
from dphybrid.recipes.configs import build_config
from dphybrid.testing import check_recipe
from dphybrid.util.errors import UserError
from examples.films import Films, Network, compute


class Sound(Films):
    def rows(self, data: Any, seed: int) -> Any:
        train, valid, vocabularies = super().rows(data, seed)
        return {k: v[:200] for k, v in train.items()}, {k: v[:40] for k, v in valid.items()}, vocabularies

    net: type[Network] = Network

    def build(self, context: Any) -> torch.nn.Module:
        return self.net(context)


class OtherData(Sound):
    def rows(self, data: Any, seed: int) -> Any:
        return super().rows(data, int(np.random.default_rng().integers(2**31)))


class NoSuchOutput(Sound):
    def task(self, info: Any) -> Task:
        return Task("mae", False, compute, reads=("predicted", "stars"))


class _DrawsUnseeded(Network):
    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        noise_B = torch.from_numpy(np.random.default_rng().random(len(batch["user_B"])))
        found = super().forward(batch)
        return found | {"loss": found["loss"] * noise_B.to(found["loss"]) if self.training else found["loss"]}


class _Counts(Network):
    """Its loss grows with a count that no checkpoint holds."""

    count = 0

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        found = super().forward(batch)
        self.count += self.training
        return found | {"loss": found["loss"] * (1 + self.count)}


class _CountsAhead(Network):
    """Announcing ids changes its loss."""

    announced = 0

    def table_ids(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self.announced += 1
        return super().table_ids(batch)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        found = super().forward(batch)
        return found | {"loss": found["loss"] * (1 + min(self.announced, 1))}


class _Unannounced(Network):
    table_ids = None  # type: ignore[assignment]

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return super().forward({name: value.roll(1, 0) for name, value in batch.items()})


class _Centred(torch.nn.Bilinear):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        found = super().forward(left, right)
        return found - found.mean(0)


class _AcrossTheBatch(Network):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.region.module = _Centred(8, 8, 1)


NETWORKS = [_DrawsUnseeded, _Counts, _CountsAhead, _AcrossTheBatch]
for _net in NETWORKS:  # a recipe of each one's name
    _name = _net.__name__.removeprefix("_")
    globals()[_name] = type(_name, (Sound,), {"net": _net, "__module__": __name__})


class Forgets(Sound):
    def predict(self, model: Any, rows: Any, vocabularies: Any) -> Any:
        return pl.DataFrame({"rating": torch.rand(len(rows)).numpy()})


class Bare(Sound):
    """It announces no ids, and predicts nothing."""

    net = _Unannounced
    predict = Recipe.predict


def check(name: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        check_recipe(f"{__name__}:{name}")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("OtherData", "draw all random numbers from the seed"),
        ("NoSuchOutput", "reads 'stars', which neither batches nor outputs have"),
        ("DrawsUnseeded", "draw random numbers from torch"),
        ("Counts", "resuming gives other weights"),
        ("CountsAhead", "prefetching gives other weights"),
        ("AcrossTheBatch", "between a split batch and the same"),
        ("Forgets", "draw no random numbers in evaluation mode"),
    ],
)
def test_what_breaks_is_named_with_its_remedy(name: str, words: str, data_dir: Path) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        check(name)
    assert list((data_dir / "runs").iterdir()) == []


@pytest.mark.parametrize("name", ["Sound", "Bare"])
def test_a_sound_recipe_holds_and_leaves_nothing_behind(name: str, data_dir: Path) -> None:
    check(name)
    assert list((data_dir / "runs").iterdir()) == []


def test_a_recipe_that_reads_whole_arrays_is_checked_on_a_sample(data_dir: Path, tmp_path: Path) -> None:
    rows = [f"u{n % 40},i{n * n % 23}" for n in range(300)]
    (tmp_path / "pairs.csv").write_text("\n".join(["user,item", *rows]))
    data = {"path": str(tmp_path / "pairs.csv"), "valid_fraction": 0.2}
    check_recipe(build_config({"recipe": "retrieval", "data": data}))
