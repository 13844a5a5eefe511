"""Requests to servers, with the certificates of this machine."""

import ssl
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """What a server answered. status: 0 if it did not. wrong: why there is no content, or ""."""

    content: bytes = b""
    status: int = 0
    wrong: str = ""


def ask(url: str, auth: str | None = None, token: str | None = None, timeout_s: float = 5.0) -> Answer:
    """Request an http address. auth: USER:PASSWORD; None: the ones in `url`, if any. token: sent instead."""
    import httpx  # a tenth of a second

    user, _, password = (auth or "").partition(":")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(
            url,
            auth=(user, password) if auth else None,
            headers=headers,
            timeout=timeout_s,
            verify=ssl.create_default_context(),
            follow_redirects=True,
        )
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return Answer(wrong=f"does not answer ({error})")
    if answer.is_success:
        return Answer(answer.content, answer.status_code)
    refused = answer.status_code == 401
    wrong = "refuses user and password, or the token" if refused else f"answers {answer.status_code}"
    return Answer(status=answer.status_code, wrong=wrong)
