"""Files, flags and overrides compose, and every mistake is told with its place and remedy."""

import shlex
from pathlib import Path
from typing import get_args

import pytest
from dphybrid.tutorials import Toy

from dphybrid.cli.flags import ConfigCommand
from dphybrid.cli.main import command_of
from dphybrid.cli.parser import sentence
from dphybrid.config import ModelConfig, nest
from dphybrid.config.settings import load_settings
from dphybrid.lifecycle.sweep import Sweep
from dphybrid.recipes.configs import (
    Values,
    apply_overrides,
    build_config,
    field_types,
    given_flags,
    given_values,
    load_config,
)
from dphybrid.recipes.registry import BUILT_IN, find_recipe
from dphybrid.util.text import as_flags
from tests.refusing import refused, refused_with


def flags(*argv: str, recipe: str = "text") -> Values:
    values: Values = ConfigCommand.parse("config", "", ["--recipe", recipe, *argv]).values
    return values


def test_flags_go_over_the_file_and_the_file_over_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text('recipe="ctr"\n[train]\nbatch_size=64\nlr=0.5\n[data]\nnumeric=["age", "hours"]\n')
    config = load_config(file, flags("--train.batch-size", "128", "--data.ignore", "a, b", recipe="ctr"))
    assert (config.train.batch_size, config.train.lr) == (128, 0.5)
    assert config.train.epochs == find_recipe("ctr").train["epochs"]
    assert config.data.numeric == ("age", "hours")
    assert config.data.ignore == ("a", "b")


def test_the_empty_text_is_a_list_without_items() -> None:
    table = ["recipe=ctr", "data.path=x.csv", "data.label=y"]
    assert load_config(None, [*table, "data.missing="]).data.no_value == ()
    assert "NA" in load_config(None, [*table, "data.missing=-1"]).data.no_value
    assert "NA" in load_config(None, table).data.no_value


def test_the_run_that_goes_on_gives_the_values_that_are_not_given() -> None:
    base = ["recipe=ctr", "data.path=x.csv", "data.label=y", "table.optimizer=adagrad"]
    run = load_config(None, [*base, "cluster.ranks=2", "devices=cpu", "train.lr=0.5"])
    on = load_config(None, ["train.epochs=12"], run)
    assert (on.recipe, on.train.lr, on.train.epochs, on.devices) == ("ctr", 0.5, 12, "cpu")
    assert not on.cluster.several  # any number of ranks goes on, one process where none is given
    assert load_config(None, ["recipe=toy"], run).recipe == "toy"


def test_overrides_keep_what_was_given_and_follow_a_new_recipe() -> None:
    config = load_config(None, ["recipe=ctr", "train.seed=7"])
    changed = apply_overrides(config, ["recipe=toy", "train.epochs=2"])
    assert (changed.recipe, changed.train.seed, changed.train.epochs) == ("toy", 7, 2)
    assert changed.train.batch_size == find_recipe("toy").train["batch_size"]
    assert given_values(changed) == {"recipe": "toy", "train": {"seed": 7, "epochs": 2}}


def test_every_field_has_a_sentence_and_a_flag() -> None:
    for recipe in BUILT_IN:
        fields = dict(field_types(recipe))
        for name in fields:
            assert sentence(find_recipe(recipe).config_class, name).endswith("."), name
        del fields["recipe"]  # given
        given = (word for n, name in enumerate(fields) for word in (f"--{name.replace('_', '-')}", str(n)))
        values = {name: str(n) for n, name in enumerate(fields)}
        assert flags(*given, recipe=recipe) == {"recipe": recipe} | nest(values)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("train.batch_size=-1", ["train.batch_size", "'-1'", "--train.batch-size", "than or equal to 0"]),
        ("train.bach_size=3", ["train.bach_size", "did you mean 'train.batch_size'"]),
        ("train.lr", ["expected name=value"]),
        ("nonsense=1", ["nonsense", "known: recipe, devices"]),
        ("epochs=3", ["epochs", "did you mean 'train.epochs'"]),
        ("epoch=3", ["epoch", "did you mean 'train.epochs'"]),
        ("train.dropout=0.1", ["train.dropout", "did you mean 'model.dropout'"]),
        ("model.kind=decoder model.heads=3", ["hidden=256 cannot be shared by heads=3"]),
        ("recipe=digits data.path=x.csv", ["data.path", "digits does not use it", "ctr, retrieval, kge"]),
        ("recipe=text model.penalty=0.1", ["model.penalty", "recipe text", "kge"]),
        ("[train]\nepoch = 3\n", ["experiment.toml", "train.epoch", "did you mean 'train.epochs'"]),
        ("train = 3\n", ["experiment.toml", "write [train]"]),
        ("[train\n", ["experiment.toml", "line 1"]),
        ("[train]\nbatch_size = -1\n", ["experiment.toml", "train.batch_size = -1"]),
    ],
)
def test_mistakes_are_named_with_place_and_remedy(given: str, words: list[str], tmp_path: Path) -> None:
    """given: the text of a file, or overrides."""
    file = tmp_path / "experiment.toml"
    file.write_text(given)
    with refused_with(words):
        load_config(file, []) if "\n" in given else load_config(None, given.split())


def test_without_a_recipe_a_label_means_a_table() -> None:
    for values, recipe in (
        (["data.path=movies.csv", "data.label=Liked?"], "ctr"),
        (["data.path=words.txt"], "text"),
        ([], "text"),
        (["recipe=text", "data.path=movies.csv"], "text"),
        (["recipe=kge", "data.path=movies.csv"], "kge"),
    ):
        assert load_config(None, values).recipe == recipe


class ListsModel(ModelConfig):
    bottom: tuple[int, ...] = (8,)
    rates: list[float] | None = None
    widths: dict[str, int] = {"a": 1}


class Lists(Toy):
    name = "lists"
    model = ListsModel


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("bottom", "64,32", (64, 32)),
        ("bottom", "[]", ()),
        ("rates", "0.1,2", [0.1, 2.0]),
        ("rates", "none", None),
        ("widths", '{"b": 2, "a": 1}', {"b": 2, "a": 1}),
    ],
)
def test_lists_and_mappings_are_the_same_as_flag_override_grid_and_keyword(
    field: str, text: str, value: object, data_dir: Path
) -> None:
    recipe, name = f"{__name__}:Lists", f"model.{field}"
    wanted = build_config({"recipe": recipe, "model": {field: value}})
    assert getattr(wanted.model, field) == value
    assert load_config(None, [f"recipe={recipe}", f"{name}={text}"]) == wanted
    assert command_of(["train", "--recipe", recipe, f"--{name}", text]).given_config() == wanted
    printed = as_flags(given_flags(wanted))
    assert command_of(["train", *shlex.split(printed)]).given_config() == wanted
    sweep = Sweep("s", build_config({"recipe": recipe, "devices": "cpu"}), {name: [value]})
    assert getattr(sweep.config_of({name: value}, load_settings()).model, field) == value


# Each value with its opposite: what makes it useless, what would make it count.
_IDLE = {
    "model.layers=5": ("recipe=retrieval", "model.kind=bag", "model.kind=transformer"),
    "model.heads=4": ("recipe=retrieval", "model.kind=bag", "model.kind=transformer"),
    "model.dropped=0.5": ("recipe=retrieval", "model.kind=transformer", "model.kind=bag"),
    "model.dropout=0.5": ("recipe=retrieval", "model.kind=bag", "model.kind=transformer"),
    "data.negatives=50": ("recipe=retrieval", "model.softmax=full", "model.softmax=sampled"),
    "model.cross_layers=4": ("recipe=ctr", "model.kind=mlp", "model.kind=dcn"),
    "data.valid_fraction=0.3": ("recipe=ctr", "data.valid_path=held.csv", "data.valid_path="),
    "model.memory=1000": ("recipe=text", "model.kind=lstm", "model.kind=decoder"),
    "data.vocabulary=500": ("recipe=text", "data.tokens=words", "data.tokens=bpe"),
}


@pytest.mark.parametrize("value", _IDLE)
def test_a_value_that_does_nothing_is_refused(value: str) -> None:
    recipe, useless, useful = _IDLE[value]
    name = value.partition("=")[0]
    with refused_with([name, f"--{name.replace('_', '-')}", f"does nothing with {useless}"]):
        load_config(None, [recipe, useless, value])
    used = load_config(None, [recipe, useful, value])
    # A sweep or a retraining that chooses the other kind goes on without the value.
    assert name not in given_flags(apply_overrides(used, [useless]))


@pytest.mark.parametrize("section", ["data", "model"])
@pytest.mark.parametrize("recipe", BUILT_IN)
def test_conditions_of_values_name_fields_and_their_choices(recipe: str, section: str) -> None:
    fields = field_types(recipe)
    for name, condition in getattr(load_config(None, [f"recipe={recipe}"]), section).used_with.items():
        other, _, useful = condition.partition("=")
        assert f"{section}.{name}" in fields
        assert set(filter(None, useful.split(","))) <= set(get_args(fields[other].annotation))


def test_a_share_beside_files_that_choose_the_split_is_refused(tmp_path: Path) -> None:
    for folder, recipe, text in (("kge", "kge", "a\tr\tb\n"), ("text", "text", "one two\n\nthree four\n")):
        (tmp_path / folder).mkdir()
        for part in ("train", "valid"):
            (tmp_path / folder / f"{part}.txt").write_text(text)
        config = build_config(
            {"recipe": recipe, "data": {"path": str(tmp_path / folder), "valid_fraction": 0.5}}
        )
        with refused("valid_fraction=0.5 does nothing: .*valid.txt"):
            find_recipe(recipe).source(config.data, 0)


def test_a_number_that_no_float_holds_is_told_in_a_line() -> None:
    with refused(r"^train\.lr = 10{299}\.\.\.: must be a valid number$"):
        build_config({"recipe": "toy", "train": {"lr": 10**400}})
