"""Training as a whole: equal to training without splits, the same bits twice, on from where it stopped."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from dphybrid.cli.main import main
from dphybrid.embedding import RowOptimizer
from dphybrid.run.pages import Report, ResultPage
from dphybrid.serving.load import model_from_checkpoint
from dphybrid.training.checkpoint import complete_checkpoints, load_weights, read_state
from dphybrid.training.optimizers import learning_rate_factor
from dphybrid.training.split_log import SplitLog
from tests.commands import run_with
from tests.conftest import SHARED
from tests.refusing import refused
from tests.training.stopping import stopped_and_resumed

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


@pytest.mark.parametrize("kind", ["lstm", "hybrid"])
def test_it_trains_to_the_same_losses_on_any_number_of_devices(
    kind: str, data_dir: Path, small_text: str
) -> None:
    options = [small_text, *SMALL_TEXT, f"model.kind={kind}"]
    if kind == "hybrid":
        options = ["recipe=hybrid", "model.dtype=float64", "train.epochs=1", "train.batch_size=143"]
    one = run_with(*options, "devices=cpu")
    with torch.no_grad():  # of the caller: the training is not affected
        split = run_with(*options, "devices=cpu*8")
    assert split.metrics == pytest.approx(one.metrics, rel=1e-9, abs=1e-10)
    torch.testing.assert_close(tensors(split), tensors(one), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("recipe", ["toy", "hybrid", "digits"])
def test_recipes_learn_what_was_planted(recipe: str, data_dir: Path) -> None:
    epochs = {"toy": 30, "hybrid": 1, "digits": 2}[recipe]
    quiet = ["train.print_splits=new"]
    report = run_with(f"recipe={recipe}", "devices=cpu*2", f"train.epochs={epochs}", *quiet)
    if recipe == "digits":
        assert report.metrics["accuracy"] > 0.9
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


def recorded(run: Path) -> list[Any]:
    """Return the metrics of training steps in a run's record."""
    rows = [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


def test_stopped_and_resumed_equals_undisturbed(
    data_dir: Path, small_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPHYBRID_TRACKING_URI", "files")
    options = [small_text, *SMALL_TEXT, "model.dropout=0.3", "train.epochs=3", "table.lr=0.01"]
    options += ["table.optimizer=adam", "train.average=0.9", "train.log_every=4", "devices=cpu*2"]
    whole = run_with(*options, run_name="whole")
    resumed = stopped_and_resumed(*options, at=7)
    assert resumed.digests == whole.digests
    assert resumed.metrics == whole.metrics
    runs = [data_dir / "runs" / name for name in ("whole", "broken")]
    pages = [ResultPage.read(run / "result.json") for run in runs]
    for name in ("splits", "split_lines", "history"):
        assert getattr(pages[1], name) == getattr(pages[0], name)
    losses = [[(row["step"], row["train/loss"]) for row in recorded(run)] for run in runs]
    assert losses[1] == losses[0]
    assert [step for step, _ in losses[0]] == [*range(4, 37, 4)]
    # Counts start at 0 in each process: the resumed one took the last of these four steps alone.
    unique = [recorded(run)[1]["embedding/unique"] for run in runs]
    assert unique[1] == pytest.approx(unique[0], rel=0.3)


def test_a_finished_run_goes_on_for_more_epochs(data_dir: Path, small_text: str) -> None:
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
    for schedule, last in (("constant", 1.0), ("cosine", 0.01), ("linear", 0.01)):
        assert learning_rate_factor(schedule, 0.0) == 1.0
        assert learning_rate_factor(schedule, 1.0) == pytest.approx(last)
    count = len(rates[RowOptimizer])
    factors = [learning_rate_factor("linear", step / count) for step in range(count)]
    assert count > 2
    assert rates[RowOptimizer] == pytest.approx([0.2 * factor for factor in factors])
    assert rates[torch.optim.SGD] == pytest.approx([0.3 * factor for factor in factors])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command_checkpoints_and_goes_on(
    number: int,
    code: int,
    data_dir: Path,
    small_text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    after_step = SplitLog.after_step

    def interrupted(self: SplitLog, step: int, rows: int) -> list[str]:
        if step == 7:
            signal.raise_signal(number)
        return after_step(self, step, rows)

    monkeypatch.setattr(SplitLog, "after_step", interrupted)
    values = [small_text, *SMALL_TEXT]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (text.split("=", 1) for text in values)]
    assert main(["train", *flags, "--run-name", "long"]) == code
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    assert "--resume" in errors
    (checkpoint,) = complete_checkpoints(data_dir / "runs" / "long" / "checkpoints")
    assert read_state(checkpoint).progress.step == 7
    report = run_with(*values, resume="long")
    assert read_state(Path(report.latest_checkpoint)).progress.step == 24
