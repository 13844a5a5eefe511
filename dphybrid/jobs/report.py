"""The last part of a run: what it came to, as numbers, pictures and a page, and the end of its record."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dphybrid.config import ExperimentConfig, flatten, given_values
from dphybrid.config.settings import Settings
from dphybrid.data import Prepared, open_prepared
from dphybrid.jobs.runs import Run, read_json, read_run
from dphybrid.parallel import resolve_devices
from dphybrid.tracking import Tracker, open_tracker
from dphybrid.tracking.balance import balance_warnings
from dphybrid.training.checkpoint import read_state
from dphybrid.training.clock import NOT_A_STEP
from dphybrid.training.retention import checkpoint_uid


class Report(BaseModel):
    """What a run came to; `--report FILE` writes it as JSON."""

    run_name: str
    devices: str
    run_id: str
    run_url: str
    tracking_uri: str
    ui_command: str
    metrics: dict[str, float]
    best_checkpoint: str
    latest_checkpoint: str
    registered_as: str
    splits: list[dict[str, Any]]
    split_lines: list[str]
    stages: dict[str, float]
    step_ms: dict[str, float]
    warnings: list[str]
    digests: dict[str, str]
    text: str


def open_run_tracker(settings: Settings, must_answer: bool) -> Tracker:
    """Return the tracker that the settings name. must_answer: raise UserError when its server does not answer now."""
    return open_tracker(
        settings.mlflow_uri,
        settings.experiment,
        settings.mlflow_dir,
        upload_limit=settings.upload_limit_mib * 2**20,
        must_answer=must_answer,
    )


def attached(run: Run, settings: Settings) -> Tracker:
    """Return a tracker that goes on recording a run; its server need not answer now."""
    tracker = open_run_tracker(settings, must_answer=False)
    tracker.attach(run.page["run_id"])
    return tracker


def report_run(run_folder: str, settings: Settings) -> Report:
    """Write the report of a trained and evaluated run, end its MLflow run, and return the report."""
    run = read_run(run_folder)
    result, metrics, splits = (read_json(run.folder / f"{name}.json") for name in ("result", "metrics", "splits"))
    data = open_prepared(Path(run.page["prepared"]))
    tracker = attached(run, settings)
    warnings = balance_warnings(splits, len(resolve_devices(result["devices"])), result["system"], result["stages"])
    name = run.config.checkpoint.register_as or ""
    report = Report(
        run_name=run.folder.name,
        devices=result["devices"],
        run_id=run.page["run_id"],
        run_url=tracker.run_url,
        tracking_uri=tracker.tracking_uri,
        ui_command=tracker.ui_command,
        metrics=metrics,
        best_checkpoint=result["best_checkpoint"],
        latest_checkpoint=result["checkpoint"],
        registered_as=name,
        splits=splits,
        split_lines=(run.folder / "splits.txt").read_text(encoding="utf-8").splitlines(),
        stages=result["stages"],
        step_ms=result["step_ms"],
        warnings=warnings,
        digests={"data": run.page["data_digest"], **read_state(Path(result["best_checkpoint"]))["sha256"]},
        text="",
    )
    report.text = _closing_words(report)
    (run.folder / "report.json").write_text(report.model_dump_json(indent=1), encoding="utf-8")
    tracker.log_summary(_summary(result, splits, run.config))
    _log_figures(tracker, result, splits)
    tracker.log_file(run.folder / "report.json", "")
    tracker.log_text("config.json", run.config.model_dump_json(indent=1))
    tracker.set_description(_page(report, run, data))
    if name:
        tracker.register(name, checkpoint_uid(Path(result["best_checkpoint"])), "challenger")
    tracker.finish("FINISHED")
    return report


def _closing_words(report: Report) -> str:
    shown = ", ".join(f"{name} {value:.4f}" for name, value in report.metrics.items())
    lines = [
        "",
        f"Held out:    {shown}",
        f"Run:         {report.run_name}" + (f", id {report.run_id}" if report.run_id else ", not recorded"),
        f"Best:        {report.best_checkpoint}",
    ]
    lines += [f"Registered:  models:/{report.registered_as}@challenger"] if report.registered_as else []
    lines += [f"Look at it:  {report.ui_command}"] if report.ui_command else []
    lines += [f"             {report.run_url}"] if report.run_url not in ("", report.ui_command) else []
    lines += [f"Note:        {warning}" for warning in report.warnings]
    return "\n".join(lines)


def _summary(result: dict[str, Any], splits: list[dict[str, Any]], config: ExperimentConfig) -> dict[str, float]:
    total = sum(result["stages"].values())
    summary = {f"timing_share/{stage}_pct": 100 * seconds / total for stage, seconds in result["stages"].items()}
    if count := result["steps_timed"]:
        in_step = {stage: seconds for stage, seconds in result["stages"].items() if stage not in NOT_A_STEP}
        summary |= {f"timing_mean/{stage}_ms": 1e3 * seconds / count for stage, seconds in in_step.items()}
    if splits:
        rows = [row["rows"] for row in splits if row["where"].startswith("split 1 /")]
        summary |= {"split/replicas_used": len(rows), "split/rows_max": max(rows), "split/rows_min": min(rows)}
    step_ms = result["step_ms"]
    summary |= {f"summary/step_ms_{name}": value for name, value in step_ms.items() if name != "steps"}
    if step_ms:
        summary["summary/samples_per_s_median"] = 1e3 * config.train.batch_size / step_ms["p50"]
    return summary | {"summary/train_s": total}


def _log_figures(tracker: Tracker, result: dict[str, Any], splits: list[dict[str, Any]]) -> None:
    from dphybrid.tracking.figures import curves_figure, rows_per_replica_figure, stage_figure

    if splits:
        tracker.log_figure("figures/rows_per_replica.png", rows_per_replica_figure(splits))
    tracker.log_figure("figures/where_time_goes.png", stage_figure(result["stages"]))
    history = result["history"]
    if len(history) > 1:
        curves = {name: [(row["step"], row[name]) for row in history] for name in history[0] if name != "step"}
        tracker.log_figure("figures/learning_curves.png", curves_figure(curves, "step"))


def _page(report: Report, run: Run, data: Prepared) -> str:
    from dphybrid.tracking.report import run_report_markdown

    facts = {
        "given": flatten(given_values(run.config)),
        "data_name": data.path.name,
        "data_source": run.config.data.path or f"built in, recipe {run.config.recipe}",
        "data_lines": data.describe().splitlines(),
    }
    return run_report_markdown(report.model_dump() | facts, run.config.model_dump(mode="json"), run.page["links"])
