"""Wrong input ends with one message and exit code 2 before work starts: never in a traceback, never late."""

import re
import shutil
from pathlib import Path

import pytest

from dphybrid.cli.main import main
from dphybrid.config.settings import load_settings
from dphybrid.recipes.configs import stored_config
from dphybrid.tracking.loader import checkpoint_folder
from tests.commands import command
from tests.refusing import refused

LONG = "x" * 300
NOT_UTF_8 = "caf\udce9.csv"  # as Python reads the bytes caf\xe9.csv
TOY = "train --recipe toy"


def with_a_width(width: int = 8) -> int:
    """A factory whose only parameter is not a context."""
    return width + 1


def told(*argv: str) -> str:
    text = command(*argv, ends=2)
    assert text.startswith("error: ")
    return text


@pytest.mark.parametrize("path", [LONG, "~nosuchuser/x", "a\0b", "a**b*.csv", NOT_UTF_8])
@pytest.mark.parametrize("recipe", ["ctr", "kge", "text"])
def test_data_paths(path: str, recipe: str, data_dir: Path) -> None:
    more = ["--data.label", "y"] if recipe == "ctr" else []
    assert "data.path=" in told("prepare", "--recipe", recipe, "--data.path", path, *more)


@pytest.mark.parametrize("path", ["~nosuchuser/x", NOT_UTF_8, "nowhere.csv", "x.txt", "."])
@pytest.mark.parametrize("recipe", ["ctr", "kge", "retrieval", "text"])
def test_test_paths(path: str, recipe: str, tmp_path: Path, data_dir: Path) -> None:
    Path("x.txt").write_text("user,item,y\n" + "".join(f"u{i},i{i % 7},{i % 2}\n" for i in range(90)))
    more = ["--data.label", "y"] if recipe == "ctr" else []
    words = told("prepare", "--recipe", recipe, "--data.path", "x.txt", *more, "--data.test-path", path)
    assert "data.test_path" in words


@pytest.mark.parametrize(("recipe", "name"), [("ctr", NOT_UTF_8), ("text", "caf\udce9.txt")])
def test_a_file_in_a_folder_whose_name_is_not_utf_8(
    recipe: str, name: str, tmp_path: Path, data_dir: Path
) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / name).write_text("a,y\n1,0\n", encoding="utf-8")
    more = ["--data.label", "y"] if recipe == "ctr" else []
    words = told("prepare", "--recipe", recipe, "--data.path", str(folder), *more)
    assert "cannot be looked up" in words


@pytest.mark.parametrize("path", [LONG, "~nosuchuser/x", "a\0b", NOT_UTF_8])
def test_other_paths(path: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told("predict", path, "--data.path", "x.csv", "--out", "y.csv")
    told("train", "--config", path)
    if "\0" not in path:  # the environment takes none
        monkeypatch.setenv("DPHYBRID_DATA_DIR", path)
        with refused("DPHYBRID_DATA_DIR = "):
            load_settings()


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (f"{TOY} --tracking http://a_b?", "MLflow server http://a b: does not answer"),
        (f"{TOY} --tracking http://127.0.0.1:9", "127.0.0.1:9: does not answer.*correct the address"),
        (
            f"{TOY} --tracking ./mlruns",
            "./mlruns: MLflow refuses to record a run .The filesystem",
        ),
        (f"{TOY} --tracking mysql+none://x", "mysql.none://x: MLflow refuses to record a run"),
    ],
)
def test_odd_servers_and_factories_are_told_in_a_line(typed: str, words: str, data_dir: Path) -> None:
    said = command(*(word.replace("a_b?", "a b") for word in typed.split()), ends=2)
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert re.search(words, line), line


ROWS = "a,b,y\n" + "".join(f"{i},{i % 7},{i % 2}\n" for i in range(60))
FILES = {
    "ok.csv": ROWS,
    "headed.csv": "a,y\n",
    "constant.csv": "a,y\n1,1\n2,1\n",
    "single.csv": "a,y\n" + "1,0\n" * 99 + "2,1\n",
}
OK = "--data.path ok.csv --data.label y"
KEY = "--data.split key --data.split-column a"


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("prepare --data.path headed.csv --data.label y", "has no rows that can be read"),
        ("prepare --data.path constant.csv --data.label y", "needs two different values"),
        ("prepare --data.path single.csv --data.label y", "all 20 rows to validate are '0'"),
        ("prepare --data.path ok.csv --data.label Y", "'Y': ok.csv has no such column; known: a, b, y"),
        ("prepare --recipe ctr --data.path ok.csv", "data.label is not set; name the column"),
        (f"prepare {OK} --data.times a", "data.times: column 'a' holds .*, not a date or time"),
        (f"prepare {OK} --data.split time", "split=time needs a column: set data.split_column"),
        (f"prepare {OK} --data.split-column a", "split=random takes no split_column=a"),
        (f"prepare {OK} {KEY} --data.valid-path ok.csv", "with split=key: both choose the validation rows"),
        (f"prepare {OK} --data.ignore y", "already named as label"),
        (f"prepare {OK} --data.weight w", "data.weight='w': ok.csv has no such column"),
        (f"train {OK} --devices cuda:7", "cuda:7 does not exist .*; use cpu$"),
        (f"train {OK} --table.optimizer adamx", "table.optimizer = 'adamx'"),
        (f"train {OK} --devices gpu", "'gpu' .from --devices.: cannot read 'gpu'; use auto, "),
        ("train --config ok.csv", "--config ok.csv: cannot be read .Expected '='"),
        ("train --recipe os:path", "recipe = 'os:path': os has no recipe 'path'"),
        ("devices --ask 0", "--ask 0: there is no cuda:0"),
        (f"train {OK} --run-name ../x", "use a plain name of at most 180 bytes, without slashes"),
        (f"train {OK} --resume nobody", "nobody: there is no such run in .*runs; known: none yet$"),
        ("train --recipe ctrr", "unknown recipe; did you mean 'ctr'"),
        ("train --recipe no.such:Thing", "no.such:Thing.*PYTHONPATH"),
        ("train --recipe toy --model.factory no.such:thing", "model.factory.*no.such:thing"),
        ("train --recipe toy --model.factory json", "package.module:NAME"),
        ("train --recipe toy --model.factory json:absent", "has no function 'absent'"),
        ("train --recipe toy --model.factory builtins:id", "returned an int"),
        ("train --recipe toy --resume", "--resume latest: recipe toy has no run in"),
        ("prepare --recipe retrieval --data.cutoffs 10,10", "that differ"),
        ("train --recipe ctr --model.kind lstm", "model.kind = 'lstm'.*mlp.*dlrm"),
        ("train --config nowhere.toml", "--config nowhere.toml: cannot be read .*No such file"),
        ("train --recipe retrieval --data.path ok.csv", "has no column 'user'"),
        ("predict nobody --data.path ok.csv", "nobody: no run, checkpoint folder or models:/ address"),
        ("predict nobody --data.path=", "data.path='': is empty; give a path"),
        ("evaluate nobody --data.path=", "data.path='': is empty; give a path"),
        ("predict nobody --prompt a --data.encoding utf-8", "give either --data.path, or --prompt"),
        ("sweep --recipe toy --grid {} --sweep=", "--sweep '': use a plain name"),
        ('sweep --recipe toy --grid {"train.lr":[1],"train.lr":[2]}', "repeated: train.lr, train.lr"),
        ("train --train.epochs three", "'three' .from --train.epochs.: must be a valid integer$"),
        ("train --train.deterministic maybe", "must be true or false$"),
        (f"train {OK} --run-name {LONG}", "use a plain name of at most 180 bytes"),
        ("ui", "no run is recorded there yet; train one first"),
        ("sweep --recipe toy", "--grid: is missing"),
        ("sweep --recipe toy --grid train.lr=1", "not valid JSON"),
        ('sweep --recipe toy --grid {"train.lr":[1]} --sweep a/b', "--sweep 'a/b': use a plain name"),
    ],
)
def test_a_new_users_mistakes(typed: str, words: str, data_dir: Path) -> None:
    for name, text in FILES.items():
        Path(name).write_text(text)
    assert re.search(words, told(*typed.split()).strip(), re.MULTILINE)
    assert not list(data_dir.glob("runs/*")), "a run is left"
    if typed.startswith("prepare") or "--run-name" in typed:
        assert not list(data_dir.glob("prepared/ctr-*")), "prepared data is left"


def test_a_checkpoint_with_another_models_values_says_to_train_again(tmp_path: Path) -> None:
    page = tmp_path / "state.json"
    with refused(r"state\.json: model\.old: .*have changed since, train again"):
        stored_config({"recipe": "ctr", "model": {"old": 1}}, page, load_settings())


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("trian", "'trian': there is no such command; did you mean 'train'?"),
        (
            "train --train.amp true",
            "train.amp (from --train.amp): there is no such field; known: train.epochs, ",
        ),
        ("train --train.epoch 3", "there is no such field; did you mean 'train.epochs'?"),
        ("train --train.lr 1 --train.lr 2", "--train.lr: is given 2 times; give it once"),
        ("train --train.epochs", "--train.epochs: needs a value, as in --train.epochs VALUE"),
        ("train --epochs 3", "--epochs: there is no such flag; did you mean '--train.epochs'?"),
        ("sweep --recipe toy --grid {} --trials 0", "--trials '0': must be greater than or equal to 1"),
        ("sweep --recipe toy --grid {} --at-once x", "error: --at-once 'x': must be a valid integer\n"),
        ("sync --waits 3", "--waits: there is no such flag; did you mean '--wait'?"),
        ("train --run-nme x", "--run-nme: there is no such flag; did you mean '--run-name'?"),
        ("worker --limit -1", "--limit '-1': must be greater than or equal to 1"),
        ("train --tag x", "--tag 'x': write NAME=VALUE"),
        ("export nobody", "FOLDER: is missing"),
        ("evaluate nobody", "--data.path: is missing"),
        ("train --data clicks.csv", "--data: there is no such flag; did you mean '--data.path' or "),
        ("train --train=3", "did you mean '--train.epochs' or '--train.batch-size' or "),
        (
            "train --data.ignore a b",
            "unexpected 'b'; write its flag before it, or a list as a,b",
        ),
        ("train --label y", "--label: there is no such flag; did you mean '--data.label'?"),
    ],
)
def test_flags(typed: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(typed.split()) == 2
    assert words in capsys.readouterr().err


def test_names_of_runs_stay_on_one_line_and_are_quoted(data_dir: Path) -> None:
    assert "run name 'a\\nb': use a plain name" in told("train", "--recipe", "toy", "--run-name", "a\nb")
    assert "Look at it:  dphybrid ui 'a b'" in command("train", "--recipe", "toy", "--run-name", "a b")


def test_an_address_of_no_model_makes_no_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with refused("models:/clicks: write models:/NAME@champion, models:/NAME/VERSION or"):
        checkpoint_folder("models:/clicks", f"sqlite:///{tmp_path}/x.db")
    assert not Path("mlflow.db").exists()


def test_a_data_folder_that_cannot_be_made_is_told_by_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPHYBRID_DATA_DIR", "/proc/x")
    said = told("train", "--recipe", "toy")
    assert "error: /proc/x: No such file or directory; DPHYBRID_DATA_DIR=/proc/x must be a folder" in said


def test_every_option_with_a_path_knows_the_home_folder(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "my home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    lines = [f"{i},{'ab'[i % 2]},{i % 3 % 2}" for i in range(90)]
    (home / "x 1.csv").write_text("\n".join(["n,c,y", *lines]))
    (home / "s.toml").write_text('recipe = "ctr"\n[data]\npath = "~/x 1.csv"\nlabel = "y"\n')
    given = ("train", "--config=~/s.toml", "--train.epochs=1", "--run-name", "one", "--tracking", "none")
    command(*given)
    shutil.copytree(data_dir / "runs/one", home / "one")
    command("evaluate", "~/one", "--data.path=~/x 1.csv")
    command("predict", "~/one", "--data.path=~/x 1.csv", "--out=~/scores.csv")
    assert len((home / "scores.csv").read_text().splitlines()) == 91
    command("export", "~/one", "~/exported")
    assert (home / "exported/state.json").is_file()
    assert not list(tmp_path.rglob("~*"))
