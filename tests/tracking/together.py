"""Record five runs at once in one SQLite store: `python -m tests.tracking.together FOLDER`."""

import json
import os
import random
import sys
import time
import traceback
from pathlib import Path

from mlflow.tracking import MlflowClient

from dphybrid.tracking import open_tracker
from dphybrid.tracking.opening import embedded_uri
from dphybrid.tracking.record import waits

RUNS, STEPS = 5, 20


def run(store: Path, number: int) -> None:
    chance = random.Random(number)
    tracker = open_tracker(None, "together", store)
    tracker.start(f"run-{number}", {f"param.{i}": str(i) for i in range(20)}, {"number": str(number)}, "note")
    folder = store / "runs" / f"run-{number}" / "checkpoints"
    for step in range(1, STEPS + 1):
        tracker.log_metrics({"train/loss": 1 / step, "valid/auc": step / STEPS}, step)
        if step % 10 == 0:
            path = folder / f"step-{step:06d}"
            path.mkdir(parents=True)
            (path / "state.json").write_text(json.dumps({"sha256": {}, "number": number}))
            card = {"uid": f"{number}-{step}", "name": path.name, "role": "latest", "step": step}
            card |= {"folder": path, "metrics": {"valid/auc": step / STEPS}}
            tracker.log_checkpoints([card])
        if chance.random() < 0.1:
            time.sleep(chance.random())
    (folder.parent / "note.txt").write_text("words")
    tracker.log_file("note.txt")
    assert tracker.register("all of it", f"{number}-{STEPS}", "challenger") == ""
    tracker.finish("FINISHED")


def one_round(store: Path) -> list[str]:
    """Record each run in its own process, which shares only the store; return the problems."""
    children = []
    for number in range(RUNS):
        if child := os.fork():
            children.append(child)
            continue
        code = 1
        try:
            run(store, number)
            code = 0
        except BaseException:  # noqa: BLE001 - a forked process must end here
            traceback.print_exc()
        finally:
            os._exit(code)
    return [
        f"process {child} ended with {status}" for child in children if (status := os.waitpid(child, 0)[1])
    ]


def look(store: Path) -> list[str]:
    """Return which records of the runs in a store are missing or doubled."""
    client = MlflowClient(embedded_uri(store), registry_uri=embedded_uri(store))
    wrong = [f"{n} wait" for n in [sum(map(waits, (store / "runs").iterdir()))] if n]
    (experiment,) = [e for e in client.search_experiments() if e.name == "together"]
    runs = client.search_runs([experiment.experiment_id])
    wrong += [f"{len(runs)} runs"] if len(runs) != RUNS else []
    for found in runs:
        run_id, told = found.info.run_id, found.info.run_name
        for key in ("train/loss", "valid/auc"):
            steps = [point.step for point in client.get_metric_history(run_id, key)]
            if sorted(steps) != list(range(1, STEPS + 1)):
                wrong.append(f"{told}: {key} at {steps}")
        models = client.search_logged_models(
            [experiment.experiment_id], filter_string=f"source_run_id = '{run_id}'"
        )
        facts = {
            "status": found.info.status == "FINISHED",
            "params": len(found.data.params) == 20,
            "artifacts": [item.path for item in client.list_artifacts(run_id)] == ["note.txt"],
            "model": [[(m.key, m.step) for m in model.metrics] for model in models]
            == [[("valid/auc", STEPS)]],
        }
        wrong += [f"{told}: {name}" for name, good in facts.items() if not good]
    versions = client.search_model_versions("name = 'all of it'")
    if sorted(version.run_id for version in versions) != sorted(found.info.run_id for found in runs):
        wrong.append(f"{len(versions)} versions")
    return wrong


if __name__ == "__main__":
    print(json.dumps([*one_round(Path(sys.argv[1])), *look(Path(sys.argv[1]))]))
