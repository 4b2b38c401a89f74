"""Quick tuning: the first call for a shape measures the few points that the model expects to be fastest.

It is a search like any other, of those points alone and with few finalists. The worker and the compilers of a
GPU are kept between shapes, because they take longer to start than a shape takes, and let go when they have
been idle for a while. They hold no operands meanwhile.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autotune import records
from autotune.code.pool import default_workers
from autotune.errors import AutotuneError, RecordError, UsageError
from autotune.records import Store
from autotune.records.files import unwritable
from autotune.records.locks import held
from autotune.space.space import Space
from autotune.tuning.budget import Budget
from autotune.tuning.request import Request
from autotune.tuning.tuner import Workshop, search
from autotune.values.device import Device
from autotune.values.problem import Problem

# Points. The fastest of so many, of which two are alike at most, takes 1.004 times the best of 40 (16 random
# shapes, H200; the first twelve in a row 1.026); on as many cores they compile in the time of the slowest.
FIRST = 16
SEARCH_S = 1.2  # of searching, on as many cores as there are points; longer on fewer
START_S = 2.5  # more for the first shape, while worker and compilers start
IDENTITY_S = 10.0  # in which a worker that starts knows its GPU, or there is something wrong with it
IDLE_S = 20.0  # after which worker and compilers are let go
WAIT_S = 15.0  # for another process that tunes the same problem
MOST_FAILURES = 3  # problems in a row, after which a GPU is left alone
RESTING = Problem(64, 64, 64)  # what an idle worker is ready for: operands of a few KB

_failed: dict[tuple[int, Problem | None], str] = {}  # what would fail again; None stands for every problem


def tune_first(
    problem: Problem,
    device: Device,
    ordinal: int,
    store: Store,
    *,
    lacks: Callable[[], bool],
    space: Space | None = None,
    share: float = 1.0,
) -> str:
    """Measure the first points of a problem and store the winner, unless another process has just done so.

    Args:
        problem: What to compute.
        device: The GPU.
        ordinal: Its CUDA ordinal.
        store: Of the records.
        lacks: Returns whether there is still no record that serves.
        space: The family to look at; all built-in ones when not given.
        share: Of the points, where several problems share them.

    Returns:
        Why nothing was measured; "" where there is a record now. What failed here once is not tried again.
    """
    for key in ((ordinal, None), (ordinal, problem)):
        if key in _failed:
            return _failed[key]
    path = store.home(device) / f"{problem.key}.quick.lock"
    shop = _shops.setdefault(ordinal, KeptWorkshop(ordinal))
    try:
        store.check_writable()
        with held(path, WAIT_S) as mine:
            if lacks():
                if not mine:
                    return f"another process has been tuning {problem} for more than {WAIT_S:g} s"
                shop.tune(problem, store, space=space, share=share)
    except OSError as error:
        return str(unwritable(path, error))
    except (RecordError, UsageError) as error:
        return str(error)
    except AutotuneError as error:
        shop.failures += 1
        hopeless = not shop.known or shop.failures >= MOST_FAILURES
        _failed[ordinal, None if hopeless else problem] = str(error)
        return str(error)
    return ""


class KeptWorkshop:
    """The worker of one GPU and the compilers, started when first needed; threads use them in turns.

    Args:
        ordinal: CUDA ordinal of the GPU.

    Attributes:
        known: The GPU was identified: what fails now is the fault of a problem, or of the moment.
        failures: Problems in a row that could not be measured.
    """

    def __init__(self, ordinal: int) -> None:
        self.known = False
        self.failures = 0
        self._ordinal = ordinal
        self._lock = threading.Lock()
        self._shop: Workshop | None = None
        self._used = 0.0  # time.monotonic

    def tune(
        self, problem: Problem, store: Store, *, space: Space | None = None, share: float = 1.0
    ) -> records.Record:
        """Measure the first points of a problem and store the winner.

        Raises:
            AutotuneError: As for `autotune.tuning.tuner.tune`.
        """
        first = max(1, round(FIRST * share))
        workers = min(FIRST, default_workers(spare=0))
        request = Request(
            budget=Budget(),
            space=space,
            gpus=(self._ordinal,),
            first=first,
            workers=workers,
            root=store.root,
        )
        with self._lock:
            seconds = SEARCH_S * max(1.0, first / workers)  # one compile takes as long as many side by side
            progress = request.progress(problem)
            try:
                if self._shop is None:
                    seconds += START_S
                    self._shop = Workshop(problem, request)
                    self._shop.gpus[0].identity(IDENTITY_S)
                else:
                    self._shop.gpus[0].ready(IDENTITY_S)
                    self._shop.turn_to(problem)
                self.known = True
                progress.budget = Budget(seconds=seconds)
                record = search(problem, self._shop, replace(request, budget=progress.budget), progress)
                self._shop.turn_to(RESTING)
            except BaseException:
                # Both may have come at once: which GPU it is, and that the operands do not fit.
                self.known = self.known or (self._shop is not None and self._shop.gpus[0].known)
                self._let_go()
                raise
            self.failures = 0
            self._used = time.monotonic()
            self._leave(IDLE_S)
            return record

    def close(self, *, wait: bool = True) -> None:
        """End the processes; without waiting, only if no thread uses them now."""
        if self._lock.acquire(blocking=wait):
            try:
                self._let_go()
            finally:
                self._lock.release()

    def _let_go(self) -> None:
        shop, self._shop = self._shop, None
        if shop is not None:
            shop.__exit__(None, None, None)

    def _leave(self, seconds: float) -> None:
        """Look some seconds from now whether the processes are still needed."""
        timer = threading.Timer(seconds, self._look)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # the interpreter is ending
            self._let_go()

    def _look(self) -> None:
        with self._lock:
            if self._shop is not None and time.monotonic() - self._used >= IDLE_S:
                self._let_go()


_shops: dict[int, KeptWorkshop] = {}  # by ordinal
_inherited: list[Any] = []  # of the process that this one was forked from, whose children they are


def close() -> None:
    """Let go the processes of all GPUs that are not in use."""
    for shop in list(_shops.values()):
        shop.close(wait=False)


def _forked() -> None:
    _inherited.extend(_shops.values())
    _shops.clear()


atexit.register(close)
os.register_at_fork(after_in_child=_forked)
