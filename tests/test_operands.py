from __future__ import annotations

import ctypes
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import UsageError
from autotune.kernel.libraries import NumPyLibrary
from autotune.kernel.operands import Operand, as_stored, first_of, leading, scalar, stream_pointer, strided
from autotune.values.problem import Problem, Strided

PROBLEM = Problem(3, 5, 4)
BASE = 1 << 20


def matrix(rows, columns, address=BASE, lead=None, ordinal=0, writable=True):
    return Operand(address, (rows, columns), (lead or columns, 1), ordinal, writable)


A, B, OUT = matrix(3, 4), matrix(4, 5, BASE + 4096), matrix(3, 5, BASE + 8192)


def view(array):
    return NumPyLibrary().view("a", array, 0)[0]


def fault(call, *words):
    with pytest.raises(UsageError) as caught:
        call(*words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tight_and_aligned_operands_are_the_problem_itself():
    assert strided(PROBLEM, A, B, OUT) is PROBLEM


def test_longer_rows_and_less_aligned_addresses_are_a_strided_problem():
    loose = strided(
        PROBLEM, matrix(3, 4, lead=7), B._replace(address=BASE + 4100), OUT._replace(address=BASE + 8200)
    )
    assert loose == Strided(3, 5, 4, lda=7, ldb=5, ldc=5, align_a=4, align_b=1, align_c=2)


@pytest.mark.parametrize(
    ("name", "operand", "message"),
    [
        ("a", matrix(4, 3), "a has shape (4, 3): this kernel takes (3, 4) (3 x 5 x 4 nn)"),
        ("b", matrix(4, 4), "b has shape (4, 4): this kernel takes (4, 5)"),
        ("out", matrix(5, 3), "out has shape (5, 3): this kernel takes (3, 5)"),
        ("a", Operand(BASE, (12,), (1,), 0), "a has shape (12,): this kernel takes (3, 4)"),
        ("a", matrix(3, 4, BASE + 2), "a starts at an address that is no multiple of 4 bytes: pass a.copy()"),
        ("a", matrix(3, 4, 0), "a has no memory"),
        ("a", Operand(BASE, (3, 4), (-4, 1), 0), "a has negative strides (a flipped view): pass a.copy()"),
        ("a", Operand(BASE, (3, 4), (4, -1), 0), "a has negative strides"),
        ("a", Operand(BASE, (3, 4), (8, 2), 0), "a has elements 2 apart within a row"),
        ("a", Operand(BASE, (3, 4), (1, 0), 0), "a has elements 0 apart within a row"),
        ("a", Operand(BASE, (3, 4), (0, 1), 0), "a has rows of 4 elements only 0 apart (a broadcast or"),
        ("a", Operand(BASE, (3, 4), (3, 1), 0), "a has rows of 4 elements only 3 apart"),
        ("a", Operand(BASE, (3, 4), (1, 3), 0), "a is stored by columns, not by rows: pass a.T to a kernel"),
        (
            "a",
            Operand(BASE, (3, 4), (2**31, 1), 0),
            "a has rows 2147483648 elements apart: at most 2147483647",
        ),
        ("out", matrix(3, 5, BASE + 8192, writable=False), "out is read-only"),
        ("out", matrix(3, 5, BASE + 40), "out overlaps a in memory: pass an array of its own"),
        ("out", matrix(3, 5, BASE + 4096 - 56), "out overlaps b in memory"),
    ],
)
def test_each_fault_is_one_line_that_says_what_to_pass(name, operand, message):
    operands = {"a": A, "b": B, "out": OUT, name: operand}
    assert fault(strided, PROBLEM, *operands.values()).startswith(message)


def test_a_row_alone_has_no_leading_dimension():
    assert leading("a", Operand(BASE, (1, 4), (0, 1), 0), (1, 4), PROBLEM) == 4
    assert leading("a", Operand(BASE, (1, 4), (-9, 1), 0), (1, 4), PROBLEM) == 4
    assert leading("a", Operand(BASE, (3, 1), (7, -5), 0), (3, 1), PROBLEM) == 7
    assert leading("a", Operand(BASE, (1, 1), (0, 0), 0), (1, 1), PROBLEM) == 1


def test_neighbours_touch_but_do_not_overlap():
    strided(PROBLEM, A, B, matrix(3, 5, BASE + 48))  # right behind A
    strided(PROBLEM, A, B, matrix(3, 5, BASE - 60))  # right before it


def test_columns_of_one_buffer_may_lie_side_by_side():
    strided(PROBLEM, matrix(3, 4, BASE, 9), B, matrix(3, 5, BASE + 16, 9))
    strided(PROBLEM, matrix(3, 4, BASE + 20, 9), B, matrix(3, 5, BASE, 9))
    assert "overlaps a" in fault(strided, PROBLEM, matrix(3, 4, BASE, 9), B, matrix(3, 5, BASE + 12, 9))


@settings(max_examples=300, deadline=None)
@given(
    st.tuples(*[st.integers(1, 4)] * 3),
    st.tuples(*[st.integers(0, 4)] * 2),
    st.tuples(*[st.integers(0, 40)] * 2),
)
def test_whatever_shares_an_element_is_refused(extents, extra, places):
    """A factor and C as rows within one buffer, compared with the elements they really touch."""
    m, n, k = extents
    lead_a, lead_c = k + extra[0], n + extra[1]
    a, c = matrix(m, k, BASE + 4 * places[0], lead_a), matrix(m, n, BASE + 4 * places[1], lead_c)
    touched = [
        {place + row * lead + column for row in range(m) for column in range(columns)}
        for place, lead, columns in ((places[0], lead_a, k), (places[1], lead_c, n))
    ]
    problem = Problem(m, n, k)
    if touched[0] & touched[1]:
        assert "overlaps a" in fault(strided, problem, a, matrix(k, n, BASE + 8192), c)
    elif lead_a == lead_c and m > 1 and max(k, n) < lead_a:
        span = sorted(places)
        if span[0] + min(k, n) <= span[1] <= span[0] + lead_a - max(k, n):
            strided(problem, a, matrix(k, n, BASE + 8192), c)  # side by side: taken


def batch_of(rows, columns, address, lead, stride):
    return Operand(address, (3, rows, columns), (stride, lead, 1), 0)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_batches_share_is_refused(data):
    m, n, k = data.draw(st.tuples(*[st.integers(1, 3)] * 3))
    (place_a, lead_a, stride_a, a), (place_c, lead_c, stride_c, c) = (
        data.draw(
            st.tuples(
                st.integers(0, 30),
                st.sampled_from([columns, 9, 10]),
                st.sampled_from([columns, columns + 1, 9, 9 * m, 27]),
                st.just((m, columns)),
            )
        )
        for columns in (k, n)
    )
    touched = [
        {
            place + i * stride + row * lead + column
            for i in range(3)
            for row in range(m)
            for column in range(columns)
        }
        for place, lead, stride, columns in ((place_a, lead_a, stride_a, k), (place_c, lead_c, stride_c, n))
    ]
    problem = Problem(m, n, k, batch=3)
    operands = batch_of(*a, BASE + 4 * place_a, lead_a, stride_a), matrix(k, n, BASE + 8192)
    out = batch_of(*c, BASE + 4 * place_c, lead_c, stride_c)
    if len(touched[1]) < 3 * m * n:
        assert "out has matrices" in fault(strided, problem, *operands, out)
    elif touched[0] & touched[1]:
        assert re.search("out overlaps a|out has matrices", fault(strided, problem, *operands, out))


def test_batches_of_one_buffer_may_lie_side_by_side():
    """Queries and results of three heads beside each other in rows of 40, or in three planes of such rows."""
    problem = Problem(4, 5, 6, batch=3)
    b = matrix(6, 5, BASE + 8192)
    for stride_a, stride_c in ((6, 5), (160, 160)):
        a = batch_of(4, 6, BASE, 40, stride_a)
        strided(problem, a, b, batch_of(4, 5, BASE + 4 * 18, 40, stride_c))
        assert "out overlaps a" in fault(strided, problem, a, b, batch_of(4, 5, BASE + 4 * 4, 40, stride_c))


# --- layouts ---


@pytest.mark.parametrize("transposed", [False, True])
def test_a_transposed_view_is_read_as_it_lies(transposed):
    stored = np.zeros((6, 4), np.float32)
    given_ = stored if transposed else stored.T
    letter, operand = as_stored("a", view(given_), transposed)
    assert (letter, operand.shape, operand.strides) == ("t", (6, 4), (4, 1))
    letter, operand = as_stored("a", view(given_.T), transposed)
    assert (letter, operand.shape, operand.strides) == ("n", (6, 4), (4, 1))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(1, 3), st.integers(1, 3)
)
def test_the_stored_operand_holds_the_factor(rows, columns, fortran, transposed, row_step, column_step):
    """Whatever view is given, the operand found addresses the same elements as the factor."""
    whole = np.zeros((rows * row_step, columns * column_step), np.float32, order="F" if fortran else "C")
    array = whole[::row_step, ::column_step]
    letter, operand = as_stored("x", view(array), transposed)
    factor = array.T if transposed else array
    stored = factor.T if letter == "t" else factor
    assert operand.shape == stored.shape
    assert operand.strides == tuple(stride // 4 for stride in stored.strides)
    try:
        lead = leading("x", operand, operand.shape, PROBLEM)
    except UsageError:
        assert (
            min(abs(stride) for stride in array.strides) > 4 or 1 in array.shape or row_step + column_step > 2
        )
    else:
        for i in range(operand.shape[0]):
            for j in range(operand.shape[1]):
                assert i * lead + j == i * operand.strides[0] + j * operand.strides[1]


def test_a_vector_is_no_matrix():
    assert fault(first_of, "a", view(np.zeros(4, np.float32))).startswith(
        "a has 1 dimensions, shape (4,): pass a matrix"
    )


# --- scalars and streams ---


@pytest.mark.parametrize("value", [2, 2.0, True, np.float32(2), np.float64(2), np.int64(2), Fraction(2, 1)])
def test_a_real_number_is_a_scalar(value):
    assert isinstance(scalar("alpha", value), float)
    assert scalar("alpha", value) == float(value)


@pytest.mark.parametrize("value", ["2", None, 2j, np.zeros(1), np.array(2.0), [2.0]])
def test_anything_else_is_none(value):
    assert fault(scalar, "alpha", value).endswith(": pass a real number, such as 1.0")


def test_a_scalar_beyond_float32_is_refused():
    assert "beyond the range of float32" in fault(scalar, "beta", 1e39)
    assert scalar("beta", float("inf")) == float("inf")
    assert (
        fault(scalar, "alpha", 10**400) == "alpha is an int beyond the range of float32: pass at most 3.4e38"
    )
    assert "a fractions.Fraction beyond the range" in fault(scalar, "beta", Fraction(-(10**5000)))


class WithPointer:
    def __init__(self, **names):
        vars(self).update(names)


@pytest.mark.parametrize(
    "stream",
    [
        77,
        WithPointer(ptr=77),
        WithPointer(cuda_stream=77),
        WithPointer(handle=ctypes.c_void_p(77)),
        WithPointer(handle=77),
        WithPointer(__cuda_stream__=lambda: (0, 77)),
        WithPointer(__cuda_stream__=(0, 77)),
    ],
)
def test_streams_of_every_library(stream):
    assert stream_pointer(stream) == 77


def test_the_null_stream_of_numba_is_zero():
    assert stream_pointer(WithPointer(handle=ctypes.c_void_p(None))) == 0


@pytest.mark.parametrize("stream", [-1, True, "s", 1.5, object()])
def test_what_is_no_stream(stream):
    assert "pass a stream of CuPy, PyTorch or Numba, or its handle" in fault(stream_pointer, stream)
