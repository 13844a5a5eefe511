"""Rollbacks of a registered model, and what is remembered of former champions."""

from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from dphybrid.tracking.models import Registry, former_champions
from tests.refusing import refused
from tests.stores import put_database


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    put_database("mlflow", tmp_path / "mlflow.db")
    found = Registry(f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "locks")
    found._client.create_registered_model("m")
    for _ in range(14):
        found._client.create_model_version("m", str(tmp_path), run_id=None)
    return found


def promoted(registry: Registry, *numbers: int) -> None:
    for number in map(str, numbers):
        now = registry.champion("m")
        assert registry.decide(registry.version("m", number), now.number if now else "", "promoted: better")


def former(registry: Registry) -> list[str]:
    return former_champions(registry._client.get_registered_model("m"))


def test_a_rollback_after_one_to_a_version_returns_to_what_that_replaced(registry: Registry) -> None:
    promoted(registry, 1, 2, 3)
    for to, now in ((None, "2"), ("4", "4"), (None, "2"), (None, "1"), ("3", "3"), ("1", "1"), (None, "3")):
        before = registry.champion("m").number
        replaced, found = registry.roll_back("m", to)
        assert (replaced.number, found.number) == (before, now)
    with refused("version 3 is the champion already"):
        registry.roll_back("m", "3")
    assert registry.version("m", "4").decision.startswith("champion again after version 2")


def test_the_last_ten_former_champions_are_remembered(registry: Registry) -> None:
    promoted(registry, *range(1, 15))
    assert former(registry) == [str(number) for number in range(4, 14)]
    assert registry.roll_back("m")[1].number == "13"


@pytest.mark.parametrize("method", ["set_registered_model_tag", "set_registered_model_alias"])
@pytest.mark.parametrize("to", [None, "4"])
def test_a_rollback_that_died_half_way_is_done_by_another_one(
    registry: Registry, to: str | None, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    promoted(registry, 1, 2, 3)
    real = getattr(MlflowClient, method)

    def dies(self: MlflowClient, *given: str) -> None:
        real(self, *given)
        if given[1] in ("dphybrid.former_champions", "champion"):
            raise SystemExit("killed")

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, method, dies)
        with pytest.raises(SystemExit):
            registry.roll_back("m", to)
    if registry.champion("m").number == "3":
        registry.roll_back("m", to)
    assert registry.champion("m").number == (to or "2")
    assert registry.roll_back("m")[1].number == ("3" if to else "1")
