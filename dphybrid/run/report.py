"""The last part of a run: write its report, and end its record. The terminal and MLflow's description show a
few facts (`_facts`), and a page shows them with more texts (`_texts`) and figures."""

import textwrap
from collections.abc import Mapping
from contextlib import closing
from math import isfinite, nan
from pathlib import Path

from dphybrid.recipes.configs import given_flags
from dphybrid.run.experiment import Experiment
from dphybrid.run.folder import attached
from dphybrid.run.pages import MetricsPage, Report, ResultPage, TrainedPage
from dphybrid.tracking.html import Line, html_of, lines
from dphybrid.training.checkpoint import read_state, step_of
from dphybrid.training.metrics import Task
from dphybrid.training.results import Chart
from dphybrid.training.saving import checkpoint_uid
from dphybrid.util.files import write_text
from dphybrid.util.text import as_flags, as_markdown, masked, metric_text

REPORT_PAGE = "Report.html"
"""The page in the run's folder. The capital letter sorts it before MLflow's other artifacts."""


def report_run(experiment: Experiment) -> Report:
    """Write the report of a trained and evaluated run, end its MLflow run, and return the report."""
    run, engine, task = experiment.run, experiment.engine, experiment.task
    folder, name = run.folder, experiment.config.checkpoint.register_as or ""
    result, evaluated = ResultPage.read(folder / "result.json"), MetricsPage.read(folder / "metrics.json")
    best = Path(result.best_checkpoint)
    # Closed whatever happens: an open tracker holds the record, and a run resumed in this process could not
    # send its records.
    with closing(attached(run)) as tracker:
        refused = tracker.register(name, checkpoint_uid(best), "challenger") if name else ""
        report = Report(
            **{field: getattr(result, field) for field in TrainedPage.model_fields},
            run_name=folder.name,
            devices=engine.shown_devices(result.devices),
            run_id=run.page.run_id,
            run_url=tracker.run_url,
            tracking_uri=tracker.tracking_uri,
            # A database has no pages of its own: the command serves them.
            ui_command=tracker.run_url or (run.ui_command if "://" in tracker.tracking_uri else ""),
            metrics=evaluated.metrics,
            test=evaluated.test,
            beside=_beside(evaluated, task),
            latest_checkpoint=result.checkpoint,
            page=str(folder / REPORT_PAGE),
            registered_as="" if refused else name,
            not_registered=f"{name}: {refused}" if refused else "",
            digests={"data": run.page.data_digest, **read_state(best).digests},
        )
        report = report.model_copy(update={"text": _closing_words(report)})
        write_text(folder / REPORT_PAGE, _page(experiment, report))
        report.write(folder / "report.json")
        tracker.log_file(REPORT_PAGE)
        # MLflow shows the first tag as the run's description, and the second in its list of runs.
        deciding = f"{metric_text((report.test or report.metrics)[task.metric])} {task.metric}"
        note = _description(experiment, report)
        tracker.set_tags({"mlflow.note.content": note, "mlflow.source.name": deciding})
        tracker.finish("FINISHED")
    return report


def _beside(evaluated: MetricsPage, task: Task) -> str:
    """Return a text that compares the run with its floor in the task's deciding metric."""
    if not evaluated.floor:
        return ""
    found, floor = evaluated.metrics[task.metric], evaluated.floor[task.metric]
    better = "better" if (found - floor) * (1 if task.higher_is_better else -1) >= 0 else "WORSE"
    verdict = f"(this run is {metric_text(abs(found - floor))} {better})"
    return f"{task.floor_name} {task.metric} {metric_text(floor)} {verdict}"


def _facts(report: Report) -> dict[str, str]:
    """Return what the terminal, MLflow and the page show first, by name."""

    def numbers(metrics: Mapping[str, float]) -> str:
        return ", ".join(f"{name} {metric_text(value)}" for name, value in metrics.items())

    chosen = "" if report.test else " (which chose the epoch)"
    facts = {"Test": numbers(report.test), "Validation": numbers(report.metrics) + chosen}
    facts["Baseline"] = report.beside
    full = [row for row in report.splits if row.number == 1]  # of the first batch, which is full
    rows = [row.rows for row in full if row.block == full[0].block]
    if len(rows) > 1:
        parts = " + ".join(map(str, rows[:8])) + (" + ..." if len(rows) > 8 else "")
        facts["Split"] = f"{full[0].batch_rows} rows on {len(rows)} devices: {parts}"
    total, longest = sum(report.stages.values()) or 1.0, list(report.stages.items())[:3]
    facts["Time"] = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in longest)
    if report.step_ms:
        facts["Time"] += f"; {report.step_ms['p50']:.3g} ms a step (median)"
    facts["Registered"] = report.registered_as and f"models:/{report.registered_as}@challenger"
    name, _, why = report.not_registered.partition(": ")
    facts[f"NOT registered as {name}"] = why
    return {name: text for name, text in facts.items() if text}


def _closing_words(report: Report) -> str:
    """Return the lines for the terminal: of 80 columns, where a long word, such as a path, stays whole."""
    wrap = textwrap.TextWrapper(
        80, subsequent_indent=" " * 13, break_long_words=False, break_on_hyphens=False
    )
    words = [wrap.fill(f"{name + ':':<12} {text}") for name, text in _facts(report).items()]
    words += [f"Look at it:  {report.ui_command}"] if report.ui_command else []
    words += [f"Run:         {report.run_name}" + ("" if report.run_id else ", not recorded")]
    words += [f"Checkpoint:  {report.best_checkpoint}"]
    return "\n".join(["", *words, f"Report:      {report.page}"])


def _what(experiment: Experiment, report: Report) -> str:
    train = experiment.config.train
    return f"{experiment.config.recipe} on {report.devices}, batch {train.batch_size}, seed {train.seed}"


def _texts(experiment: Experiment, report: Report) -> dict[str, str]:
    """Return the report as texts by title: the words of the terminal, the stages, the splits, the data, and
    how to repeat the run."""
    config, data = experiment.config, experiment.data
    source = config.data.model_dump().get("path") or "the recipe"
    about = f"{data.path.name} from {source}, digest {report.digests['data'][:16]}"
    given = masked(f"dphybrid train {as_flags(given_flags(config))}")
    return {
        _what(experiment, report): report.text.strip(),
        "Where time went": "\n".join(f"{s:12,.2f} s  {name}" for name, s in report.stages.items()),
        "How batches were split": "\n".join(report.split_lines),
        "Data": f"{about}\n\n{data.describe()}",
        "Reproduce": f"{given}\n\n# All values are in the run's run.json, versions in its tags.",
    }


def _description(experiment: Experiment, report: Report) -> str:
    """Return what the run is and its facts as Markdown, for the run's description in MLflow."""
    what = f"{_what(experiment, report)}; {experiment.data.manifest.description[0].strip()}"
    facts = {"What": what, **_facts(report), "More": f"{REPORT_PAGE} and splits.txt under Artifacts"}
    return "\n".join(f"- **{name}**: {as_markdown(text)}" for name, text in facts.items())


def _page(experiment: Experiment, report: Report) -> str:
    """Return the report of a finished run as one HTML page: the same texts, and figures."""
    folder = experiment.run.folder
    history = ResultPage.read(folder / "result.json").history
    charts = MetricsPage.read(folder / "metrics.json").charts
    kept = step_of(Path(report.best_checkpoint))
    curves = []
    for name in history[0] if history else ():
        points = {row["step"]: row[name] for row in history if isfinite(row.get(name, nan))}
        if name != "step" and len(points) > 1 and kept in points:
            curve: Line = list(points), list(points.values()), "line"
            title = f"{name}: {metric_text(points[kept])} at the epoch that is kept"
            curves.append(lines([curve, ([kept], [points[kept]], "kept")], title, "step"))
    figures = {
        "How it learned": curves,
        f"What it predicts: {'test' if report.test else 'validation'} rows": list(map(_chart_figure, charts)),
    }
    return html_of(report.run_name, _texts(experiment, report), figures)


def _chart_figure(chart: Chart) -> str:
    """Draw a chart of predictions as SVG, beside the line y = x."""
    xs, ys = zip(*chart.points, strict=True) if chart.points else ((), ())
    ends = [min([*xs, *ys], default=0.0), max([*xs, *ys], default=1.0)]
    shown: list[Line] = [(ends, ends, "reference"), (xs, ys, chart.drawn)]
    return lines(shown, chart.title, chart.xlabel, chart.ylabel)
