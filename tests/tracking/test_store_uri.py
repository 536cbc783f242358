from pathlib import Path

import pytest

from runner.errors import SECRETS, without_password
from runner.tracking.store_uri import masker, shown, sqlite_path


def test_relative_sqlite_path_becomes_absolute():
    here = Path.cwd()
    assert sqlite_path("sqlite:///mlflow.db") == here / "mlflow.db"
    assert sqlite_path("sqlite:////a/b.db?timeout=5") == Path("/a/b.db")
    assert sqlite_path("sqlite+pysqlite:///b.db") == here / "b.db"
    assert sqlite_path("sqlite:///:memory:") is None and sqlite_path("sqlite://") is None
    assert sqlite_path("http://127.0.0.1:5000") is None
    assert shown("sqlite:///mlflow.db") == f"sqlite:///{here}/mlflow.db"
    assert shown("sqlite:////a/b.db?timeout=5") == "sqlite:////a/b.db?timeout=5"


PASSWORDS = [
    "postgresql://host/db?user=ann&password=secret&sslmode=require",
    "http://secret@host:5000",
    "http://ann:secret@host:5000",
    "https://ann:se@cret@host/path",
    "postgresql://ann:se%40cret@host/db",
    "postgresql://ann:se/cret@host/db",
    "mysql+pymysql://ann:secret@host:3306/db?ssl=true",
]


@pytest.mark.parametrize("uri", PASSWORDS)
def test_shown_uri_has_no_password(uri):
    assert "cret" not in shown(uri) and "***" in shown(uri) and "host" in shown(uri)
    text = masker(uri)(f"no answer from {uri}/api: password 'se@cret' is wrong\nand {uri}")
    assert "host" in text and uri not in text and "secret" not in text


def test_password_escaped_in_the_uri_is_hidden_decoded():
    for uri in ("postgresql://ann:se%40cret@h/db", "postgresql://h/db?password=se%40cret"):
        assert masker(uri)("wrong: se@cret, se%40cret") == "wrong: ***, ***"


def test_overlapping_secrets_are_hidden_whole(monkeypatch):
    monkeypatch.setenv("LONG", "word-and-more")
    monkeypatch.setenv(SECRETS, "LONG,=word,=a%40word")
    assert without_password("word-and-more a@word a%40word word") == "<oc.env:LONG> *** *** ***"


def test_passwords_of_other_uris_are_hidden():
    assert "secret" not in masker("sqlite:///a.db")("proxy http://ann:secret@proxy:80 says no")


@pytest.mark.parametrize(
    "uri", ["http://127.0.0.1:5000", "databricks", "sqlite:////a.db?check_same_thread=False", "not a uri"]
)
def test_uri_without_password_is_unchanged(uri):
    assert shown(uri) == uri
