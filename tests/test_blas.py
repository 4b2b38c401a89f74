from __future__ import annotations

import pytest

from autotune.tuning.blas import _libraries, blas_threads


def threads():
    return [get() for get, _ in _libraries()]


def test_threads_are_set_for_a_while_only():
    before = threads()
    if not before:
        pytest.skip("NumPy was not built with OpenBLAS")
    with blas_threads(1):
        assert set(threads()) == {1}
        with blas_threads(2):
            assert set(threads()) == {2}
        assert set(threads()) == {1}
    assert threads() == before


def test_an_error_within_sets_them_back():
    before = threads()
    with pytest.raises(KeyError), blas_threads(1):
        raise KeyError
    assert threads() == before
