"""The kernels on tensor cores in the simulator: choices and their pairs, their accuracy, planted mistakes."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pairwise
import pytest
from numpy.typing import NDArray
from pairwise import SCALARS, Case

from autotune.code.compiler import Binary, compile_text
from autotune.code.pool import CompilePool
from autotune.code.render import Source, render
from autotune.errors import Rejected
from autotune.measure.verify import UNIT_ROUNDOFF, verify_numpy
from autotune.simulator import run_ptx
from autotune.simulator.fma import fma32
from autotune.simulator.launches import workspace_of
from autotune.space.file import read_space_file
from autotune.space.space import Space
from autotune.values.device import named_device
from autotune.values.problem import Problem

Floats = NDArray[np.float32]
H200 = named_device("h200")
UNOPTIMISED = ("-Xptxas=-O0",)  # the PTX is the same
BOUND = 16  # c of the contract: |C - C64| <= c k 2^-24 |A||B|
COSTS = (  # of simulating
    "tiles_m * BM * tiles_n * BN * tiles_k * BK <= 600000",
    "tiles_m * tiles_n * split_k <= 24",
    "num_threads <= 256",
)
FAMILIES = ("sgemm_3xtf32", "sgemm_3xtf32_wgmma")
GROUPS = (  # what acts together
    "layout edge vec_a vec_b vec_c stages first_step odd_steps promote fragment_pipeline splits BK",
    "operands edge layout first_step",
    "split_k edge stages",
    "scalars vec_c edge",
    "edge group_m ragged_group",
    "edge rows",
    "edge cols",
    "edge depth",
    "BM WM layout",
    "BN WN layout",
    "BM BN",
    "target layout",
)
PAIRS = {
    family: pairwise.cases(read_space_file(family), 5000, groups=GROUPS, costs=COSTS) for family in FAMILIES
}


@functools.cache
def space(family: str) -> Space:
    return Space.load(family)


def rendered(case: Case) -> Source:
    return render(space(case.family), case.config, case.problem, case.device)


class Compiler:
    """Compiles what the selected tests need, two at a time, while the first of them run."""

    def __init__(self, pool: CompilePool) -> None:
        self.pool = pool
        self.outcomes: dict[object, Binary | Rejected] = {}

    def __call__(self, case: Case) -> Binary:
        while case not in self.outcomes:
            self.outcomes.update(dict(self.pool.collect(timeout=60)))
        outcome = self.outcomes[case]
        assert isinstance(outcome, Binary), f"{case.config.id}: {outcome}"
        return outcome


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[Compiler]:
    items = [
        item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")
    ]
    with CompilePool(workers=2, timeout_s=60) as pool:
        for case in [value for item in items for value in item.callspec.params.values()]:
            if isinstance(case, Case):
                source = rendered(case)
                pool.submit(case, source.text, source.entry, case.device.arch, UNOPTIMISED)
        yield Compiler(pool)


def stored(problem: Problem, a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """op(A) and op(B) as the problem stores them."""
    return tuple(
        np.ascontiguousarray(each if how == "n" else each.T)
        for each, how in zip((a, b), problem.layout, strict=True)
    )  # type: ignore[return-value]  # two of them


def multiply(source: Source, ptx: str, a: Floats, b: Floats, c: Floats, alpha: float, beta: float) -> Floats:
    """Run a kernel with every check on; a, b as stored."""
    launch = source.launch
    out, workspace = c.copy(), tuple(workspace_of(source.launch).values())
    args: tuple[Any, ...] = (np.float32(alpha), a.copy(), b.copy(), np.float32(beta), out, *workspace)
    report = run_ptx(ptx, source.entry, launch.grid, launch.block, args, shared_bytes=launch.shared_bytes)
    if report.faults or report.notes:
        binary = compile_text(source.text, source.entry, "sm_90", ("-lineinfo",))
        assert isinstance(binary, Binary)
        again = run_ptx(
            binary.ptx, source.entry, launch.grid, launch.block, args, shared_bytes=launch.shared_bytes
        )
        pytest.fail(f"{again.faults or report.faults or report.notes}\n{source.config.id}\n{source.problem}")
    counters = [each.view(np.uint32)[: launch.zeroed_bytes // 4] for each in workspace]
    assert not any(each.any() for each in counters), "the counters are not zero again"
    return out


def product(config: Mapping[str, int | str], family: str, a: Floats, b: Floats, layout: str = "nn") -> Floats:
    """op(A) op(B) by the family's first preset, changed and fitted."""
    problem = Problem(len(a), b.shape[1], len(b), layout, math="3xtf32")  # type: ignore[arg-type]
    source, ptx = built(family, tuple(config.items()), problem)
    c = np.full(problem.c_shape, np.nan, np.float32)
    return multiply(source, ptx, *stored(problem, a, b), c, 1.0, 0.0)


@functools.cache
def built(family: str, changes: tuple[tuple[str, int | str], ...], problem: Problem) -> tuple[Source, str]:
    """The family's first preset, changed and fitted; and its PTX."""
    base = next(iter(space(family).presets.values()))
    fitted = space(family).fitted(space(family).config({**base, **dict(changes)}), problem, H200)
    source = render(space(family), fitted, problem, H200)
    binary = compile_text(source.text, source.entry, "sm_90", UNOPTIMISED)
    assert isinstance(binary, Binary), binary
    return source, binary.ptx


def relative_error(out: Floats, a: Floats, b: Floats) -> float:
    """In the Frobenius norm, against float64."""
    reference = a.astype(np.float64) @ b.astype(np.float64)
    return float(np.linalg.norm(out - reference) / np.linalg.norm(reference))


# -- choices and their pairs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for cases in PAIRS.values() for case in cases], ids=str)
def test_a_kernel_is_right(compiled: Compiler, case: Case) -> None:
    problem, source = case.problem, rendered(case)
    _, alpha, beta, start = SCALARS[case.scalars]
    random = np.random.default_rng([problem.m, problem.n, problem.k])
    op_a = random.standard_normal((problem.m, problem.k), np.float32)
    op_b = random.standard_normal((problem.k, problem.n), np.float32)
    c = random.standard_normal(problem.c_shape, np.float32)
    row, col = problem.m // 2, problem.n // 2
    finite = np.ones(problem.c_shape, bool)
    if case.operands == "infinite":  # a kernel that multiplies what lies beyond a tile makes more of them
        op_a[row, problem.k - 1] = op_b[0, col] = np.inf
        finite[row], finite[:, col] = False, False
    if start == "nan":
        c[:] = np.nan
    a, b = stored(problem, op_a, op_b)
    out = multiply(source, compiled(case).ptx, a, b, c, alpha, beta)
    np.testing.assert_array_equal(np.isfinite(out), finite)
    if case.operands == "random":
        read = None if start == "nan" else c
        verdict = verify_numpy(problem, a, b, read, out, alpha, beta if problem.beta else 0)
        assert verdict.ok, verdict
        assert verdict.error < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_of_every_parameter_is_run(family: str) -> None:
    have = {(name, value) for case in PAIRS[family] for name, value in case.config.items()}
    want = {(name, value) for name, values in space(family).parameters.items() for value in values}
    assert {name for name, _ in want - have} == {"split_k"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split_k", [2, 3, 6, 16, 128])
def test_parts_of_k_add_up(family: str, split_k: int) -> None:
    """Every part has three steps of 32 or one more; the first is shallower. Two tiles, or one of many."""
    random = np.random.default_rng(split_k)
    n, k = 70 if split_k < 16 else 40, 32 * (3 * split_k + 1) - 5
    a, b = (random.standard_normal(shape, np.float32) for shape in ((40, k), (k, n)))
    small = {"BM": 64, "BN": 64, "stages": 3, "splits": 2}
    choices = {name: value for name, value in small.items() if name in space(family).parameters}
    out = product(
        {**choices, "split_k": split_k, "edge": "guarded", "vec_a": 1, "vec_b": 1}, family, a, b, "tn"
    )
    assert relative_error(out, a, b) < 3e-7


# -- accuracy ------------------------------------------------------------------------------------------------


def fp32(a: Floats, b: Floats) -> Floats:
    """What fused multiply-adds in the order of k give."""
    acc = np.zeros((len(a), b.shape[1]), np.float32)
    for p in range(len(b)):
        acc = fma32(a[:, p : p + 1], b[p], acc)
    return acc


def powers(random: np.random.Generator, reach: int, *shape: int) -> Floats:
    return np.exp2(random.integers(-reach, reach + 1, shape)).astype(np.float32)


def drawn(kind: str, k: int, random: np.random.Generator) -> tuple[Floats, Floats]:
    """Operands `[24, k]` and `[k, 40]`."""
    a, b = random.standard_normal((24, k), np.float32), random.standard_normal((k, 40), np.float32)
    if kind == "uniform":
        a, b = random.random((24, k), np.float32), random.random((k, 40), np.float32)
    elif kind == "badly scaled rows and columns":
        a, b = a * powers(random, 50, 24, 1), b * powers(random, 50, 1, 40)
    elif kind == "badly scaled along k":
        scale = powers(random, 50, k)
        a, b = a * scale, b / scale[:, None]
    elif kind == "elements of all sizes":
        a, b = a * powers(random, 30, *a.shape), b * powers(random, 30, *b.shape)
    elif kind == "cancelling":
        a[:, k // 2 :] = a[:, : k // 2]
        b[k // 2 :] = -b[: k // 2] * (1 + 1e-5 * random.standard_normal((k // 2, 40))).astype(np.float32)
    elif kind == "small":
        a, b = a * np.float32(2.0**-60), b * np.float32(2.0**-60)
    return a, b


KINDS = (
    "normal",
    "uniform",
    "badly scaled rows and columns",
    "badly scaled along k",
    "elements of all sizes",
    "cancelling",
    "small",
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("k", "promote"), [(256, 16), (1024, 32)])
def test_the_error_is_within_the_contract_and_no_larger_than_fp32s(
    family: str, kind: str, k: int, promote: int
) -> None:
    """In units of 2^-24 |A||B|: each element, and the root of the mean square, beside a chain of FMAs.

    Elements of all sizes are the exception: there one product decides a sum, and has an error of its own.
    """
    a, b = drawn(kind, k, np.random.default_rng(k))
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    exact, unit = wide_a @ wide_b, UNIT_ROUNDOFF * (np.abs(wide_a) @ np.abs(wide_b))
    tile = {"BM": 64, "BN": 64, "WN": 32, "promote": promote}
    choices = {name: value for name, value in tile.items() if name in space(family).parameters}
    errors = np.abs(product(choices, family, a, b) - exact) / unit
    usual = np.abs(fp32(a, b) - exact) / unit
    assert errors.max() <= BOUND * k
    mean, usual_mean = (np.sqrt(np.square(each).mean()) for each in (errors, usual))
    assert mean <= (3 if kind == "elements of all sizes" else usual_mean)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_product_is_as_exact_as_the_contract_says(family: str) -> None:
    """The terms but one are zero: what is left is the error of one product, at most 16 units."""
    random = np.random.default_rng(1)
    a, b = np.zeros((64, 128), np.float32), np.zeros((128, 64), np.float32)
    a[:, 70], b[70] = random.uniform(1, 2, 64), random.uniform(1, 2, 64)
    a[:4, 70], b[70, :4] = 1 + 2.0**-11, 2 - 2.0**-23  # hard to split
    out = product({"BM": 64, "BN": 64}, family, a, b)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    errors = np.abs(out - exact) / exact / UNIT_ROUNDOFF
    assert errors.max() <= BOUND
    assert np.sqrt(np.square(errors).mean()) < 2


@pytest.mark.parametrize("family", FAMILIES)
def test_integers_of_11_bits_are_multiplied_exactly(family: str) -> None:
    random = np.random.default_rng(2)
    a = random.integers(-2047, 2048, (33, 100)).astype(np.float32)
    b = random.integers(-3, 4, (100, 50)).astype(np.float32)
    np.testing.assert_array_equal(product({"BM": 64, "BN": 64}, family, a, b), a @ b)


NOT_FINITE = {"inf": 0x7F800000, "nan": 0x7FC00000, "hidden nan": 0x7F800001, "other nan": 0x7FFFFFFF}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", NOT_FINITE)
@pytest.mark.parametrize("operand", ["a", "b"])
def test_what_is_not_finite_stays_so_and_spoils_nothing_else(family: str, kind: str, operand: str) -> None:
    a, b = drawn("normal", 128, np.random.default_rng(3))
    b[77, 10:20] = 0  # infinity times zero is no number
    (a if operand == "a" else b).view(np.uint32)[5, 77 if operand == "a" else 15] = NOT_FINITE[kind]
    with np.errstate(invalid="ignore"):
        finite = np.isfinite(a.astype(np.float64) @ b.astype(np.float64))
    out = product({"BM": 64, "BN": 64}, family, a, b)
    np.testing.assert_array_equal(np.isfinite(out), finite)
    assert not finite.all()


@pytest.mark.parametrize("family", FAMILIES)
def test_subnormal_operands_lose_at_most_2_to_the_minus_136(family: str) -> None:
    """TF32 has 10 bits of mantissa there too: what is below its last one is lost."""
    a, b = drawn("normal", 128, np.random.default_rng(4))
    a *= np.float32(2.0**-128)
    b *= np.float32(2.0**20)
    error = np.abs(product({"BM": 64, "BN": 64}, family, a, b) - a.astype(np.float64) @ b.astype(np.float64))
    lost = 2.0**-136 * np.abs(b.astype(np.float64)).sum(axis=0)
    assert (error <= lost + 1e-6 * (np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)))).all()


# -- planted mistakes ----------------------------------------------------------------------------------------

SYNC = "__syncthreads();  // the next tile is split, the one behind it is there"
MISTAKES = {
    "no fence for wgmma": ({}, f"fence_for_wgmma();\n        {SYNC}", SYNC, "async-product"),
    "no barrier": ({}, SYNC, "", "shared-race|async"),
    "no fence of registers": ({}, "        wgmma_fence();\n        #", "        #", "async-product"),
    "waits for too few copies": ({}, "cp_async_wait<stages - 4>", "cp_async_wait<stages - 3>", "async-copy"),
    "split into the buffer in use": (
        {},
        "split_columns(to, next)",
        "split_columns(from, next)",
        "async-product",
    ),
    "copied to the buffer in use": ({}, "load_tile(vacant)", "load_tile(stage)", "async-product"),
    "one barrier with two buffers": (
        {"splits": 2},
        "        __syncthreads();  // nobody multiplies the tile before any more\n",
        "",
        "async-product|shared-race",
    ),
    "rows split into the half in use": (
        {},
        "split_rows(1 - half",
        "split_rows(half",
        "async-product|differs",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_simulator_finds_what_is_wrong_with_warpgroups(mistake: str) -> None:
    changes, old, new, faults = MISTAKES[mistake]
    problem = Problem(64, 128, 256, math="3xtf32")
    preset = {**space("sgemm_3xtf32_wgmma").presets["narrow_block"], **changes}
    source = render(space("sgemm_3xtf32_wgmma"), space("sgemm_3xtf32_wgmma").config(preset), problem, H200)
    assert old in source.text
    binary = compile_text(source.text.replace(old, new), source.entry, "sm_90", UNOPTIMISED)
    assert isinstance(binary, Binary), binary
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape, np.float32) for shape in (problem.a_shape, problem.b_shape))
    c, launch = np.zeros(problem.c_shape, np.float32), source.launch
    args = (1.0, a, b, 0.0, c)
    report = run_ptx(
        binary.ptx, source.entry, launch.grid, launch.block, args, shared_bytes=launch.shared_bytes
    )
    found = str(report.faults[0]) if report.faults else "differs" if not np.isfinite(c).all() else ""
    if not report.faults and relative_error(c, a, b) > 1e-6:
        found = "differs"
    assert re.match(faults, found), found


@pytest.mark.parametrize("family", ["sgemm_3xtf32", "sgemm_3xtf32_wgmma"])
def test_no_vector_reaches_over_the_end_of_a_longer_row(family):
    from autotune.values.problem import Strided

    space = Space.load(family)
    for layout in ("nn", "nt", "tn", "tt"):
        longer = Strided(65, 67, 517, layout, 0, "3xtf32", lda=520, ldb=520, ldc=68)
        columns = space.columns(space.enumerate(longer, H200), longer, H200)
        assert {int(columns[vec].max()) for vec in ("vec_a", "vec_b", "vec_c")} == {1}
