"""One compile outside a search: in a child process that is killed when it takes too long."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

from autotune.code.compiler import Binary, compile_text
from autotune.code.pool import CompilePool
from autotune.code.process import NoInterpreterError
from autotune.errors import AutotuneError, MachineFault, Rejected, ToolchainError

ALONE_TIMEOUT_S = 120.0  # of one compile outside a search: the slowest kernels of ours take some seconds
IDLE_S = 20.0  # after which the compiler of such compiles ends


def compile_bounded(
    text: str, entry: str, arch: str, options: tuple[str, ...] = (), *, timeout_s: float | None = None
) -> Binary | Rejected:
    """Compile as `compile_text` does, in a child that is ended after a time, `ALONE_TIMEOUT_S` if not given.

    A text can keep a compiler busy for ever, and a thread cannot be stopped. Where no child can be started,
    as in a program that embeds Python, this process compiles.

    Raises:
        ToolchainError: As for `compile_text`; or the machine failed twice, such as by killing the compiler.
    """
    with _alone:
        try:
            outcome = _alone.compile(timeout_s or ALONE_TIMEOUT_S, text, entry, arch, options)
        except NoInterpreterError:
            return compile_text(text, entry, arch, options)
    if isinstance(outcome, MachineFault):
        raise ToolchainError(f"kernel {entry} cannot be compiled now: {outcome.why}")
    return outcome


def begin() -> None:
    """Start the compiler of `compile_bounded`, which takes as long as choosing what to compile."""
    _alone.begin()


class _Alone:
    """The compiler of `compile_bounded`: one child, for one compile at a time, of one process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pool: CompilePool | None = None
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Leave the child, and a lock that another thread may have held, to the process that forked."""
        self._lock, self._pool = threading.RLock(), None

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def begin(self) -> None:
        if self._lock.acquire(blocking=False):  # else another thread compiles
            try:
                self._pool = self._pool or CompilePool(1, idle_s=IDLE_S)
                with suppress(AutotuneError):  # who compiles is told
                    self._pool.warm()
            finally:
                self._lock.release()

    def compile(
        self, timeout_s: float, text: str, entry: str, arch: str, options: tuple[str, ...]
    ) -> Binary | Rejected | MachineFault:
        self._pool = pool = self._pool or CompilePool(1, idle_s=IDLE_S)
        pool.timeout_s = timeout_s
        try:
            pool.submit(entry, text, entry, arch, options)
            while not (ended := pool.collect(1.0)):
                pass
        except BaseException:  # an interrupt too: the next compile must not wait for this one
            pool.close()
            self._pool = None
            raise
        return ended[0][1]


_alone = _Alone()
