"""Users' own functions after each epoch: what they see, what of theirs is logged, how they end a training."""

from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch

import dphybrid
from dphybrid.api.run import TrainedRun
from dphybrid.recipes.configs import load_config
from dphybrid.training.callbacks import EpochEnd, run_callbacks
from dphybrid.training.engine import Engine
from tests.refusing import refused


def train(**given: Any) -> TrainedRun:
    values: dict[str, Any] = {"recipe": "toy", "devices": "cpu*2", "quiet": True, "epochs": 3, "patience": 0}
    return dphybrid.train(**(values | given))


def test_each_epoch_is_seen_and_numbers_are_logged(data_dir: Path) -> None:
    seen: list[EpochEnd] = []

    def tell(epoch: EpochEnd) -> dict[str, float]:
        seen.append(epoch)
        return {"norm": sum(float(p.detach().norm()) for p in epoch.model.parameters()), "epoch": epoch.epoch}

    run = train(callbacks=[tell, lambda epoch: None], run_name="seen")
    assert [(one.run, one.epoch, one.epochs) for one in seen] == [("seen", number, 3) for number in (1, 2, 3)]
    history = run.history
    assert [one.step for one in seen] == history["step"].to_list()
    assert [one.train_loss for one in seen] == history["train loss"].to_list()
    assert [one.metrics["mse"] for one in seen] == history["validation mse"].to_list()
    best = min(seen, key=lambda one: one.metrics["mse"])
    assert [one.epoch for one in seen if one.best][-1] == best.epoch
    client = mlflow.MlflowClient(f"sqlite:///{data_dir}/mlflow/mlflow.db")
    points = client.get_metric_history(run.run_id, "own/epoch")
    assert [(point.step, point.value) for point in points] == [(one.step, one.epoch) for one in seen]
    plain = train(tracking="none", run_name="plain")
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, run.model.state_dict()[name])


def test_patience_counts_epochs_since_the_best_one(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter([5.0, 6.0, 4.0, 4.5, 3.0, 3.5, 3.6, 1.0])
    monkeypatch.setattr(Engine, "metrics", lambda *_: {"mse": next(errors)})
    run = train(epochs=8, patience=2, tracking="none")
    assert run.history["validation mse"].to_list() == [5.0, 6.0, 4.0, 4.5, 3.0, 3.5, 3.6]


def test_an_lstm_trains_with_one_thread_and_gives_the_callers_back(
    tmp_path: Path, unrecorded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPHYBRID_THREADS", "0")
    (tmp_path / "words.txt").write_text("\n\n".join(f"some words of paragraph {i % 7}" for i in range(60)))
    text = {"recipe": "text", "data": tmp_path / "words.txt", "window": 8, "dim": 8, "hidden": 8}
    before, seen = torch.get_num_threads(), list[int]()
    torch.set_num_threads(2)
    try:
        for kind in ("lstm", "decoder"):
            train(**text, kind=kind, epochs=1, callbacks=[lambda _: seen.append(torch.get_num_threads())])
            seen.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2, 2, 2]


def test_a_callback_ends_the_training_and_resume_goes_on(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def enough(epoch: EpochEnd) -> None:
        if epoch.epoch == 2:
            epoch.stop("two are enough")

    run = train(callbacks=[enough], tracking="none", run_name="short", quiet=False)
    assert "stopped early: two are enough" in capsys.readouterr().out
    assert len(run.history) == 2
    assert run.status == "finished"
    longer = train(tracking="none", resume="short")
    whole = train(tracking="none", run_name="whole")
    assert longer.history.equals(whole.history)


def test_paths_of_callbacks_are_checked_before_data_is_read(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "told.py").write_text(
        "def tell(epoch): open('told.txt', 'a').write(f'{epoch.epoch} ')\ndef wrong(epoch): return 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    train(tracking="none", train={"callbacks": ["told:tell"]})
    assert Path("told.txt").read_text() == "1 2 3 "
    before = set((data_dir / "prepared").iterdir())
    with refused("callbacks = 'told:absent': told has no function 'absent'; known: tell"):
        train(tracking="none", train={"callbacks": ["told:absent"]}, seed=5)
    assert set((data_dir / "prepared").iterdir()) == before
    with refused("callback wrong: returned an int; return a dict"):
        train(tracking="none", train={"callbacks": ["told:wrong"]})
    with refused("callbacks: 'told:tell' is not a function"):
        train(tracking="none", callbacks=["told:tell"])
    both = load_config(None, ["train.callbacks=told:tell,told:wrong"]).train.callbacks
    assert both == ("told:tell", "told:wrong")
    seen = EpochEnd("run", 1, 1, 1, 0.0, {}, True, torch.nn.Linear(1, 1))
    with refused("'loss' is a str; return numbers"):
        run_callbacks([lambda epoch: {"loss": "low"}], seen)  # type: ignore[dict-item]
