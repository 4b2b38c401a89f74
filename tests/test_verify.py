from __future__ import annotations

import math

import numpy as np
import pytest

from autotune.measure.verify import (
    Deviation,
    Projection,
    draw_scalars,
    error_bound,
    judge,
    projection_limit,
    projection_vector,
    verify_numpy,
)
from autotune.values.problem import LAYOUTS, Problem

M, N = 24, 20
ALPHA, BETA = 0.8125, -0.5625


def beta_of(problem):
    return BETA if problem.beta else 0.0


def operands(problem, seed=0):
    random = np.random.default_rng(seed)
    shapes = (problem.a_shape, problem.b_shape, problem.c_shape)
    a, b, c0 = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
    return a, b, c0 if problem.beta else None


def multiplied(problem, a, b, c0):
    """Sum in sequence in float32, as one thread of a kernel does."""
    op_a = a if problem.layout[0] == "n" else a.T
    op_b = b if problem.layout[1] == "n" else b.T
    total = np.zeros(problem.c_shape, np.float32)
    for index in range(problem.k):
        total += np.outer(op_a[:, index], op_b[index])
    total *= np.float32(ALPHA)
    return total if c0 is None else total + np.float32(BETA) * c0


def verdict(problem, inputs, c):
    return verify_numpy(problem, *inputs, c, ALPHA, beta_of(problem))


@pytest.mark.parametrize("beta", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("k", [1, 7, 4096])
def test_right_results_pass_with_room(k, layout, beta):
    problem = Problem(M, N, k, layout, beta)
    inputs = operands(problem)
    outcome = verdict(problem, inputs, multiplied(problem, *inputs))
    assert outcome.ok
    assert outcome.why == ""
    assert 0 < outcome.error < 0.3 * outcome.bound


def swapped_columns(problem, inputs, c):
    c[:, [3, 4]] = c[:, [4, 3]]


def one_element(problem, inputs, c):
    c[5, 6] += 0.1


def never_written(problem, inputs, c):
    c[-1, -1] = np.nan


def infinite(problem, inputs, c):
    c[0, 0] = np.inf


def all_zero(problem, inputs, c):
    c[:] = 0


def last_k_missing(problem, inputs, c):
    a, b, _ = inputs
    c -= np.float32(ALPHA) * np.outer(a[:, -1], b[-1])


def alpha_ignored(problem, inputs, c):
    c /= np.float32(ALPHA)


def tf32(problem, inputs, c):
    def rounded(x):
        return ((x.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)

    c[:] = ALPHA * (rounded(inputs[0]).astype(np.float64) @ rounded(inputs[1]).astype(np.float64))


@pytest.mark.parametrize("k", [1, 7, 4096])
@pytest.mark.parametrize(
    "mistake",
    [swapped_columns, one_element, never_written, infinite, all_zero, last_k_missing, alpha_ignored, tf32],
)
def test_wrong_results_fail(mistake, k):
    problem = Problem(M, N, k)
    inputs = operands(problem)
    c = multiplied(problem, *inputs)
    mistake(problem, inputs, c)
    outcome = verdict(problem, inputs, c)
    assert not outcome.ok
    assert outcome.why
    assert "\n" not in outcome.why


def test_why_names_the_element():
    problem = Problem(M, N, 64)
    inputs = operands(problem)
    c = multiplied(problem, *inputs)
    c[5, 6] = np.nan
    assert verdict(problem, inputs, c).why.startswith("C[5, 6] is nan;")
    c[5, 6] = 1e4
    assert verdict(problem, inputs, c).why.startswith("C[5, 6] = 10000 is off by ")


def test_beta_ignored_fails():
    problem = Problem(M, N, 64, beta=1)
    inputs = operands(problem)
    c = multiplied(problem, *inputs)
    assert verdict(problem, inputs, c).ok
    assert not verdict(problem, inputs, c - np.float32(BETA) * inputs[2]).ok


def test_zero_operands_are_no_error():
    problem = Problem(M, N, 8)
    zeros = np.zeros(problem.a_shape, np.float32), np.zeros(problem.b_shape, np.float32), None
    outcome = verdict(problem, zeros, np.zeros(problem.c_shape, np.float32))
    assert outcome.ok
    assert outcome.error == 0
    assert not verdict(problem, zeros, np.full(problem.c_shape, 1e-30, np.float32)).ok


@pytest.mark.parametrize("beta", [0, 1])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 1, 2), (1, 1, 256), (2, 1, 64)])
def test_terms_that_cancel_in_a_small_c_are_no_error(m, n, k, beta):
    problem = Problem(m, n, k, beta=beta)
    smallest = math.inf
    for seed in range(400):
        inputs = operands(problem, seed)
        c = multiplied(problem, *inputs)
        outcome = verdict(problem, inputs, c)
        assert outcome.ok, outcome.why
        smallest = min(smallest, abs(c).max())
    assert smallest < 0.05 * math.sqrt(k)  # some did cancel


def test_one_small_element_is_checked_as_strictly_as_a_usual_one():
    k = 256
    problem = Problem(1, 1, k)
    for seed in range(20):
        inputs = operands(problem, seed)
        c = multiplied(problem, *inputs)
        usual = ALPHA * math.sqrt(k)
        assert not verdict(problem, inputs, c + np.float32(4 * error_bound(k) * usual)).ok


@pytest.mark.parametrize("beta", [0, 1])
@pytest.mark.parametrize(("m", "n", "k"), [(8, 8, 1), (8, 8, 2), (8, 8, 256), (24, 20, 4096)])
def test_the_error_of_some_dozens_of_elements_is_relative_to_their_norm(m, n, k, beta):
    problem = Problem(m, n, k, beta=beta)
    for seed in range(20):
        inputs = operands(problem, seed)
        reference = ALPHA * (inputs[0].astype(np.float64) @ inputs[1].astype(np.float64))
        reference += BETA * inputs[2].astype(np.float64) if beta else 0.0
        wrong = (1.001 * reference).astype(np.float32)
        outcome = verdict(problem, inputs, wrong)
        assert outcome.error == pytest.approx(
            np.linalg.norm(wrong - reference) / np.linalg.norm(reference), rel=1e-12
        )


def test_scalars_are_exact_and_no_number_that_a_kernel_assumes():
    random = np.random.default_rng(0)
    drawn = [draw_scalars(Problem(M, N, 8, beta=1), random) for _ in range(200)]
    for scalar in (scalar for pair in drawn for scalar in pair):
        assert float(np.float32(scalar)) == scalar
        assert 0.5 < abs(scalar) < 1.5
        assert abs(scalar) != 1
    assert all(len(set(scalars)) == 16 for scalars in zip(*drawn, strict=True))
    assert draw_scalars(Problem(M, N, 8), random)[1] == 0
    again = np.random.default_rng(0)
    assert [draw_scalars(Problem(M, N, 8, beta=1), again) for _ in range(200)] == drawn


def test_bound_is_four_unit_roundoffs_times_root_k():
    assert error_bound(1) == 4 * 2.0**-24
    assert error_bound(4096) == 64 * error_bound(1)


@pytest.mark.parametrize(("worst", "ok"), [(0.99, True), (1.01, False), (math.inf, False), (math.nan, False)])
def test_projection_decides_where_samples_see_nothing(worst, ok):
    right = Deviation(0.0, 1.0, 1.0, 0.0, 0, 0, 1.0)
    outcome = judge(64, [right, right], Projection(worst, 17), "test")
    assert outcome.ok is ok
    assert ok or "row 17" in outcome.why


def test_nan_squares_never_pass():
    assert not judge(64, [Deviation(math.nan, 1.0, 1.0, 0.0, 0, 0, 1.0)], None, "test").ok


@pytest.mark.parametrize("beta", [0, 1])
@pytest.mark.parametrize(("m", "n", "k"), [(2000, 300, 1), (300, 200, 7), (64, 64, 1024)])
def test_projection_limit_is_beyond_rounding_but_near_it(m, n, k, beta):
    problem = Problem(m, n, k, beta=beta)
    a, b, c0 = operands(problem)
    c = multiplied(problem, a, b, c0)
    x = projection_vector(n, 1)
    start = np.zeros((m, n)) if c0 is None else c0.astype(np.float64)
    exact = ALPHA * (a.astype(np.float64) @ (b.astype(np.float64) @ x)) + beta_of(problem) * (start @ x)
    limit = projection_limit(
        ALPHA,
        np.linalg.norm(a.astype(np.float64), axis=1),
        float(np.linalg.norm(b * x)),
        beta_of(problem),
        np.linalg.norm(start * x, axis=1),
    )
    ratio = abs(c.astype(np.float64) @ x - exact) / limit
    assert ratio.max() < 0.8
    assert np.sqrt(np.mean(ratio**2)) > 1 / 40
    row = int(limit.argmax())
    c[row, 7] += 2 * limit[row] / 0.75  # twice the limit at least, less the rounding errors of the row
    assert abs(c[row].astype(np.float64) @ x - exact[row]) > limit[row]


def test_projection_vector_has_signs_and_no_small_element():
    x = projection_vector(10000, 3)
    assert 0.75 <= abs(x).min() < 0.76
    assert 1.24 < abs(x).max() <= 1.25
    assert abs(np.sign(x).mean()) < 0.05
    assert not np.array_equal(x, projection_vector(10000, 4))
