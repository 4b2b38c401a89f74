"""autotune.torch where PyTorch is not installed; tests/gpu has what it does where it is."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.errors import UsageError

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("program", ["import autotune.torch", "import autotune; autotune.torch.matmul"])
def test_without_pytorch_it_is_one_clear_line(program, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no such library here')")
    said = f"try:\n    {program}\nexcept ImportError as error:\n    print(type(error).__name__, error)"
    words = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{said}"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == (
        "LibraryMissing autotune.torch needs PyTorch, which cannot be imported (no such library here): "
        "install it, as pytorch.org says\n"
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_say_what_they_are_and_need_nothing_else(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported - set(sys.stdlib_module_names) == {"autotune", "torch"}


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_the_operator_has_shapes_without_a_gpu():
    import torch

    from autotune.torch import matmul

    a, b = torch.empty(3, 5, 7, device="meta"), torch.empty(7, 2, device="meta")
    assert matmul(a, b).shape == (3, 5, 2)
    assert matmul(a, b.expand(3, 7, 2)).shape == (3, 5, 2)
    with pytest.raises(UsageError, match=r"b \(2, 7, 2\): extents before the last two must agree"):
        matmul(a, b.expand(2, 7, 2))
    with pytest.raises(UsageError, match=r"b is a list: pass a torch\.Tensor"):
        matmul(a, [[1.0]])
