"""The start-up hook of Prefect's command."""

import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dphybrid.orchestration.plugin import refuse_wrong_parameters
from dphybrid.util.errors import UserError
from dphybrid.util.importing import ONLY


class Server:
    """Answers with one deployment, whose parameters somebody else wrote."""

    def __init__(self, **parameters: Any) -> None:
        self.deployment = SimpleNamespace(
            name="train", tags=["dphybrid"], entrypoint="", parameters=parameters
        )

    async def read_deployment(self, _: str) -> Any:
        return self.deployment


@pytest.mark.parametrize(
    "parameters", [{"overrides": ["recipe=evilmod:Nothing"]}, {"config": {"recipe": "evilmod:Nothing"}}]
)
def test_a_deployment_s_parameters_import_no_foreign_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_dir: Path, parameters: dict[str, Any]
) -> None:
    (tmp_path / "evilmod.py").write_text("raise SystemExit('evil ran')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="would run code of package 'evilmod'"):
        asyncio.run(refuse_wrong_parameters(Server(**parameters), "id", {}))
    assert "evilmod" not in sys.modules
    assert ONLY not in os.environ
    asyncio.run(refuse_wrong_parameters(Server(config={"recipe": "toy"}), "id", {}))
