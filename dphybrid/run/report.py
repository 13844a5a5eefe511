"""The last part of a run: write its report, and end its record. The report is a few texts
(`_texts`): the terminal shows the first, MLflow's description a summary and the others, a page all of them
with figures.
"""

import shlex
import textwrap
from collections.abc import Mapping
from contextlib import closing
from math import isfinite, nan
from pathlib import Path

from dphybrid.data import rows_of_batch
from dphybrid.data.store import PARTS
from dphybrid.recipes.configs import given_flags
from dphybrid.run.experiment import Experiment
from dphybrid.run.folder import FLOW_RUN_URL_TAG, attached
from dphybrid.run.pages import MetricsPage, Report, ResultPage, TrainedPage
from dphybrid.tracking.html import Line, bars, html_of, lines
from dphybrid.tracking.system import balance_warnings
from dphybrid.tracking.tracker import REPORT_PAGE
from dphybrid.training.checkpoint import read_state, step_of
from dphybrid.training.metrics import Task
from dphybrid.training.results import Chart
from dphybrid.training.saving import checkpoint_uid
from dphybrid.util.text import as_flags, as_markdown, masked, metric_text, printable

_FEW_POINTS = 30
"""A curve of fewer points has a mark on each."""
_MOST_LINES = 24
"""The most lines of a block in MLflow's description, which may have 8,000 characters."""
_WIDTH = 80
"""Columns of a terminal, and of a block in MLflow's description."""


def report_run(experiment: Experiment) -> Report:
    """Write the report of a trained and evaluated run, end its MLflow run, and return the report."""
    run, engine, task = experiment.run, experiment.engine, experiment.task
    folder, name = run.folder, experiment.config.checkpoint.register_as or ""
    result, evaluated = ResultPage.read(folder / "result.json"), MetricsPage.read(folder / "metrics.json")
    best = Path(result.best_checkpoint)
    in_first_split = sum(row.number == 1 for row in result.splits)
    replicas = engine.num_parts(result.devices, in_first_split)
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
            page=str(tracker.page or ""),
            registered_as="" if refused else name,
            not_registered=f"{name}: {refused}" if refused else "",
            warnings=balance_warnings(
                [row.table_row() for row in result.splits], replicas, result.system, result.stages
            ),
            digests={"data": run.page.data_digest, **read_state(best).digests},
        )
        report = report.model_copy(update={"text": _closing_words(report)})
        report.write(folder / "report.json", ResultPage.DEPTH)
        tracker.log_summary(_summary(report, experiment))
        if run.page.run_id:  # without a record, nobody would see the page: do not draw it
            tracker.log_file(folder / "report.json", "")
            tracker.log_text("config.json", experiment.config.model_dump_json(indent=1))
            tracker.log_bytes(REPORT_PAGE, report_page(experiment, report).encode())
            tracker.set_description(_description(experiment, report))
            # MLflow's list of runs shows this tag, in the column Source, and metrics only if asked to.
            shown = report.test or report.metrics
            tracker.set_tags({"mlflow.source.name": f"{metric_text(shown[task.metric])} {task.metric}"})
        tracker.finish("FINISHED")
    return report


def _beside(evaluated: MetricsPage, task: Task) -> str:
    """Return a text that compares the run with its baseline in the task's deciding metric."""
    words = []
    for which, metrics in evaluated.baselines.items():
        gain = evaluated.metrics[task.metric] - metrics[task.metric]
        better = "better" if gain * (1 if task.higher_is_better else -1) >= 0 else "WORSE"
        verdict = f"(this run is {metric_text(abs(gain))} {better})"
        words.append(f"{which} {task.metric} {metric_text(metrics[task.metric])} {verdict}")
    return ", ".join(words)


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
    facts |= {f"Note {k}" if k > 1 else "Note": text for k, text in enumerate(report.warnings, start=1)}
    facts["Registered"] = report.registered_as and f"models:/{report.registered_as}@challenger"
    name, _, why = report.not_registered.partition(": ")
    facts[f"NOT registered as {name}"] = why
    return {name: text for name, text in facts.items() if text}


def _closing_words(report: Report) -> str:
    """Return the lines for the terminal: of 80 columns, where a long word, such as a path, stays whole."""

    def filled(text: str) -> str:
        indent = " " * 13
        return textwrap.fill(
            text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )

    words = [filled(f"{name + ':':<12} {text}") for name, text in _facts(report).items()]
    words += [f"Look at it:  {report.ui_command}"] if report.ui_command else []
    if not report.ui_command.endswith(f" {shlex.quote(report.run_name)}"):
        words += [f"Run:         {report.run_name}" + ("" if report.run_id else ", not recorded")]
    words += [f"Checkpoint:  {report.best_checkpoint}"]
    words += [f"Report:      {report.page}"] if report.page != report.ui_command else []
    return "\n".join(["", *words])


def _summary(report: Report, experiment: Experiment) -> dict[str, float]:
    total, step_ms = sum(report.stages.values()), report.step_ms
    summary = {f"timing_share/{stage}_pct": 100 * seconds / total for stage, seconds in report.stages.items()}
    if rows := [row.rows for row in report.splits if row.number == 1]:
        summary |= {"split/replicas_used": len(rows)}
        summary |= {"split/rows_max": max(rows), "split/rows_min": min(rows)}
    summary |= {f"summary_step_ms_{name}": value for name, value in step_ms.items() if name != "steps"}
    if step_ms:
        full = rows_of_batch(experiment.data.dataset("train"), experiment.config.train.batch_size)
        summary["summary_samples_per_s_median"] = 1e3 * full / step_ms["p50"]
    summary["summary_checkpoint_stall_s"] = report.saving.stall_s
    summary["summary_checkpoint_mib"] = report.saving.written_bytes / 2**20
    return summary | {"summary_train_s": total}


def _texts(experiment: Experiment, report: Report) -> dict[str, str]:
    """Return the report as texts by title: the words of the terminal, the splits, the data, how to load the
    best checkpoint and how to repeat the run."""
    config, data = experiment.config, experiment.data
    about = f"{data.path.name} from {experiment.source}, digest {report.digests['data'][:16]}"
    load = ["import dphybrid", "", f"model = dphybrid.load_model({report.run_name!r})  # a torch module"]
    if report.registered_as:
        load.append(f'model = dphybrid.load_model("models:/{report.registered_as}@challenger")')
    if experiment.recipe.tabular:
        load.append(f"predictor = dphybrid.load({report.run_name!r})  # with its preprocessing, for new rows")
    given = masked(f"dphybrid train {as_flags(given_flags(config))}")
    what = f"{config.recipe} on {report.devices}, batch {config.train.batch_size}, seed {config.train.seed}"
    return {
        what: report.text.strip(),
        "How batches were split": "\n".join(report.split_lines),
        "Data": f"{about}\n\n{data.describe()}",
        "Load the best checkpoint": "\n".join(load),
        "Reproduce": f"{given}\n\n# All values are in config.json, versions and commit in the run's tags.",
    }


def _description(experiment: Experiment, report: Report) -> str:
    """Return the report as Markdown, for the run's description in MLflow: what, results, floor and doubts in
    four lines that wrap, then blocks of 80 columns: a wider one would push the metrics off the page."""
    data, facts = experiment.data, _facts(report)
    (what, _), *blocks = _texts(experiment, report).items()
    rows = ", ".join(
        f"{len(data.dataset(part)):,} {verb}" for part, verb in PARTS.items() if part in data.parts
    )
    doubts = [
        *report.warnings,
        *([f"NOT registered as {report.not_registered}"] * bool(report.not_registered)),
    ]
    summary = {
        "What": f"{what}; {data.manifest.description[0].strip()}; {rows}",
        "Results": "; ".join(f"{name} {facts[name]}" for name in ("Test", "Validation") if name in facts),
        "Floor": report.beside or "none",
        "Doubts": " ".join(doubts) or "none",
    }
    flow_run = experiment.run.page.tags.get(FLOW_RUN_URL_TAG, "")
    # The page may come from others; MLflow would run `javascript:` in an address.
    parts = [f"Prefect flow run: <{flow_run}>"] if flow_run.startswith(("http://", "https://")) else []
    parts.append("\n".join(f"- **{name}**: {as_markdown(text)}" for name, text in summary.items()))
    for title, text in blocks:
        if title == "How batches were split":
            text = f"{facts.get('Time', '')}\n{text}"
        # Three backticks in a column's name would end the code block.
        escaped = printable(text).replace("```", "` ` `").strip("\n")
        shown = [part for line in escaped.splitlines() for part in _folded(line, title)]
        if (more := len(shown) - _MOST_LINES) > 0:
            shown[_MOST_LINES:] = [f"... {more} more lines in {REPORT_PAGE}"]
        parts += ["### {}\n\n```\n{}\n```".format(as_markdown(title), "\n".join(shown))] if shown else []
    return "\n\n".join(parts)


def _folded(line: str, title: str) -> list[str]:
    """Return a line as lines of at most 80 columns, except that a long value stays whole: a command breaks
    before its flags, a line of the data's table is cut, and any other one wraps."""
    if title == "Data":
        return [line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…"]
    if title != "Reproduce":
        return textwrap.wrap(line, _WIDTH, subsequent_indent="  ", drop_whitespace=False) or [""]
    first, *flags = line.split(" --")
    folded = [first]
    for flag in flags:
        if len(folded[-1]) + len(flag) > _WIDTH - 5:
            folded[-1] += " \\"
            folded.append(f"  --{flag}")
        else:
            folded[-1] += f" --{flag}"
    return folded


def report_page(experiment: Experiment, report: Report) -> str:
    """Return the report of a finished run as one HTML page: the same texts, and figures."""
    folder = experiment.run.folder
    history = ResultPage.read(folder / "result.json").history
    charts = MetricsPage.read(folder / "metrics.json").charts
    kept = step_of(Path(report.best_checkpoint))
    curves = []
    for name in history[0] if history else ():
        points = {row["step"]: row[name] for row in history if isfinite(row.get(name, nan))}
        if name != "step" and len(points) > 1 and kept in points:
            curve: Line = list(points), list(points.values()), "both" if len(points) < _FEW_POINTS else "line"
            title = f"{name}: {metric_text(points[kept])} at the epoch that is kept"
            curves.append(lines([curve, ([kept], [points[kept]], "kept")], title, "step"))
    total = sum(report.stages.values()) or 1.0
    times = {
        f"{name}  {seconds:.2f} s, {seconds / total:.0%}": seconds
        for name, seconds in report.stages.items()
        if seconds > 0.005 * total
    }
    figures = {
        "How it learned": curves,
        f"What it predicts: {'test' if report.test else 'validation'} rows": list(map(_chart_figure, charts)),
        "Where time went": [bars(times, "seconds")],
    }
    return html_of(report.run_name, _texts(experiment, report), figures)


def _chart_figure(chart: Chart) -> str:
    """Draw a chart of predictions as SVG, beside the line y = x."""
    xs, ys = zip(*chart.points, strict=True) if chart.points else ((), ())
    ends = [min([*xs, *ys], default=0.0), max([*xs, *ys], default=1.0)]
    shown: list[Line] = [(ends, ends, "reference"), (xs, ys, chart.drawn)]
    return lines(shown, chart.title, chart.xlabel, chart.ylabel)
