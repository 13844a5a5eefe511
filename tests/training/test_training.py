"""Training as a whole: equal to training without splits, the same bits twice, on from where it stopped."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dphybrid.embedding import RowOptimizer
from dphybrid.run.pages import Report
from dphybrid.serving.load import model_from_checkpoint
from dphybrid.training.checkpoint import complete_checkpoints, load_weights, read_state
from dphybrid.training.optimizers import learning_rate_factor
from tests.commands import run_with
from tests.conftest import SHARED
from tests.refusing import refused
from tests.training.stopping import stopped_and_resumed
from tests.waiting import patience, wait_until

pytestmark = pytest.mark.usefixtures("unrecorded")

SMALL_TEXT = ["model.dim=8", "model.hidden=8", "data.window=16", "train.epochs=2"]
SMALL_TEXT += ["model.dtype=float64", "model.dropout=0"]


@pytest.fixture
def small_text(tmp_path: Path) -> str:
    sentence = "the cat sat on the mat and the dog ran to the red house where a bird sang"
    words = sentence.split()
    lines = [" ".join(words[(i * j + j) % len(words)] for j in range(40)) for i in range(1, 40)]
    file = tmp_path / "small.txt"
    file.write_text("\n".join(lines))
    return f"data.path={file}"


def tensors(report: Report) -> dict[str, torch.Tensor]:
    model = model_from_checkpoint(report.latest_checkpoint)
    return dict(model.state_dict())


def test_it_trains_where_gradients_are_off(data_dir: Path, small_text: str) -> None:
    options = [small_text, *SMALL_TEXT, "train.epochs=1"]
    with torch.no_grad():
        off = run_with(*options)
    assert off.digests == run_with(*options).digests


@pytest.mark.parametrize("kind", ["lstm", "decoder", "hybrid"])
def test_it_trains_to_the_same_losses_on_any_number_of_devices(
    kind: str, data_dir: Path, small_text: str
) -> None:
    options = [small_text, *SMALL_TEXT, f"model.kind={kind}"]
    if kind == "hybrid":
        options = ["recipe=hybrid", "model.dtype=float64", "train.epochs=1", "train.batch_size=143"]
    one = run_with(*options, "devices=cpu")
    split = run_with(*options, "devices=cpu*8")
    assert split.metrics == pytest.approx(one.metrics, rel=1e-9, abs=1e-10)
    torch.testing.assert_close(tensors(split), tensors(one), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("recipe", ["toy", "hybrid", "digits"])
def test_recipes_learn_what_was_planted(recipe: str, data_dir: Path) -> None:
    epochs = {"toy": 30, "hybrid": 3, "digits": 3}[recipe]
    quiet = ["train.print_splits=new"]
    report = run_with(f"recipe={recipe}", "devices=cpu*2", f"train.epochs={epochs}", *quiet)
    if recipe == "digits":
        assert report.metrics["accuracy"] > 0.94
    else:
        assert report.metrics["mse"] < 0.5 * {"toy": 5.0, "hybrid": 1.0}[recipe]


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_toy_prints_and_records_the_reference_lines(
    devices: int, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = SHARED / "reference" / "split_shapes.json"
    if not file.is_file():
        pytest.skip("the reference table is not here")
    reference = json.loads(file.read_text())
    words = reference["lines"]
    expected = [words["announce"].format(n=devices).replace("GPUs", "devices")] if devices > 1 else []
    for rows in reference["by_devices"][str(devices)]:
        expected += [words["replica"].format(rows=count) for count in rows]
        expected.append(words["outside"].format(batch=sum(rows)))
    report = run_with("recipe=toy", f"devices=cpu*{devices}")
    starts = ("Let's use", "\tIn Model", "Outside")
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith(starts)] == expected
    assert report.split_lines == expected


@pytest.mark.parametrize(("optimizer", "average"), [("adam", 0.0), ("adagrad", 0.9)])
def test_stopped_and_resumed_equals_undisturbed(
    optimizer: str, average: float, data_dir: Path, small_text: str
) -> None:
    options = [small_text, *SMALL_TEXT, "model.dropout=0.3", "train.epochs=3", "table.lr=0.01"]
    options += [f"table.optimizer={optimizer}", f"train.average={average}"]
    whole = run_with(*options, run_name="whole")
    resumed = stopped_and_resumed(*options, at=7)
    assert resumed.digests == whole.digests
    assert resumed.metrics == whole.metrics


def test_a_finished_run_goes_on_for_more_epochs_and_not_with_another_model(
    data_dir: Path, small_text: str
) -> None:
    options = [small_text, *SMALL_TEXT, "train.schedule=constant"]
    whole = run_with(*options, "train.epochs=3", run_name="whole")
    run_with(*options, "train.epochs=1", run_name="grown")
    grown = run_with(*options, "train.epochs=3", resume="latest")
    assert grown.run_name == "grown"
    assert grown.digests == whole.digests
    with refused(r"model.hidden: 8 -> 9"):
        run_with(*options, "model.hidden=9", resume="latest")
    with refused(r"table.dtype: model -> bfloat16"):  # the rows would be rounded
        run_with(*options, "table.dtype=bfloat16", resume="latest")


def test_a_checkpoint_of_another_shape_or_a_damaged_one_is_named(data_dir: Path, small_text: str) -> None:
    report = run_with(small_text, *SMALL_TEXT, "train.epochs=1")
    other = run_with(small_text, *SMALL_TEXT, "train.epochs=1", "model.hidden=9", "model.layers=1")
    model = model_from_checkpoint(other.latest_checkpoint)
    with refused(r"region.network.network.0.weight_ih_l0 is .*, expected .*"):
        load_weights(Path(report.latest_checkpoint), model)
    with refused("is not a checkpoint"):
        model_from_checkpoint(data_dir / "runs")


def test_schedules_end_at_a_hundredth() -> None:
    assert learning_rate_factor("constant", 0.9) == 1.0
    for schedule in ("cosine", "linear"):
        assert learning_rate_factor(schedule, 0.0) == 1.0
        assert learning_rate_factor(schedule, 1.0) == pytest.approx(0.01)


def test_rates_of_tables_and_blocks_follow_the_schedule(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: dict[type, list[float]] = {RowOptimizer: [], torch.optim.SGD: []}
    for kind, seen in rates.items():

        def note(self: Any, step: Any = kind.step, seen: list[float] = seen) -> Any:
            seen.append(self.param_groups[0]["lr"])
            return step(self)

        monkeypatch.setattr(kind, "step", note)
    options = ["recipe=hybrid", "devices=cpu", "train.epochs=2", "train.patience=0", "train.batch_size=500"]
    optimizers = ["train.optimizer=sgd", "train.lr=0.3", "table.optimizer=sgd", "table.lr=0.2"]
    run_with(*options, *optimizers, "train.schedule=linear")
    count = len(rates[RowOptimizer])
    factors = [learning_rate_factor("linear", step / count) for step in range(count)]
    assert count > 2
    assert rates[RowOptimizer] == pytest.approx([0.2 * factor for factor in factors])
    assert rates[torch.optim.SGD] == pytest.approx([0.3 * factor for factor in factors])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.nightly), (signal.SIGTERM, 143)]
)
def test_an_interrupted_command_checkpoints_and_goes_on(
    number: int, code: int, data_dir: Path, small_text: str
) -> None:
    small = [text for text in SMALL_TEXT if text != "train.epochs=2"]
    values = [*small, small_text, "train.epochs=4000", "train.patience=0"]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (text.split("=", 1) for text in values)]
    argv = [sys.executable, "-m", "dphybrid", "train", *flags, "--run-name", "long"]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    folder = data_dir / "runs" / "long" / "checkpoints"
    wait_until(lambda: folder.is_dir() and complete_checkpoints(folder), "a checkpoint is there")
    child.send_signal(number)
    _, errors = child.communicate(timeout=patience(60))
    assert child.returncode == code, errors
    assert "Traceback" not in errors
    assert "--resume" in errors
    step = read_state(complete_checkpoints(folder)[-1]).progress.step
    epochs = step // 5 + 2
    more = ["train.patience=0", f"train.epochs={epochs}"]
    report = run_with(small_text, *SMALL_TEXT, *more, resume="long")
    assert read_state(Path(report.latest_checkpoint)).progress.step > step
