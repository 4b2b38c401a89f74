"""A clock for limits of time, which pauses of this process and of the machine do not advance."""

from __future__ import annotations

import time
from collections.abc import Callable


class AwakeClock:
    """Counts seconds in which this process ran: a pause of it or of the machine does not count.

    A stopped process, a suspended machine or one that gives no CPU time stops the children as well: limits of
    theirs are kept by this clock. Of the time between two looks at it counts what the thread computed, and
    `LONGEST_LOOK` in any case: whoever waits looks more often.
    """

    LONGEST_LOOK = 1.0

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        computed: Callable[[], float] = time.thread_time,
    ) -> None:
        self._monotonic, self._computed = monotonic, computed
        self._seen, self._computed_then = monotonic(), computed()
        self._awake = 0.0

    def now(self) -> float:
        """Seconds awake since the clock was made."""
        seen, computed = self._monotonic(), self._computed()
        self._awake += min(seen - self._seen, max(self.LONGEST_LOOK, computed - self._computed_then))
        self._seen, self._computed_then = seen, computed
        return self._awake

    def left(self, deadline: float) -> float:
        """Seconds until a time of this clock, and no more than may pass before the next look."""
        return max(0.0, min(deadline - self.now(), self.LONGEST_LOOK / 2))

    def monotonic(self, deadline: float) -> float:
        """The `time.monotonic` at which a time of this clock comes, if nothing pauses until then."""
        return self._monotonic() + deadline - self.now()
