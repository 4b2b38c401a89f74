"""Exported CUDA files on a real GPU: compiled by nvcc, and checked by the program they carry."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from autotune.records import Store
from autotune.report.export import cuda_file, to_export
from autotune.values.device import current_device
from autotune.values.problem import Problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: install CUDA"),
]
PROBLEMS = [
    Problem(1000, 1000, 1000),
    Problem(1021, 1021, 1021, "nt", 1),
    Problem(257, 130, 33, "tt", 1),
    Problem(64, 64, 20000, "nt"),
    Problem(1, 4096, 512, "tn"),
    Problem(100, 60, 2000, "nt", 1, batch=9),
]


def built(problem, folder, change=lambda text: text):
    device = current_device(0)
    export = to_export(problem, device, Store(), substitute=True)
    (folder / "kernel.cu").write_text(change(cuda_file(export)))
    flags = ["-O3", "-std=c++17", *export.nvcc_flags.split(), "-DAUTOTUNE_SELF_CHECK"]
    subprocess.run(["nvcc", *flags, "kernel.cu", "-o", "check"], cwd=folder, check=True)
    return subprocess.run([folder / "check"], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_program_finds_its_kernel_right(problem, tmp_path):
    done = built(problem, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    match = re.search(r": right \(worst error ([\d.e-]+) of its bound\), ([\d.e-]+) ms", done.stdout)
    assert match, done.stdout
    assert 0 < float(match[1]) < 0.5


def test_the_program_finds_a_wrong_kernel_wrong(tmp_path):
    problem = Problem(300, 200, 100, beta=1)
    done = built(problem, tmp_path, lambda text: text.replace("&alpha, &A", "&beta, &A", 1))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG" in done.stdout
