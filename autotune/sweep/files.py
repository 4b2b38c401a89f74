"""Reads a sweep from a file of any form, and writes one in any form."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

from autotune.errors import UsageError
from autotune.outside import MIB, read_text
from autotune.paths import write_file
from autotune.sweep.kernel_tuner import parse_cache, read_cache, write_cache
from autotune.sweep.log import read_log_sweep, write_log
from autotune.sweep.sweep import Sweep
from autotune.sweep.t4 import keeps, read_t4, write_t4
from autotune.sweep.table import OTHERS, read_table, write_table

LIMIT = 512 * MIB  # of a sweep's text
LOG, TABLE = ".trials.jsonl", (".csv", ".csv.gz")
FORMS: dict[str, Callable[[Sweep, Path], str]] = {
    "csv": lambda sweep, path: write_table(sweep),
    "trials": write_log,
    "t4": lambda sweep, path: write_t4(sweep),
    "kernel-tuner": lambda sweep, path: write_cache(sweep),
}


def read_sweep(path: Path) -> Sweep:
    """Read a sweep in any of `FORMS`: the ending of the name tells a log and a table, the content the others.

    Raises:
        UsageError: One line with the file, what is wrong in it, and what to do.
    """
    if path.name.endswith(LOG):
        return read_log_sweep(path)
    text = _text(path)
    if path.name.endswith(TABLE):
        return read_table(path, text)
    if not path.name.endswith((".json", ".json.gz")):
        raise UsageError(
            f"{path}: its ending says no form: give a .csv, .csv.gz, .json, .json.gz or {LOG} file"
        )
    content = parse_cache(path, text)
    if isinstance(content, dict) and "cache" in content:
        return read_cache(path, content)
    if isinstance(content, dict) and "results" in content:
        return read_t4(path, content)
    raise UsageError(
        f"{path}: neither a cache file of Kernel Tuner (no field cache) nor T4 results (no field results)"
    )


def form_of(path: Path) -> str:
    """Return the form of a file to be written, from the ending of its name.

    Raises:
        UsageError: The ending tells no form.
    """
    if path.name.endswith(LOG):
        return "trials"
    if path.name.endswith(TABLE):
        return "csv"
    raise UsageError(f"{path}: its ending does not tell the form: say --to {' or '.join(FORMS)}")


def left_out(sweep: Sweep, form: str) -> list[str]:
    """Return the names of what a form has no place for, in the order of the file."""
    others = dict.fromkeys(name for point in sweep.points for name in point.extra)
    if form == "csv":
        about = [name for name in ("kernel", "device", "header") if getattr(sweep.about, name)]
        return about + [name for name in others if name not in OTHERS]
    if form == "t4":
        plain = {name for point in sweep.points for name, value in point.extra.items() if keeps(value)}
        about = ["size"] if sweep.about.size and sweep.about.header is None else []
        return about + [name for name in others if name not in plain]
    return []


def write_sweep(sweep: Sweep, path: Path, form: str) -> None:
    """Write a sweep in one of `FORMS`, compressed where the path ends in .gz.

    Raises:
        UsageError: The form cannot hold it, or the file cannot be written, or is the log of other trials.
    """
    if path.name.endswith(LOG) and path.exists():
        raise UsageError(f"{path} is a log, which may hold trials of a search: give a name that is not taken")
    try:
        content = FORMS[form](sweep, path).encode()
    except UnicodeEncodeError as error:
        odd = error.object[error.start : error.end]
        raise UsageError(
            f"{path} cannot be written: {odd!a:.40} in a name or value of {sweep.name} is half a character, "
            "which UTF-8 has not: leave it out, or convert --to t4 or kernel-tuner"
        ) from None
    except RecursionError:
        raise UsageError(f"{path} cannot be written: lists of {sweep.name} nest too deeply") from None
    try:
        write_file(path, gzip.compress(content, mtime=0) if path.name.endswith(".gz") else content)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None


def _text(path: Path) -> str:
    try:
        return read_text(path, LIMIT)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
