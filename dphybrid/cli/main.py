"""The command `dphybrid`: its subcommands and their flags."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dphybrid import __version__
from dphybrid.cli import commands
from dphybrid.cli.completion import SHELLS
from dphybrid.cli.flags import (
    TRAIN_HELP,
    Parser,
    add_config_flags,
    add_reading_flags,
    add_train_flags,
    recipe_of,
    recipes_text,
    run_cli,
)

PLAN_HELP = """\
examples:
  %(prog)s --devices 'cpu*8' --batch-size 30 --rows 100
  %(prog)s --data.path clicks.csv --data.label clicked      rows of the data, when it is prepared
  %(prog)s --devices cuda:0,cuda:1 --recipe text --rows 50000 --memory
  %(prog)s --recipe ctr --cluster.ranks 16 --nodes 2 --link-gbit 25 --table-rows 4000000000
"""

CHECK_HELP = """\
examples:
  %(prog)s my_models:build_block              a function without arguments, or one that takes a ModelContext
  %(prog)s --recipe text                      the model of a recipe

Each finding says whether it BREAKS (fails, or computes on the wrong weights, on two GPUs) or differs (other
results than on one device), where, and the remedy. The exit code is 1 when something breaks.
"""


COMPARE_HELP = """\
examples:
  %(prog)s text-cpu-1121-044553 text-cpux2-1121-045901
  %(prog)s --experiment dphybrid --group-by devices
  %(prog)s --sweep nightly --group-by table.optimizer --log
  %(prog)s --sweep nightly --text
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
  %(prog)s retrieval-cpu-1121-044553 --data.path users.csv --out top.parquet --top 20
  %(prog)s models:/clicks@champion --data.path 'today/*.csv.gz' --out predictions.csv --devices cuda:0

The file of predictions has a row for each row read: its file, its line, and the probability of the label's
positive value (the likeliest of several classes and the probability of each, or the number); with --threshold
the predicted one of two classes, with --keep columns of the input. A model of recipe retrieval writes user,
rank, item and score instead, --top items for each user of the files.
"""

UI_HELP = """\
examples:
  %(prog)s                                    all runs, the best first
  %(prog)s text-cpu-1121-044553               one run: its report, curves, splits, timings, checkpoints

Where no server is set (DPHYBRID_TRACKING_URI, MLFLOW_TRACKING_URI), MLflow's own is started for this machine,
and runs until Ctrl-C.
"""

INIT_HELP = """\
examples:
  %(prog)s --recipe ctr
  %(prog)s --data.path clicks.csv --data.label clicked --out clicks.toml

Each value stands there with its sentence; those that are given are set, the others are comments that show
the recipe's own.
"""

COMPLETION_HELP = """\
bash: echo 'source <(dphybrid completion bash)' >> ~/.bashrc
zsh:  echo 'source <(dphybrid completion zsh)' >> ~/.zshrc
fish: dphybrid completion fish > ~/.config/fish/completions/dphybrid.fish
"""

SYNC_HELP = """\
Training never waits for MLflow: what could not be sent stays in DPHYBRID_DATA_DIR/mlflow/spool. Run this when
the server is back; it may run any number of times, and beside running trainings. The exit code is 1 when
something still waits.
"""


VERIFY_HELP = """\
Every file is read and compared with the sums that were written with it. Each place gives a line; the exit
code is 1 when one is damaged. Training, prediction and registration check what they use by themselves; this
is for the rest: after a power failure, or on an old disk.
"""

SELFTEST_HELP = """\
examples:
  %(prog)s                    five trials of each kind of fault, about a minute
  %(prog)s --minutes 30       more trials, for half an hour

Small runs are killed, lose power or meet a full disk, in a folder of their own below DPHYBRID_DATA_DIR that
is removed afterwards. Each is resumed and compared with an undisturbed run. The exit code is 1 when one
differs.
"""


def _at_least_one(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def make_parser(argv: Sequence[str] = ()) -> Parser:
    """Return the parser of the whole command, with the flags of the recipe that the command line means."""
    recipe = recipe_of(argv)
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="dphybrid",
        description="Hybrid models: tables in host memory, dense blocks data-parallel on GPUs, every split "
        "on record.",
        epilog=recipes_text(),
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"dphybrid {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    def command(name: str, sentence: str, examples: str | None = None) -> Parser:
        found = subparsers.add_parser(name, help=sentence, epilog=examples, formatter_class=raw)
        found.set_defaults(function=getattr(commands, name))
        return found

    train = command("train", "train without Prefect (the same job as the flow)", TRAIN_HELP)
    add_train_flags(train, recipe)
    train.add_argument(
        "--tag",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a tag for the MLflow run; may be repeated",
    )

    plan = command("plan", "show how batches will be split, before anything runs", PLAN_HELP)
    plan.add_argument(
        "--batch-size", type=int, metavar="N", help="rows of a batch over all devices (default: the recipe's)"
    )
    plan.add_argument(
        "--rows",
        type=int,
        metavar="N",
        help="rows of an epoch, so that the last batch is shown too (default: of the prepared data)",
    )
    plan.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="machines, with --cluster.ranks W over them all (1)"
    )
    plan.add_argument(
        "--link-gbit", type=float, default=100.0, metavar="G", help="rate of the network between them (100)"
    )
    plan.add_argument(
        "--table-rows",
        type=int,
        metavar="N",
        help="rows of the table, to plan for one that is not there yet (default: the prepared data's)",
    )
    plan.add_argument(
        "--memory",
        action="store_true",
        help="also build the recipe's model and estimate each device's memory",
    )
    add_config_flags(plan, recipe)

    check = command("check", "list what of a model differs or breaks under data parallelism", CHECK_HELP)
    check.add_argument(
        "target",
        nargs="?",
        metavar="package.module:factory",
        help="function that returns the module (default: the recipe's model)",
    )
    add_config_flags(check, recipe)

    compare = command(
        "compare", "put runs side by side on a page: speed, stages, curves, differences", COMPARE_HELP
    )
    compare.add_argument("runs", nargs="*", metavar="RUN", help="MLflow ids or names of runs")
    compare.add_argument(
        "--experiment",
        metavar="NAME",
        help="where the runs are; alone: all its finished runs (the newest 24)",
    )
    compare.add_argument("--sweep", metavar="ID", help="the runs of a sweep")
    compare.add_argument(
        "--group-by",
        default="devices",
        metavar="NAME",
        help="devices, or a param such as train.batch_size (devices)",
    )
    compare.add_argument(
        "--out",
        type=Path,
        default=Path("comparison"),
        metavar="FOLDER",
        help="where the page goes (comparison)",
    )
    compare.add_argument(
        "--text", action="store_true", help="print the comparison here instead of writing a page"
    )
    compare.add_argument(
        "--log", action="store_true", help="also put the page into MLflow, as a run of its own"
    )

    sync = command(
        "sync", "send to MLflow what was kept while it was away, and end runs whose process died", SYNC_HELP
    )
    sync.add_argument(
        "--wait", type=float, default=60.0, metavar="SECONDS", help="how long each run may take (60)"
    )

    ui = command("ui", "open MLflow's pages on a run, or on all runs", UI_HELP)
    ui.add_argument("run", nargs="?", metavar="RUN", help="name or MLflow id of a run (all runs)")
    ui.add_argument(
        "--port", type=_at_least_one, metavar="N", help="port of a server started here (from 5000 on)"
    )
    ui.add_argument("--no-browser", action="store_true", help="print the address only")

    init = command("init", "write an experiment's TOML file with a sentence for each value", INIT_HELP)
    init.add_argument(
        "--out",
        type=Path,
        default=Path("experiment.toml"),
        metavar="FILE",
        help="file to write (experiment.toml)",
    )
    add_config_flags(init, recipe)

    completion = command("completion", "print what a shell completes", COMPLETION_HELP)
    completion.add_argument("shell", choices=SHELLS, help="your shell")

    devices = command("devices", "show the GPUs: memory, load, who uses them, which run has leased them")
    devices.add_argument("--live", action="store_true", help="go on showing them until Ctrl-C")
    devices.add_argument("--ask", type=int, metavar="N", help="ask the run on cuda:N to give its GPUs back")
    rollback = command("rollback", "make the former champion of a registered model the champion again")
    rollback.add_argument("model", metavar="MODEL", help="name in MLflow's model registry")
    rollback.add_argument(
        "--to", metavar="VERSION", help="version to go back to (the champion before this one)"
    )

    validate = command("validate", "check deployments: what Prefect's server does not check, too")
    validate.add_argument(
        "file", nargs="?", type=Path, help="a prefect.yaml (the one here, or else the package's own)"
    )

    prepare = command("prepare", "read the data, show its columns and splits, and stop", PREPARE_HELP)
    prepare.add_argument(
        "--schema", type=Path, metavar="FILE", help="also write the columns' roles there, to be edited (ctr)"
    )
    add_config_flags(prepare, recipe)

    predict = command(
        "predict",
        "score the rows of new files with a trained click model, or recommend items to users",
        PREDICT_HELP,
    )
    predict.add_argument(
        "model",
        metavar="RUN_OR_MODEL",
        help="a run (name or MLflow id), a checkpoint folder, or models:/NAME@champion",
    )
    predict.add_argument(
        "--data.path",
        dest="path",
        required=True,
        metavar="PATH",
        help="CSV, TSV or Parquet: a file, folder or pattern",
    )
    predict.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="predictions, as .parquet or .csv"
    )
    predict.add_argument("--devices", default="cpu", help="where the model runs (cpu)")
    predict.add_argument(
        "--batch-size", type=int, default=8192, metavar="N", help="rows of a batch over all devices (8192)"
    )
    predict.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="COLUMN",
        help="a column of the input to write besides; may be given several times",
    )
    predict.add_argument(
        "--threshold",
        type=float,
        metavar="P",
        help="also write which of two classes a row is: the positive one from this probability on",
    )
    predict.add_argument(
        "--top", type=int, metavar="K", help="items for each user, of a model that recommends (10)"
    )
    add_reading_flags(predict)

    verify = command(
        "verify", "read prepared folders and checkpoints whole, and name what is damaged", VERIFY_HELP
    )
    verify.add_argument(
        "places",
        nargs="*",
        metavar="PLACE",
        help="a run's name, a prepared folder or a checkpoint folder (all of DPHYBRID_DATA_DIR)",
    )

    selftest = command(
        "selftest",
        "kill small runs on this disk, resume them, and check that they end with the same bits",
        SELFTEST_HELP,
    )
    selftest.add_argument("--trials", type=int, default=5, metavar="N", help="trials a kind of fault (5)")
    selftest.add_argument(
        "--minutes", type=float, default=0.0, metavar="X", help="go on for at least so long (0)"
    )
    selftest.add_argument("--seed", type=int, metavar="N", help="which faults (at random)")

    for name, sentence in (
        ("worker", "take training runs from a Prefect work pool, politely"),
        ("deploy", "set a Prefect server up: pool, queues, deployments, automation; or bring it up to date"),
    ):
        subparsers.add_parser(name, help=sentence)  # `main` hands these on to their own parsers

    command("doctor", "check versions, folders and servers")
    parser.commands = subparsers.choices
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, 2 for wrong input, 130 when interrupted."""
    given = sys.argv[1:] if argv is None else argv
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        # recipes and models of your own, as `python -m` finds them; last, so that nothing is shadowed
        sys.path.append(str(Path.cwd()))
    if given[:1] in (["worker"], ["deploy"]):
        return commands.hand_on(given[0], given[1:])
    args = make_parser(given).parse_args(given)
    return run_cli(lambda: args.function(args))
