"""The URL of a storage: what of it may be shown, and what must be kept out of every message.

A URL may carry a password as ``user:password@host``, as a parameter such as ``?password=``, percent-encoded,
or misplaced by a character that should have been percent-encoded. So a part is shown only where it has the
form of a user name, host, port, database or file; all else is hidden, in the URL and in the text of errors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, quote, quote_plus, unquote, unquote_plus

from autotune.outside import printable

HIDDEN = "***"
SHORT = 4  # characters of a secret that is hidden only where it stands alone, lest it garble other words
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_HOST = r"(?:[\w.-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?"
_HOSTS = re.compile(rf"(?:{_HOST}(?:,{_HOST})*)?")
_USER = re.compile(r"[\w.-]+")
_DATABASE = re.compile(r"(?:/[\w./ ~-]*)?")
_HARMLESS = {  # parameters whose values help to understand an error
    *("application_name", "channel_binding", "client_encoding", "connect_timeout", "dbname", "gssencmode"),
    *("host", "hostaddr", "keepalives", "keepalives_count", "keepalives_idle", "keepalives_interval"),
    *("port", "require_auth", "sslmode", "target_session_attrs", "tcp_user_timeout", "user"),
}


@dataclass(frozen=True)
class StorageUrl:
    """The URL of a storage.

    Attributes:
        text: As the user gave it; for the driver alone.
        shown: Without secrets.
        secrets: What must not be shown.
    """

    text: str = field(repr=False)
    shown: str
    secrets: frozenset[str] = field(repr=False)

    @classmethod
    def of(cls, text: str) -> StorageUrl:
        """Return a URL, or text that should be one, with the secrets in it."""
        found = _URL.fullmatch(text)
        if found is None:  # it may be anything, such as "host=h password=..."
            return cls(text, "(not shown, it may hold a password)", _spellings([text]))
        scheme, rest = found.groups()
        if scheme.startswith("sqlite") and rest.startswith("/"):
            file, _, query = rest.partition("?")
            shown, secrets = _file(file)
            return cls(text, f"{scheme}://{shown}", _spellings([*secrets, *_values(query)]))
        authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
        after = rest[len(authority) :]
        if "@" in after:  # in a password with a raw /, or in a parameter: where what begins is unknown
            return cls(text, f"{scheme}://{HIDDEN}", _spellings([rest, *re.split(r"[/?#:@&=]", rest)]))
        login, at, hosts = authority.rpartition("@")
        user, colon, password = login.partition(":")
        database = re.split(r"[?#]", after, maxsplit=1)[0]
        parameters = after[len(database) + 1 :]
        secrets = [password, *_values(parameters)]
        shown = f"{scheme}://"
        for part, pattern in ((user, _USER), (hosts, _HOSTS), (database, _DATABASE)):
            if part and pattern.fullmatch(part) is None:
                secrets += [part, *re.split(r"[/:@;&= ]", part)]
        shown += (user if _USER.fullmatch(user) or not user else HIDDEN) + (colon and f":{HIDDEN}") + at
        shown += hosts if _HOSTS.fullmatch(hosts) else HIDDEN
        shown += database if _DATABASE.fullmatch(database) else f"/{HIDDEN}"
        return cls(text, shown, _spellings(secrets))

    @classmethod
    def of_journal(cls, path: Path) -> StorageUrl:
        """Return the URL of a journal file."""
        shown, secrets = _file(str(path))
        return cls(str(path), f"journal:{shown}", _spellings(secrets))

    def without_secrets(self, message: str) -> str:
        """Return a message with every secret of this URL hidden."""
        for secret in sorted(self.secrets, key=len, reverse=True):
            pattern = re.escape(secret)
            message = re.sub(pattern if len(secret) > SHORT else rf"(?<!\w){pattern}(?!\w)", HIDDEN, message)
        return message


def _file(path: str) -> tuple[str, list[str]]:
    """Return what may be shown of a path, and its secrets: where it looks like a login, that is hidden."""
    login, at, name = path.rpartition("@")
    if ":" not in login:
        return printable(path), []
    return f"{HIDDEN}{at}{printable(name)}", [login, *re.split("[/:]", login)]


def _values(query: str) -> list[str]:
    """Return the parameters of a query that may be secret, decoded and as they stand there."""
    decoded = [value for name, value in parse_qsl(query) if name not in _HARMLESS]
    pairs = (pair.partition("=") for pair in re.split("[&;]", query))
    return decoded + [value or name for name, _, value in pairs if name not in _HARMLESS]


def _spellings(secrets: list[str]) -> frozenset[str]:
    """Return secrets in all the forms in which an error may quote them."""
    every = {way(secret) for secret in secrets for way in (str, unquote, unquote_plus)}
    every |= {way(secret, errors="replace") for secret in secrets for way in (quote, quote_plus)}
    every |= {repr(secret)[1:-1] for secret in every}
    return frozenset(each for each in every if each.strip(HIDDEN + " "))
