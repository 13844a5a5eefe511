"""Prefect's part of `dphybrid doctor`: versions, server, settings. Importing this module fails when installed
versions do not work together."""

import json
from collections.abc import Callable, Iterator
from importlib.metadata import version

import prefect.server.api.server  # noqa: F401 - incompatible versions fail here, as the server's start would
from prefect.settings.models.root import Settings

from dphybrid.orchestration.checking import PACKAGED
from dphybrid.util.asking import Answer


def checks(ask: Callable[[str, str | None], Answer]) -> Iterator[tuple[bool, str]]:
    """Yield for each check whether it passed, and its line. ask: `dphybrid.util.asking.ask`."""
    here, sqlalchemy = version("prefect"), version("sqlalchemy")
    yield True, f"prefect {here} with fastapi {version('fastapi')}: the server can start"
    if tuple(int(part) for part in sqlalchemy.split(".")[:2]) >= (2, 1):
        remedy = "remedy: pip install 'sqlalchemy>=2.0.16,<2.1'"
        yield False, f"sqlalchemy {sqlalchemy}: with 2.1 Prefect 3.8 creates no scheduled runs; {remedy}"
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
    # `dphybrid worker` sets these two if nobody else has, so being unset is no fault.
    client, flows = settings.client, settings.flows
    retries = client.max_retries if "max_retries" in client.model_fields_set else 9
    heartbeat_s = flows.heartbeat_frequency if "heartbeat_frequency" in flows.model_fields_set else 60
    wanted = {
        "PREFECT_CLIENT_MAX_RETRIES=9": retries >= 9,
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY=60": heartbeat_s is not None and heartbeat_s <= 60,
        "PREFECT_PLUGINS_ENABLED=true": settings.plugins.enabled,
    }
    if missing := [name for name, good in wanted.items() if not good]:
        where = f"infra/make-env writes them for services, else copy {PACKAGED.with_suffix('.toml')}"
        yield False, f"Prefect settings: set {', '.join(missing)} ({where})"
    else:
        yield True, "Prefect settings: runs wait out outages and send heartbeats, bare deployment names work"
