"""The command `dphybrid`: plan a split, train, look at devices, check a model, measure."""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dphybrid import __version__
from dphybrid.config import ExperimentConfig
from dphybrid.config_sources import add_config_flags, load_config, overrides_from_args
from dphybrid.errors import UserError
from dphybrid.settings import Settings, load_settings

TRAIN_HELP = """\
examples:
  %(prog)s                                    the word language model, on the Python reference that ships with Python
  %(prog)s --recipe toy --devices 'cpu*3'     the tutorials' toy model, split over three virtual devices
  %(prog)s --recipe ctr --data.path clicks.csv --data.label clicked
  %(prog)s --data.path my_texts/ --train.epochs 3 --train.batch-size 64
  %(prog)s --resume                           go on with the newest run of the recipe
  %(prog)s --config experiment.toml --report result.json

A TOML file has the same names: `recipe = "ctr"`, then sections like [train] with `batch_size = 512`.
Values in brackets of a flag are the text recipe's; other recipes set their own. Data, checkpoints and the MLflow store
lie under DPHYBRID_DATA_DIR (~/.dphybrid).
"""


PLAN_HELP = """\
examples:
  %(prog)s --devices 'cpu*8' --batch-size 30 --rows 100
  %(prog)s --devices cuda:0,cuda:1 --recipe text --rows 50000 --memory
"""

CHECK_HELP = """\
examples:
  %(prog)s my_models:build_block              a function without arguments, or one that takes a ModelContext
  %(prog)s --recipe text                      the model of a recipe

Each finding says whether it BREAKS (fails, or computes on the wrong weights, on two GPUs) or differs (other results than on one
device), where, and the remedy. The exit code is 1 when something breaks.
"""


COMPARE_HELP = """\
examples:
  %(prog)s text-cpu-1121-044553 text-cpux2-1121-045901
  %(prog)s --experiment dphybrid --group-by devices
  %(prog)s --sweep nightly --group-by table.optimizer --log
"""

PREPARE_HELP = """\
examples:
  %(prog)s --recipe ctr --data.path clicks.csv --data.label clicked --schema schema.toml
  %(prog)s --data.path my_texts/

The prepared data is kept: training with the same values finds it made.
"""

PREDICT_HELP = """\
examples:
  %(prog)s ctr-cpu-1121-044553 --data.path new.csv --out predictions.parquet
  %(prog)s models:/clicks@champion --data.path 'today/*.csv.gz' --out predictions.csv --devices cuda:0

The file of predictions has a row for each row read: its file, its line, and the probability of the label's positive value.
"""

SYNC_HELP = """\
Training never waits for MLflow: what could not be sent stays in DPHYBRID_DATA_DIR/mlflow/spool. Run this when the server is back; it may
run any number of times, and beside running trainings. The exit code is 1 when something still waits.
"""


class Parser(argparse.ArgumentParser):
    """argparse, but wrong flags end in one message with a remedy."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\nSee `{self.prog} --help`.\n")


def add_train_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a training command: the config's, and those of the run."""
    parser.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="RUN",
        help="go on with a run (name or MLflow id); alone: the newest of this recipe",
    )
    parser.add_argument("--run-name", metavar="NAME", help="name of the run and its folder (default: recipe, devices, time)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what the run came to as JSON")
    parser.add_argument(
        "--profile", metavar="FIRST-LAST", help="steps to record with torch's profiler, such as 20-24 (opens in Perfetto)"
    )
    add_experiment_flags(parser)


def add_experiment_flags(parser: argparse.ArgumentParser) -> None:
    """Add the config's flags, and where it is recorded: all that a command needs which makes several runs, or names them itself."""
    parser.set_defaults(**{name: parser.get_default(name) for name in ("resume", "report", "profile")})
    parser.add_argument(
        "--tracking", metavar="URI", help="MLflow server or database; none: record nothing (default: DPHYBRID_TRACKING_URI)"
    )
    add_config_flags(parser)


def config_from_args(args: argparse.Namespace) -> tuple[ExperimentConfig, Settings, str | None, Path | None]:
    """Return (config, settings, resume, report path). Raises UserError."""
    report: Path | None = args.report
    if report is not None and (report.is_dir() or not report.absolute().parent.is_dir()):
        raise UserError(f"--report {report}: cannot be written there; name a file in a folder that exists")
    for name, value in (("DPHYBRID_TRACKING_URI", args.tracking), ("DPHYBRID_PROFILE", args.profile)):
        if value is not None:
            os.environ[name] = value  # a setting: the flow's tasks read it, too
    return load_config(args.config, overrides_from_args(args)), load_settings(), args.resume, report


def tags_from_args(args: argparse.Namespace) -> dict[str, str]:
    """Return the tags that were given. Raises UserError for one without a value."""
    tags = {}
    for text in args.tag:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(f"--tag {text}: write NAME=VALUE")
        tags[name] = value
    return tags


def run_cli(function: Callable[[], int | None]) -> int:
    """Call `function`; tell a UserError in one message with exit code 2, an interruption with 130 (128 + the signal that asked for it)."""
    try:
        return function() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interruption:
        print(f"\n{interruption}" if str(interruption) else "\ninterrupted", file=sys.stderr)
        # Only `Interrupted` carries a signal's number; shells report 128 + that number, and Ctrl-C is 2.
        return 128 + (vars(interruption).get("signal_number") or 2)
    except BrokenPipeError:
        sys.stderr.close()
        return 141


def _train(args: argparse.Namespace) -> int:
    config, settings, resume, report_path = config_from_args(args)
    from dphybrid.job import run_job
    from dphybrid.politeness import go_on_later
    from dphybrid.training.stop import Interrupted

    try:
        report = run_job(config, settings, run_name=args.run_name, resume=resume, tags=tags_from_args(args))
    except Interrupted as interruption:
        if interruption.requeue:
            go_on_later(interruption, settings)
        raise
    print(report.text)
    if report_path:
        report_path.write_text(report.model_dump_json(indent=1), encoding="utf-8")
    return 0


def _plan(args: argparse.Namespace) -> int:
    from dphybrid.parallel import resolve_devices, split_plan

    config, settings = load_config(args.config, overrides_from_args(args)), load_settings()
    batch_size = config.train.batch_size if args.batch_size is None else args.batch_size
    if batch_size < 1 or args.rows < 1:
        raise UserError(f"--batch-size {batch_size} --rows {args.rows}: both must be at least 1")
    devices = resolve_devices(settings.devices if config.devices == "auto" else config.devices)
    print(split_plan(args.rows, batch_size, devices.labels).text())
    if args.memory:
        from dphybrid.inspection import memory_report

        print(f"\n{memory_report(config, settings, batch_size)}")
    return 0


def _check(args: argparse.Namespace) -> int:
    from dphybrid.inspection import check_target

    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    breaks = 0
    for block, findings in check_target(args.target, load_config(args.config, overrides_from_args(args)), load_settings()):
        print(f"{block}: {'nothing found' if not findings else f'{len(findings)} found'}")
        for finding in findings:
            print(f"  {finding.text()}")
        breaks += sum(finding.breaks for finding in findings)
    return 1 if breaks else 0


def _bench(args: argparse.Namespace) -> int:
    if args.what == "parallel":
        from dphybrid.parallel import bench

        result = bench.run(args.repeats or 200)
        print(bench.text(result))
    elif args.what == "tracking":
        from dphybrid.tracking import bench as tracking_bench

        result = tracking_bench.run(args.repeats or 15)
        print(tracking_bench.text(result))
    elif args.what == "data":
        from dphybrid.data import bench as data_bench

        rounds, num_rows = args.repeats or 5, args.rows or data_bench.NUM_ROWS
        result = _bench_clicks(rounds, num_rows) if args.train else data_bench.run(rounds, num_rows)
        print(data_bench.text(result))
    else:
        from dphybrid.embedding import bench as rows_bench

        result = rows_bench.run(rounds=args.repeats or 15)
        print(rows_bench.table_text(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    return 0


def _bench_clicks(rounds: int, num_rows: int) -> dict[str, Any]:
    """Measure preparing, then train recipe ctr on the same file, for an epoch and without a row for each rare value."""
    from dphybrid.data import bench as data_bench
    from dphybrid.job import run_job

    settings = load_settings()
    file = settings.data_dir / "bench" / f"clicks-{num_rows}.csv"
    file.parent.mkdir(parents=True, exist_ok=True)
    result = data_bench.run(rounds, num_rows, file)
    report = run_job(
        load_config(None, ["recipe=ctr", f"data.path={file}", "data.label=label", "data.min_count=50", "train.epochs=1"]),
        settings,
    )
    return result | {"auc": report.metrics["auc"]}


def _devices(args: argparse.Namespace) -> int:
    from rich.console import Console

    from dphybrid.gpus import Inventory, ask_for, lease_folder, visible
    from dphybrid.gpus.table import gpu_table, show_live

    settings, names = load_settings(), os.environ.get("CUDA_VISIBLE_DEVICES")
    inventory = Inventory(settings.nvml)
    units = inventory.read()
    if not units:
        print(f"no GPU ({inventory.reason}); devices=auto means cpu")
        return 0
    folder = lease_folder(settings.lease_dir)
    if args.ask is not None:
        chosen = visible(units, names)
        if not 0 <= args.ask < len(chosen):
            raise UserError(f"--ask {args.ask}: there is no cuda:{args.ask}; {len(chosen)} GPUs are visible")
        print(ask_for(folder, chosen[args.ask]))
        return 0
    if args.live:
        show_live(inventory, names, folder, settings.gpu_policy)
    Console().print(gpu_table(units, names, folder, settings.gpu_policy))
    return 0


def _doctor(_: argparse.Namespace) -> int:
    from dphybrid.doctor import run_checks

    return run_checks(load_settings())


def _prepare(args: argparse.Namespace) -> int:
    import shutil

    from dphybrid.job import prepare_data

    if args.schema is not None and not args.schema.absolute().parent.is_dir():
        raise UserError(f"--schema {args.schema}: cannot be written there; name a file in a folder that exists")
    config = load_config(args.config, overrides_from_args(args))
    if args.schema is not None and config.recipe != "ctr":
        raise UserError(f"--schema {args.schema}: recipe {config.recipe} has no columns; only ctr has")
    folder = Path(prepare_data(config, load_settings()))
    if args.schema is not None:
        shutil.copyfile(folder / "schema.toml", args.schema)
        print(f"Roles: {args.schema}; edit it and give it back with --data.schema-file {args.schema}")
    return 0


def _predict(args: argparse.Namespace) -> int:
    from pydantic import ValidationError

    from dphybrid.loading import find_checkpoint
    from dphybrid.predict import Predictor
    from dphybrid.training.display import preparation_progress

    given = {name: getattr(args, name) for name in ("header", "delimiter", "max_rejected") if getattr(args, name) is not None}
    if args.batch_size < 1:
        raise UserError(f"--batch-size {args.batch_size}: must be at least 1")
    predictor = Predictor(find_checkpoint(args.model, load_settings()), args.devices, args.batch_size)
    try:
        with preparation_progress() as progress:
            done = predictor.predict_file(args.path, args.out, progress, **given)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise UserError(f"--data.{wrong['loc'][-1]} {wrong['input']}: {wrong['msg']}") from error
    print(f"{done.num_rows:,} predictions of {predictor.encoder.label}={predictor.classes[1]}: {done.out}")
    if done.num_rejected:
        print(f"{done.num_rejected:,} rows cannot be read and are left out: {done.out}.rejected.jsonl says which and why")
    if done.wrong_numbers:
        print(f"{done.wrong_numbers:,} values of numeric columns are no numbers and count as missing")
    return 0


def _sync(args: argparse.Namespace) -> int:
    from dphybrid.tracking.opening import embedded_uri
    from dphybrid.tracking.sync import sync

    settings = load_settings()
    uri = settings.mlflow_uri or embedded_uri(settings.mlflow_dir)

    def tell(run_id: str, records: int) -> None:
        print(f"{run_id}: sending {records:,} records", flush=True)

    done = sync(settings.mlflow_dir, uri, settings.experiment, settings.upload_limit_mb * 2**20, wait_s=args.wait, on_run=tell)
    print(done.text())
    return 1 if done.waiting else 0


def _compare(args: argparse.Namespace) -> int:
    from dphybrid.tracking import compare
    from dphybrid.tracking.opening import store_to_read

    settings = load_settings()
    experiment = args.experiment or settings.experiment
    if not args.runs and args.sweep is None and args.experiment is None:
        raise UserError("name runs to compare, or --experiment NAME, or --sweep ID; see `dphybrid compare --help`")
    if args.out.exists() and not args.out.is_dir():
        raise UserError(f"--out {args.out}: is a file; name a folder for the page and its pictures")
    uri = store_to_read(settings.mlflow_uri, settings.mlflow_dir)
    run_ids = compare.find_runs(uri, experiment, args.runs, args.sweep)
    page = compare.compare_runs(uri, run_ids, args.out, args.group_by)
    print(f"{len(run_ids)} runs: {compare.page_link(page)}")
    if args.log:
        run_id = compare.log_comparison(uri, experiment, settings.mlflow_dir, page, run_ids, args.sweep)
        print(f"Recorded as run {run_id}")
    return 0


def _rollback(args: argparse.Namespace) -> int:
    from dphybrid.retraining import open_registry

    before, now = open_registry(load_settings()).roll_back(args.model, args.to)
    print(f"{args.model}: champion is version {now.number} again, it was version {before.number}")
    return 0


def _at_least_one(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _validate(args: argparse.Namespace) -> int:
    # By name: nothing in this package may need Prefect, and the check needs the flows.
    for line in importlib.import_module("flows.validate").check_prefect_yaml(args.file):
        print(line)
    return 0


def make_parser() -> Parser:
    """Return the parser of the whole command."""
    parser = Parser(
        prog="dphybrid",
        description="Hybrid models: tables in host memory, dense blocks data-parallel on GPUs, every split on record.",
    )
    parser.add_argument("--version", action="version", version=f"dphybrid {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    raw = argparse.RawDescriptionHelpFormatter

    train = commands.add_parser(
        "train", help="train without Prefect (the same job as the flow)", epilog=TRAIN_HELP, formatter_class=raw
    )
    add_train_flags(train)
    train.add_argument(
        "--tag", action="append", default=[], metavar="NAME=VALUE", help="a tag for the MLflow run; may be repeated"
    )
    train.set_defaults(function=_train)

    plan = commands.add_parser(
        "plan", help="show how batches will be split, before anything runs", epilog=PLAN_HELP, formatter_class=raw
    )
    plan.add_argument("--batch-size", type=int, metavar="N", help="rows of a batch over all devices (default: the recipe's)")
    plan.add_argument(
        "--rows", type=int, required=True, metavar="N", help="rows of an epoch, so that the last batch is shown too"
    )
    plan.add_argument("--memory", action="store_true", help="also build the recipe's model and estimate each device's memory")
    add_config_flags(plan)
    plan.set_defaults(function=_plan)

    check = commands.add_parser(
        "check", help="list what of a model differs or breaks under data parallelism", epilog=CHECK_HELP, formatter_class=raw
    )
    check.add_argument(
        "target",
        nargs="?",
        metavar="package.module:factory",
        help="function that returns the module (default: the recipe's model)",
    )
    add_config_flags(check)
    check.set_defaults(function=_check)

    bench = commands.add_parser(
        "bench", help="measure splitting, row updates and preparing beside torch's and polars' own, and what recording costs"
    )
    bench.add_argument("what", choices=["parallel", "embedding", "tracking", "data"], help="what to measure")
    bench.add_argument(
        "--repeats",
        type=_at_least_one,
        metavar="N",
        help="calls a figure is the median of (200; embedding, tracking: 15; data: 5)",
    )
    bench.add_argument("--rows", type=_at_least_one, metavar="N", help="rows of the made-up file of clicks (data: 2,000,000)")
    bench.add_argument(
        "--train", action="store_true", help="also train ctr on that file, an epoch, and compare with the best AUC (data)"
    )
    bench.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    bench.set_defaults(function=_bench)

    compare = commands.add_parser(
        "compare",
        help="put runs side by side on a page: speed, stages, curves, differences",
        epilog=COMPARE_HELP,
        formatter_class=raw,
    )
    compare.add_argument("runs", nargs="*", metavar="RUN", help="MLflow ids or names of runs")
    compare.add_argument("--experiment", metavar="NAME", help="where the runs are; alone: all its finished runs (the newest 24)")
    compare.add_argument("--sweep", metavar="ID", help="the runs of a sweep")
    compare.add_argument(
        "--group-by", default="devices", metavar="NAME", help="devices, or a param such as train.batch_size (devices)"
    )
    compare.add_argument(
        "--out", type=Path, default=Path("comparison"), metavar="FOLDER", help="where the page goes (comparison)"
    )
    compare.add_argument("--log", action="store_true", help="also put the page into MLflow, as a run of its own")
    compare.set_defaults(function=_compare)

    sync = commands.add_parser(
        "sync",
        help="send to MLflow what was kept while it was away, and end runs whose process died",
        epilog=SYNC_HELP,
        formatter_class=raw,
    )
    sync.add_argument("--wait", type=float, default=60.0, metavar="SECONDS", help="how long each run may take (60)")
    sync.set_defaults(function=_sync)

    devices = commands.add_parser("devices", help="show the GPUs: memory, load, who uses them, which run has leased them")
    devices.add_argument("--live", action="store_true", help="go on showing them until Ctrl-C")
    devices.add_argument("--ask", type=int, metavar="N", help="ask the run on cuda:N to give its GPUs back")
    devices.set_defaults(function=_devices)
    rollback = commands.add_parser("rollback", help="make the former champion of a registered model the champion again")
    rollback.add_argument("model", metavar="MODEL", help="name in MLflow's model registry")
    rollback.add_argument("--to", metavar="VERSION", help="version to go back to (the champion before this one)")
    rollback.set_defaults(function=_rollback)

    validate = commands.add_parser("validate", help="check deployments: what Prefect's server does not check, too")
    validate.add_argument("file", nargs="?", type=Path, default=Path("prefect.yaml"), help="a prefect.yaml (the one here)")
    validate.set_defaults(function=_validate)

    prepare = commands.add_parser(
        "prepare", help="read the data, show its columns and splits, and stop", epilog=PREPARE_HELP, formatter_class=raw
    )
    prepare.add_argument("--schema", type=Path, metavar="FILE", help="also write the columns' roles there, to be edited (ctr)")
    add_config_flags(prepare)
    prepare.set_defaults(function=_prepare)

    predict = commands.add_parser(
        "predict", help="score the rows of new files with a trained click model", epilog=PREDICT_HELP, formatter_class=raw
    )
    predict.add_argument(
        "model", metavar="RUN_OR_MODEL", help="a run (name or MLflow id), a checkpoint folder, or models:/NAME@champion"
    )
    predict.add_argument(
        "--data.path", dest="path", required=True, metavar="PATH", help="CSV, TSV or Parquet: a file, folder or pattern"
    )
    predict.add_argument("--out", type=Path, required=True, metavar="FILE", help="predictions, as .parquet or .csv")
    predict.add_argument("--devices", default="cpu", help="where the model runs (cpu)")
    predict.add_argument("--batch-size", type=int, default=8192, metavar="N", help="rows of a batch over all devices (8192)")
    for name, what in (
        ("header", "does the first line name the columns: auto, yes, no"),
        ("delimiter", "character between columns"),
        ("max-rejected", "share of unreadable rows above which it stops"),
    ):
        predict.add_argument(f"--data.{name}", dest=name.replace("-", "_"), help=f"{what} (as in training)")
    predict.set_defaults(function=_predict)

    commands.add_parser("doctor", help="check versions, folders and servers").set_defaults(function=_doctor)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, 2 for wrong input, 130 when interrupted."""
    args = make_parser().parse_args(argv)
    return run_cli(lambda: args.function(args))
