"""What is kept on disk under a key, so that every process of this machine finds it again.

An entry is one file, named by the key and written atomically. Its first 32 bytes are the SHA-256 of key and
content: a file that is cut, edited or under a wrong name is no entry, and is removed. When the folder exceeds
its limit, what was not used for longest goes first; a few entries may be beyond it for a while. A folder that
cannot be written keeps nothing and is no error: what is stored here can be made again.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from autotune.errors import UsageError
from autotune.outside import read_bytes
from autotune.paths import write_file
from autotune.values.digest import digest_of

LIMIT_VARIABLE = "AUTOTUNE_COMPILED_MIB"
DEFAULT_MIB = 512
FOLDER = "compiled"
MOST_BYTES = 256 << 20  # of one entry; a large kernel has some hundred thousand
_DIGEST_BYTES = 32
_TURN = 16  # of so many entries one is followed by a look at all: thousands of them take some 30 ms
_ABANDONED_S = 3600.0  # a temporary file of that age has no writer any more


class Depot:
    """Entries in one folder.

    Args:
        root: Folder of records, in which the entries have one of their own.
        limit_bytes: Bytes of all entries together; ``AUTOTUNE_COMPILED_MIB`` (512) when not given.
            0: nothing is kept, and nothing found.

    Raises:
        UsageError: ``AUTOTUNE_COMPILED_MIB`` is no number.
    """

    def __init__(self, root: Path, limit_bytes: int | None = None) -> None:
        self.folder = root / FOLDER
        self.limit_bytes = _limit() if limit_bytes is None else limit_bytes

    def path(self, key: str) -> Path:
        """Return the file of a key, whose letters, digits and dots may stand in a file name."""
        return self.folder / key

    def get(self, key: str) -> bytes | None:
        """Return the content of an entry, which counts as used now; None when there is none that is whole."""
        if not self.limit_bytes:
            return None
        path = self.path(key)
        try:
            stored = read_bytes(path, MOST_BYTES)
        except OSError:
            return None
        content = stored[_DIGEST_BYTES:]
        if stored[:_DIGEST_BYTES] != _digest(key, content):
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)
        return content

    def put(self, key: str, content: bytes) -> bool:
        """Keep content under a key, in place of what was there; return whether that was possible."""
        if not self.limit_bytes:
            return False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            digest = _digest(key, content)
            write_file(self.path(key), digest + content, own=True, durable=False)
        except OSError:
            return False
        if digest[0] % _TURN == 0 or _TURN * len(content) > self.limit_bytes:
            self._drop_oldest()
        return True

    def entries(self) -> list[tuple[Path, os.stat_result]]:
        """List the files of the folder, temporary ones too."""
        return list(_files(self.folder))

    def _drop_oldest(self) -> None:
        """Remove the entries that were not used for longest until the others keep the limit."""
        entries = self.entries()
        excess = sum(facts.st_size for _, facts in entries) - self.limit_bytes
        before = time.time() - _ABANDONED_S
        for path, facts in sorted(entries, key=lambda entry: entry[1].st_mtime_ns):
            temporary = path.suffix == ".tmp"
            if (facts.st_mtime >= before) if temporary else (excess <= 0):
                continue
            with suppress(OSError):
                path.unlink()
            excess -= facts.st_size


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + content).digest()


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    with suppress(OSError), os.scandir(folder) as found:
        for entry in found:
            with suppress(OSError):  # another process may have removed it
                if entry.is_file(follow_symlinks=False):
                    yield Path(entry.path), entry.stat(follow_symlinks=False)


def _limit() -> int:
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    try:
        mebibytes = float(text or DEFAULT_MIB)
    except ValueError:
        mebibytes = -1.0
    if not 0 <= mebibytes < 2**40:
        raise UsageError(f"{LIMIT_VARIABLE} = {text!r}: give a number of MiB, 0 to keep nothing")
    return int(mebibytes * 2**20)


def depot_key(kind: str, parts: Iterable[str]) -> str:
    """Return the key of what is made from some texts, in this order.

    Args:
        kind: Of the entry; keys of two kinds never meet.
        parts: The texts.
    """
    return f"{kind}.{digest_of(*parts)}"
