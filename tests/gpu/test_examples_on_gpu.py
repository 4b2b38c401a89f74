"""The examples in small: they run, agree with PyTorch and learn; what they show at full size is by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "gpt2.py": "--layers 2 --width 128 --heads 4 --vocabulary 1000 --context 64 --batch 2",
    "molecules.py": "--molecules 64 --atoms 24 --features 32 --layers 2 --steps 3",
}


@pytest.mark.parametrize("more", ["--math ffma", "--math any --compiled"])
@pytest.mark.parametrize("name", sorted(SMALL))
def test_an_example_in_small(name, more):
    pytest.importorskip("torch")
    words = [*SMALL[name].split(), "--tune", "no", *more.split()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *words],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100% of it on our kernels" in done.stdout
