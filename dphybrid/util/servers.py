"""Asking a server over HTTP, for checks that tell people what is wrong with it."""

import base64
import time
import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime
from typing import Any

from dphybrid.util.text import without_credentials

_MAX_SKEW_S = 5.0
"""Seconds by which a server's clock may differ: schedules, leases and heartbeats compare times of several
machines."""
_ANSWER_S = 5.0


def ask(url: str, auth: str | None) -> tuple[Any, float]:
    """Ask for `url`, with `auth` as USER:PASSWORD; return (the answer, or what is wrong, as text; the time
    when it came)."""
    url, own = without_credentials(url)
    auth = auth or own
    if not url.startswith(("http://", "https://")):
        return "is not an http address", time.time()
    headers = {"Authorization": "Basic " + base64.b64encode(auth.encode()).decode()} if auth else {}
    try:
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 - http, as just checked
        answer = urllib.request.urlopen(request, timeout=_ANSWER_S)  # noqa: S310 - the same
    except urllib.error.HTTPError as error:
        return "refuses user and password" if error.code == 401 else f"answers {error.code}", time.time()
    except (OSError, ValueError) as error:
        return f"does not answer ({error})", time.time()
    return answer, time.time()


def same_clock(text: str, answer: Any, now: float) -> tuple[bool, str]:
    """Return whether the clock of the server that gave `answer` at `now` agrees with this one, and a line
    that begins with `text`."""
    there = answer.headers.get("Date")
    skew_s = now - parsedate_to_datetime(there).timestamp() if there else 0.0
    if abs(skew_s) > _MAX_SKEW_S:
        which = "behind" if skew_s > 0 else "ahead"
        return (
            False,
            f"{text}, but its clock is {abs(skew_s):.0f} s {which}; remedy: run an NTP client on both",
        )
    return True, f"{text}, clocks agree"
