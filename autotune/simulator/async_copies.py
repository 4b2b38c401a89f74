"""Turns the commits and waits of cp.async into which copies each lane may rely on."""

from __future__ import annotations

from typing import Any

import numpy as np


class AsyncCopies:
    """The groups of cp.async of every lane.

    Attributes:
        committed: Groups each lane has committed, ``[lanes]`` int64: the number of the group being filled.
        waited: Groups each lane knows to be complete, ``[lanes]`` int64.
        published: The same at the block's last barrier: what the other threads may rely on.
        shown: The same at the warp's last __syncwarp(): what the other threads of the warp may rely on.
    """

    def __init__(self, lanes: int) -> None:
        self.committed = np.zeros(lanes, np.int64)
        self.waited = np.zeros(lanes, np.int64)
        self.published = np.zeros(lanes, np.int64)
        self.shown = np.zeros(lanes, np.int64)

    def commit(self, mask: Any) -> None:
        """Close the group that each active lane is filling."""
        self.committed += 1 if mask is None else mask

    def wait(self, pending: int | None, mask: Any) -> None:
        """Wait until at most ``pending`` groups of each active lane are incomplete; None: for everything."""
        if pending is None:
            self.commit(mask)
            pending = 0
        complete = np.maximum(self.waited, self.committed - pending)
        np.copyto(self.waited, complete, where=True if mask is None else mask)
