"""Addresses without their secrets."""

import random
import string

import httpx
import pytest

from dphybrid.orchestration.shown import tolerating_outage
from dphybrid.util.errors import UserError
from dphybrid.util.text import masked, shown_address, without_secrets_of


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://bob:s3cret@db:5432/mlflow", "postgresql://***@db:5432/mlflow"),
        ("postgresql+psycopg2://bob:s3@cr@et@db/mlflow", "postgresql+psycopg2://***@db/mlflow"),
        ("mysql://bob:s3c/r?et@db/mlflow", "mysql://***"),
        ("mysql://bob:123/45@db/mlflow", "mysql://***@db/mlflow"),
        ("https://token@host/path", "https://***@host/path"),
        ("at 'http://u:p@h:5', and mysql://a:b@c/d too", "at 'http://***@h:5', and mysql://***@c/d too"),
        ("mysql://db/x?user=bob&password=s3cret&ssl=1", "mysql://db/x?***"),
        ("http://h/p?api_key=abc;x=1", "http://h/p?***"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
        ("http://127.0.0.1:5000/#/experiments/1/runs/a?workflowType=machine_learning", None),
        ("http://127.0.0.1:5000/models/clicks@champion", "http://***@champion"),
        ("http://127.0.0.1:5000 has models:/clicks@champion", None),
        ("postgresql://ana:HUN>TER2@db/mlflow", "postgresql://***@db/mlflow"),
        ("postgresql://ana:my own@db/mlflow fails", "postgresql://***@db/mlflow fails"),
        ("https://host/p#access_token=abc", "https://host/p#***"),
        ("(see <https://host/p>, [docs](http://h/x).)", None),
        ("MLflow knows no nonsense://; it knows http", None),
        ("http://h:port/x?", "http://***?"),
        (
            "file:///home/jürgen/my data/a@b.csv and sqlite:///x?key=abc",
            "file:///home/jürgen/my data/a@b.csv and sqlite:///x?***",
        ),
        ("data.path=postgresql:/ana:HUN>TER2@db/x: no file", "data.path=postgresql:/***@db/x: no file"),
        ("at C:/a@b, data:/a@b", None),
        ("password=abc in a connection string", "password=*** in a connection string"),
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


_CHARACTERS = string.ascii_letters + string.digits + string.punctuation + "äß€"
_PLACES = (
    "postgresql://ana:{}@db/mlflow",
    "postgresql+psycopg2://ana:{}@db:5432/mlflow?sslmode=require",
    "https://{}@host/path",
    "http://bob:{}@127.0.0.1:5000",
    "http://bob:{}@[::1]:5000/#/experiments/1",
    "https://host/p?token={}",
    "https://host/p?x=1&sig={}",
    "mysql://db/x?user=bob&password={}&ssl=1",
    "https://host/p#access_token={}",
    "https://host/p#{}",
)
_SENTENCES = ("{}", "tracking={!r}: cannot be used", "MLflow server {}: does not answer (refused)", "a {}\nb")


def _parts(secret: str) -> set[str]:
    return {secret[place : place + 4] for place in range(len(secret) - 3)}


def test_no_secret_of_four_thousand_is_shown_in_any_place_of_an_address() -> None:
    chance = random.Random(7)
    for number in range(4000):
        secret = "".join(chance.choices(_CHARACTERS, k=chance.randint(6, 20)))
        address = _PLACES[number % len(_PLACES)].format(secret)
        said = _SENTENCES[number // len(_PLACES) % len(_SENTENCES)].format(address)
        # With repr's escapes, too: a sentence may have the address in quotes.
        parts = _parts(secret) | _parts(repr(secret)[1:-1])
        for shown in (str(UserError(said)), shown_address(address), without_secrets_of(address, said)):
            assert not [part for part in parts if part in shown], (secret, said, shown)
        # A driver may take a password apart, and name a piece of it as the host.
        told = f"could not translate host name {secret!r} to address"
        assert secret not in without_secrets_of(address, told)


def test_a_whole_address_may_have_blanks_in_its_secrets() -> None:
    assert shown_address("postgresql://ana:my own word@db/x") == "postgresql://***@db/x"
    assert shown_address("https://h/p?token=my own word") == "https://h/p?***"
    assert shown_address("bob:secret@host:5000") == "***"
