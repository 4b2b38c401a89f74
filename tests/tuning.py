"""Runs of the tuner on a stub in the GPU's place, and what they leave."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from functools import partial
from pathlib import Path

from autotune.measure.worker import GpuWorker
from autotune.records.trials import read_log
from autotune.space.space import Space
from autotune.tuning import tuner
from autotune.tuning.budget import Budget
from autotune.tuning.campaign import tune_all
from autotune.tuning.request import Request
from autotune.values.problem import Problem

PROBLEM = Problem(64, 64, 8)
PLAIN = Path(__file__).parent / "data" / "plain" / "plain.toml"


class Bench:
    """A folder of records, and a stub that counts what it measures.

    Args:
        folder: Empty.
        monkeypatch: Of the test.
        seconds: That a measurement takes.
        service: Of the worker.
    """

    def __init__(self, folder, monkeypatch, seconds=0.002, service="stub_gpu:serve_hashed"):
        self.root = folder / "records"
        self._counts = folder / "measured"
        monkeypatch.setenv("STUB_GPU", str(self._counts))
        monkeypatch.setenv("STUB_SECONDS", str(seconds))
        monkeypatch.setattr(tuner, "GpuWorker", partial(GpuWorker, service=service))

        (folder / "few").mkdir()
        self.few = folder / "few" / "plain.toml"  # 15 candidates of the 60
        self.few.write_text(f'extends = "{PLAIN}"\n[parameters]\nvalue = [0, 3, 6]\n')
        shutil.copy(PLAIN.with_name("plain.cu.jinja"), self.few.parent)

    def tune(self, space=PLAIN, budget="100", problem=PROBLEM, **options):
        space = Space.load(space) if isinstance(space, Path) else space
        options = {"strategy": "random", "workers": 2, "root": self.root, **options}
        return tuner.tune(problem, space=space, budget=budget, **options)

    def campaign(self, shapes, budget, **options):
        request = Request(
            budget=Budget.of(budget),
            space=Space.load(self.few),
            strategy="random",
            workers=2,
            root=self.root,
            **options,
        )
        return tune_all(shapes, request)

    def started(self, **options):
        """Tune in a fork; return what waits for its exit status."""
        child = self._forked(options)
        return lambda: _waited(child, 60)

    def _forked(self, options):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                self.tune(**options)
                status = 0
            finally:
                os._exit(status)
        return child

    def killed_after(self, seconds, **options):
        """Tune in a fork and kill it -9 after some seconds; tell whether it ended by itself before."""
        child = self._forked(options)
        end = _waited(child, seconds)
        if end is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        assert end == 0
        return True

    @property
    def measured(self):
        """How often each code and launch was measured, as the GPU saw it."""
        return Counter(self._counts.read_text().split()) if self._counts.exists() else Counter()

    @property
    def logs(self):
        return sorted(self.root.glob("*/*.trials.jsonl"))

    def lines(self, family="plain"):
        (path,) = [
            path for path in self.logs if path.name.startswith(f"{family}_f32") and ".old" not in path.name
        ]
        return read_log(path)[1]

    def outcomes(self, family="plain"):
        return [line for line in self.lines(family) if "event" not in line]


def _waited(child, seconds):
    """Wait for a child; its exit status, or None after some seconds."""
    pidfd = os.pidfd_open(child)
    try:
        import select

        if not select.select([pidfd], [], [], seconds)[0]:
            return None
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(pidfd)
