"""The last part of a run: write its report - as JSON, as text for the terminal, as MLflow's description, as
a page - and end its record."""

import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from math import isfinite, nan
from pathlib import Path
from typing import Any

from dphybrid.config import flatten
from dphybrid.config.settings import Settings
from dphybrid.data import rows_of_batch
from dphybrid.recipes.configs import given_values
from dphybrid.run.experiment import Experiment
from dphybrid.run.folder import Run
from dphybrid.run.pages import MetricsPage, Report, ResultPage
from dphybrid.tracking import Tracker, open_tracker
from dphybrid.tracking.pages import (
    COLOURS,
    GREY,
    Cell,
    Picture,
    Section,
    Table,
    bars,
    cell,
    html_of,
    number,
    short,
)
from dphybrid.tracking.system import balance_warnings
from dphybrid.tracking.tracker import REPORT_PAGE
from dphybrid.training.checkpoint import read_state
from dphybrid.training.clock import NOT_A_STEP
from dphybrid.training.metrics import Chart, Confusion
from dphybrid.training.saving import checkpoint_uid
from dphybrid.util.text import as_flags, as_markdown, masked, printable

_SHOWN_COLUMNS = 20
"""Bars of the picture of columns."""
_MOST_LINES = 24
"""The most lines of a block in MLflow's description, which may have 8,000 characters."""


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
    engine, folder = experiment.engine, run.folder
    result, evaluated = ResultPage.read(folder / "result.json"), MetricsPage.read(folder / "metrics.json")
    replicas = engine.num_parts(result.devices, in_first_split=sum(row.number == 1 for row in result.splits))
    table = [row.table_row() for row in result.splits]
    name, not_registered = experiment.config.checkpoint.register_as or "", ""
    if name:
        not_registered = tracker.register(name, checkpoint_uid(Path(result.best_checkpoint)), "challenger")
    in_step = {stage: seconds for stage, seconds in result.stages.items() if stage not in NOT_A_STEP}
    report = Report(
        run_name=folder.name,
        devices=engine.shown_devices(result.devices, run.page.tags),
        run_id=run.page.run_id,
        run_url=tracker.run_url,
        tracking_uri=tracker.tracking_uri,
        # A database has no pages of its own: the command serves them.
        ui_command=tracker.run_url or (run.ui_command if "://" in tracker.tracking_uri else ""),
        metrics=evaluated.metrics,
        test=evaluated.test,
        beside=evaluated.beside,
        advice=evaluated.advice,
        columns=_most_important(evaluated.importance, experiment.task.metric),
        best_checkpoint=result.best_checkpoint,
        latest_checkpoint=result.checkpoint,
        registered_as="" if not_registered else name,
        not_registered=f"{name}: {not_registered}" if not_registered else "",
        splits=result.splits,
        split_lines=result.split_lines,
        stages=result.stages,
        stages_ms={stage: 1e3 * s / result.steps_timed for stage, s in in_step.items() if result.steps_timed},
        step_ms=result.step_ms,
        saving=result.saving,
        warnings=balance_warnings(table, replicas, result.system, result.stages),
        digests={"data": run.page.data_digest, **read_state(Path(result.best_checkpoint)).digests},
        text="",
    )
    report = report.model_copy(update={"text": _closing_words(report)})
    report.write(folder / "report.json", run.data_dir)
    tracker.log_summary(_summary(report, experiment))
    if run.page.run_id:  # without a record, nobody would see the page: do not draw it
        tracker.log_file(folder / "report.json", "")
        tracker.log_text("config.json", experiment.config.model_dump_json(indent=1))
        tracker.log_bytes(REPORT_PAGE, report_page(run, experiment, report).encode())
        tracker.set_description(_description(run, experiment, report))
        # MLflow's list of runs shows this tag, in the column Source, but no metric unless people choose one.
        metric = experiment.task.metric
        tracker.set_tags({"mlflow.source.name": f"{report.metrics[metric]:.4g} {metric}"})
    tracker.finish("FINISHED")
    return report


def _facts(report: Report) -> dict[str, str]:
    """Return what the terminal, MLflow and the page show first, by name."""
    chosen = "" if report.test else " (validation, which chose the epoch)"
    facts = {"Validation": _numbers(report.metrics) + chosen}
    facts |= {"Test": _numbers(report.test)} if report.test else {}
    facts |= {"Baselines": report.beside} if report.beside else {}
    facts |= {f"Try {what}": text for what, _, text in (line.partition(": ") for line in report.advice)}
    facts |= {"Columns": report.columns} if report.columns else {}
    full = [row for row in report.splits if row.number == 1]  # of the first batch, which is full
    rows = [row.rows for row in full if row.block == full[0].block]
    if len(rows) > 1:
        parts = " + ".join(map(str, rows[:8])) + (" + ..." if len(rows) > 8 else "")
        facts["Split"] = f"{full[0].batch_rows} rows on {len(rows)} devices: {parts}"
    total = sum(report.stages.values()) or 1.0
    if largest := sorted(report.stages.items(), key=lambda stage: -stage[1])[:3]:
        step = f"; {report.step_ms['p50']:.3g} ms a step (median)" if report.step_ms else ""
        facts["Time"] = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in largest) + step
    facts |= {f"Note {k}" if k > 1 else "Note": text for k, text in enumerate(report.warnings, start=1)}
    facts |= {"Registered": f"models:/{report.registered_as}@challenger"} if report.registered_as else {}
    return facts | ({"NOT registered as": report.not_registered} if report.not_registered else {})


def _numbers(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def _most_important(importance: Mapping[str, float], metric: str) -> str:
    """Return the columns that matter most, as text."""
    shown = ", ".join(f"{printable(name)} {value:.3g}" for name, value in list(importance.items())[:5])
    more = f", {len(importance) - 5} more" if len(importance) > 5 else ""
    return shown and f"{shown}{more} ({metric} lost when a column is shuffled)"


def _closing_words(report: Report) -> str:
    lines = [f"{name + ':':<12} {text}" for name, text in _facts(report).items()]
    lines = ["", *(line.replace("NOT registered as:", "NOT registered as") for line in lines)]
    # Lines of 80 columns; a long word, such as a path, stays whole.
    lines = [
        textwrap.fill(line, 80, subsequent_indent=" " * 13, break_long_words=False, break_on_hyphens=False)
        for line in lines
    ]
    lines += [f"Look at it:  {report.ui_command}"] if report.ui_command else []
    if not report.ui_command.endswith(f" {shlex.quote(report.run_name)}"):
        lines += [f"Run:         {report.run_name}" + ("" if report.run_id else ", not recorded")]
    return "\n".join([*lines, f"Checkpoint:  {report.best_checkpoint}"])


def _summary(report: Report, experiment: Experiment) -> dict[str, float]:
    total, step_ms = sum(report.stages.values()), report.step_ms
    summary = {f"timing_share/{stage}_pct": 100 * seconds / total for stage, seconds in report.stages.items()}
    summary |= {f"timing_mean/{stage}_ms": value for stage, value in report.stages_ms.items()}
    if rows := [row.rows for row in report.splits if row.number == 1]:
        summary |= {
            "split/replicas_used": len(rows),
            "split/rows_max": max(rows),
            "split/rows_min": min(rows),
        }
    summary |= {f"summary_step_ms_{name}": value for name, value in step_ms.items() if name != "steps"}
    if step_ms:
        full = rows_of_batch(experiment.data.dataset("train"), experiment.config.train.batch_size)
        summary["summary_samples_per_s_median"] = 1e3 * full / step_ms["p50"]
    summary["summary_checkpoint_stall_s"] = report.saving.stall_s
    summary["summary_checkpoint_mib"] = report.saving.written_bytes / 2**20
    return summary | {"summary_train_s": total}


def _description(run: Run, experiment: Experiment, report: Report) -> str:
    """Return the run's description in MLflow: the words of the terminal, as Markdown."""
    texts = {"How batches were split": "\n".join(report.split_lines), **_texts(experiment, report)}
    first = {_where(experiment, report): ""} | _facts(report) | _links(run)
    # Two blanks at the end of a line: without them, Markdown would join the lines.
    parts = ["  \n".join(f"**{as_markdown(name)}** {_linked(text)}" for name, text in first.items())]
    for title, text in texts.items():
        lines = text.splitlines()
        if title == "Data":  # where a column's values may be long
            lines = [line[:160] for line in lines]
        if (more := len(lines) - _MOST_LINES) > 0:
            lines[_MOST_LINES:] = [f"... {more} more lines in {REPORT_PAGE}"]
        # Three backticks in a column's name would end the code block.
        shown = printable("\n".join(lines)).replace("```", "` ` `")
        parts.append(f"### {title}\n\n```\n{shown}\n```")
    return "\n\n".join(parts)


def report_page(run: Run, experiment: Experiment, report: Report) -> str:
    """Return the report of a finished run as one HTML page."""
    history = ResultPage.read(run.folder / "result.json").history
    evaluated = MetricsPage.read(run.folder / "metrics.json")
    charts, hidden = evaluated.charts, ("Valid", "Test", "Columns", "Note")
    facts = {name: text for name, text in _facts(report).items() if not name.startswith(hidden)}
    measured = (
        "validation; test rows, once, at the end" if report.test else "validation, which chose the epoch"
    )
    facts = {"Measured on": measured, **facts}
    big = {name: number(value) for name, value in report.metrics.items()}
    big |= {f"test {name}": number(value) for name, value in report.test.items()}
    big |= {"ms a step": number(report.step_ms["p50"])} if report.step_ms else {}
    total = sum(report.stages.values()) or 1.0
    times = [
        (f"{name}  {seconds:.2f} s, {seconds / total:.0%}", {"seconds": seconds})
        for name, seconds in sorted(report.stages.items(), key=lambda stage: -stage[1])
        if seconds > 0.005 * total
    ]
    columns = ("where", "split", "device", "steps")
    splits = [[cell(row.table_row()[name]) for name in columns] for row in report.splits]
    return html_of(
        report.run_name,
        [
            Section(
                note=_where(experiment, report), big=big, facts=facts | _links(run), warnings=report.warnings
            ),
            Section("How it learned", pictures=_curves(history)),
            Section(
                "What it predicts",
                pictures=[_picture(chart) for chart in charts],
                tables=[_recall(chart) for chart in charts if isinstance(chart, Confusion)],
            ),
            *_columns(evaluated.importance, experiment.task.metric),
            Section("How batches were split", tables=[Table(columns, splits)] if splits else []),
            Section("Where time went", pictures=[bars(times, "seconds")] if times else []),
            *(Section(title, text=text) for title, text in _texts(experiment, report).items()),
        ],
    )


def _where(experiment: Experiment, report: Report) -> str:
    config = experiment.config
    return f"{config.recipe} on {report.devices}, batch {config.train.batch_size}, seed {config.train.seed}"


def _links(run: Run) -> dict[str, str]:
    # Addresses may come from others, and `javascript:` in one would run on the page.
    return {name: to for name, to in run.page.links.items() if to.startswith(("http://", "https://"))}


def _linked(text: str) -> str:
    return f"<{text}>" if text.startswith(("http://", "https://")) else as_markdown(text)


def _texts(experiment: Experiment, report: Report) -> dict[str, str]:
    """Return the data, how to load the best checkpoint and how to repeat the run, by title."""
    data, name, best = experiment.data, report.registered_as, report.best_checkpoint
    about = f"{data.path.name} from {experiment.source}, digest {report.digests['data'][:16]}"
    load = ["import dphybrid", "", f"model = dphybrid.load_model({best!r})  # a torch module"]
    if name:
        load.append(f'model = dphybrid.load_model("models:/{name}@challenger")  # or, from the registry')
    if experiment.recipe.tabular:
        load.append(f"predictor = dphybrid.load({best!r})  # with its preprocessing, for new rows")
    given = masked(f"dphybrid train {as_flags(flatten(given_values(experiment.config)))}")
    return {
        "Data": f"{about}\n\n{data.describe()}",
        "Load the best checkpoint": "\n".join(load),
        "Reproduce": f"{given}\n\n# All values are in config.json, versions and commit in the run's tags.",
    }


def _columns(importance: Mapping[str, float], metric: str) -> list[Section]:
    """Return the section about a table's columns; none without a measurement."""
    if not importance:
        return []
    what, most = f"{metric} lost", list(importance.items())[:_SHOWN_COLUMNS]
    picture = bars([(name, {what: value}) for name, value in most], what)
    table = Table(("column", what), [[cell(name), cell(value)] for name, value in importance.items()])
    note = f"How much {metric} gets worse on validation rows when the column is shuffled."
    return [Section("Which columns matter", note, pictures=[picture], tables=[table])]


def _curves(history: Sequence[Mapping[str, float]]) -> list[Picture]:
    """Return a picture for each metric with at least two values."""
    pictures = []
    for name in history[0] if history else ():
        points = [(row["step"], row[name]) for row in history if isfinite(row.get(name, nan))]
        if name != "step" and len(points) > 1:
            look = "o-" if len(points) < 30 else "-"
            draw = partial(_draw_points, points, look)
            pictures.append(Picture(draw, f"{name}: {number(points[-1][1])} at the end", "step"))
    return pictures


def _draw_points(points: Sequence[tuple[float, float]], look: str, axes: Any) -> None:
    axes.plot(*zip(*points, strict=True), look, color=COLOURS[0])


def _picture(chart: Chart | Confusion) -> Picture:
    """Return the picture of a chart of predictions."""
    if isinstance(chart, Confusion):
        size = max(3.2, 1.6 + 0.4 * len(chart.classes))
        return Picture(
            partial(_draw_confusion, chart), chart.title, "predicted class", "true class", (size + 2, size)
        )

    def draw(axes: Any) -> None:
        xs, ys = zip(*chart.points, strict=True) if chart.points else ((), ())
        ends = [min(xs, default=0.0), max(xs, default=1.0)]
        if chart.line == "equal":
            ends = [min([*xs, *ys], default=0.0), max([*xs, *ys], default=1.0)]
        if chart.line != "none":
            axes.plot(ends, ends if chart.line == "equal" else [0.0, 0.0], **GREY)
        axes.plot(xs, ys, "-" if chart.drawn == "line" else "o", color=COLOURS[0])

    return Picture(draw, chart.title, chart.xlabel, chart.ylabel)


def _draw_confusion(chart: Confusion, axes: Any) -> None:
    names = [short(name, 16) for name in chart.classes]
    axes.grid(visible=False)
    shares = [[count / (sum(counts) or 1.0) for count in counts] for counts in chart.counts]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for y, line in enumerate(shares):
        for x, share in enumerate(line):
            if share >= 0.005:
                axes.text(
                    x, y, f"{share:.0%}", ha="center", va="center", color="white" if share > 0.6 else "black"
                )
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    totals = [f"{name} ({sum(counts):,.6g})" for name, counts in zip(names, chart.counts, strict=True)]
    axes.set_yticks(range(len(names)), totals)


def _recall(chart: Confusion) -> Table:
    rows = [
        [Cell(name), cell(sum(counts)), cell(None if recall is None else 100 * recall)]
        for name, counts, recall in zip(chart.classes, chart.counts, chart.recall, strict=True)
    ]
    return Table(("class", "validation rows", "recall, %"), rows)
