"""Prefect's part of `dphybrid doctor`: versions, server. Importing this module fails when installed versions
do not work together."""

import json
from collections.abc import Callable, Iterator
from importlib.metadata import version

import prefect.server.api.server  # noqa: F401 - incompatible versions fail here, as the server's start would
from prefect.settings.models.root import Settings

from dphybrid.util.asking import Answer


def checks(ask: Callable[[str, str | None], Answer]) -> Iterator[tuple[bool, str]]:
    """Yield for each check whether it passed, and its line. ask: `dphybrid.util.asking.ask`."""
    here = version("prefect")
    yield True, f"prefect {here} with fastapi {version('fastapi')}: the server can start"
    settings = Settings()
    url, auth = (settings.api.url or "").rstrip("/"), settings.api.auth_string
    if not url:
        yield True, "Prefect server: PREFECT_API_URL is not set; flows start a temporary server"
        return
    answer = ask(f"{url}/admin/version", auth.get_secret_value() if auth else None)
    wrong = answer.wrong
    # Without /api the address is that of Prefect's pages, which answer every request with HTML.
    if not wrong and not answer.content.startswith(b'"'):
        wrong = "does not answer as Prefect's API does, whose address ends in /api"
    if wrong:
        remedy = "correct PREFECT_API_URL or PREFECT_API_AUTH_STRING, or start the server"
        yield False, f"Prefect server {url}: {wrong}; remedy: {remedy}"
    elif (there := json.loads(answer.content)) != here:
        remedy = "remedy: install the same version on both"
        yield False, f"Prefect server {url} has version {there}, this machine {here}; {remedy}"
    else:
        yield True, f"Prefect server {url}: the same version"
