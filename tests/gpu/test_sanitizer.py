"""Rendered kernels under compute-sanitizer: no stray access and no race, while planted ones are found."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.values.device import current_device

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).with_name("measure_counters.py")
SPEC = importlib.util.spec_from_file_location("measure_counters", SCRIPT)
assert SPEC is not None
assert SPEC.loader is not None
measure_counters = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(measure_counters)

NAMES = (
    "three stages, unrolled",
    "cp_async of 16 bytes",
    "both transposed, through registers",
    "guarded cp_async of 8 bytes",
    "guarded, through registers, beta",
    "odd sizes, cp_async",
    "ladder: shared_tile",
)
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: .*")


def summary(tool: str, kernels: list[dict[str, object]], folder: Path) -> str:
    """Launch kernels once each under a tool of the sanitizer; return the line in which it sums up."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    bundle = folder / "kernels.json"
    bundle.write_text(json.dumps({"kernels": kernels}))
    command = [
        sanitizer,
        "--tool",
        tool,
        "--target-processes",
        "all",
        sys.executable,
        SCRIPT,
        bundle,
        "--launch",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    said = done.stdout + done.stderr
    if "Device not supported" in said:
        pytest.skip("compute-sanitizer does not support this machine: it says 'Device not supported'")
    found = SUMMARY.findall(said)
    assert found, said[-3000:]
    return found[-1] if done.returncode == 0 else f"{found[-1]}; {said[-3000:]}"


@pytest.mark.parametrize("tool", measure_counters.PLANTED)
def test_rendered_kernels_are_clean(tool: str, tmp_path: Path) -> None:
    kernels = [measure_counters.built(name, current_device(0).arch) for name in NAMES]
    clean = {
        "memcheck": "ERROR SUMMARY: 0 errors",
        "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    }
    assert summary(tool, kernels, tmp_path) == clean[tool]


@pytest.mark.parametrize("tool", measure_counters.PLANTED)
def test_a_planted_mistake_is_found(tool: str, tmp_path: Path) -> None:
    name, old, new = measure_counters.PLANTED[tool]
    kernel = measure_counters.built(name, current_device(0).arch, old, new)
    found = summary(tool, [kernel], tmp_path).partition(";")[0]
    assert re.search(r"[1-9]\d* (?:errors?|hazards?)", found), found
