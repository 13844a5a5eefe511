"""The one-page report of a run, in Markdown: it stands first on the run's page."""

from collections.abc import Mapping
from typing import Any


def run_report_markdown(report: Mapping[str, Any], config: Mapping[str, Any], links: Mapping[str, str] | None = None) -> str:
    """Return the page. report: the fields of `dphybrid.job.Report`. links: name -> address for the first line, such as the flow run's."""
    parts = [" · ".join(f"[{name}]({address})" for name, address in (links or {}).items())]
    held_out = ", ".join(f"{name} **{value:.4f}**" for name, value in report["metrics"].items())
    parts.append(
        f"**{config['recipe']}** on `{report['devices']}`, batch {config['train']['batch_size']}, seed {config['train']['seed']}: {held_out}"
    )
    parts.append("### How batches were split\n\n" + _table(report["splits"], ("where", "split", "device", "steps")))
    total = sum(report["stages"].values()) or 1.0
    stages = [
        {"stage": name, "seconds": f"{s:.2f}", "share": f"{s / total:.0%}"}
        for name, s in report["stages"].items()
        if s / total > 0.005
    ]
    parts.append("### Where time went\n\n" + _table(stages, ("stage", "seconds", "share")))
    best = report["best_checkpoint"]
    parts.append(
        f"### Load the best checkpoint\n\n```python\nfrom dphybrid.loading import model_from_checkpoint\nmodel = model_from_checkpoint({best!r})\n```"
    )
    flags = " ".join(f"--{name.replace('_', '-')} {value!r}" for name, value in report.get("given", {}).items())
    parts.append(
        f"### Reproduce\n\n```\ndphybrid train {flags}\n```\nData digest `{report['digests']['data'][:16]}`; `config.json` holds every value."
    )
    return "\n\n".join(part for part in parts if part)


def _table(rows: Any, columns: tuple[str, ...]) -> str:
    if not rows:
        return "nothing recorded"
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(str(row[column]) for column in columns) + " |" for row in list(rows)[:24]]
    if len(rows) > 24:
        lines.append(f"\n{len(rows) - 24} more in `split_shapes.json`.")
    return "\n".join(lines)
