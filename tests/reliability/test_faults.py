"""A run is hit at its file operations, one after the other, and started again: it must come to the same bits,
metrics and checkpoints.

A seeded few of all operations and modes by default, of two runs. With DPHYBRID_LONG_TESTS=1 the runs of all
recipes are hit, at random: DPHYBRID_FAULTS_SEED=N repeats what a failure names. DPHYBRID_FAULTS=N tries N
operations of each run, DPHYBRID_FAULTS=all every one (hours).
"""

import os
import random
import shutil
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from dphybrid.recipes.registry import BUILT_IN
from dphybrid.run.folder import RunPage
from dphybrid.tracking.opening import embedded_uri
from dphybrid.tracking.record import waits
from tests.conftest import LONG
from tests.reliability.faults import ERRORS, KILLED, MODES
from tests.reliability.scenarios import SCENARIOS, options_of, write_files
from tests.reliability.trials import run_results, run_trial
from tests.stores import put_database

TRIALS = os.environ.get("DPHYBRID_FAULTS", "4")
SEED = int(os.environ.get("DPHYBRID_FAULTS_SEED") or (random.randrange(2**32) if LONG else 0))
CLICKS = Path(__file__).parent.parent / "fixtures" / "clicks.csv"
OPTIONS = [
    "recipe=ctr",
    f"data.path={CLICKS}",
    "data.label=clicked",
    "model.dim=2",
    "model.hidden=4",
    "model.layers=1",
    "train.epochs=2",
    "train.batch_size=16",
    "train.log_every=2",
    "devices=cpu*2",
    "checkpoint.keep_last=1",
    "checkpoint.every_steps=2",
]

CHANGED_ROWS = [
    *[text for text in OPTIONS if not text.startswith(("train.batch", "checkpoint."))],
    "data.categorical=age",
    "data.min_count=1",
    "train.batch_size=6",
    "checkpoint.every_steps=3",
    "checkpoint.full_every=4",
    "checkpoint.keep_last=2",
]
"""Of seven checkpoints, five hold changed rows alone."""

RUNS = {"a table on two devices": OPTIONS, "changed rows alone": CHANGED_ROWS}
OTHERS = [name for name in SCENARIOS if name != "ctr, cpu*2"] if LONG else []


def test_every_recipe_of_the_project_has_a_run_to_be_hit() -> None:
    there = {text.removeprefix("recipe=") for options in SCENARIOS.values() for text in options}
    assert set(BUILT_IN) <= there


def recorded_of(data_dir: Path) -> dict[str, Any]:
    """Return what MLflow's store holds of a finished run, whatever happened on the way."""
    (page,) = data_dir.glob("runs/*/run.json")
    run_id, store = RunPage.read(page).run_id, data_dir / "mlflow"
    client = MlflowClient(embedded_uri(store), registry_uri=embedded_uri(store))
    run = client.get_run(run_id)
    curves = [name for name in run.data.metrics if name.startswith(("valid/", "train/", "final_"))]
    models = client.search_logged_models(
        [run.info.experiment_id], filter_string=f"source_run_id = '{run_id}'"
    )
    return {
        "status": run.info.status,
        "params": len(run.data.params),
        "points": {
            name: sorted({(point.step, point.value) for point in client.get_metric_history(run_id, name)})
            for name in curves
        },
        "models": sorted(
            (model.name, model.tags["dphybrid.role"], [(m.key, m.step, m.value) for m in model.metrics or []])
            for model in models
        ),
        "waiting": sum(map(waits, (data_dir / "runs").iterdir())),
        "files": sorted(path.name for path in page.parent.iterdir()),
    }


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_recorded_run_on_a_slow_disk_loses_and_doubles_nothing(tmp_path: Path) -> None:
    # trials are forked from a process that has imported MLflow, unless an earlier one has started it without
    forkserver.set_forkserver_preload(["tests.reliability.trials", "mlflow.store.tracking.sqlalchemy_store"])
    forkserver.ensure_running()
    new = tmp_path / "new"
    put_database("mlflow", new / "mlflow" / "mlflow.db")

    def begun(number: int) -> Path:  # each at a place of its own: clients keep a database open
        return Path(shutil.copytree(new, tmp_path / f"data-{number}"))

    whole = run_trial(begun(0), CHANGED_ROWS, recorded=True, slow_s=0.01)
    assert whole.code == 0, whole.output
    expected = run_results(tmp_path / "data-0"), recorded_of(tmp_path / "data-0")
    assert expected[1]["models"]
    chosen = random.Random(2)
    for number in range(1, 201 if TRIALS == "all" else 1 + max(1, int(TRIALS) // 4)):
        target, mode = chosen.randint(30, whole.operations), chosen.choice(MODES[:4])
        data_dir = begun(number)
        hit = run_trial(data_dir, CHANGED_ROWS, target, mode, recorded=True, slow_s=0.01)
        assert hit.code in (0, KILLED), hit.output
        resumed = run_trial(data_dir, CHANGED_ROWS, recorded=True)
        assert resumed.code == 0, f"after {target} {mode}\n{resumed.output}"
        found = run_results(data_dir), recorded_of(data_dir)
        assert found == expected, f"after {target} {mode}\n{resumed.output}"
        shutil.rmtree(data_dir)


@pytest.fixture(scope="module", params=[*RUNS, *OTHERS])
def undisturbed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], int, list[str]]:
    """What an undisturbed run comes to, its number of file operations, and its options."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_files(folder)
    options = RUNS.get(request.param) or options_of(request.param, folder)
    ended = run_trial(folder / "data", options)
    assert ended.code == 0, ended.output
    assert ended.unsafe == []
    return run_results(folder / "data"), ended.operations, options


def check(data_dir: Path, options: list[str], undisturbed: dict[str, Any], target: int, mode: str) -> None:
    hit = run_trial(data_dir, options, target, mode)
    assert hit.code in ((0, 2) if mode in ERRORS else (KILLED,)), f"{target} {mode}: {hit.code}\n{hit.output}"
    resumed = run_trial(data_dir, options)
    assert resumed.code == 0, f"after {target} {mode}\n{resumed.output}"
    assert run_results(data_dir) == undisturbed, f"after {target} {mode}\n{resumed.output}"


@pytest.mark.slow
@pytest.mark.timeout(36000 if TRIALS == "all" else 1200)
def test_a_run_that_is_hit_anywhere_comes_to_the_same(
    tmp_path: Path, undisturbed: tuple[dict[str, Any], int, list[str]]
) -> None:
    expected, count, options = undisturbed
    assert count > 150
    every = [(target, mode) for target in range(1, count + 1) for mode in MODES]
    chosen = every if TRIALS == "all" else random.Random(SEED).sample(every, int(TRIALS))
    failed = []
    for target, mode in chosen:
        try:
            check(tmp_path / "data", options, expected, target, mode)
        except AssertionError as error:
            failed.append(str(error))
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        shutil.rmtree(tmp_path / "data-kept", ignore_errors=True)
    told = f"DPHYBRID_FAULTS_SEED={SEED}: {len(failed)} of {len(chosen)} trials failed:\n"
    assert not failed, told + "\n".join(failed)


@pytest.mark.nightly
def test_a_run_that_is_hit_again_and_again_comes_to_the_same(
    tmp_path: Path, undisturbed: tuple[dict[str, Any], int, list[str]]
) -> None:
    expected, count, options = undisturbed
    chosen = random.Random(1)
    for _ in range(3):
        hit = run_trial(tmp_path / "data", options, chosen.randint(40, count // 2), "unsynced")
        assert hit.code in (0, KILLED), hit.output
    resumed = run_trial(tmp_path / "data", options)
    assert resumed.code == 0, resumed.output
    assert run_results(tmp_path / "data") == expected
