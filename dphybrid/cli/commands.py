"""What the commands of `dphybrid` do, each from its parsed flags to its exit code. Heavy imports wait until
their command runs."""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dphybrid.cli.flags import config_from_args, overrides_from_args, reading_from_args, tags_from_args
from dphybrid.config import ExperimentConfig
from dphybrid.config.settings import Settings, load_settings
from dphybrid.recipes.configs import load_config
from dphybrid.recipes.registry import find_recipe, tabular_names
from dphybrid.util.errors import UserError
from dphybrid.util.files import check_target, write_text
from dphybrid.util.importing import importing_much
from dphybrid.util.masking import masked

if TYPE_CHECKING:
    from dphybrid.run.pages import Report


def train(args: argparse.Namespace) -> int:
    """Train without Prefect."""
    config, settings, resume, report_path = config_from_args(args)
    with importing_much():
        from dphybrid.gpus.politeness import go_on_later
        from dphybrid.run.train import run_job
        from dphybrid.util.stop import Interrupted

    if config.cluster.several:
        from dphybrid.run.joined import is_joined, join_job

        if is_joined():
            try:
                joined = join_job(config, settings, args.run_name, resume, tags_from_args(args))
            except Interrupted as interruption:
                print(interruption)
                return 0  # for torchrun this process has done what it should: it is not started again
            if joined is not None:
                _show(joined, report_path)
            return 0
    try:
        report = run_job(config, settings, run_name=args.run_name, resume=resume, tags=tags_from_args(args))
    except Interrupted as interruption:
        if interruption.requeue:
            go_on_later(interruption, settings)
        raise
    _show(report, report_path)
    return 0


def _show(report: "Report", path: Path | None) -> None:
    print(report.text)
    if path:
        report.write(path)


def plan(args: argparse.Namespace) -> int:
    """Print how batches will be split, and what each device will hold."""
    from dphybrid.gpus.leasing import wanted_spec
    from dphybrid.parallel import resolve_devices, split_plan

    config, settings = load_config(args.config, overrides_from_args(args)), load_settings()
    rows = args.rows
    if rows is None and not (config.cluster.ranks and (args.batch_size or config.train.batch_size)):
        rows = _rows_of_epoch(config, settings)
    if rows is not None and rows > 0:
        config, _ = find_recipe(config.recipe).sized(config, rows)
    batch_size = config.train.batch_size if args.batch_size is None else args.batch_size
    if config.cluster.several:
        from dphybrid.cluster.plan import plan_text

        recipe, nodes = find_recipe(config.recipe), args.nodes
        print(plan_text(recipe, config, settings, batch_size, nodes, args.link_gbit, args.table_rows))
        return 0
    if batch_size < 1 or rows < 1:
        raise UserError(f"--batch-size {batch_size} --rows {rows}: both must be at least 1")
    devices = resolve_devices(wanted_spec(config, settings).text)
    print(split_plan(rows, batch_size, devices.labels).text())
    if args.memory:
        from dphybrid.run.check import memory_report

        print(f"\n{memory_report(config, settings, batch_size)}")
    return 0


def _rows_of_epoch(config: ExperimentConfig, settings: Settings) -> int:
    """Return the rows of the training split, of data that is prepared or needs no file. Raises UserError."""
    recipe = find_recipe(config.recipe)
    prepared = recipe.find(config.data, settings.prepared_dir, config.train.seed)
    if prepared is None and not config.data.model_dump().get("path"):
        prepared = recipe.prepare(config.data, settings.prepared_dir, config.train.seed)
    if prepared is None:
        raise UserError(
            "--rows: the data is not prepared with these values, so its rows are not known; run `dphybrid "
            "prepare` with them first, or give --rows N"
        )
    rows = len(prepared.dataset("train"))
    print(f"{rows:,} rows to train, of {prepared.path}")
    return rows


def check(args: argparse.Namespace) -> int:
    """Print what of a model differs or breaks under data parallelism; 1 when something breaks."""
    from dphybrid.run.check import check_target

    breaks = 0
    for block, findings in check_target(
        args.target, load_config(args.config, overrides_from_args(args)), load_settings()
    ):
        print(f"{block}: {'nothing found' if not findings else f'{len(findings)} found'}")
        for finding in findings:
            print(f"  {finding.text()}")
        breaks += sum(finding.breaks for finding in findings)
    return 1 if breaks else 0


def devices(args: argparse.Namespace) -> int:
    """Show the GPUs, or ask a run to give way."""
    from rich.console import Console

    from dphybrid.gpus import Inventory, Policy, ask_for, lease_folder, visible
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
        show_live(inventory, names, folder, Policy.of(settings))
    Console().print(gpu_table(units, names, folder, Policy.of(settings)))
    return 0


def doctor(_: argparse.Namespace) -> int:
    """Check the machine; 1 when something needs a remedy."""
    from dphybrid.cli.doctor import run_checks

    return run_checks(load_settings())


def prepare(args: argparse.Namespace) -> int:
    """Read the data, show its columns and splits, and stop."""
    import shutil

    from dphybrid.run.build import prepare_data

    if args.schema is not None:
        check_target(args.schema, f"--schema {args.schema}")
    config = load_config(args.config, overrides_from_args(args))
    if args.schema is not None and not find_recipe(config.recipe).tabular:
        raise UserError(
            f"--schema {args.schema}: recipe {config.recipe} has no columns; {', '.join(tabular_names())} has"
        )
    folder = prepare_data(config, load_settings()).data.path
    if args.schema is not None:
        shutil.copyfile(folder / "schema.toml", args.schema)
        print(f"Roles: {args.schema}; edit it and give it back with --data.schema-file {args.schema}")
    return 0


def predict(args: argparse.Namespace) -> int:
    """Score the rows of new files."""
    from dphybrid.serving.load import find_checkpoint
    from dphybrid.serving.predict import Predictor, open_predictor
    from dphybrid.training.display import preparation_progress

    given: dict[str, Any] = reading_from_args(args)
    if args.batch_size < 1:
        raise UserError(f"--batch-size {args.batch_size}: must be at least 1")
    predictor = open_predictor(find_checkpoint(args.model, load_settings()), args.devices, args.batch_size)
    if args.top is not None:
        if isinstance(predictor, Predictor):
            raise UserError(f"--top {args.top}: is of models that recommend items; this one scores rows")
        given["top"] = args.top
    with preparation_progress() as progress:
        done = predictor.predict_file(args.path, args.out, progress, args.keep, args.threshold, **given)
    print("\n".join(predictor.told(done)))
    return 0


def ui(args: argparse.Namespace) -> int:
    """Open MLflow's pages on a run; a server that was started for it runs until Ctrl-C."""
    from dphybrid.cli import ui as pages
    from dphybrid.tracking.opening import store_to_read

    settings = load_settings()
    uri = store_to_read(settings.mlflow_uri, settings.mlflow_dir)
    port = None if uri.startswith("http") else pages.free_port(args.port)

    from dphybrid.tracking.views import page_path

    page = page_path(uri, settings.experiment, args.run)
    if port is None:
        pages.show(f"{masked(uri).rstrip('/')}/#{page}", not args.no_browser)
        return 0
    print("Starting MLflow's server, which takes a while; Ctrl-C ends it", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server ends with this process
    try:
        with pages.serving(uri, port) as server:
            pages.show(f"http://127.0.0.1:{port}/#{page}", not args.no_browser)
            return pages.ended(server)
    except KeyboardInterrupt:
        return 0


def init(args: argparse.Namespace) -> int:
    """Write an experiment's TOML file."""
    from dphybrid.cli.init import config_text

    target: Path = args.out
    if target.exists():
        raise UserError(f"--out {target}: is there already; remove it, or name another file")
    check_target(target, f"--out {target}")
    config = load_config(args.config, overrides_from_args(args))
    write_text(target, config_text(config))
    print(f"{target}: edit it, then `dphybrid train --config {target}`")
    return 0


def completion(args: argparse.Namespace) -> int:
    """Print a shell's completion."""
    from dphybrid.cli.completion import script
    from dphybrid.cli.main import make_parser

    print(script(args.shell, make_parser()), end="")
    return 0


def sync(args: argparse.Namespace) -> int:
    """Send what waits for MLflow; 1 when something still waits."""
    from dphybrid.tracking.opening import embedded_uri
    from dphybrid.tracking.sync import sync

    settings = load_settings()
    uri = settings.mlflow_uri or embedded_uri(settings.mlflow_dir)

    def tell(run_id: str, records: int) -> None:
        print(f"{run_id}: sending {records:,} records", flush=True)

    done = sync(
        settings.mlflow_dir,
        uri,
        settings.experiment,
        settings.upload_limit_mib * 2**20,
        wait_s=args.wait,
        on_run=tell,
    )
    print(done.text())
    return 0 if done.whole else 1


def compare(args: argparse.Namespace) -> int:
    """Write a page that puts runs side by side."""
    from dphybrid.tracking import compare
    from dphybrid.tracking.opening import store_to_read

    settings = load_settings()
    experiment = args.experiment or settings.experiment
    if not args.runs and args.sweep is None and args.experiment is None:
        raise UserError(
            "name runs to compare, or --experiment NAME, or --sweep ID; see `dphybrid compare --help`"
        )
    if args.out.exists() and not args.out.is_dir():
        raise UserError(f"--out {args.out}: is a file; name a folder for the page and its pictures")
    uri = store_to_read(settings.mlflow_uri, settings.mlflow_dir)
    run_ids = compare.find_runs(uri, experiment, args.runs, args.sweep)
    runs = compare.read_runs(uri, run_ids)
    if args.text:
        print(compare.comparison_text(runs, args.group_by))
        return 0
    page = compare.write_comparison(runs, args.out, args.group_by)
    print(f"{len(run_ids)} runs: {compare.page_link(page)}")
    if args.log:
        run_id, _ = compare.log_comparison(uri, experiment, settings.mlflow_dir, page, run_ids, args.sweep)
        print(f"Recorded as run {run_id}")
    return 0


def rollback(args: argparse.Namespace) -> int:
    """Make the former champion of a registered model the champion again."""
    from dphybrid.lifecycle.retrain import open_registry

    before, now = open_registry(load_settings()).roll_back(args.model, args.to)
    print(f"{args.model}: champion is version {now.number} again, it was version {before.number}")
    return 0


def validate(args: argparse.Namespace) -> int:
    """Check the deployments of a prefect.yaml."""
    # By name: nothing in this package may need Prefect, and the check needs the flows.
    checks = importlib.import_module("dphybrid.orchestration.validate")
    for line in checks.check_prefect_yaml(checks.deployments_file(args.file)):
        print(line)
    return 0


def hand_on(command: str, argv: Sequence[str]) -> int:
    """Run a command that lives beside Prefect, by name: nothing below may need Prefect."""
    module = {"worker": "dphybrid.orchestration.worker", "deploy": "dphybrid.orchestration.setup"}[command]
    try:
        main = importlib.import_module(module).main
    except ImportError as error:
        print(
            f"error: Prefect cannot be imported ({error}); `dphybrid doctor` says what is wrong",
            file=sys.stderr,
        )
        return 2
    return int(main(argv))


def selftest(args: argparse.Namespace) -> int:
    """Break small runs on the user's own disk; 1 when a trial failed."""
    if not 0 <= args.minutes < 10_000:
        raise UserError(f"--minutes {args.minutes}: give how many minutes it may take, such as 5")
    if args.trials < 1:
        raise UserError(f"--trials {args.trials}: give at least 1")
    from dphybrid.selftest import trials

    settings = load_settings()
    kinds = trials.run(settings, args.trials, args.minutes, args.seed, lambda line: print(line, flush=True))
    print(f"\n{trials.table(kinds)}")
    return 1 if any(kind.broken for kind in kinds) else 0


def verify(args: argparse.Namespace) -> int:
    """Read prepared folders and checkpoints whole; 1 when one is damaged."""
    from dphybrid.run.verify import verify_places

    damaged = 0
    for line, good in verify_places(args.places, load_settings()):
        damaged += not good
        print(f"{'ok ' if good else 'BAD'} {line}", flush=True)
    return 1 if damaged else 0
