from __future__ import annotations

import numpy as np
import pytest

from autotune.code.compiler import Binary, compile_text
from autotune.code.finite import finite_check
from autotune.simulator import run_ptx
from autotune.values.problem import Problem, Strided

HIDDEN_NAN = np.array([0x7F800001], np.uint32).view(np.float32)[0]
LARGEST, SMALLEST = np.finfo(np.float32).max, np.float32(1e-45)


def found(problem: Problem, a: np.ndarray, b: np.ndarray) -> float:
    source = finite_check(problem)
    binary = compile_text(source.text, source.entry, "sm_90", ("-lineinfo",))
    assert isinstance(binary, Binary), binary
    answer = np.zeros(1, np.float32)
    args = (1.0, a, b, 0.0, answer)
    run_ptx(binary.ptx, source.entry, source.launch.grid, source.launch.block, args).raise_if_faulty()
    return float(answer[0])


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, HIDDEN_NAN])
@pytest.mark.parametrize(("operand", "at"), [("a", 0), ("a", -1), ("b", 0), ("b", 3000), ("b", -1)])
def test_what_is_not_finite_is_found_wherever_it_is(value: np.float32, operand: str, at: int) -> None:
    problem = Problem(33, 70, 65, "tn")
    a, b = np.ones(problem.a_shape, np.float32), np.ones(problem.b_shape, np.float32)
    (a if operand == "a" else b).flat[at] = value
    assert found(problem, a, b) == 1


def test_every_finite_number_is_finite() -> None:
    problem = Problem(40, 40, 40)
    a = np.full(problem.a_shape, LARGEST, np.float32)
    b = np.full(problem.b_shape, SMALLEST, np.float32)
    assert found(problem, a, b) == found(problem, -a, -0 * b) == 0


def test_what_lies_between_rows_is_not_looked_at() -> None:
    problem = Strided(3, 5, 1100, lda=1200, ldb=8)
    a, b = np.full((3, 1200), np.nan, np.float32), np.full((1100, 8), np.nan, np.float32)
    a[:, :1100], b[:, :5] = 1, 1
    assert found(problem, a, b) == 0
    a[2, 1099] = np.inf
    assert found(problem, a, b) == 1
