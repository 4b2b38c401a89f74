"""Records by what the user calls them: a file, a problem's sizes, or the name of a file in the folder."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import RecordError, RecordMissing, UsageError
from autotune.outside import shown
from autotune.values.problem import LAYOUTS, MATHS, Problem

if TYPE_CHECKING:
    from autotune.cli.options import Wanted
    from autotune.records import Record, Store

_SIZES = re.compile(
    r"(?:(?P<batch>\d{1,10}) ?x ?\()?(?P<m>\d{1,10}) ?x ?(?P<n>\d{1,10}) ?x ?(?P<k>\d{1,10})\)?"
    r"(?P<words>(?: \w{2,6})*)"
)
_STEM = re.compile(r"\w{1,250}")


def record_named(
    name: str,
    wanted: Wanted,
    store: Store,
    takes: Callable[[Record], bool],
    refused: Callable[[RecordError], None],
) -> Record:
    """Find the one record that is meant; of several families on a GPU the fastest.

    Args:
        name: A file's path, sizes such as "4096x4096x4096" or a problem as it is printed, "8 x 8 x 8 nt beta
            3xtf32", or a name such as "sgemm_f32_nn_m8_n8_k8_beta0_ffma".
        wanted: What else was given: it holds for sizes that do not say it themselves.
        store: Where names and sizes are looked up.
        takes: Which of the records found may be meant.
        refused: Told of each file that cannot be read.

    Raises:
        UsageError: It names nothing, or records of several GPUs.
        RecordError: The file is no record.
        RecordMissing: There is no such record.
    """
    from autotune import records

    if name.endswith(".json") or os.sep in name:
        found, what, remedy = [records.read(Path(name))], name, "give fewer options"
    else:
        problem = problem_named(name, wanted)
        if problem is not None:
            what, remedy = str(problem), f"run 'autotune tune {problem.cli_flags()}'"
            pattern = f"*_{problem.key}.json"
        elif _STEM.fullmatch(name):
            what, remedy, pattern = name, "'autotune show' lists all", f"{name}.json"
        else:
            raise UsageError(
                f"{shown(name)} names no record: give a .json file, sizes such as 4096x4096x4096, or "
                f"'4096 x 4096 x 4096 nt beta 3xtf32', or the name of a record's file"
            )
        entries = store.entries(refused, name=pattern)
        found = [entry.record for entry in entries if problem in (None, entry.record.problem)]
    found = [record for record in found if takes(record)]
    if not found:
        raise RecordMissing(f"no such record of {what}: {remedy}")
    gpus = sorted({record.device.slug for record in found})
    if len(gpus) > 1:
        raise UsageError(f"there are records of {what} on {', '.join(gpus)}: add --target, or give a file")
    return min(found, key=lambda each: each.timing.median_ms if each.timing else math.inf)


def problem_named(text: str, wanted: Wanted) -> Problem | None:
    """Read sizes and the words behind them; None where the text has no sizes."""
    match = _SIZES.fullmatch(text)
    if match is None:
        return None
    facts: dict[str, Any] = {
        "layout": wanted.layout or LAYOUTS[0],
        "beta": wanted.beta or 0,
        "math": wanted.math or MATHS[0],
        "batch": int(match["batch"] or wanted.batch or 1),
    }
    for word in match["words"].split():
        if word in LAYOUTS:
            facts["layout"] = word
        elif word in MATHS:
            facts["math"] = word
        elif word == "beta":
            facts["beta"] = 1
        else:
            raise UsageError(
                f"{shown(text)}: {word!r} is unknown: behind the sizes give one of {', '.join(LAYOUTS)}, "
                f"then beta, then one of {', '.join(MATHS)}"
            )
    m, n, k = (int(match[size]) for size in "mnk")
    return Problem(m, n, k, **facts)
