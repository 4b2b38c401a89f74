"""Examples of README and docs/ that need a GPU: what calls kernels, and what tunes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
from doc_examples import PAGES, ROOT, Block, blocks, lessened, write_files

pytestmark = pytest.mark.gpu

PYTHON = [page for page in PAGES if any(b.language == "python" and "gpu" in b.marks for b in blocks(page))]
TUNE = [
    (block, words)
    for page in PAGES
    for block in blocks(page)
    if block.language in ("sh", "console") and block.marks == ("gpu",)
    for words in block.commands
    if words[:2] == ["autotune", "tune"]
]


@pytest.mark.parametrize("page", PYTHON, ids=lambda page: page.name)
def test_python(page, tmp_path, monkeypatch):
    import cupy
    import numpy as np

    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path))
    x, y = (np.random.default_rng(0).random((4096, 4096), np.float32) for _ in range(2))
    names = {"x": x, "y": y, "a": cupy.asarray(x), "b": cupy.asarray(y), "s": cupy.cuda.Stream()}
    for block in blocks(page):
        if block.language == "python" and "gpu" in block.marks:
            if "import torch" in block.text:
                try:
                    importlib.import_module("torch")
                except ImportError:
                    continue
            exec(compile(block.text, str(block), "exec"), names)


@pytest.mark.parametrize(("block", "words"), TUNE, ids=str)
def test_tune(block: Block, words: list[str], tmp_path):
    write_files(block.page, tmp_path)
    environment = {**os.environ, "AUTOTUNE_CACHE_DIR": str(tmp_path / "records")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", *lessened(words)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{block}: {command}\n{done.stdout}\n{done.stderr}"
    assert "stored in" in done.stdout or "--suite" in words
