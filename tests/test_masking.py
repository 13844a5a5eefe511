"""Addresses without their secrets."""

import httpx
import pytest

from dphybrid.orchestration.shown import tolerating_outage
from dphybrid.util.text import masked


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://bob:s3cret@db:5432/mlflow", "postgresql://***@db:5432/mlflow"),
        ("postgresql+psycopg2://bob:s3@cr@et@db/mlflow", "postgresql+psycopg2://***@db/mlflow"),
        ("mysql://bob:s3c/r?et@db/mlflow", "mysql://***@db/mlflow"),
        ("mysql://bob:123/45@db/mlflow", "mysql://***@db/mlflow"),
        ("https://token@host/path", "https://***@host/path"),
        ("at 'http://u:p@h:5', and mysql://a:b@c/d too", "at 'http://***@h:5', and mysql://***@c/d too"),
        ("mysql://db/x?user=bob&password=s3cret&ssl=1", "mysql://db/x?user=bob&password=***&ssl=1"),
        ("http://h/p?api_key=abc;x=1", "http://h/p?api_key=***;x=1"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
        ("http://127.0.0.1:5000/#/experiments/1/runs/a?workflowType=machine_learning", None),
        ("http://127.0.0.1:5000/models/clicks@champion", None),
        ("models:/clicks@champion and bob@example.com", None),
    ],
)
def test_user_and_password_are_not_shown(text: str, shown: str | None) -> None:
    assert masked(text) == (text if shown is None else shown)


def test_an_error_of_prefects_client_shows_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    address = httpx.Request("POST", "http://bob:s3cret@h:4200/api/artifacts")
    with tolerating_outage("no artifact"):
        httpx.Response(401, request=address).raise_for_status()
    said = capsys.readouterr().out
    assert "Note: no artifact (Client error '401 Unauthorized' for url 'http://***@h:4200" in said
