"""Prefect's half of `dphybrid doctor`, which runs this module in a process of its own: versions, server,
settings.

Prints a page of JSON: the checks, each whether it passed and a line for people, and whether a server is set.
"""

import json
from importlib.metadata import version

import prefect.server.api.server  # noqa: F401 - a broken set of versions fails here
from prefect.settings import get_current_settings
from prefect.settings.models.root import Settings as PrefectSettings

from dphybrid.util.servers import ask, same_clock

_Check = tuple[bool, str]
"""Whether it passed, and what was found, with its remedy."""


def _database() -> _Check:
    found = version("sqlalchemy")
    if tuple(int(part) for part in found.split(".")[:2]) >= (2, 1):
        text = (
            f"sqlalchemy {found}: with 2.1 Prefect 3.8 creates no scheduled runs; remedy: pip install "
            "'sqlalchemy>=2.0,<2.1'"
        )
        return False, text
    return True, f"sqlalchemy {found}: schedules work"


def _server(settings: PrefectSettings) -> _Check:
    url, auth = settings.api.url, settings.api.auth_string
    if not url:
        return (
            True,
            "Prefect server: none is set (PREFECT_API_URL); flows start a temporary one, workers need a "
            "real one",
        )
    answer, now = ask(f"{url}/admin/version", auth.get_secret_value() if auth else None)
    if isinstance(answer, str):
        remedy = "correct PREFECT_API_URL or PREFECT_API_AUTH_STRING, or start it"
        return False, f"Prefect server {url}: {answer}; remedy: {remedy}"
    there, here = json.loads(answer.read()), version("prefect")
    if there != here:
        return (
            False,
            f"Prefect server {url} is {there}, here is {here}; remedy: install the same version everywhere",
        )
    return same_clock(f"Prefect server {url}: the same version", answer, now)


def _workers(settings: PrefectSettings) -> _Check:
    if not settings.api.url:
        return True, "Prefect settings for workers: not looked at without a server"
    # where nobody has set these two, the worker brings them
    client, flows = settings.client, settings.flows
    retries = client.max_retries if "max_retries" in client.model_fields_set else 9
    heartbeat_s = flows.heartbeat_frequency if "heartbeat_frequency" in flows.model_fields_set else 60
    wanted = {
        "PREFECT_CLIENT_MAX_RETRIES=9": retries >= 9,
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY=60": heartbeat_s is not None and heartbeat_s <= 60,
        "PREFECT_PLUGINS_ENABLED=true": settings.plugins.enabled,
    }
    if missing := [name for name, good in wanted.items() if not good]:
        where = "infra/make-env writes them for services, else `dphybrid deploy --write` to prefect.toml"
        return False, f"Prefect settings: set {', '.join(missing)} ({where})"
    return True, "Prefect settings: outages are waited for, heartbeats are sent, bare deployment names work"


if __name__ == "__main__":
    current = get_current_settings()
    versions = f"prefect {version('prefect')} with fastapi {version('fastapi')}"
    checks = [(True, f"{versions}: the server can start"), _database(), _server(current), _workers(current)]
    print(json.dumps({"checks": checks, "with_server": bool(current.api.url)}))
