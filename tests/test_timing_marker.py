"""The marker of tests that assert a time: last in the order, and skipped on a busy machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from conftest import load_of_others

TESTS = """
import pytest
@pytest.mark.timing
def test_time(): assert {holds}
def test_other(): pass
"""


def outcome(tmp_path: Path, holds: bool) -> str:
    (tmp_path / "conftest.py").write_bytes(Path(__file__).with_name("conftest.py").read_bytes())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    timing\n    gpu\n")
    (tmp_path / "test_one.py").write_text(TESTS.format(holds=holds))
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", str(tmp_path)]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout


def test_it_is_skipped_with_the_load_as_reason_while_others_want_the_cores(tmp_path):
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(1 + (os.cpu_count() or 1))]
    try:
        assert "the machine is busy: a probe of 0.5 s got " in load_of_others(0.5)
        told = outcome(tmp_path, holds=False)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert "1 passed, 1 skipped" in told
    assert told.index("test_other") < told.index("test_time")
    assert " of a core while " in told


def test_it_runs_where_nobody_else_does(tmp_path):
    told = outcome(tmp_path, holds=False)
    assert ("1 failed, 1 passed" in told) != ("the machine is busy" in told)
