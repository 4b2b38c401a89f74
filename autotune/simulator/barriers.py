"""Turns arrivals at barriers into the groups of lanes that may go on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from autotune.simulator.lanes import Lanes

BARRIERS = 16  # per block, as in hardware


class Barriers:
    """Who waits at which barrier of its block.

    Attributes:
        waiting: Lanes that wait, ``[lanes]`` bool.
        condition: What each waiting lane brought to a reducing barrier, ``[lanes]`` bool.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.waiting = np.zeros(lanes.count, bool)
        self.condition = np.zeros(lanes.count, bool)
        self._number = np.zeros(lanes.count, np.int64)
        self._expected = np.zeros(lanes.count, np.int64)
        self._arrived = np.zeros((lanes.blocks, BARRIERS), np.int64)  # threads that did not stay to wait

    def wait(self, chosen: Any, number: Any, expected: Any) -> None:
        """Make the chosen lanes wait.

        Args:
            chosen: ``[lanes]`` bool.
            number: Barrier of each lane, ``[lanes]``.
            expected: Threads it needs, ``[lanes]``; 0 for all living threads of the block.
        """
        self._number[chosen] = number[chosen]
        self._expected[chosen] = expected[chosen]
        self.waiting |= chosen

    def arrive(self, chosen: Any, number: Any, expected: Any) -> None:
        """Count the chosen lanes without making them wait (bar.arrive)."""
        self._expected[chosen] = expected[chosen]
        np.add.at(self._arrived, (self.lanes.block[chosen], number[chosen].astype(np.int64)), 1)

    def complete(self, alive: Any) -> Iterator[tuple[int, Any, bool]]:
        """Release complete barriers.

        Yields:
            (block, its lanes that go on ``[stride]`` bool, whether the barrier was one for the whole block).
        """
        stride = self.lanes.stride
        waiting = (self.waiting & alive).reshape(-1, stride)
        for block in np.flatnonzero(waiting.any(axis=1)).tolist():
            part = slice(block * stride, (block + 1) * stride)
            here, living = waiting[block], alive[part]
            for number in np.unique(self._number[part][here]).tolist():
                at = here & (self._number[part] == number)
                expected = int(self._expected[part][at].max())
                if expected == 0 and not (at == living).all():
                    continue
                if expected and int(at.sum()) + int(self._arrived[block, number]) < expected:
                    continue
                self.waiting[part][at] = False
                self._arrived[block, number] = 0
                yield block, at, expected == 0
