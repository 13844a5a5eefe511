"""Texts of numbers, and addresses without their secrets."""

import httpx
import pytest

from dphybrid.orchestration.shown import tolerating_outage
from dphybrid.util.errors import UserError
from dphybrid.util.text import masked, metric_text, shown_address, without_secrets_of


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://bob:s3cret@db:5432/mlflow", "postgresql://***@db:5432/mlflow"),
        ("postgresql+psycopg2://bob:s3@cr@et@db/mlflow", "postgresql+psycopg2://***@db/mlflow"),
        ("mysql://bob:123/45@db/mlflow", "mysql://***@db/mlflow"),
        ("mysql://bob:s3c/r?et@db/mlflow", "mysql://***"),
        ("https://token@host/path", "https://***@host/path"),
        ("at 'http://u:p@h:5', and mysql://a:b@c/d too", "at 'http://***@h:5', and mysql://***@c/d too"),
        ("mysql://db/x?user=bob&password=s3cret&ssl=1", "mysql://db/x***"),
        ("https://host/p#access_token=abc", "https://host/p***"),
        ("sqlite:////data/a@b/mlflow.db", None),
        ("file:///home/jürgen/a@b.csv", None),
        ("http://127.0.0.1:5000/#/experiments/1/runs/a?workflowType=machine_learning", None),
        ("http://127.0.0.1:5000 has models:/clicks@champion", None),
        ("(see <https://host/p>, [docs](http://h/x).)", None),
        ("MLflow knows no nonsense://; it knows http", None),
        ("at C:/a@b, data:/a@b and bob@example.com", None),
    ],
)
def test_user_and_password_are_not_shown(text: str, shown: str | None) -> None:
    assert masked(text) == (text if shown is None else shown)
    assert str(UserError(text)) == masked(text)


def test_an_error_of_prefects_client_shows_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    address = httpx.Request("POST", "http://bob:s3cret@h:4200/api/artifacts")
    with tolerating_outage("no artifact"):
        httpx.Response(401, request=address).raise_for_status()
    said = capsys.readouterr().out
    assert "Note: no artifact (Client error '401 Unauthorized' for url 'http://***@h:4200" in said


def test_a_driver_s_error_shows_no_piece_of_the_address() -> None:
    address = "postgresql://ana:hunter%402@db/x"
    said = f"{address}: user 'ana:hunter%402' with password hunter@2 at db"
    assert without_secrets_of(address, said) == "postgresql://***@db/x: user '***' with password *** at db"
    assert shown_address("bob:secret@host:5000") == "***"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.71234567, "0.7123"), (0.0, "0.0000"), (0.00003, "3e-05"), (-1.5, "-1.5000"), (123456.7, "1.235e+05")],
)
def test_a_metric_shows_four_digits_of_tiny_and_large_numbers_too(value: float, text: str) -> None:
    assert metric_text(value) == text
