"""Kernels that look at their operands first, in the simulator."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from autotune import best_kernel
from autotune.errors import UsageError
from autotune.kernel.kernel import CheckedKernel, Kernel


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return best_kernel(40, 24, 70, math="3xtf32", check_finite=True, device="simulator")


def operands() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.standard_normal((40, 70), np.float32), random.standard_normal((70, 24), np.float32)


def test_finite_operands_go_to_the_tensor_cores_and_others_to_fp32(kernel: Kernel) -> None:
    assert isinstance(kernel, CheckedKernel)
    assert (kernel.problem.math, kernel.strict.problem.math) == ("3xtf32", "ffma")
    emulating = best_kernel(40, 24, 70, math="3xtf32", device="simulator")
    a, b = operands()
    np.testing.assert_array_equal(kernel(a, b), emulating(a, b))
    assert (kernel(a, b) != kernel.strict(a, b)).any()
    a[3, 5] = np.inf
    np.testing.assert_array_equal(kernel(a, b), kernel.strict(a, b))
    assert np.isinf(kernel(a, b)[3]).all()
    assert np.isnan(emulating(a, b)[3]).all()


def test_operands_with_longer_rows_are_looked_at_as_they_lie(kernel: Kernel) -> None:
    a, b = operands()
    wide = np.full((40, 80), np.nan, np.float32)
    wide[:, :70] = a
    np.testing.assert_allclose(kernel(wide[:, :70], b), a @ b, rtol=1e-4, atol=1e-5)
    wide[0, 0] = np.nan
    found = kernel(wide[:, :70], b)
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1:]).all()


def test_wrong_operands_are_refused_as_ever(kernel: Kernel) -> None:
    a, b = operands()
    with pytest.raises(UsageError, match="shape"):
        kernel(b, a)
    with pytest.raises(UsageError, match="float32"):
        kernel(a.astype(np.float64), b)


def test_fp32_kernels_need_no_look() -> None:
    assert type(best_kernel(40, 24, 70, check_finite=True, device="simulator")) is Kernel


def test_a_pickled_kernel_looks_at_its_operands_too(kernel: Kernel) -> None:
    again = pickle.loads(pickle.dumps(kernel))
    a, b = operands()
    a[3, 5] = np.inf
    np.testing.assert_array_equal(again(a, b), kernel.strict(a, b))
