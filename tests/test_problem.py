from __future__ import annotations

import numpy as np
import pytest

from autotune.errors import ProblemError, UsageError
from autotune.values.problem import LAYOUTS, MAX_EXTENT, Problem, Strided, asked_maths


@pytest.mark.parametrize(
    ("layout", "a_shape", "b_shape", "lda", "ldb"),
    [
        ("nn", (3, 7), (7, 5), 7, 5),
        ("nt", (3, 7), (5, 7), 7, 7),
        ("tn", (7, 3), (7, 5), 3, 5),
        ("tt", (7, 3), (5, 7), 3, 7),
    ],
)
def test_layout_decides_the_stored_shapes(layout, a_shape, b_shape, lda, ldb):
    problem = Problem(3, 5, 7, layout)
    assert (problem.a_shape, problem.b_shape, problem.c_shape) == (a_shape, b_shape, (3, 5))
    assert (problem.lda, problem.ldb, problem.ldc) == (lda, ldb, 5)


def test_work_and_bytes():
    problem = Problem(3, 5, 7)
    assert problem.flops == 2 * 3 * 5 * 7
    assert problem.operand_bytes == 4 * (3 * 7 + 7 * 5 + 3 * 5)


def test_largest_problem_is_counted_exactly():
    problem = Problem(MAX_EXTENT, MAX_EXTENT, MAX_EXTENT)
    assert problem.flops == 2 * MAX_EXTENT**3


@pytest.mark.parametrize("name", ["m", "n", "k"])
@pytest.mark.parametrize("extent", [0, -5, 2**31, 10**30])
def test_extent_out_of_range(name, extent):
    with pytest.raises(ProblemError, match=rf"^{name} = {extent} is out of range: give 1 to 2147483647"):
        Problem(**{"m": 1, "n": 1, "k": 1, name: extent})


@pytest.mark.parametrize("name", ["m", "n", "k", "beta"])
@pytest.mark.parametrize("extent", [1.0, "1", None, True, [1]])
def test_what_is_no_integer_is_refused(name, extent):
    with pytest.raises(ProblemError, match=rf"^{name} must be an integer, not "):
        Problem(**{"m": 1, "n": 1, "k": 1, name: extent})


def test_integers_of_numpy_become_plain_ones():
    problem = Problem(np.int64(3), np.uint8(5), np.int16(7), beta=np.int32(1))  # type: ignore[arg-type]
    assert problem == Problem(3, 5, 7, beta=1)
    assert {type(each) for each in (problem.m, problem.n, problem.k, problem.beta)} == {int}
    assert problem.key == "f32_nn_m3_n5_k7_beta1_ffma"


@pytest.mark.parametrize("layout", ["xx", "", "NN", "n", "nnn", None, ["n", "n"]])
def test_unknown_layout(layout):
    with pytest.raises(ProblemError, match="is unknown: give one of nn, nt, tn, tt"):
        Problem(1, 1, 1, layout)


@pytest.mark.parametrize("beta", [2, -1])
def test_unknown_beta_class(beta):
    with pytest.raises(ProblemError, match=f"beta = {beta} .* give 0 .* or 1"):
        Problem(1, 1, 1, beta=beta)


def test_unknown_math():
    with pytest.raises(ProblemError, match="math 'fp8' is unknown: give one of ffma"):
        Problem(1, 1, 1, math="fp8")  # type: ignore[arg-type]


def test_a_problem_error_is_a_usage_error_and_a_value_error():
    assert issubclass(ProblemError, UsageError)
    assert issubclass(ProblemError, ValueError)


def test_key_tells_problems_apart():
    problems = [Problem(m, n, k, layout, beta) for m, n, k in [(1, 23, 4), (12, 3, 4), (1, 2, 34)]
                for layout in LAYOUTS for beta in (0, 1)]  # fmt: skip
    assert len({problem.key for problem in problems}) == len(problems)
    assert len({str(problem) for problem in problems}) == len(problems)


def test_flags_name_the_problem_on_the_command_line():
    assert Problem(1, 2, 3).cli_flags() == "--m 1 --n 2 --k 3"
    assert Problem(1, 2, 3, "tn", 1).cli_flags() == "--m 1 --n 2 --k 3 --layout tn --beta 1"
    assert Problem(1, 2, 3, math="3xtf32").cli_flags() == "--m 1 --n 2 --k 3 --math 3xtf32"


def test_a_problem_says_its_math_unless_it_is_the_usual() -> None:
    assert str(Problem(1, 2, 3, "tn", 1)) == "1 x 2 x 3 tn beta"
    assert str(Problem(1, 2, 3, math="3xtf32")) == "1 x 2 x 3 nn 3xtf32"
    assert Problem(1, 2, 3).key != Problem(1, 2, 3, math="3xtf32").key


def test_strided_operands() -> None:
    problem = Strided(5, 6, 7, layout="tn", lda=8, align_b=1)
    assert (problem.lda, problem.ldb, problem.ldc) == (8, 6, 6)
    assert (problem.align_a, problem.align_b, problem.align_c) == (4, 1, 4)
    assert Problem(5, 6, 7).align_a == 4
    with pytest.raises(ProblemError, match="lda = 4 is out of range: a row has 5 floats"):
        Strided(5, 6, 7, layout="tn", lda=4)
    with pytest.raises(ProblemError, match="align_c = 3 is no alignment: give 1, 2 or 4 floats"):
        Strided(5, 6, 7, align_c=3)


def test_any_asks_for_every_math_and_is_none_itself():
    assert asked_maths("any") == ("ffma", "3xtf32", "3xfp16")
    assert asked_maths("3xtf32") == ("3xtf32",)
    with pytest.raises(ProblemError, match=r"math 'fp8' is unknown: give one of ffma, 3xtf32, 3xfp16, any"):
        asked_maths("fp8")
    with pytest.raises(
        ProblemError, match=r"math 'any' is no single problem: give one of ffma, 3xtf32, 3xfp16$"
    ):
        Problem(1, 1, 1, math="any")
