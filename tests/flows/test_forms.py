"""The forms of deployments: each with its own recipe's values, checked by the server, and filled in by mouse.

With DPHYBRID_SCREENSHOTS set to a folder, the pages are kept there as pictures to look at.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
from dphybrid.flows.train_hybrid import train_hybrid
from prefect.settings import PREFECT_API_URL, temporary_settings

from dphybrid.cli.main import main
from dphybrid.config import flatten
from dphybrid.orchestration.forms import FEW, experiment, form_of
from dphybrid.orchestration.queueing import reaching_server
from dphybrid.orchestration.setup import call_prefect
from dphybrid.recipes.configs import field_types
from dphybrid.recipes.registry import BUILT_IN, find_recipe
from dphybrid.util.stop import StopRequest
from tests.refusing import refused


def leaves(shown: dict[str, Any], prefix: str = "") -> dict[str, dict[str, Any]]:
    """The fields of a form by their dotted names, in the order of their positions."""
    found: dict[str, dict[str, Any]] = {}
    assert [field["position"] for field in shown.values()] == list(range(len(shown)))
    for name, field in shown.items():
        below = field.get("properties")
        found |= leaves(below, f"{prefix}{name}.") if below else {f"{prefix}{name}": field}
    return found


def test_what_prefect_says_of_a_failed_deploy_keeps_its_lines_whole(tmp_path: Path) -> None:
    missing = tmp_path / ("a-long-name-" * 8) / "prefect.yaml"
    away = temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"})  # or a server would be started
    with away, refused(rf"deployments could not be created: [^\n]*{missing}"):
        call_prefect("--no-prompt", "deploy", "--all", "--prefect-file", str(missing))


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/api", "127.0.0.1:4200/api"])
@pytest.mark.parametrize("command", ["deploy", "worker"])
def test_an_address_without_a_server_is_told_in_a_line(
    command: str, address: str, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with temporary_settings({PREFECT_API_URL: address}):
        assert main([command]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"error: PREFECT_API_URL={address}: no Prefect server answers there (" in line


def test_a_server_that_refuses_is_not_one_that_does_not_answer() -> None:
    answer = httpx.Response(409, request=httpx.Request("POST", "http://s/api"))
    away = temporary_settings({PREFECT_API_URL: "http://s/api"})
    with away, refused("the server refuses: 409 Conflict"), reaching_server():
        answer.raise_for_status()


def test_every_value_of_every_flow_is_described() -> None:
    for name in ("train_hybrid", "retrain_hybrid", "sweep_hybrid", "clean_up"):
        flow = getattr(import_module(f"dphybrid.flows.{name}"), name)
        assert all(field.get("description") for field in flow.parameters.properties.values()), name


@pytest.mark.parametrize("recipe", ["text", "ctr", "kge", "retrieval"])
def test_a_form_has_its_recipes_values_the_few_first_and_all_of_them_empty(recipe: str) -> None:
    form = form_of(train_hybrid, recipe)
    few = [name for name, field in FEW.items() if field in field_types(recipe) and name != "register_as"]
    assert ("label" in few) == (recipe == "ctr")
    assert list(form.properties)[: len(few) + 1] == [*few, "overrides"]
    assert list(form.properties)[-1] == "skip_if_late_min"
    fields = leaves(form.properties)
    assert form.required == {"ctr": ["data_path", "label"], "kge": ["data_path"]}.get(recipe, [])
    assert not [name for name in few if f"config.{FEW[name]}" in fields]
    assert {FEW[name] for name in few} | {
        name.removeprefix("config.") for name in fields if name.startswith("config.")
    } == set(field_types(recipe))
    assert not [name for name, field in fields.items() if "default" in field]
    assert all(field["description"] for field in fields.values())
    assert fields["config.recipe"]["enum"] == [recipe]
    assert f"Empty: {field_types(recipe)['train.epochs'].default}." in fields["epochs"]["description"]
    train = form.properties["config"]["properties"]["train"]
    assert [list(train["properties"])[place] for place in (0, -1)] == ["accumulate", "shuffle_rows"]
    model = form.properties["config"]["properties"]["model"]["properties"]
    assert list(model)[-2:] == ["factory", "dtype"]  # rarely used, so behind the recipe's own
    assert train["patternProperties"]["^epochs$"]["minimum"] == 0  # the server takes it there, too
    assert "`cpu*8`" in fields["devices"]["description"]


def test_the_form_of_any_recipe_begins_with_data_recipe_and_devices() -> None:
    form = form_of(train_hybrid, None)
    names = sorted(form.properties, key=lambda name: form.properties[name]["position"])
    assert names[:4] == ["data_path", "label", "recipe", "devices"]
    assert {"ctr", "kge", "retrieval", "text"} <= set(form.properties["recipe"]["enum"])
    assert not [name for name, field in form.properties.items() if "default" in field]
    assert all(field["description"] for field in form.properties.values())


@pytest.mark.parametrize(
    ("given", "recipe"),
    [
        ({}, "text"),  # what a bare `prefect deployment run train-hybrid` trains
        ({"data_path": "clicks.csv", "label": "clicked"}, "ctr"),
        ({"data_path": "clicks.csv", "label": "clicked", "recipe": ""}, "ctr"),
        ({"recipe": "hybrid"}, "hybrid"),
        ({"recipe": "kge", "config": {"train": {"seed": 3}}}, "kge"),
        ({"config": {"recipe": "ctr"}, "data_path": "triples"}, "ctr"),
        ({"recipe": "toy", "overrides": ["recipe=hybrid"]}, "hybrid"),
        ({"label": "y", "config": {"train": {"seed": 3}}}, "ctr"),
        ({"overrides": ["data.label=y"]}, "ctr"),
    ],
)
def test_a_run_without_a_recipe_has_that_of_its_data(given: dict[str, Any], recipe: str) -> None:
    config = experiment({"recipe": None} | given)
    assert config.recipe == recipe
    assert (config.train.seed == 3) == ("train" in given.get("config", {}))


@pytest.mark.parametrize("recipe", BUILT_IN)
def test_only_what_is_off_by_default_is_a_switch(recipe: str) -> None:
    """Prefect's pages submit a switch that nobody touched as off, and a selection as nothing."""
    values = flatten(find_recipe(recipe).config_class().model_dump())
    fields = leaves(form_of(train_hybrid, recipe).properties)
    shown = {name.removeprefix("config."): field for name, field in fields.items()}
    switches = {name for name, field in shown.items() if field.get("type") == "boolean"}
    selections = {name for name, field in shown.items() if field.get("enum") == [True, False]}
    assert switches == {name for name, value in values.items() if value is False}
    assert selections >= {name for name, value in values.items() if value is True} >= {"train.check_split"}
    assert ("data.dayfirst" in selections) == (recipe in ("ctr", "retrieval"))  # inferred when empty
    assert not any("type" in shown[name] for name in selections)


def test_a_sweeps_form_prunes_unless_the_user_says_no() -> None:
    form = form_of(import_module("dphybrid.flows.sweep_hybrid").sweep_hybrid, "ctr")
    assert form.properties["prune"]["enum"] == [True, False]
    assert not {"type", "default"} & set(form.properties["prune"])


def test_the_few_values_go_over_the_config_and_overrides_over_both() -> None:
    config = {"recipe": "ctr", "train": {"epochs": 2, "batch_size": 64}}
    given = {
        "config": config,
        "data_path": "a.csv",
        "label": "Liked?",
        "epochs": 3,
        "devices": "cpu*2",
        "lr": "",
    }
    assert experiment(given).train.epochs == 3
    found = experiment(given | {"overrides": ["train.epochs=4", "devices=cpu"]})
    assert (found.recipe, found.train.epochs, found.train.batch_size, found.devices) == ("ctr", 4, 64, "cpu")
    assert (found.data.path, found.data.label) == ("a.csv", "Liked?")  # type: ignore[attr-defined]
    with refused(r"data\.label.*ctr"):
        experiment({"config": {"recipe": "text"}, "label": "clicked"})


@pytest.mark.parametrize("flow", ["train_hybrid", "retrain_hybrid", "sweep_hybrid"])
def test_a_wrong_value_is_told_under_supervision_which_leaves_out_its_traceback(
    flow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, entered = import_module(f"flows.{flow}"), list[str]()

    @contextmanager
    def supervised() -> Iterator[StopRequest]:
        entered.append(flow)
        yield StopRequest()

    monkeypatch.setattr(module, "supervised", supervised)
    grid: dict[str, Any] = {"grid": {}} if flow == "sweep_hybrid" else {}
    with refused("train.epoch"):
        getattr(module, flow).fn(overrides=["train.epoch=3"], **grid)
    assert entered == [flow]
