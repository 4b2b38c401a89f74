"""Turns names into places: where templates and search spaces are read, where records are kept."""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent


def in_checkout() -> bool:
    """Tell whether this package runs from a checkout (its data folders lie beside it)."""
    return (_CHECKOUT / "pyproject.toml").is_file() and (_CHECKOUT / "templates").is_dir()


def data_dir(name: str) -> Path:
    """Find ``templates``, ``search_spaces`` or ``cache``: inside an installed package, else in the checkout.

    An editable install does not see folders mapped into the wheel, hence the second place.
    """
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _CHECKOUT / name


def install_command(extra: str) -> str:
    """Give the command that installs this package with an extra such as "cuda13"."""
    return f"pip install -e '.[{extra}]'" if in_checkout() else f"pip install 'autotune-cuda[{extra}]'"


def cache_dir() -> Path:
    """Find the folder of records: ``AUTOTUNE_CACHE_DIR``, the checkout's ``cache/``, or the user's own."""
    chosen = os.environ.get("AUTOTUNE_CACHE_DIR")
    if chosen:
        return Path(os.path.expanduser(chosen))
    if in_checkout():
        return _CHECKOUT / "cache"
    import platformdirs

    return platformdirs.user_cache_path("autotune")
