"""The form of the flows, the experiment that it describes, and what is said of servers that do not answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import PREFECT_API_URL, temporary_settings

from dphybrid.cli.main import main
from dphybrid.orchestration.forms import experiment
from dphybrid.orchestration.queueing import reaching_server
from dphybrid.orchestration.setup import call_prefect
from dphybrid.util.stop import StopRequest
from tests.refusing import refused


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
    with temporary_settings({PREFECT_API_URL: "http://s/api"}):
        with refused("the server refuses: 409 Conflict"), reaching_server():
            answer.raise_for_status()
        twice = refused("http://s/api: another command set it up meanwhile; try again")
        with twice, reaching_server():  # two `dphybrid deploy` at once, on a new server
            raise ObjectAlreadyExists(httpx.HTTPStatusError("", request=answer.request, response=answer))


def test_the_forms_begin_with_the_same_fields_and_describe_each() -> None:
    for name in ("train_hybrid", "retrain_hybrid", "sweep_hybrid", "clean_up"):
        form = getattr(import_module(f"dphybrid.flows.{name}"), name).parameters.properties
        assert all(field.get("description") for field in form.values()), name
        order = sorted(form.keys() - {"grid", "register_as"}, key=lambda name: form[name]["position"])
        if name != "clean_up":
            assert order[:4] == [
                "data_path",
                "label",
                "recipe",
                "devices",
            ]
            assert form["config"]["type"] == "object"
            assert form["config"]["default"] == {}, "Prefect submits what a form shows"


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


def test_single_values_go_over_the_config_and_overrides_over_both() -> None:
    config = {"recipe": "ctr", "devices": "auto", "train": {"epochs": 2, "batch_size": 64}}
    given = {"config": config, "data_path": "a.csv", "label": "Liked?", "devices": "cpu*2"}
    assert experiment(given).devices == "cpu*2"
    assert experiment(given | {"devices": ""}).devices == "auto"
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
