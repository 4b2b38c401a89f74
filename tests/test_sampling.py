from __future__ import annotations

import numpy as np
import pytest

from autotune.measure.sampling import LINES, MAX_ELEMENTS, draw_samples


def draw(m, n, seed=0):
    return draw_samples(m, n, np.random.default_rng(seed))


def test_rows_are_whole_and_include_the_ends():
    rows, cols = draw(4096, 1000)
    assert len(rows.rows) == LINES
    assert len(cols.cols) == LINES
    assert np.array_equal(rows.cols, np.arange(1000))
    assert np.array_equal(cols.rows, np.arange(4096))
    assert {0, 4095} <= set(rows.rows.tolist())
    assert {0, 999} <= set(cols.cols.tolist())


def test_lines_are_distinct_and_drawn_anew():
    first, second = draw(4096, 1000, 1)[0].rows, draw(4096, 1000, 2)[0].rows
    assert len(set(first.tolist())) == LINES
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("m", [1, 2, 3, LINES])
def test_all_lines_of_a_small_matrix(m):
    assert np.array_equal(draw(m, 7)[0].rows, np.arange(m))
    assert np.array_equal(draw(7, m)[1].cols, np.arange(m))


@pytest.mark.parametrize(("m", "n"), [(4, 3 * MAX_ELEMENTS), (2**31 - 1, 1), (1, 2**31 - 1), (10**6, 10**6)])
def test_huge_matrices_are_sampled_within_the_limit(m, n):
    rows, cols = draw(m, n)
    for sample in (rows, cols):
        assert sample.count <= 2 * MAX_ELEMENTS
        assert sample.rows[-1] == m - 1
        assert sample.cols[-1] == n - 1
        assert sample.rows.dtype == sample.cols.dtype == np.int32
