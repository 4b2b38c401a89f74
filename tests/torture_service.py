"""The worker's service on a real GPU, in which a cubin that says so kills the process that loads it."""

from __future__ import annotations

import os
import signal

from autotune.measure import service


class Bench(service._Bench):
    def trial(self, cubin, *rest):
        if b"torture_segfault" in cubin:  # no kernel can do that to its host
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().trial(cubin, *rest)


def serve(*arguments):
    service._Bench = Bench
    service.serve(*arguments)
