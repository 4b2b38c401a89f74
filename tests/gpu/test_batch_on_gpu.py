"""Batches on a real GPU: every family, shared and strided operands, workspaces, far offsets, and a search."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autotune import best_kernel, matmul
from autotune.code.compiler import Binary, compile_text
from autotune.code.render import Source, render
from autotune.measure.worker import GpuWorker
from autotune.space.space import Space
from autotune.values.device import current_device
from autotune.values.measurement import MeasuredTrial
from autotune.values.problem import LAYOUTS, Problem, Strided

pytestmark = pytest.mark.gpu
UNCUT = {"edge": "guarded", "blocks_per_sm": 0}
CASES = {  # family, preset, what differs from it, problem
    "tiles": ("sgemm", "small_block", {}, Problem(256, 256, 256, batch=64)),
    "parts of k": ("sgemm", "tiny_block", {"split_k": 4}, Problem(96, 80, 1024, "nt", 1, batch=24)),
    "shifted": ("sgemm", "tiny_block", {"edge": "shifted"}, Problem(65, 67, 130, "tt", 1, batch=200)),
    "one tile": ("sgemm", "tiny_block", {}, Problem(64, 64, 64, "tn", batch=1024)),
    "more than layers": ("sgemm", "tiny_block", {}, Problem(32, 32, 64, "nn", 1, batch=70_000)),
    "rows": ("sgemm_skinny", "rows_across", {}, Problem(8, 1024, 2048, "nn", 1, batch=3)),
    "columns": ("sgemm_skinny", "columns_along", UNCUT, Problem(500, 7, 1000, batch=5)),
    "mma": ("sgemm_3xtf32", "two_warps", {}, Problem(256, 256, 256, "nt", 0, "3xtf32", 64)),
    "mma, parts": ("sgemm_3xtf32", "two_warps", {"split_k": 4}, Problem(96, 80, 1024, "tn", 1, "3xtf32", 9)),
    "wgmma": ("sgemm_3xtf32_wgmma", "small_block", {}, Problem(256, 256, 256, "nn", 1, "3xtf32", 64)),
    "wgmma, parts": (
        "sgemm_3xtf32_wgmma", "small_block", {"split_k": 3}, Problem(100, 90, 1500, "nt", 0, "3xtf32", 7)
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def device():
    return current_device(0)


def made(
    device: Any, family: str, preset: str, changes: dict[str, Any], problem: Problem
) -> tuple[Source, Binary]:
    space = Space.load(family)
    config = space.fitted(space.config({**space.presets[preset], **changes}), problem, device)
    source = render(space, config, problem, device)
    binary = compile_text(source.text, source.entry, device.arch)
    assert isinstance(binary, Binary), binary
    return source, binary


def drawn(shape: tuple[int, ...], seed: int) -> Any:
    import cupy

    return cupy.random.default_rng(seed).standard_normal(shape, dtype=cupy.float32)


def turned(array: Any, letter: str) -> Any:
    return array if letter == "n" else array.swapaxes(-1, -2)


def close(found: Any, a: Any, b: Any, k: int, more: Any = 0.0) -> None:
    import cupy

    wanted = a.astype(cupy.float64) @ b.astype(cupy.float64) + more
    error = float(cupy.linalg.norm(found - wanted) / cupy.linalg.norm(wanted))
    assert error < 4 * 2**-24 * k**0.5 + 1e-6


@pytest.mark.parametrize("name", CASES)
def test_every_family_computes_every_product(name, device):
    from autotune.kernel.cuda import loaded

    family, preset, changes, problem = CASES[name]
    if family == "sgemm_3xtf32_wgmma" and device.capability != 90:
        pytest.skip("wgmma is of compute capability 9.0")
    source, binary = made(device, family, preset, changes, problem)
    assert bool(source.launch.workspace_bytes) == (changes.get("split_k", 1) > 1 or name == "rows")
    a, b, c0 = (drawn(shape, seed) for seed, shape in enumerate(problem.arrays))
    enqueue = loaded(0, source, binary.cubin)
    for _ in range(3):  # what one launch leaves in the workspace is as the next one needs it
        c = c0.copy()
        enqueue(a.data.ptr, b.data.ptr, c.data.ptr, 1.5, 0.5, 0)
        close(
            c,
            1.5 * turned(a, problem.layout[0]),
            turned(b, problem.layout[1]),
            problem.k,
            0.5 * problem.beta * c0,
        )


def test_the_checker_sees_a_wrong_product_and_times_a_right_one(device):
    problem = Problem(128, 64, 256, "nt", 1, batch=32)
    source, right = made(device, "sgemm", "tiny_block", {}, problem)
    text = source.text.replace(
        "const long long product = blockIdx.z;",
        "const long long product = blockIdx.z == 31 ? 30 : blockIdx.z;",
    )
    assert text != source.text
    wrong = compile_text(text, source.entry, device.arch)
    with GpuWorker(0, problem, seed=1) as gpu:
        for key, binary in enumerate((right, wrong)):
            gpu.submit(key, binary, source.launch, None, 30.0)
        outcomes: dict[int, Any] = {}
        while gpu.pending:
            outcomes.update(gpu.collect(20))
        finals = gpu.finals([(key, binary, source.launch) for key, binary in enumerate((right, wrong))], 60)
    assert isinstance(outcomes[0], MeasuredTrial), outcomes[0]
    assert outcomes[1].kind == "correctness"
    assert isinstance(finals.outcomes[0], MeasuredTrial), finals.outcomes[0]
    assert "C[31" in finals.outcomes[1].why or "wrote outside" in finals.outcomes[1].why
    assert finals.cublas is not None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("math", ["ffma", "3xtf32"])
def test_shared_and_strided_operands(layout, math):
    problem = Problem(48, 80, 96, layout, 1, math, 12)
    kernel = best_kernel(48, 80, 96, layout, beta=1, math=math, batch=12)
    a, b, c0 = (drawn(shape, seed) for seed, shape in enumerate(problem.arrays))
    whole = drawn((48, 12, 92), 7)  # rows of all products side by side
    out = whole[:, :, 5:85].swapaxes(0, 1)
    wide = drawn((24, problem.a_shape[0], problem.a_shape[1] + 3), 8)[::2, :, 1:-2]
    for x, y, z in (
        (a, b, c0.copy()),
        (a[0], b, c0.copy()),
        (a, b[3], c0.copy()),
        (wide, b, out),
        (a[:1], b[:1], out),
    ):
        before = z.copy()
        kernel(x, y, z, 2.0, -0.5)
        close(z, 2 * turned(x, layout[0]), turned(y, layout[1]), 96, -0.5 * before)


def test_matmul_of_batches_runs_captured_too():
    import cupy

    a, b = drawn((5, 64, 2048), 1), drawn((5, 2048, 32), 2)
    out = cupy.empty((5, 64, 32), cupy.float32)
    close(matmul(a, b), a, b, 2048)
    close(matmul(a, b[0]), a, b[0], 2048)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        matmul(a, b, out)
        graph = stream.end_capture()
        for _ in range(2):
            out.fill(cupy.nan)
            graph.launch(stream)
        stream.synchronize()
    close(out, a, b, 2048)


@pytest.mark.parametrize("family", ["sgemm", "sgemm_3xtf32_wgmma"])
def test_products_beyond_32_bits(family, device):
    """The last of 33 products begins 2^31 floats behind the first."""
    import cupy

    if family != "sgemm" and device.capability != 90:
        pytest.skip("wgmma is of compute capability 9.0")
    math = "ffma" if family == "sgemm" else "3xtf32"
    problem = Strided(64, 64, 192, "nn", 0, math, 33, stride_a=1 << 26, stride_b=0, stride_c=1 << 26)
    source, binary = made(device, family, "small_block", {}, problem)
    from autotune.kernel.cuda import loaded

    a, c = (cupy.zeros(33 << 26, cupy.float32) for _ in range(2))
    b, last = drawn((192, 64), 1), drawn((64, 192), 2)
    a[32 << 26 : (32 << 26) + 64 * 192] = last.ravel()
    loaded(0, source, binary.cubin)(a.data.ptr, b.data.ptr, c.data.ptr, 1.0, 0.0, 0)
    close(c[32 << 26 : (32 << 26) + 4096].reshape(64, 64), last, b, 192)
    assert not c[: 32 << 26].any()
    del a, c
    cupy.get_default_memory_pool().free_all_blocks()


def test_corners_read_no_factor():
    import cupy

    nan = cupy.full((3, 40, 40), cupy.nan, cupy.float32)
    c = drawn((3, 40, 40), 1)
    whole = drawn((3, 40, 44), 2)
    assert not matmul(nan, nan, alpha=0.0).any()
    for out in (c, whole[:, :, 1:41]):
        before = out.copy()
        matmul(nan, nan, out, alpha=0.0, beta=-2.0)
        np.testing.assert_array_equal(out.get(), -2 * before.get())
    assert not matmul(cupy.empty((3, 40, 0), cupy.float32), cupy.empty((0, 8), cupy.float32)).any()
    assert matmul(cupy.empty((0, 4, 5), cupy.float32), cupy.empty((5, 8), cupy.float32)).shape == (0, 4, 8)
