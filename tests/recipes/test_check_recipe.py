"""`dphybrid check recipe` finds what breaks, one recipe for each way, and says what to do."""

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from dphybrid.newrecipe.model import Network, compute
from dphybrid.newrecipe.recipe import NewRecipe
from torch import Tensor

from dphybrid.cli.main import main
from dphybrid.recipes import Recipe, Task
from dphybrid.util.alive import process_name
from tests.commands import command


class Sound(NewRecipe):
    def rows(self, data: Any, seed: int) -> Any:
        train, valid, vocabularies = super().rows(data, seed)
        return {k: v[:200] for k, v in train.items()}, {k: v[:40] for k, v in valid.items()}, vocabularies

    net: type[Network] = Network

    def build(self, context: Any) -> torch.nn.Module:
        return self.net(context)


class FailsToRead(Sound):
    def rows(self, data: Any, seed: int) -> Any:
        return {}["ratings"]


class OtherData(Sound):
    def rows(self, data: Any, seed: int) -> Any:
        return super().rows(data, int(np.random.default_rng().integers(2**31)))


class NoSuchOutput(Sound):
    def task(self, info: Any) -> Task:
        return Task("mae", False, compute, reads=("predicted", "stars"))


class _FailsInTraining(Network):
    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.training:
            raise RuntimeError("the shapes do not fit")
        return super().forward(batch)


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


class _CentredInEvaluation(_Centred):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.nn.Bilinear.forward(self, left, right) if self.training else super().forward(left, right)


class _AcrossInEvaluation(Network):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.region.module = _CentredInEvaluation(8, 8, 1)


class _AcrossTheBatch(Network):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.region.module = _Centred(8, 8, 1)


NETWORKS = [_FailsInTraining, _DrawsUnseeded, _Counts, _CountsAhead, _Unannounced]
NETWORKS += [_AcrossTheBatch, _AcrossInEvaluation]
for _net in NETWORKS:  # a recipe of each one's name
    _name = _net.__name__.removeprefix("_")
    globals()[_name] = type(_name, (Sound,), {"net": _net, "__module__": __name__})


class Forgets(Sound):
    def predict(self, model: Any, rows: Any, vocabularies: Any) -> Any:
        return pl.DataFrame({"rating": torch.rand(len(rows)).numpy()})


class FailsToPredict(Sound):
    example = {"user": ["user 1"]}


class Mute(Sound):
    predict = Recipe.predict


def found_in(name: str) -> dict[str, tuple[str, str]]:
    """The state and the words of each check that was run."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(["check", "recipe", f"{__name__}:{name}"])
    lines = out.getvalue().splitlines()
    return {line[7:21].strip(): (line[:7].strip(), line[21:]) for line in lines}


@pytest.mark.parametrize(
    ("name", "check", "words"),
    [
        ("FailsToRead", "prepare", "KeyError: 'ratings' (test_check_recipe.py, line"),
        ("OtherData", "prepare twice", "draw all random numbers from the seed"),
        ("NoSuchOutput", "evaluate", "reads 'stars', which neither batches nor outputs have"),
        ("FailsInTraining", "train", "RuntimeError: the shapes do not fit (test_check_recipe.py, line"),
        ("DrawsUnseeded", "train twice", "dphybrid.data.DrawnDataset"),
        ("Counts", "resume", "keep all state that training changes in parameters, buffers or optimizers"),
        ("CountsAhead", "pipeline", "table_ids must return the ids that forward looks up"),
        ("AcrossTheBatch", "devices", "computes across the batch"),
        ("AcrossInEvaluation", "devices", "computes across the batch"),
        ("Forgets", "predict", "draw no random numbers in evaluation mode"),
        ("FailsToPredict", "predict", "the rows have no column 'item'; columns: user"),
    ],
)
def test_what_breaks_is_named_with_its_remedy(name: str, check: str, words: str, data_dir: Path) -> None:
    found = found_in(name)
    assert found[check][0] == "BREAKS"
    assert words in found[check][1]
    before = list(found)[: list(found).index(check)]
    assert [one for one in before if found[one][0] == "BREAKS"] == []


def test_a_sound_recipe_holds_and_leaves_nothing_behind(data_dir: Path) -> None:
    nobody = process_name().replace(str(os.getpid()), str(2**22 + 1), 1)  # no process has this number
    left = data_dir / "runs" / f".check-{nobody}-killed"
    left.mkdir(parents=True)
    lines = command("check", "recipe", f"{__name__}:Sound", "--train.batch-size", "16").splitlines()
    checks = ["prepare", "prepare twice", "evaluate", "train", "train twice", "resume"]
    checks += ["pipeline", "devices", "predict"]
    assert [line[:21].split(maxsplit=1)[1].strip() for line in lines] == checks
    assert all(line.startswith("ok ") for line in lines)
    assert "batches of 16" in lines[3]
    assert list((data_dir / "runs").iterdir()) == []
    assert "BREAKS evaluate" in command("check", "recipe", f"{__name__}:NoSuchOutput", ends=1)


def test_a_table_predicts_for_its_first_rows(data_dir: Path, tmp_path: Path) -> None:
    rows = [f"{n},{'ab'[n % 3 // 2]},{int(n % 7 > 2)}" for n in range(300)]
    (tmp_path / "clicks.csv").write_text("\n".join(["n,shop,clicked", *rows]))
    values = ["--data.path", str(tmp_path / "clicks.csv"), "--data.label", "clicked", "--model.dim", "4"]
    lines = command("check", "recipe", "ctr", *values).splitlines()
    assert [line.split()[0] for line in lines[-9:]] == ["ok"] * 9
    assert "8 predictions of 8 rows" in lines[-1]


def test_what_is_not_there_is_not_held_against_it(data_dir: Path) -> None:
    state, words = found_in("Unannounced")["pipeline"]
    assert state == "-"
    assert "the ids are not known ahead" in words
    state, words = found_in("Mute")["predict"]
    assert state == "-"
    assert "define predict(model, rows, vocabularies)" in words
