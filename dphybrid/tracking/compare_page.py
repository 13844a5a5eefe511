"""The page of a comparison in one file: its numbers, its script and plotly in it; no server, no network,
readable from a mail."""

import json
from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from dphybrid.tracking.compare_facts import (
    DEVICES,
    SEED,
    Point,
    RunFacts,
    combination,
    differing,
    finals,
    ordered,
    speeds,
    split_table,
)
from dphybrid.tracking.figures import COLOURS

_MAX_POINTS = 600
"""Points of a curve that the page keeps: more than a screen shows."""


def write_page(folder: Path, runs: Sequence[RunFacts], param: str) -> Path:
    """Write `index.html` into `folder`, grouped by `param` when it opens; return the page."""
    import jinja2
    from plotly.offline import get_plotlyjs

    folder.mkdir(parents=True, exist_ok=True)
    own = files("dphybrid.tracking")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    page = folder / "index.html"
    text = environment.from_string(own.joinpath("page.html").read_text(encoding="utf-8")).render(
        title=f"{len(runs)} runs by {param}",
        made=datetime.now().strftime("%Y-%m-%d %H:%M"),
        data=_in_a_script(page_data(runs, param)),
        script=own.joinpath("page.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
    )
    page.write_text(text, encoding="utf-8")
    return page


def page_data(runs: Sequence[RunFacts], param: str) -> dict[str, object]:
    """Return what the page's script draws, as values fit for JSON."""
    names = differing(runs)
    by = list(
        dict.fromkeys([param, *names] + ([DEVICES] if any(DEVICES in run.params for run in runs) else []))
    )
    return {
        "param": param,
        "colours": COLOURS,
        "params": by,
        "differing": names,
        "finals": finals(runs),
        "seed": SEED,
        "devices": DEVICES,
        "virtual": any("*" in run.value(DEVICES) for run in runs),
        "orders": {name: [run.run_id for run in ordered(runs, name)] for name in by},
        "speeds": {name: _speeds(runs, name, names) for name in by},
        "splits": split_table(runs),
        "runs": [_run(run, [*by, *names]) for run in runs],
    }


def _speeds(runs: Sequence[RunFacts], param: str, names: Sequence[str]) -> dict[str, Any]:
    """Return run id -> ratio, efficiency, the baseline's value, and what the runs measured against each other
    agree in."""
    found = {}
    for run_id, speed in speeds(runs, param).items():
        (run,) = (run for run in runs if run.run_id == run_id)
        among = ", ".join(f"{name}={value}" for name, value in combination(run, param, names))
        found[run_id] = {
            "ratio": speed.ratio,
            "efficiency": speed.efficiency,
            "against": speed.against,
            "among": among,
        }
    return found


def _run(run: RunFacts, names: Sequence[str]) -> dict[str, object]:
    return {
        "id": run.run_id,
        "name": run.name,
        "url": run.url,
        "status": run.status.lower(),
        "started": run.started.strftime("%Y-%m-%d %H:%M:%S"),
        "replicas": run.replicas,
        "params": {name: run.value(name) for name in names},
        "metrics": {
            name: value for name, value in run.metrics.items() if name.startswith(("final/", "summary/"))
        },
        "stages": dict(run.stages_ms),
        "steps": {name: _thinned(points) for name, points in run.steps.items()},
        "times": {name: _thinned(points) for name, points in run.times.items()},
    }


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Return points at even distances, the last one among them."""
    stride = -(-len(points) // _MAX_POINTS) or 1
    return [point for place, point in enumerate(points) if (len(points) - 1 - place) % stride == 0]


def _in_a_script(value: object) -> str:
    """Return JSON that may stand in a page's script: nothing in it ends the script, and numbers that JSON
    lacks are null."""
    return json.dumps(_finite(value), allow_nan=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not -1e308 < value < 1e308 else value
