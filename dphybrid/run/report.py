"""The last part of a run: write its report as JSON, figures and an HTML page, and end its record."""

import re
import shlex
import textwrap
from contextlib import closing
from pathlib import Path

from dphybrid.config import flatten
from dphybrid.config.settings import Settings
from dphybrid.data import rows_of_batch
from dphybrid.recipes.configs import given_values
from dphybrid.run.experiment import Experiment
from dphybrid.run.folder import Run
from dphybrid.run.pages import MetricsPage, Report, ResultPage
from dphybrid.tracking import Tracker, open_tracker
from dphybrid.tracking.report import first_facts, run_report_html, run_report_markdown
from dphybrid.tracking.system import balance_warnings
from dphybrid.tracking.tracker import REPORT_PAGE
from dphybrid.training.checkpoint import read_state
from dphybrid.training.clock import NOT_A_STEP
from dphybrid.training.saving import checkpoint_uid


def open_run_tracker(settings: Settings, recipe: str, must_answer: bool) -> Tracker:
    """Return the tracker that the settings name. must_answer: raise UserError if its server does not answer
    now."""
    # An experiment for each recipe, as other recipes have other metrics; unless the user chose one.
    experiment = settings.experiment
    if "experiment" not in settings.model_fields_set:
        experiment += "/" + re.sub(r"\W+", "-", recipe)
    return open_tracker(
        settings.mlflow_uri,
        experiment,
        settings.mlflow_dir,
        runs=settings.runs_dir,
        upload_limit=settings.upload_limit_mib * 2**20,
        must_answer=must_answer,
    )


def attached(run: Run) -> Tracker:
    """Return a tracker that continues the record of a run; its server need not answer now."""
    tracker = open_run_tracker(run.settings, run.page.recipe, must_answer=False)
    tracker.attach(run.folder.name)
    return tracker


def report_run(run: Run, experiment: Experiment) -> Report:
    """Write the report of a trained and evaluated run, end its MLflow run, and return the report."""
    # Close it whatever happens: an open tracker holds the record, and a run resumed in this process could not
    # send its records.
    with closing(attached(run)) as tracker:
        return _reported(run, experiment, tracker)


def _reported(run: Run, experiment: Experiment, tracker: Tracker) -> Report:
    engine = experiment.engine
    result, evaluated = (
        ResultPage.read(run.folder / "result.json"),
        MetricsPage.read(run.folder / "metrics.json"),
    )
    table = [row.table_row() for row in result.splits]
    replicas = engine.num_parts(result.devices, in_first_split=sum(row.number == 1 for row in result.splits))
    warnings = balance_warnings(table, replicas, result.system, result.stages)
    name, not_registered = experiment.config.checkpoint.register_as or "", ""
    if name:
        not_registered = tracker.register(name, checkpoint_uid(Path(result.best_checkpoint)), "challenger")
    report = Report(
        run_name=run.folder.name,
        devices=engine.shown_devices(result.devices, run.page.tags),
        run_id=run.page.run_id,
        run_url=tracker.run_url,
        tracking_uri=tracker.tracking_uri,
        ui_command=run.ui_command
        if "://" in tracker.tracking_uri and not tracker.run_url
        else tracker.run_url,
        metrics=evaluated.metrics,
        beside=evaluated.beside,
        best_checkpoint=result.best_checkpoint,
        latest_checkpoint=result.checkpoint,
        registered_as="" if not_registered else name,
        not_registered=f"{name}: {not_registered}" if not_registered else "",
        splits=result.splits,
        split_lines=result.split_lines,
        stages=result.stages,
        stages_ms=_stages_ms(result),
        step_ms=result.step_ms,
        saving=result.saving,
        warnings=warnings,
        digests={"data": run.page.data_digest, **read_state(Path(result.best_checkpoint)).digests},
        text="",
    )
    report = report.model_copy(update={"text": _closing_words(report)})
    report.write(run.folder / "report.json", run.data_dir)
    tracker.log_summary(_summary(result, experiment))
    if run.page.run_id:  # without a record, nobody would see the report: do not draw it
        facts = _facts(run, experiment, report)
        tracker.log_file(run.folder / "report.json", "")
        tracker.log_text("config.json", experiment.config.model_dump_json(indent=1))
        tracker.log_bytes(REPORT_PAGE, run_report_html(facts).encode())
        tracker.set_description(run_report_markdown(facts))
        # MLflow's list of runs shows this tag, in the column Source, but no metric unless people choose one.
        metric = experiment.task.metric
        tracker.set_tags({"mlflow.source.name": f"{report.metrics[metric]:.4g} {metric}"})
    tracker.finish("FINISHED")
    return report


def report_page(run: Run, clickable: bool) -> str:
    """Return the report of a finished run as a self-contained HTML page. clickable: with plotly inside, 5 MB;
    else with pictures. Raises UserError when the run has not ended, or its data is missing."""
    report = Report.read(run.folder / "report.json", run.data_dir)
    return run_report_html(_facts(run, run.experiment(), report), clickable)


def _closing_words(report: Report) -> str:
    shown = ", ".join(f"{name} {value:.4f}" for name, value in report.metrics.items())
    facts = {"Validation": shown, **({"Baselines": report.beside} if report.beside else {})}
    facts |= first_facts(report.model_dump())
    facts |= {
        f"Note{'' if place == 0 else f' {place + 1}'}": text for place, text in enumerate(report.warnings)
    }
    lines = ["", *(_wrapped(f"{name + ':':<12} {line}") for name, line in facts.items())]
    lines += [f"Registered:  models:/{report.registered_as}@challenger"] if report.registered_as else []
    lines += [f"NOT registered as {report.not_registered}"] if report.not_registered else []
    lines += [f"Look at it:  {report.ui_command}"] if report.ui_command else []
    if not report.ui_command.endswith(f" {shlex.quote(report.run_name)}"):
        lines += [f"Run:         {report.run_name}" + ("" if report.run_id else ", not recorded")]
    lines += [f"Checkpoint:  {report.best_checkpoint}"]
    return "\n".join(lines)


def _wrapped(line: str) -> str:
    """Return a line in lines of 80 columns; a long word, such as a path, stays whole."""
    return textwrap.fill(line, 80, subsequent_indent=" " * 13, break_long_words=False, break_on_hyphens=False)


def _stages_ms(result: ResultPage) -> dict[str, float]:
    """Return the milliseconds of an average step by stage."""
    in_step = {stage: seconds for stage, seconds in result.stages.items() if stage not in NOT_A_STEP}
    return (
        {stage: 1e3 * seconds / result.steps_timed for stage, seconds in in_step.items()}
        if result.steps_timed
        else {}
    )


def _summary(result: ResultPage, experiment: Experiment) -> dict[str, float]:
    config = experiment.config.train
    total = sum(result.stages.values())
    summary = {f"timing_share/{stage}_pct": 100 * seconds / total for stage, seconds in result.stages.items()}
    summary |= {f"timing_mean/{stage}_ms": value for stage, value in _stages_ms(result).items()}
    if rows := [row.rows for row in result.splits if row.number == 1]:
        summary |= {
            "split/replicas_used": len(rows),
            "split/rows_max": max(rows),
            "split/rows_min": min(rows),
        }
    summary |= {f"summary_step_ms_{name}": value for name, value in result.step_ms.items() if name != "steps"}
    if result.step_ms:
        full = rows_of_batch(experiment.data.dataset("train"), config.batch_size)
        summary["summary_samples_per_s_median"] = 1e3 * full / result.step_ms["p50"]
    summary["summary_checkpoint_stall_s"] = result.saving.stall_s
    summary["summary_checkpoint_mib"] = result.saving.written_bytes / 2**20
    return summary | {"summary_train_s": total}


def _facts(run: Run, experiment: Experiment, report: Report) -> dict[str, object]:
    """Return the facts for the run's page: the report, and more."""
    return report.model_dump() | {
        "splits": [row.table_row() for row in report.splits],
        "history": ResultPage.read(run.folder / "result.json").history,
        "charts": [chart.model_dump() for chart in MetricsPage.read(run.folder / "metrics.json").charts],
        "tabular": experiment.recipe.tabular,
        "config": experiment.config.model_dump(mode="json"),
        "given": flatten(given_values(experiment.config)),
        "links": run.page.links,
        "data_name": experiment.data.path.name,
        "data_source": experiment.source,
        "data_lines": experiment.data.describe().splitlines(),
    }
