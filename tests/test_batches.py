"""Batches in the simulator: every family, strided and shared operands, `matmul` and `best_kernel`."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from autotune import best_kernel, matmul
from autotune.code.compiler import Binary, compile_text
from autotune.code.render import render
from autotune.errors import ConfigError, ProblemError, UsageError
from autotune.simulator.launches import run_launch, workspace_of
from autotune.space.space import Space
from autotune.values.device import named_device
from autotune.values.problem import Problem, Strided

H200 = named_device("h200")
RANDOM = np.random.default_rng(3)
FEW = {"stages": 3, "splits": 2}
STEPS = ("naive", "coalesced", "flattened", "register_tile", "shared_tile")
UNOPTIMISED = ("-Xptxas=-O0",)
CASES = [  # family, preset, changes, problem
    ("sgemm", "tiny_block", {}, Problem(33, 17, 20, "nt", 1, batch=3)),
    ("sgemm", "tiny_block", {"split_k": 3}, Problem(33, 18, 260, "tn", 0, batch=2)),
    ("sgemm", "tiny_block", {"edge": "shifted"}, Problem(65, 67, 24, "tt", 1, batch=2)),
    ("sgemm_skinny", "rows_across", {}, Problem(5, 130, 520, "nn", 1, batch=2)),
    ("sgemm_skinny", "row_along", {"edge": "guarded"}, Problem(130, 3, 260, "nn", 0, batch=3)),
    ("sgemm_3xtf32", "two_warps", {"split_k": 2}, Problem(33, 65, 100, "tn", 1, "3xtf32", 2)),
    ("sgemm_3xtf32_wgmma", "small_block", FEW, Problem(65, 66, 200, "nt", 0, "3xtf32", 2)),
    ("sgemm_3xtf32_wgmma", "small_block", FEW | {"split_k": 2}, Problem(65, 66, 256, "tn", 1, "3xtf32", 2)),
    *((name, name, {}, Problem(33, 17, 20, "nt", 1, batch=3)) for name in STEPS),
]  # fmt: skip


def drawn(*shape):
    return RANDOM.standard_normal(shape, np.float32)


def turned(array, letter):
    return array if letter == "n" else array.swapaxes(-1, -2)


def made(family, preset, changes, problem):
    space = Space.load(family)
    config = space.fitted(space.config({**space.presets[preset], **changes}), problem, H200)
    source = render(space, config, problem, H200)
    binary = compile_text(source.text, source.entry, "sm_90", UNOPTIMISED)
    assert isinstance(binary, Binary), binary
    return source, binary


@pytest.mark.parametrize(("family", "preset", "changes", "problem"), CASES, ids=lambda each: str(each))
def test_every_family_computes_a_batch(family, preset, changes, problem):
    source, binary = made(family, preset, changes, problem)
    a, b, c0 = (drawn(*shape) for shape in problem.arrays)
    expected = 1.5 * (turned(a, problem.layout[0]).astype(float) @ turned(b, problem.layout[1]))
    expected += 0.5 * problem.beta * c0
    workspace = workspace_of(source.launch)
    assert source.launch.scratch_bytes == 0  # each product has counters of its own
    assert bool(workspace) == (changes.get("split_k", 1) > 1 or preset == "rows_across")
    for _ in range(2):  # the second finds what the first left in the workspaces of all products
        c = c0.copy() if problem.beta else np.full_like(c0, np.nan)
        values = {"alpha": 1.5, "a": a, "b": b, "beta": 0.5, "c": c, **workspace}
        run_launch(binary.ptx, source.launch, values).raise_if_faulty()
        np.testing.assert_allclose(c, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", sorted({case[0] for case in CASES}))
def test_one_product_is_rendered_as_if_there_were_no_batches(family):
    _, preset, _, problem = next(case for case in CASES if case[0] == family)
    space = Space.load(family)
    one = Problem(8 if family == "sgemm_skinny" else 64, 64, 1024, "nn", 0, problem.math)
    config = space.fitted(space.presets[preset], one, H200)
    source = render(space, config, one, H200)
    assert "stride_a" not in source.text
    assert source.launch.grid[1:] == (1, 1)


def test_more_products_than_a_grid_has_layers():
    problem = Problem(4, 4, 4, batch=65537)
    source, _ = made("sgemm", "tiny_block", {}, problem)
    assert source.launch.grid[1:] == (2, 32769)
    assert "if (product >= 65537)" in source.text
    assert "gridDim.y" in source.text


def test_a_family_without_layers_computes_no_batch(tmp_path):
    text = (
        'family = "mine"\n[parameters]\nBM = { values = [32] }\n'
        '[launch]\ngrid = "1"\nblock = "BM"\nshared_bytes = "0"\n[presets.first]\nBM = 32\n'
    )
    (tmp_path / "mine.toml").write_text(text)
    space = Space.load(tmp_path / "mine.toml")
    config = space.presets["first"]
    space.require_legal(config, Problem(4, 4, 4), H200)
    with pytest.raises(ConfigError, match="one_product: needs batch == 1 but batch = 2"):
        space.require_legal(config, Problem(4, 4, 4, batch=2), H200)


# -- kernels and matmul --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return best_kernel(9, 12, 7, beta=1, batch=3, device="simulator", root=tmp_path_factory.mktemp("none"))


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


A, B, C = drawn(3, 9, 7), drawn(3, 7, 12), drawn(3, 9, 12)


def test_a_kernel_takes_whole_batches(kernel):
    assert kernel.problem == Problem(9, 12, 7, beta=1, batch=3)
    close(kernel(A, B), A @ B)
    out = C.copy()
    assert kernel(A, B, out, 2.0, 0.5) is out
    close(out, 2 * A @ B + 0.5 * C)
    out = C.copy()
    kernel.launch(0, 0, out.ctypes.data, 0.0, 3.0)
    close(out, 3 * C)


def test_one_matrix_is_shared_by_all_products(kernel):
    for a, b in ((A[0], B), (A[:1], B), (A, B[1]), (np.broadcast_to(A[2], A.shape), B), (A[0], B[1])):
        close(kernel(a, b), np.broadcast_to(a @ b, C.shape))
    assert all(each.stride_a == 0 or each.stride_b == 0 for each in kernel._variants.made)


def test_batches_that_lie_otherwise(kernel):
    whole = drawn(9, 3, 20)  # rows of all C side by side, as heads of attention are
    out = whole.swapaxes(0, 1)[:, :, 3:15]
    kept = whole.copy()
    wide_a, wide_b = drawn(6, 9, 11), drawn(3, 8, 13)
    a, b = wide_a[::2, :, 1:8], wide_b[:, 1:, 1:]
    kernel(a, b, out, 1.0, 1.0)
    close(out, a @ b + kept.swapaxes(0, 1)[:, :, 3:15])
    assert (np.delete(whole, range(3, 15), axis=2) == np.delete(kept, range(3, 15), axis=2)).all()
    kernel(A, B, out, 0.0, 0.0)
    assert not out.any()


def test_what_is_no_batch_of_the_kernel_is_refused(kernel):
    with pytest.raises(UsageError, match=r"a has shape \(2, 9, 7\): this kernel takes \(3, 9, 7\)"):
        kernel(A[:2], B)
    with pytest.raises(UsageError, match=r"out has shape \(9, 12\): this kernel takes \(3, 9, 12\)"):
        kernel(A, B, C[0])
    with pytest.raises(
        UsageError,
        match=r"out has matrices of \(9, 12\) only 1 elements apart, so that they overlap",
    ):
        kernel(A, B, np.lib.stride_tricks.as_strided(C, C.shape, (4, 48, 4)))
    with pytest.raises(UsageError, match="a has negative strides"):
        kernel(A[::-1], B)
    with pytest.raises(UsageError, match="out overlaps b"):
        kernel(A, C[:, :7], C)
    with pytest.raises(ProblemError, match="batch = 0 is out of range"):
        best_kernel(9, 12, 7, batch=0, device="simulator")


@pytest.mark.parametrize(("ta", "tb"), list(product((False, True), repeat=2)))
def test_matmul_of_batches(ta, tb):
    a, b = np.ascontiguousarray(turned(A, "nt"[ta])), np.ascontiguousarray(turned(B, "nt"[tb]))
    close(matmul(a, b, transpose_a=ta, transpose_b=tb, device="simulator"), A @ B)
    views = turned(a, "nt"[ta]), turned(b, "nt"[tb])
    out = C.copy()
    close(matmul(*views, out, alpha=-1.0, beta=2.0, device="simulator"), 2 * C - A @ B)


def test_matmul_of_a_batch_and_a_matrix(monkeypatch):
    from autotune.kernel import multiply

    problems = []
    load = multiply._loaded
    monkeypatch.setattr(multiply, "_loaded", lambda *words: problems.append(words[0]) or load(*words))
    m, n, k = 5, 11, 6
    a, b = drawn(4, m, k), drawn(k, n)
    close(matmul(a, b, device="simulator"), a @ b)
    out = np.zeros((4, m, n + 2), np.float32)
    close(matmul(a, b, out[:, :, :n], device="simulator"), a @ b)
    assert problems == [Problem(4 * m, n, k)]  # its rows follow each other: they are one matrix
    close(matmul(drawn(m, k)[None], b[None], device="simulator").shape, (1, m, n))
    left, right = drawn(m, k), drawn(4, k, n)
    close(matmul(left, right, device="simulator"), left @ right)
    close(matmul(a[:, :1], b, device="simulator"), a[:, :1] @ b)
    turned_a = np.ascontiguousarray(a.swapaxes(1, 2))
    close(matmul(turned_a, b, transpose_a=True, device="simulator"), a @ b)
    assert Problem(m, n, k, batch=4) in problems
    assert Problem(m, n, k, "tn", batch=4) in problems


def test_what_does_not_fit_is_one_line():
    for a, b, why in (
        (A, B[:2], "a is a batch of 3 and b of 2: they must agree, or one be a single matrix"),
        (A, drawn(3, 8, 12), "the inner extents must agree"),
        (drawn(2, 3, 9, 7), B, "a has 4 dimensions, shape (2, 3, 9, 7): pass a matrix, or a batch"),
    ):
        with pytest.raises(UsageError) as caught:
            matmul(a, b, device="simulator")
        assert why in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"out has shape \(9, 12\)"):
        matmul(A, B, C[0], device="simulator")
    for a, b, out, shape in ((A[:1], B[:1], C[0], "(1, 9, 12)"), (A, B[0], C.reshape(27, 12), "(3, 9, 12)")):
        with pytest.raises(UsageError, match="out has shape") as caught:
            matmul(a, b, out, device="simulator")
        assert shape in str(caught.value)


@pytest.mark.parametrize(
    ("shape_a", "shape_b"), [((0, 9, 7), (0, 7, 12)), ((3, 0, 7), (7, 12)), ((9, 7), (0, 7, 12))]
)
def test_an_empty_batch(shape_a, shape_b):
    a, b = np.empty(shape_a, np.float32), np.empty(shape_b, np.float32)
    assert matmul(a, b, device="simulator").shape == (a @ b).shape


def test_batches_of_nothing():
    a, b = np.empty((3, 9, 0), np.float32), np.empty((0, 12), np.float32)
    assert not matmul(a, b, device="simulator").any()
    whole = np.full((3, 9, 20), 7, np.float32)
    matmul(a, b, whole[:, :, 4:16], beta=0.5, device="simulator")
    assert (whole[:, :, 4:16] == 3.5).all()
    assert (np.delete(whole, range(4, 16), axis=2) == 7).all()
    one = np.full((1, 9, 12), 2, np.float32)
    assert (matmul(a[:1], b, one, beta=0.5, device="simulator") == 1).all()


def test_infinities_of_any_product_are_seen(tmp_path):
    checked = best_kernel(
        9, 12, 7, math="3xtf32", batch=3, check_finite=True, device="simulator", root=tmp_path
    )
    for a, b in ((A, B), (A[0], B), (np.pad(A, ((0, 0), (0, 1), (0, 1)))[:, :9, :7], B)):
        close(checked(a, b), np.broadcast_to(a @ b, C.shape))
    bad = A.copy()
    bad[2, 8, 6] = np.inf
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(np.isfinite(checked(bad, B)), np.isfinite(bad @ B))
    assert len(checked._checks.made) == 3


def test_words_and_names_of_a_batch():
    problem = Problem(256, 128, 64, "nt", batch=64)
    assert str(problem) == "64 x (256 x 128 x 64) nt"
    assert problem.key == "f32_nt_m256_n128_k64_batch64_beta0_ffma"
    assert problem.cli_flags() == "--m 256 --n 128 --k 64 --batch 64 --layout nt"
    assert problem.flops == 64 * Problem(256, 128, 64).flops
    assert problem.operand_bytes == 64 * Problem(256, 128, 64).operand_bytes
    assert problem.arrays == ((64, 256, 64), (64, 128, 64), (64, 256, 128))
    assert (problem.stride_a, problem.stride_b, problem.stride_c) == (256 * 64, 128 * 64, 256 * 128)
    shared = Strided(4, 8, 5, batch=3, stride_b=0, lda=6)
    assert (shared.stride_a, shared.stride_b, shared.stride_c) == (24, 0, 32)
    assert Strided(4, 8, 5, batch=3, ldc=24, stride_c=8).stride_c == 8
    for wrong in ({"stride_c": 0}, {"stride_c": 31}, {"stride_c": 7, "ldc": 24}, {"stride_a": -1}):
        with pytest.raises(ProblemError):
            Strided(4, 8, 5, batch=3, **wrong)
