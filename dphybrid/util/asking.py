"""Requests to servers, with the certificates and the token that MLflow's client would use."""

import base64
import os
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPException

from dphybrid.util.text import without_credentials

_CLOCKS_S = 30.0
"""Clocks that differ by less count as equal; an answer's time has whole seconds."""


@dataclass(frozen=True)
class Answer:
    """What a server answered.

    Attributes:
        status: 0 if it did not.
        wrong: The reason why there is no content, or "".
        ahead_s: How far this machine's clock is ahead of the server's, in seconds; None if it does not say.
    """

    content: bytes = b""
    status: int = 0
    wrong: str = ""
    ahead_s: float | None = None


def ask(url: str, auth: str | None = None, token: str | None = None, timeout_s: float = 5.0) -> Answer:
    """Request an http address. auth: USER:PASSWORD; None: the ones in `url`, if any. token: sent instead."""
    # urllib would take USER:PASSWORD@ for a part of the host's name.
    url, own = without_credentials(url)
    auth = auth or own
    if not url.startswith(("http://", "https://")):
        return Answer(wrong="is not an http address")
    headers = {"Authorization": "Basic " + base64.b64encode(auth.encode()).decode()} if auth else {}
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    try:
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 - http, as just checked
        with urllib.request.urlopen(request, timeout=timeout_s, context=_context()) as answer:  # noqa: S310 - the same
            return Answer(answer.read(), answer.status, ahead_s=ahead_s(answer.headers.get("Date")))
    except urllib.error.HTTPError as error:
        wrong = "refuses user and password, or the token" if error.code == 401 else f"answers {error.code}"
        return Answer(status=error.code, wrong=wrong)
    except (OSError, ValueError, HTTPException) as error:
        return Answer(wrong=f"does not answer ({error})")


def _context() -> ssl.SSLContext:
    """Return the certificates to trust: MLflow's variables name those of a server with an own one."""
    named = (os.environ.get(name) for name in ("MLFLOW_TRACKING_SERVER_CERT_PATH", "REQUESTS_CA_BUNDLE"))
    file = next(filter(None, named), None)
    if os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() == "true":
        return ssl._create_unverified_context()  # noqa: S323 - the user's own setting of MLflow's client
    return ssl.create_default_context(
        cafile=None if file is None or os.path.isdir(file) else file,
        capath=file if file and os.path.isdir(file) else None,
    )


def ahead_s(date: str | None) -> float | None:
    """Return how far this machine's clock is ahead of a server's, in seconds; None if it does not say. date:
    the header of its answer."""
    try:
        return time.time() - parsedate_to_datetime(date).timestamp() if date else None
    except ValueError:
        return None


def clock_check(text: str, answer: Answer) -> tuple[bool, str]:
    """Return a check's result and line: `text`, unless the clocks of server and machine differ."""
    if answer.ahead_s is None or abs(answer.ahead_s) < _CLOCKS_S:
        return True, text
    which = "ahead of" if answer.ahead_s > 0 else "behind"
    return False, (
        f"{text}, and this machine's clock is {abs(answer.ahead_s):.0f} s {which} the server's; remedy: set "
        "both by NTP, or schedules and times in reports are off"
    )
