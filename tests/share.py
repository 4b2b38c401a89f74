"""Several processes that measure the points of one list together; a program.

A point's time comes from the recorded sweep. Each process writes what it measures into a file of its own:
"begun" before it measures, "told" once the search has taken the outcome.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import sys
import time
import traceback
from pathlib import Path

import numpy as np

from autotune.records.schema import RecordedDevice
from autotune.records.trials import TrialHeader
from autotune.search import WAIT
from autotune.sharing import SharedSearch, Storage, open_search
from autotune.space.space import Legal
from autotune.values.device import named_device
from autotune.values.problem import Problem

SWEEP = Path(__file__).parent / "data" / "h200_sgemm_4096_sweep.csv.gz"
HEADER = TrialHeader(
    family="sgemm",
    problem=Problem(4096, 4096, 4096),
    device=RecordedDevice.of(named_device("h200")),
    space_digest="c" * 64,
    template_digest="b" * 64,
    nvrtc="13.5",
)
BEAT_S, PATIENCE = 0.2, 15


def sweep(count: int) -> tuple[Legal, list[float]]:
    """List the first points of the sweep, and their times in ms."""
    with gzip.open(SWEEP, "rt") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name != "median_ms"]
    choices = {name: tuple(sorted({int(row[name]) for row in rows})) for name in names}
    ordinals = [[choices[name].index(int(row[name])) for name in names] for row in rows[:count]]
    legal = Legal(tuple(names), choices, np.array(ordinals, np.int16), 0, ())
    return legal, [float(row["median_ms"]) for row in rows[:count]]


def measure(search: SharedSearch, times: list[float], seconds: float, file: str) -> None:
    """Measure until every point has an outcome; every seventh point is rejected."""
    log = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    while (index := search.ask()) is not None:
        if index == WAIT:
            time.sleep(0.02)
            continue
        os.write(log, f"begun {index}\n".encode())
        time.sleep(seconds)
        if index % 7 == 6:
            search.tell(index, None, "compile", "it does not")
        else:
            search.tell(index, times[index], "measured")
        os.write(log, f"told {index}\n".encode())


def read(folder: Path) -> tuple[list[int], list[int]]:
    """List what all processes began and told."""
    lines = [line.split() for file in folder.glob("*.txt") for line in file.read_text().splitlines()]
    return tuple([int(line[1]) for line in lines if line[0] == word] for word in ("begun", "told"))


def main(url: str, folder: str, processes: str, points: str, seconds: str, strategy: str) -> None:
    legal, times = sweep(int(points))
    Storage(f"sqlite:///{folder}/warm.db")  # imports what takes a second, once for all
    ready, begin = os.pipe(), os.pipe()
    children = []
    for number in range(int(processes)):
        child = os.fork()
        if child == 0:
            os.close(begin[1])
            try:
                search = open_search(
                    Storage(url), None, legal, HEADER, strategy=strategy, beat_s=BEAT_S, patience=PATIENCE
                )
                with search:
                    os.write(ready[1], b"x")
                    os.read(begin[0], 1)  # ends when the parent closes its side: all begin at once
                    measure(search, times, float(seconds), f"{folder}/{number}.txt")
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    os.close(ready[1])
    for _ in children:
        os.read(ready[0], 1)
    os.close(begin[1])
    print(json.dumps(children), flush=True)
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps(ended), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
