"""BLAS's corners in the simulator: what alpha = 0, k = 0 and empty operands leave of C."""

from __future__ import annotations

import numpy as np
import pytest

from autotune import best_kernel, matmul
from autotune.errors import UsageError

NANS = {name: np.full(shape, np.nan, np.float32) for name, shape in (("a", (9, 7)), ("b", (7, 12)))}
C = np.random.default_rng(0).standard_normal((9, 12)).astype(np.float32)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    root = tmp_path_factory.mktemp("none")
    return [best_kernel(9, 12, 7, beta=beta, device="simulator", root=root) for beta in (0, 1)]


def padded(fill):
    """C within rows of 17 floats, and the whole of them."""
    whole = np.full((9, 17), fill, np.float32)
    whole[:, 2:14] = C
    return whole[:, 2:14], whole


def test_without_alpha_a_kernel_reads_neither_factor(kernels):
    plain, reading = kernels
    for kernel in kernels:
        out = np.full((9, 12), np.nan, np.float32)
        assert kernel(NANS["a"], NANS["b"], out, 0.0) is out
        assert not out.any()
    assert not plain(NANS["a"], NANS["b"], alpha=0).any()
    out = C.copy()
    reading(NANS["a"], NANS["b"], out, np.float32(0), -1.5)
    np.testing.assert_array_equal(out, np.float32(-1.5) * C)
    with pytest.raises(UsageError, match="needs a kernel that reads C"):
        plain(NANS["a"], NANS["b"], out, 0.0, 2.0)


def test_padding_of_c_stays(kernels):
    out, whole = padded(7.0)
    kernels[1](NANS["a"], NANS["b"], out, 0.0, 2.0)
    np.testing.assert_array_equal(out, 2 * C)
    out[:] = 7
    assert (whole == 7).all()
    kernels[0](NANS["a"], NANS["b"], out, 0.0)
    assert not out.any()
    assert (np.delete(whole, range(2, 14), axis=1) == 7).all()


def test_addresses_alone(kernels):
    out = C.copy()
    kernels[1].launch(0, 0, out.ctypes.data, 0.0, 3.0)
    np.testing.assert_array_equal(out, 3 * C)
    kernels[0].launch(0, 0, out.ctypes.data, 0.0, 3.0)  # made for beta = 0, which it is then
    assert not out.any()


def test_operands_are_checked_even_so(kernels):
    with pytest.raises(UsageError, match=r"a has shape \(8, 7\)"):
        kernels[0](NANS["a"][:8], NANS["b"], alpha=0.0)
    out = np.zeros((9, 12), np.float32)
    out.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        kernels[0](NANS["a"], NANS["b"], out, 0.0)


def test_a_checked_kernel_does_not_look_at_what_is_not_read(tmp_path):
    checked = best_kernel(
        9, 12, 7, beta=1, math="3xtf32", check_finite=True, device="simulator", root=tmp_path
    )
    out = C.copy()
    checked(NANS["a"], NANS["b"], out, 0.0, 2.0)
    np.testing.assert_array_equal(out, 2 * C)
    assert not checked._checks.made


@pytest.mark.parametrize("shapes", [((9, 0), (0, 12)), ((0, 9), (0, 12)), ((9, 0), (12, 0))], ids=str)
def test_nothing_to_sum_up(shapes):
    a, b = (np.empty(shape, np.float32) for shape in shapes)
    turns = {"transpose_a": shapes[0][0] == 0, "transpose_b": shapes[1][1] == 0}
    found = matmul(a, b, device="simulator", **turns)
    assert found.shape == (9, 12)
    assert not found.any()
    out, whole = padded(7.0)
    assert matmul(a, b, out, beta=0.5, device="simulator", **turns) is out
    np.testing.assert_array_equal(out, C / 2)
    assert (np.delete(whole, range(2, 14), axis=1) == 7).all()
    out[:] = np.nan
    assert not matmul(a, b, out, device="simulator", **turns).any()


@pytest.mark.parametrize(("m", "n", "k"), [(0, 12, 7), (9, 0, 7), (0, 0, 7), (0, 12, 0), (0, 0, 0)])
def test_an_empty_product(m, n, k):
    a, b = np.empty((m, k), np.float32), np.empty((k, n), np.float32)
    assert matmul(a, b, device="simulator").shape == (m, n)
    out = np.empty((m, n), np.float32)
    assert matmul(a, b, out, beta=2.0, device="simulator") is out


def test_what_does_not_fit_is_refused_where_there_is_nothing_to_do():
    a, b = np.empty((9, 0), np.float32), np.empty((0, 12), np.float32)
    with pytest.raises(UsageError, match=r"out has shape \(9, 11\): this product is \(9, 12\)"):
        matmul(a, b, np.zeros((9, 11), np.float32), device="simulator")
    with pytest.raises(UsageError, match="pass it as out="):
        matmul(a, b, beta=1.0, device="simulator")
    with pytest.raises(UsageError, match="stored by columns"):
        matmul(a, b, np.zeros((9, 12), np.float32, "F"), device="simulator")
    out = np.zeros((9, 12), np.float32)
    out.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        matmul(a, b, out, device="simulator")
    with pytest.raises(UsageError, match="the inner extents must agree"):
        matmul(a, np.empty((1, 12), np.float32), device="simulator")


def test_alpha_of_nothing_in_matmul():
    out = C.copy()
    matmul(NANS["a"], NANS["b"], out, alpha=0.0, beta=-1.0, device="simulator")
    np.testing.assert_array_equal(out, -C)
