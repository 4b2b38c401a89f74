"""Where templates, search spaces and records are found, and how a file is written: whole, or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent
NOWHERE = Path(os.devnull) / "autotune"  # records of a user without a home: nothing can be there
NO_HOME = "there is no home directory to keep anything in: set AUTOTUNE_CACHE_DIR to a folder, or HOME"


def in_checkout() -> bool:
    """Return whether this package runs from a checkout (its data folders lie beside it)."""
    return (_CHECKOUT / "pyproject.toml").is_file() and (_CHECKOUT / "templates").is_dir()


def data_dir(name: str) -> Path:
    """Return the folder ``templates``, ``search_spaces`` or ``cache`` of the package, else of the checkout.

    An editable install does not see folders mapped into the wheel, hence the second place.
    """
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _CHECKOUT / name


def install_command(extra: str) -> str:
    """Return the command that installs this package with an extra such as "cuda13"."""
    return f"pip install -e '.[{extra}]'" if in_checkout() else f"pip install 'autotune-cuda[{extra}]'"


def cache_dir() -> Path:
    """Return the folder of records: ``AUTOTUNE_CACHE_DIR``, the checkout's ``cache/``, or the user's own.

    `NOWHERE` for a user without a home, such as a number that the system has no name for in a container.
    """
    chosen = os.environ.get("AUTOTUNE_CACHE_DIR")
    if chosen:
        folder = os.path.expanduser(chosen)
        return NOWHERE if folder == chosen and chosen.split("/")[0] == "~" else Path(folder)
    if in_checkout():
        return _CHECKOUT / "cache"
    import platformdirs

    try:
        found = platformdirs.user_cache_path("autotune")
    except RuntimeError:  # neither HOME nor an entry in the password database
        return NOWHERE
    return found if found.is_absolute() else NOWHERE


@contextmanager
def replacing(path: Path, *, own: bool = False, durable: bool = True) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of another when the block ends, and vanishes if the block fails.

    Readers see the old content or the new, never a part. Where the user named the file, a link stays one,
    what it leads to is replaced, and what is no regular file, such as ``/dev/stdout``, is written as it is.

    Args:
        path: The file to create or replace.
        own: It lies in a folder of this package's: whatever is in its place goes, a pipe or link too.
        durable: Wait until the content is on the disk.

    Raises:
        OSError: It cannot be written; the error names the file.
    """
    try:
        with _replacing(path, own, durable) as file:
            yield file
    except OSError as error:
        if error.filename is None:  # such as of a full disk, or of one that fails
            error.filename = str(path)
        raise


@contextmanager
def _replacing(path: Path, own: bool, durable: bool) -> Iterator[IO[bytes]]:
    mode: int | None = None
    if not own:
        path = Path(os.path.realpath(path))
        with suppress(OSError):
            mode = path.stat().st_mode
    if mode is not None and not stat.S_ISREG(mode):
        with path.open("wb") as file:
            yield file
        return
    temporary = path.with_name(f".{path.name[:200]}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_file(path: Path, content: bytes | str, *, own: bool = False, durable: bool = True) -> None:
    """Write a whole file, text as UTF-8, in place of one that is there: see `replacing`."""
    with replacing(path, own=own, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)
