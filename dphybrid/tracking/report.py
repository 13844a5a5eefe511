"""The one-page report of a run, in Markdown: it stands first on the run's page."""

from collections.abc import Mapping
from typing import Any


def run_report_markdown(report: Mapping[str, Any], config: Mapping[str, Any], links: Mapping[str, str] | None = None) -> str:
    """Return the page.

    report: the fields of `dphybrid.jobs.report.Report`, and given (flags), data_name, data_source, data_lines. links: name -> address for the
    first line, such as the flow run's.
    """
    parts = [" · ".join(f"[{name}]({address})" for name, address in (links or {}).items())]
    held_out = ", ".join(f"{name} **{value:.4f}**" for name, value in report["metrics"].items())
    where = f"batch {config['train']['batch_size']}, seed {config['train']['seed']}"
    parts.append(f"**{config['recipe']}** on `{report['devices']}`, {where}: {held_out}")
    parts += [f"> **Note:** {warning}" for warning in report["warnings"]]
    parts += [f"> **Not registered as** {report['not_registered']}"] if report["not_registered"] else []
    lines = "\n".join(f"- {line.strip()}" for line in report["data_lines"][:30])
    parts.append(
        f"### Data\n\n`{report['data_name']}` from `{report['data_source']}`, digest `{report['digests']['data'][:16]}`\n\n{lines}"
    )
    parts.append("### How batches were split\n\n" + _table(report["splits"], ("where", "split", "device", "steps")))
    parts.append(_where_time_went(report))
    parts.append(_how_to_load(report, config["recipe"]))
    flags = " ".join(f"--{name.replace('_', '-')} {value!r}" for name, value in report.get("given", {}).items())
    parts.append(
        f"### Reproduce\n\n```\ndphybrid train {flags}\n```\n`config.json` holds every value, the tags versions and commit."
    )
    return "\n\n".join(part for part in parts if part)


def _where_time_went(report: Mapping[str, Any]) -> str:
    total = sum(report["stages"].values()) or 1.0
    stages = [
        {"stage": name, "seconds": f"{seconds:.2f}", "share": f"{seconds / total:.0%}"}
        for name, seconds in report["stages"].items()
        if seconds / total > 0.005
    ]
    step = report["step_ms"]
    told = ""
    if step:
        told = f"A step took {step['p50']:.2f} ms (p50), {step['p95']:.2f} ms (p95) after the warm-up. "
    return f"### Where time went\n\n{told}Pictures are under Artifacts, `figures/`.\n\n" + _table(
        stages, ("stage", "seconds", "share")
    )


def _how_to_load(report: Mapping[str, Any], recipe: str) -> str:
    name, best = report["registered_as"], report["best_checkpoint"]
    lines = [f"model = dphybrid.load_model({best!r})  # a torch module"]
    lines += [f'model = dphybrid.load_model("models:/{name}@challenger")  # or, from the registry'] if name else []
    lines += [f"predictor = dphybrid.load({best!r})  # with its preprocessing, for new rows"] if recipe == "ctr" else []
    return "### Load the best checkpoint\n\n```python\nimport dphybrid\n\n" + "\n".join(lines) + "\n```"


def _table(rows: Any, columns: tuple[str, ...]) -> str:
    if not rows:
        return "nothing recorded"
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(str(row[column]) for column in columns) + " |" for row in list(rows)[:24]]
    if len(rows) > 24:
        lines.append(f"\n{len(rows) - 24} more in `split_shapes.json`.")
    return "\n".join(lines)
