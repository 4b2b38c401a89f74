"""Operands with longer rows and less aligned addresses: kernels fitted to them, simulated, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from test_kernels import bits, expected, space

from autotune.code.compiler import Binary, compile_text
from autotune.code.render import render
from autotune.simulator import run_ptx
from autotune.simulator.launches import workspace_of
from autotune.values.device import named_device
from autotune.values.problem import Layout, Strided

H200 = named_device("h200")
CASES: dict[str, tuple[int, int, tuple[int, int, int], Layout, str]] = {
    # floats that rows are longer; floats that addresses lie off; m, n, k; layout; preset
    "one_more": (1, 0, (40, 72, 36), "nn", "tiny_block"),
    "three_more": (3, 0, (40, 72, 36), "nt", "small_block"),
    "many_more": (64, 0, (33, 70, 41), "tn", "tiny_block"),
    "four_more_than_odd": (
        3,
        0,
        (33, 69, 37),
        "tt",
        "tiny_block",
    ),  # rows of 36 to 72 floats, none of them whole
    "one_off": (0, 1, (40, 72, 36), "nn", "turning_small"),
    "two_off": (0, 2, (40, 72, 36), "tn", "tiny_block"),
    "both": (4, 2, (40, 72, 36), "nt", "register_staged"),
    "split": (1, 1, (40, 72, 200), "nn", "split_slim"),
    "spread": (1, 1, (40, 72, 200), "nt", "odd_split"),
    "kept": (4, 0, (40, 72, 300), "nt", "thin_kept"),
}


def operand(
    shape: tuple[int, int], stride: int, off: int, seed: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Make rows `stride` apart, NaN between them, nothing behind the last; give the flat array, the rows."""
    rows, cols = shape
    flat = np.full(off + (rows - 1) * stride + cols, np.nan, np.float32)[off:]
    seen = np.lib.stride_tricks.as_strided(flat, shape, (4 * stride, 4))
    seen[:] = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return flat, seen


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("beta", [0, 1])
def test_a_kernel_fitted_to_strided_operands_is_right(name: str, beta: int) -> None:
    longer, off, (m, n, k), layout, preset = CASES[name]
    align = 4 if off == 0 else off
    tight = Strided(m, n, k, layout, beta)
    problem = Strided(
        m, n, k, layout, beta,
        lda=tight.lda + longer, ldb=tight.ldb + longer, ldc=n + longer,
        align_a=align, align_b=align, align_c=align,
    )  # fmt: skip
    sgemm = space("sgemm")
    source = render(sgemm, sgemm.fitted(sgemm.presets[preset], problem, H200), problem, H200)
    binary = compile_text(source.text, source.entry, "sm_90")
    assert isinstance(binary, Binary), binary
    a, a_rows = operand(problem.a_shape, problem.lda, off, 1)
    b, b_rows = operand(problem.b_shape, problem.ldb, off, 2)
    c, c_rows = operand(problem.c_shape, problem.ldc, off, 3)
    a_rows[m // 2 if layout[0] == "n" else k // 2, 3] = np.inf
    if not beta:
        c_rows[:] = np.nan
    wanted = expected(source, a_rows, b_rows, c_rows.copy(), 1.5, 0.5)
    launch, scalars = source.launch, (np.float32(1.5), np.float32(0.5))
    args = [scalars[0], a, b, scalars[1], c, *workspace_of(source.launch).values()]
    report = run_ptx(
        binary.ptx, source.entry, launch.grid, launch.block, args, shared_bytes=launch.shared_bytes
    )
    assert not report.faults, report.faults[0]
    assert any((bits(each) == bits(c_rows)).all() for each in wanted)
    between = np.ones(len(c), bool)
    for row in range(m):
        between[row * problem.ldc : row * problem.ldc + n] = False
    assert np.isnan(c[between]).all()


@pytest.mark.parametrize("which", ["a", "c"])
def test_offsets_beyond_31_bits_are_right(which: str) -> None:
    """40 rows of 60 million floats reach beyond 2^31 floats. Pages that nobody touches take no memory."""
    m, n, k, far = 40, 32, 24, 60_000_000
    problem = Strided(m, n, k, **{f"ld{which}": far})  # type: ignore[arg-type]
    sgemm = space("sgemm")
    source = render(sgemm, sgemm.fitted(sgemm.presets["tiny_block"], problem, H200), problem, H200)
    binary = compile_text(source.text, source.entry, "sm_90")
    assert isinstance(binary, Binary), binary
    random = np.random.default_rng(0)
    shapes = {"a": problem.a_shape, "b": problem.b_shape, "c": problem.c_shape}
    flat, rows = {}, {}
    for name, shape in shapes.items():
        stride = far if name == which else shape[1]
        flat[name] = np.zeros((shape[0] - 1) * stride + shape[1], np.float32)
        rows[name] = np.lib.stride_tricks.as_strided(flat[name], shape, (4 * stride, 4))
        rows[name][:] = random.standard_normal(shape, np.float32)
    assert len(flat[which]) > 2**31
    wanted = expected(source, rows["a"], rows["b"], rows["c"].copy(), 1.0, 0.0)
    args = [np.float32(1), flat["a"], flat["b"], np.float32(0), flat["c"]]
    launch = source.launch
    report = run_ptx(
        binary.ptx, source.entry, launch.grid, launch.block, args, shared_bytes=launch.shared_bytes
    )
    assert not report.faults, report.faults[0]
    assert any((bits(each) == bits(rows["c"])).all() for each in wanted)
