"""The checker over host memory: candidates are Python functions on the same addresses."""

from __future__ import annotations

import math

import numpy as np
import pytest
from host_gpu import HostGpu, NumpyKernels

from autotune.errors import DeviceError, Rejected
from autotune.measure.verify import error_bound
from autotune.measure.verify_kernels import VerifyKernels, compile_kernels
from autotune.values.measurement import Verdict
from autotune.values.problem import LAYOUTS, Problem

pytest.importorskip("cupy")
from autotune.measure.checker import Checker

SHAPES = [(70, 90, 40), (1, 33, 500), (33, 1, 7), (3, 5, 1)]
BATCH = Problem(30, 20, 10, "tn", 1, batch=5)


class Host:
    """A checker, and candidates that compute on the addresses they are given."""

    def __init__(self, problem, kernels=NumpyKernels, memory_free=1 << 30, seed=5):
        self.problem = problem
        self.gpu = HostGpu(memory_free)
        self.checker = Checker(self.gpu, kernels(self.gpu), problem, seed)

    def multiply(self, alpha, a, b, beta, c):
        problem = self.problem
        stored_a, stored_b, out = (
            self.gpu.view(address, np.float32, math.prod(shape)).reshape(shape)
            for address, shape in zip((a, b, c), problem.arrays, strict=True)
        )
        op_a = stored_a if problem.layout[0] == "n" else stored_a.swapaxes(-1, -2)
        op_b = stored_b if problem.layout[1] == "n" else stored_b.swapaxes(-1, -2)
        product = np.float32(alpha) * (op_a @ op_b)
        out[:] = product + np.float32(beta) * out if beta != 0 else product

    def then(self, mistake):
        """A candidate that is right, then makes ``mistake(a, b, c)`` on views to the end of memory."""

        def candidate(alpha, a, b, beta, c):
            self.multiply(alpha, a, b, beta, c)
            mistake(*(self.gpu.view(address, np.float32) for address in (a, b, c)))

        return candidate

    def timed(self, candidate, launches=3):
        """Launch a candidate as timing does."""
        for _ in range(launches):
            a, b, c = self.checker.operands
            candidate(1.0, a, b, float(self.problem.beta), c)


@pytest.mark.parametrize("beta", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_a_right_candidate_passes_on_every_set_and_in_full(m, n, k, layout, beta):
    host = Host(Problem(m, n, k, layout, beta))
    assert host.checker.set_count == 2
    verdicts = [host.checker.check(host.multiply) for _ in range(3)]
    host.timed(host.multiply)
    assert host.checker.check_timed(host.multiply) is None
    verdicts += host.checker.check_in_full([host.multiply], lambda index: None)
    for verdict in verdicts:
        assert isinstance(verdict, Verdict)
        assert verdict.ok, verdict.why
    assert "set 2 of 2" in verdicts[1].inputs
    assert "all elements" in verdicts[-1].inputs


@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_with_the_real_kernels_on_the_simulator(layout):
    binary = compile_kernels("sm_90")
    problem = Problem(33, 20, 24, layout, 1)
    host = Host(problem, lambda gpu: VerifyKernels(gpu.simulated(binary), gpu.sm_count))
    assert host.checker.check(host.multiply).ok

    def beyond(a, b, c):
        c[problem.m * problem.n] = 1

    assert "1 word after C" in host.checker.check(host.then(beyond)).why
    assert host.checker.check_timed(host.multiply) is None
    assert "C is wrong over NaN" in host.checker.check_timed(host.then(wrong_element)).why
    (verdict,) = host.checker.check_in_full([host.multiply], lambda index: None)
    assert verdict.ok


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("batch", "beta"), [(2, 0), (5, 1)])
def test_a_right_batch_passes(layout, batch, beta):
    host = Host(Problem(30, 20, 10, layout, beta, batch=batch))
    verdicts = [host.checker.check(host.multiply) for _ in range(2)]
    host.timed(host.multiply)
    assert host.checker.check_timed(host.multiply) is None
    verdicts += host.checker.check_in_full([host.multiply], lambda index: None)
    for verdict in verdicts:
        assert verdict.ok, verdict.why
    assert "20 columns of a product each, projection of all rows" in verdicts[0].inputs


@pytest.mark.parametrize("rows", [7, 75, 150])  # of references in memory: less than a product, some, all
@pytest.mark.parametrize("product", [0, 2, 4])
def test_a_wrong_element_of_any_product_is_named(product, rows):
    host = Host(BATCH)

    def mistake(a, b, c):
        c[product * 600 + 17 * 20 + 3] += 1

    for verdict in (host.checker.check(host.then(mistake)) for _ in range(2)):
        assert not verdict.ok
        assert f"C[{product}, 17, 3] " in verdict.why or f"row 17 of C[{product}] is wrong" in verdict.why
    host.gpu.memory_free = 20 * 20 * rows
    right, wrong = host.checker.check_in_full([host.multiply, host.then(mistake)], lambda index: None)
    assert right.ok, right.why
    assert wrong.why.startswith(f"C[{product}, 17, 3] ")


def test_a_batch_with_the_real_kernels_on_the_simulator():
    binary = compile_kernels("sm_90")
    host = Host(BATCH, lambda gpu: VerifyKernels(gpu.simulated(binary), gpu.sm_count))
    assert host.checker.check(host.multiply).ok

    def mistake(a, b, c):
        c[4 * 600 + 77] += 1

    host.timed(host.multiply)
    assert host.checker.check_timed(host.then(mistake)).why.startswith("row 3 of C[4] is wrong over NaN")
    (verdict,) = host.checker.check_in_full([host.multiply], lambda index: None)
    assert verdict.ok


def wrong_element(a, b, c):
    c[77] += 1


def unwritten_element(a, b, c):
    c[77] = np.nan


@pytest.mark.parametrize("mistake", [wrong_element, unwritten_element])
def test_a_wrong_element_in_sampled_lines_is_named(mistake):
    host = Host(Problem(70, 90, 40))
    for verdict in (
        host.checker.check(host.then(mistake)),
        *host.checker.check_in_full([host.then(mistake)], lambda index: None),
    ):
        assert not verdict.ok
        assert verdict.why.startswith("C[0, 77] ")


def test_a_wrong_element_anywhere_is_found_by_projection():
    host = Host(Problem(200, 300, 40))
    for position in np.random.default_rng(0).integers(0, 200 * 300, 20):

        def mistake(a, b, c, position=position):
            c[position] += 0.1

        verdict = host.checker.check(host.then(mistake))
        assert not verdict.ok
        assert f"row {position // 300} of C is wrong" in verdict.why or f"C[{position // 300}," in verdict.why


def test_reading_c_at_beta_0_is_found():
    host = Host(Problem(70, 90, 40, beta=1))

    def reads(alpha, a, b, beta, c):
        out = host.gpu.view(c, np.float32, 70 * 90)
        old = np.float32(beta) * out
        host.multiply(alpha, a, b, 0.0, c)
        out += old

    assert host.checker.check(reads).ok
    host.timed(reads)
    for outcome in (
        host.checker.check_timed(reads),
        *host.checker.check_in_full([reads], lambda index: None),
    ):
        assert outcome.kind == "correctness"
        assert "over NaN, with alpha = 1 and beta = 0: its projection is off by inf" in outcome.why


@pytest.mark.parametrize("alpha", [0.0, 1.0, 0.75, -0.5])
def test_a_scalar_that_is_built_in_is_found(alpha):
    host = Host(Problem(70, 90, 40, beta=1))
    candidates = [
        lambda _, a, b, beta, c: host.multiply(alpha, a, b, beta, c),
        lambda alpha_, a, b, beta, c: host.multiply(alpha_, a, b, alpha if beta else 0.0, c),
    ]
    for candidate in candidates:
        for verdict in (
            host.checker.check(candidate),
            host.checker.check(candidate),
            *host.checker.check_in_full([candidate], lambda index: None),
        ):
            assert not verdict.ok


def test_the_sets_are_checked_with_scalars_of_their_own():
    host = Host(Problem(8, 8, 8, beta=1))
    seen = []

    def listens(alpha, a, b, beta, c):
        seen.append((alpha, beta))
        host.multiply(alpha, a, b, beta, c)

    for _ in range(2):
        host.checker.check(listens)
    host.checker.check_in_full([listens], lambda index: None)
    assert len(set(seen[:3])) == 3
    assert set(seen[3:]) == {(1.0, 0.0)}


def test_a_common_factor_near_one_is_found_in_full():
    k = 1024
    host = Host(Problem(512, 64, k))

    def scaled(alpha, a, b, beta, c):
        host.multiply(alpha, a, b, beta, c)
        host.gpu.view(c, np.float32, 512 * 64)[:] *= np.float32(1 + 0.9 * error_bound(k))

    for outcome in (
        host.checker.check(scaled),
        *host.checker.check_in_full([scaled], lambda index: None),
    ):
        assert not outcome.ok
        assert "its projection is off" in outcome.why


def test_a_mistake_of_some_launches_is_found():
    host = Host(Problem(70, 90, 40))
    launches = 0

    def sometimes(a, b, c):
        nonlocal launches
        launches += 1
        if launches % 5 == 4:
            c[77] += 0.1

    candidate = host.then(sometimes)
    assert host.checker.check(candidate).ok
    host.timed(candidate)
    assert host.checker.check_timed(candidate).why.startswith("row 0 of C is wrong after timing, with ")
    (outcome,) = host.checker.check_in_full([candidate], lambda index: None)
    assert outcome.why.startswith("row 0 of C is wrong in ")
    assert "repeats over NaN" in outcome.why


@pytest.mark.parametrize("where", ["check_timed", "check_in_full"])
def test_stray_writes_of_later_launches_are_named(where):
    host = Host(Problem(70, 90, 40, beta=1))
    launches = 0

    def later(a, b, c):
        nonlocal launches
        launches += 1
        if launches > 2:
            c[70 * 90] = 1

    candidate = host.then(later)
    assert host.checker.check(candidate).ok
    if where == "check_timed":
        host.timed(candidate)
        outcome = host.checker.check_timed(candidate)
    else:
        outcome, right = host.checker.check_in_full([candidate, host.multiply], lambda index: None)
        assert right.ok
    assert outcome == Rejected("correctness", "wrote outside C: changed 1 word after C")
    assert host.checker.check(host.multiply).ok


@pytest.mark.parametrize("kernels", ["numpy", "simulated"])
def test_no_constant_passes_for_a_guard_nor_does_a_copied_word(kernels):
    binary = compile_kernels("sm_90")
    problem = Problem(8, 8, 8)
    chosen = NumpyKernels if kernels == "numpy" else lambda gpu: VerifyKernels(gpu.simulated(binary), 2)
    host = Host(problem, chosen)
    for bits in (0xFFFFFFFF, 0x7FFFFFFF, 0x7FC00000, 0xFFC00000, 0):

        def constant(a, b, c, bits=bits):
            c.view(np.uint32)[64] = bits

        assert "1 word after C" in host.checker.check(host.then(constant)).why

    def shifted(a, b, c):
        c[64:70] = c[65:71].copy()

    assert "6 words after C" in host.checker.check(host.then(shifted)).why
    assert np.isnan(host.gpu.view(host.checker.operands[2], np.float32)[64:100]).all()


def past_the_end(a, b, c):
    c[70 * 90] = 1


def far_past_the_end(a, b, c):
    c[70 * 90 + 200_000 : 70 * 90 + 200_010] = 1


def into_a(a, b, c):
    a[3] = 9


def into_b(a, b, c):
    b[40 * 90 - 1] += 1


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        (past_the_end, "changed 1 word after C"),
        (far_past_the_end, "changed 10 words after C"),
        (into_a, "changed the contents of A of input set 1"),
        (into_b, "changed the contents of B of input set 1"),
    ],
)
def test_stray_writes_are_named_and_repaired(mistake, named):
    host = Host(Problem(70, 90, 40))
    outcome = host.checker.check(host.then(mistake))
    assert outcome == Rejected("correctness", f"wrote outside C: {named}")
    for _ in range(2):
        assert host.checker.check(host.multiply).ok


def test_stray_writes_of_a_finalist_spoil_no_other():
    host = Host(Problem(70, 90, 40, beta=1))
    stray, wrong = host.then(into_b), host.then(wrong_element)
    outcomes = host.checker.check_in_full([host.multiply, stray, wrong, host.multiply], lambda index: None)
    assert [getattr(outcome, "ok", "rejected") for outcome in outcomes] == [True, "rejected", False, True]
    assert host.checker.check(host.multiply).ok


def test_references_in_chunks_cover_every_row():
    host = Host(Problem(70, 90, 40))
    host.gpu.memory_free = 16 * 90 * 13  # ten rows at a time

    def last_row(a, b, c):
        c[69 * 90 + 8] += 1

    right, wrong = host.checker.check_in_full([host.multiply, host.then(last_row)], lambda index: None)
    assert right.ok
    assert wrong.why.startswith("C[69, 8] ")


def test_whoever_runs_in_full_is_announced():
    host = Host(Problem(8, 8, 8))
    announced = []
    host.checker.check_in_full([host.multiply, host.multiply], announced.append)
    assert [index for index in announced if index is not None] == [0, 1, 0, 1]  # once, then repeatedly
    assert announced[0] is None


def test_inputs_differ_between_seeds():
    problem = Problem(8, 8, 8)
    first, second = (Host(problem, seed=seed) for seed in (1, 2))
    assert not np.array_equal(
        *(host.gpu.download(host.checker.operands[0], 64, np.float32) for host in (first, second))
    )


def test_one_set_where_two_do_not_fit_and_an_error_where_none_does():
    problem = Problem(256, 256, 256)
    needed = 11 << 20
    assert Host(problem, memory_free=needed).checker.set_count == 1
    assert Host(problem, memory_free=2 * needed).checker.set_count == 2
    with pytest.raises(
        DeviceError, match=r"^256 x 256 x 256 nn needs \d+ bytes .* and 5000000 are free: tune"
    ):
        Host(problem, memory_free=5_000_000)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (-1.0, 0.5), (1.5, 0.0)])
def test_scalars_that_are_given_are_those_checked_with(alpha, beta, full):
    problem = Problem(24, 20, 16, beta=int(beta != 0))
    host = Host(problem)
    host.checker = Checker(host.gpu, NumpyKernels(host.gpu), problem, 5, (alpha, beta))
    seen = []

    def candidate(*call):
        seen.append((call[0], call[3]))
        host.multiply(*call)

    def ignores_alpha(given, a, b, c_scalar, c):
        host.multiply(1.0, a, b, c_scalar, c)

    if full:
        verdicts = host.checker.check_in_full([candidate, ignores_alpha], lambda index: None)
    else:
        verdicts = [host.checker.check(candidate), host.checker.check(ignores_alpha)]
    assert [verdict.ok for verdict in verdicts] == [True, alpha == 1.0]
    assert seen[0] == (alpha, beta)


def test_c_is_finite_again_after_restoring():
    host = Host(Problem(8, 8, 8, beta=1))
    c = host.gpu.view(host.checker.operands[2], np.float32, 64)
    c[:] = np.nan
    host.checker.restore()
    assert np.isfinite(c).all()
