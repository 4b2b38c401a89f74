"""Storage URLs: no password in any form reaches a message, a traceback or the study."""

from __future__ import annotations

import traceback
from urllib.parse import quote

import pytest

from autotune.errors import UsageError
from autotune.sharing import Storage
from autotune.sharing.url import StorageUrl

SECRET = "hunter2secret"
CLOSED = "127.0.0.1:9"  # nobody listens

# Each holds SECRET, alone or beside a character that ought to be percent-encoded.
FORMS = [
    f"postgresql://me:{SECRET}@{CLOSED}/db",
    f"postgresql://:{SECRET}@{CLOSED}/db",
    f"postgresql://me@{CLOSED}/db?password={SECRET}",
    f"postgresql://{CLOSED}/db?user=me&password={SECRET}",
    f"postgresql://me@{CLOSED}/db?password={SECRET}&password=other{SECRET}",
    f"postgresql://me@{CLOSED}/db?PASSWORD={SECRET}",
    f"postgresql://me@{CLOSED}/db?pasword={SECRET}",
    f"postgresql://me@{CLOSED}/db?sslpassword={SECRET}&sslmode=wrong",
    f"postgresql://me@{CLOSED}/db?passfile=/home/{SECRET}",
    f"postgresql://me@{CLOSED}/db?options=-c%20x={SECRET}",
    f"postgresql://me@{CLOSED}/db?{SECRET}",
    f"postgresql://me@{CLOSED}/db?password=a@{SECRET}",
    f"postgresql://me@{CLOSED}/db#password={SECRET}",
    f"postgresql://me@{CLOSED}/db;password={SECRET}",
    f"postgresql://me:a@{SECRET}@{CLOSED}/db",
    f"postgresql://me:{SECRET}@b@{CLOSED}/db",
    f"postgresql://me:a@{SECRET}:b@{CLOSED}/db",
    f"postgresql://me:a/{SECRET}@{CLOSED}/db",
    f"postgresql://me:a?{SECRET}@{CLOSED}/db",
    f"postgresql://me:a#{SECRET}@{CLOSED}/db",
    f"postgresql://me:a:{SECRET}@{CLOSED}/db",
    f"postgresql://me:a%40{SECRET}@{CLOSED}/db",
    f"postgresql://me%3A{SECRET}@{CLOSED}/db",
    f"postgresql://me:{SECRET}",
    f"postgresql://me:{SECRET}/db",
    f"postgresql://{quote(SECRET + '$^')}:x@{CLOSED}/db",
    f"postgresql://me:{quote('ü ' + SECRET)}@{CLOSED}/db",
    f"postgresql://me:{SECRET}@[::1/db",
    f"postgresql://me:{SECRET}@{CLOSED}x/db",
    f"postgresql://me:{SECRET}@..{'h' * 70}/db",
    f"postgresql://me:{SECRET}@{CLOSED},{CLOSED}/db",
    f"postgresql://me:{SECRET}@{CLOSED}/db?connect_timeout=soon",
    f"postgresql+psycopg://me:{SECRET}@{CLOSED}/db",
    f"postgresql+psycopg2://me:{SECRET}@{CLOSED}/db",
    f"postgresql+asyncpg://me:{SECRET}@{CLOSED}/db",
    f"postgresql+pg8000://me:{SECRET}@{CLOSED}/db",
    f"postgresql+nosuch://me:{SECRET}@{CLOSED}/db",
    f"postgres://me:{SECRET}@{CLOSED}/db",
    f"PostgreSQL://me:{SECRET}@{CLOSED}/db",
    f"mysql://me:{SECRET}@host/db",
    f"mysql+pymysql://me@host/db?password={SECRET}",
    f"redis://:{SECRET}@host:6379/0",
    f"sqlite://me:{SECRET}@host/a.db",
    f"sqlite:////no/such/folder/a.db?key={SECRET}",
    f"sqlite:///me:{SECRET}@host/db",
    f"postgresql:///me:{SECRET}@host/db",
    f"postgresql://me:{SECRET}\udcff@{CLOSED}/db",
    f"postgresql://me:{SECRET}\x1b[2J@{CLOSED}/db",
    f"sqlite+pysqlcipher://:{SECRET}@//no/such/a.db",
    f"host=h user=me password={SECRET} dbname=db",
    f"postgresql:/me:{SECRET}@h/db",
    f"postgresql//me:{SECRET}@h/db",
    f"me:{SECRET}@h/db",
    f" postgresql://me:{SECRET}@h/db",
    f"me:{SECRET}@no/such/db.log",
    f"journal:me:{SECRET}@no/such/db",
    f"journal:redis://me:{SECRET}@no/such/db",
]


@pytest.mark.parametrize("url", FORMS)
def test_no_secret_is_told_whatever_is_wrong(url: str, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setattr("autotune.sharing.database.RETRY_S", ())
    assert SECRET not in repr(StorageUrl.of(url))
    with pytest.raises(UsageError) as failure:
        Storage(url)
    told = "".join(traceback.format_exception(failure.value))  # what --debug shows
    printed = capfd.readouterr()
    chain, error = [], failure.value
    while error is not None:
        chain.append(repr(error))
        error = error.__cause__ or error.__context__
    for text in (str(failure.value), told, *printed, *chain[:1]):
        assert SECRET not in text
    assert "storage " in str(failure.value)
    assert str(failure.value).isprintable()
    if failure.value.__context__ is not None:
        assert failure.value.__suppress_context__
        assert SECRET not in "".join(chain)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:x@h:5432/a_b", "postgresql://me:***@h:5432/a_b"),
        ("postgresql://me@h/db?sslmode=require", "postgresql://me@h/db"),
        ("postgresql://me:x@[::1]:5432/db", "postgresql://me:***@[::1]:5432/db"),
        ("postgresql://h1:1,h2:2/db", "postgresql://h1:1,h2:2/db"),
        ("postgresql:///db", "postgresql:///db"),
        ("postgresql://h", "postgresql://h"),
        ("sqlite:////home/me/a b@c.db", "sqlite:////home/me/a b@c.db"),
        ("sqlite:///\x1b[2J.db", r"sqlite:///\x1b[2J.db"),
        ("postgresql://me@h/\x1b[2J", "postgresql://me@h/***"),
    ],
)
def test_what_is_no_secret_is_shown(url: str, shown: str) -> None:
    assert StorageUrl.of(url).shown == shown


def test_a_raw_at_is_named_with_its_remedy() -> None:
    with pytest.raises(UsageError, match="more than one @: write %40 for an @"):
        Storage(f"postgresql://me:a@{SECRET}@h/db")


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("password hunter2secret is wrong", "password *** is wrong"),
        ("xhunter2secrety a%40b", "x***y a%40b"),
        ("cannot open db for e", "cannot open db for ***"),
    ],
)
def test_secrets_are_hidden_in_the_words_of_others(message: str, shown: str) -> None:
    url = StorageUrl.of(f"postgresql://me:{SECRET}@h/db?sslpassword=e&sslmode=wrong&host=cannot")
    assert url.without_secrets(message) == shown
