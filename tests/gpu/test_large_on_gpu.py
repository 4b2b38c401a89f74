"""Operands of more than 2^31 floats on a real GPU: offsets must be counted in 64 bits, in all families."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autotune.code.compiler import Binary, compile_text
from autotune.code.render import render
from autotune.space.space import Space
from autotune.values.device import current_device
from autotune.values.problem import Problem, Strided

pytestmark = pytest.mark.gpu
LONG = 1 << 20
PROBLEMS = {  # what is long: A or B along its rows or columns, C, or only the way from one row to the next
    "A, many rows": Problem(LONG + 64, 64, 2112, "nn"),
    "A, long rows": Problem(LONG + 64, 64, 2112, "tn"),
    "A, deep": Problem(2112, 96, LONG + 64, "nt"),
    "B, long rows": Problem(64, LONG + 64, 2112, "nn", 1),
    "B, many rows": Problem(96, LONG + 65, 2113, "nt"),
    "C": Problem(65536 + 32, 32768 + 64, 32, "tt", 1),
    "B beside few rows": Problem(8, LONG + 64, 2112, "nn"),
    "A beside one column": Problem(LONG + 64, 1, 2112, "nn", 1),
    "rows far apart": Strided(256, 256, 256, "nn", lda=1 << 24, ldb=1 << 24, ldc=1 << 24),
}
FAMILIES = ["sgemm", "sgemm_skinny", "sgemm_3xtf32", "sgemm_3xtf32_wgmma"]


def drawn(rows: int, row: int, seed: int) -> Any:
    import cupy

    random = cupy.random.default_rng(seed)
    return random.standard_normal((rows, row), dtype=cupy.float32)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_offsets_beyond_2_to_31(name: str, family: str) -> None:
    import cupy

    from autotune.kernel.cuda import cuda_machine

    device = current_device(0)
    problem = replace(PROBLEMS[name], math="3xtf32" if "tf32" in family else "ffma")
    space = Space.load(family)
    if not space.serves(problem, device):
        pytest.skip(f"{family} does not serve {problem}")
    points = space.enumerate(problem, device)
    source = render(space, points.config(space.starts(points)[0]), problem, device)
    binary = compile_text(source.text, source.entry, device.arch)
    assert isinstance(binary, Binary), binary
    a = drawn(problem.a_shape[0], problem.lda, 1)
    b = drawn(problem.b_shape[0], problem.ldb, 2)
    c = drawn(problem.m, problem.ldc, 3)
    assert max(a.size, b.size, c.size) > 1 << 31

    random = np.random.default_rng(4)
    i = np.concatenate([random.integers(0, problem.m, 60), [0, problem.m - 1, problem.m - 1, 0]])
    j = np.concatenate([random.integers(0, problem.n, 60), [0, problem.n - 1, 0, problem.n - 1]])
    rows = a[i, : problem.k] if problem.layout[0] == "n" else a[:, i].T
    columns = b[:, j].T if problem.layout[1] == "n" else b[j, : problem.k]
    rows, columns, before = rows.astype(float), columns.astype(float), c[i, j].astype(float)
    beta = 0.5 if problem.beta else 0.0
    exact = 1.5 * (rows * columns).sum(1) + beta * before
    scale = 1.5 * abs(rows * columns).sum(1) + beta * abs(before)
    if not problem.beta:
        c.fill(cupy.nan)
    cuda_machine(0).load(source, binary)(a.data.ptr, b.data.ptr, c.data.ptr, 1.5, beta, 0)
    assert bool(cupy.isfinite(c[:, : problem.n]).all())
    assert float((abs(c[i, j] - exact) / scale).max()) < 1e-5
    del a, b, c
    cupy.get_default_memory_pool().free_all_blocks()
