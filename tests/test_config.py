"""One declaration: files, flags and overrides compose, and every mistake is told with its place and remedy."""

import argparse
from pathlib import Path

import pytest

from dphybrid.config import RECIPES, ExperimentConfig, flatten, given_values
from dphybrid.config.sources import add_config_flags, apply_overrides, field_types, load_config, overrides_from_args
from dphybrid.util.errors import UserError


def flags(*argv: str) -> list[str]:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    return overrides_from_args(parser.parse_args(argv))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_a_valid_config(recipe: str) -> None:
    config = load_config(None, [f"recipe={recipe}"])
    for name, value in flatten(RECIPES[recipe]).items():
        assert flatten(config.model_dump())[name] == value


def test_flags_go_over_the_file_and_the_file_over_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text('recipe = "ctr"\n[train]\nbatch_size = 64\nlr = 0.5\n[data]\nnumeric = ["age", "hours"]\n')
    config = load_config(file, flags("--train.batch-size", "128", "--data.ignore", "a, b"))
    assert (config.train.batch_size, config.train.lr, config.train.epochs) == (128, 0.5, RECIPES["ctr"]["train"]["epochs"])
    assert config.data.numeric == ("age", "hours")
    assert config.data.ignore == ("a", "b")


def test_a_config_survives_json(tmp_path: Path) -> None:
    config = load_config(None, ["recipe=ctr", "devices=cpu*3", "data.path=x.csv"])
    file = tmp_path / "config.json"
    file.write_text(config.model_dump_json())
    assert load_config(file, []) == config


def test_overrides_keep_what_was_given_and_follow_a_new_recipe() -> None:
    config = load_config(None, ["recipe=ctr", "train.seed=7"])
    changed = apply_overrides(config, ["recipe=toy", "train.epochs=2"])
    assert (changed.recipe, changed.train.seed, changed.train.epochs) == ("toy", 7, 2)
    assert changed.train.batch_size == RECIPES["toy"]["train"]["batch_size"]
    assert given_values(changed) == {"recipe": "toy", "train": {"seed": 7, "epochs": 2}}


def test_every_field_has_a_sentence_and_a_flag() -> None:
    for name, (_, sentence, _) in field_types().items():
        assert sentence.endswith("."), name
        assert flags(f"--{name.replace('_', '-')}", "1") == [f"{name}=1"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.batch_size=0", ["train.batch_size", "'0'", "--train.batch-size", "greater than or equal to 1"]),
        ("recipe=txt", ["recipe", "'txt'", "'text'", "'toy'"]),
        ("devices=tpu", ["devices", "'tpu'", "cpu*8"]),
        ("train.bach_size=3", ["train.bach_size", "did you mean 'train.batch_size'"]),
        ("train.lr=fast", ["train.lr", "'fast'", "number"]),
        ("train.lr", ["expected name=value"]),
        ("nonsense=1", ["nonsense", "known: recipe, devices"]),
    ],
)
def test_wrong_values_are_named_with_place_and_remedy(override: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_config(None, [override])
    for word in words:
        assert word in str(caught.value)


def test_rules_across_fields_are_told() -> None:
    with pytest.raises(UserError, match="hidden=256 cannot be shared by heads=3"):
        load_config(None, ["model.kind=transformer", "model.heads=3"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\nepoch = 3\n", ["train.epoch", "did you mean 'train.epochs'"]),
        ("train = 3\n", ["write [train]"]),
        ("[train\n", ["line 1"]),
        ("[train]\nbatch_size = 0\n", ["experiment.toml", "train.batch_size = 0"]),
    ],
)
def test_mistakes_in_a_file_name_the_file(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        load_config(file, [])
    for word in ["experiment.toml", *words]:
        assert word in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere.toml: No such file"):
        load_config(tmp_path / "nowhere.toml", [])


def test_the_config_cannot_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        ExperimentConfig().train.epochs = 3  # type: ignore[misc]
