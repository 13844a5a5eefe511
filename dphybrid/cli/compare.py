"""Compare runs on one page: speed, time of each stage, curves, values that differ.

examples:
  %(prog)s text-cpu-1121-044553 text-cpux2-1121-045901
  %(prog)s --experiment dphybrid --group-by devices
  %(prog)s --sweep nightly --group-by table.optimizer --log
  %(prog)s --sweep nightly --text
"""

import argparse
from pathlib import Path

from dphybrid.cli.parser import Parser
from dphybrid.config.settings import load_settings
from dphybrid.util.errors import UserError


def flags(parser: Parser) -> None:
    """Add the command's flags."""
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="MLflow ids or names of runs")
    where = "experiment of the runs; without RUN: its newest 24 finished runs"
    add("--experiment", metavar="NAME", help=where)
    add("--sweep", metavar="ID", help="compare the runs of this sweep")
    groups = "group runs by devices, or by a param such as train.batch_size (default: devices)"
    add("--group-by", default="devices", metavar="NAME", help=groups)
    out = "folder of the page, index.html (default: comparison)"
    add("--out", type=Path, default=Path("comparison"), metavar="FOLDER", help=out)
    add("--text", action="store_true", help="only print the comparison, write no page")
    add("--log", action="store_true", help="also log the page to MLflow, as a separate run")


def run(args: argparse.Namespace) -> int:
    """Print a comparison of runs and write it as a page."""
    from dphybrid.tracking import compare
    from dphybrid.tracking.compare_page import param_of, text_of, write_comparison
    from dphybrid.tracking.opening import store_to_read

    settings = load_settings()
    experiment = args.experiment or settings.experiment
    if not args.runs and args.sweep is None and args.experiment is None:
        raise UserError("name runs to compare, or --experiment NAME, or --sweep ID (see --help)")
    if args.runs and args.sweep is not None:
        raise UserError(f"--sweep {args.sweep}: give a sweep or runs ({' '.join(args.runs)}), not both")
    # `--out page.html` means a file; nobody would look for the page in a folder of that name.
    if args.out.suffix in (".html", ".htm") or (args.out.exists() and not args.out.is_dir()):
        raise UserError(f"--out {args.out}: name a folder; the page is its index.html")
    uri = store_to_read(settings.mlflow_uri, settings.mlflow_dir)
    run_ids = compare.find_runs(uri, experiment, args.runs, args.sweep)
    runs = compare.read_runs(uri, run_ids)
    print(text_of(runs, param_of(args.group_by, runs)))
    if args.text:
        return 0
    page = write_comparison(runs, args.out, args.group_by)
    print(f"{len(run_ids)} runs: {page.absolute().as_uri()}")
    if args.log:
        run_id, _ = compare.log_comparison(uri, experiment, settings.mlflow_dir, page, run_ids, args.sweep)
        print(f"Recorded as run {run_id}")
    return 0
