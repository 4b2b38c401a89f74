"""Three FP16 products for each of FP32, in the simulator: choices, accuracy, range, a B that is prepared."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_tf32 import BOUND, KINDS, drawn, fp32, powers, stored

from autotune import best_kernel
from autotune.code.compiler import Binary, compile_text
from autotune.code.render import Source, render
from autotune.errors import ConfigError, UsageError
from autotune.families.estimate import estimate, estimate_columns
from autotune.measure.verify import UNIT_ROUNDOFF, verify_numpy
from autotune.simulator.launches import run_launch, workspace_of
from autotune.space.space import NothingLegal, Space
from autotune.values.device import named_device
from autotune.values.problem import Problem

Floats = NDArray[np.float32]
Choice = dict[str, int | str]
H200 = named_device("h200")
SPACE = Space.load("sgemm_3xfp16_wgmma")
PRESET = SPACE.presets["two_warpgroups"]
FEW_SMS = replace(H200, sm_count=3)  # so that blocks take turns at several tiles
SMALL: Choice = {"BM": 64, "BN": 64}
UNOPTIMISED = ("-Xptxas=-O0",)  # the PTX is the same


@functools.cache
def compiled(source: Source) -> str:
    binary = compile_text(source.text, source.entry, "sm_90", UNOPTIMISED)
    assert isinstance(binary, Binary), binary
    return binary.ptx


def source_of(problem: Problem, choice: Choice) -> Source:
    config = SPACE.fitted(SPACE.config({**PRESET, **choice}), problem, FEW_SMS)
    return render(SPACE, config, problem, FEW_SMS)


def multiply(
    source: Source, a: Floats, b: Floats, c: Floats, alpha: float = 1.0, beta: float = 0.0, times: int = 1
) -> Floats:
    """Run a kernel so many times in one workspace with every check on; a, b as stored."""
    workspace, outs = workspace_of(source.launch), []
    for _ in range(times):
        values = {"alpha": alpha, "a": a.copy(), "b": b.copy(), "beta": beta, "c": c.copy(), **workspace}
        run_launch(compiled(source), source.launch, values).raise_if_faulty()
        outs.append(values["c"])
    np.testing.assert_array_equal(outs[0], outs[-1])
    return outs[0]


def product(a: Floats, b: Floats, choice: Choice = SMALL, layout: str = "nn") -> Floats:
    problem = Problem(len(a), b.shape[1], len(b), layout, math="3xfp16")  # type: ignore[arg-type]
    c = np.full(problem.c_shape, np.nan, np.float32)
    return multiply(source_of(problem, choice), *stored(problem, a, b), c)


def by_3xtf32(a: Floats, b: Floats) -> Floats:
    """What the kernel gives that computes what is out of range."""
    fallback = SPACE.fallback(Problem(len(a), b.shape[1], len(b), math="3xfp16"), H200)
    assert fallback is not None
    c = np.full((len(a), b.shape[1]), np.nan, np.float32)
    return multiply(render(*fallback), a, b, c)


# -- choices -------------------------------------------------------------------------------------------------

CASES: list[tuple[tuple[Any, ...], Choice]] = [
    ((128, 128, 128), {"stages": 2, "group_m": 4}),
    ((65, 131, 65, "tt", 1), {**SMALL, "stages": 5, "vec_c": 1, "group_m": 4}),
    ((200, 70, 300, "tn"), {"BM": 192, "BN": 96, "stages": 3, "promote": 64}),
    ((130, 210, 100, "nt", 1), {"BN": 192, "stages": 2, "group_m": 16}),
    ((60, 150, 66), {"BM": 64, "BN": 160, "stages": 3}),
    ((260, 66, 129, "nn", 1), {**SMALL, "stages": 6, "promote": 64}),
    ((3, 37, 1030, "tn"), {"BM": 64, "BN": 32, "stages": 4, "vec_c": 1}),
]


@pytest.mark.parametrize(("problem", "choice"), CASES, ids=[str(problem) for problem, _ in CASES])
def test_a_kernel_is_right(problem: tuple[Any, ...], choice: Choice) -> None:
    asked = Problem(*problem, math="3xfp16")
    random = np.random.default_rng(1)
    a, b, c = (random.standard_normal(shape, np.float32) for shape in asked.arrays)
    beta = -0.5 if asked.beta else 0.0
    start = c if asked.beta else np.full_like(c, np.nan)
    out = multiply(source_of(asked, choice), a, b, start, 0.75, beta, times=2)
    verdict = verify_numpy(asked, a, b, c if asked.beta else None, out, 0.75, beta)
    assert verdict.ok, verdict
    assert verdict.error < 3e-7


def test_every_value_of_every_parameter_is_run_and_blocks_take_turns() -> None:
    sources = [source_of(Problem(*problem, math="3xfp16"), choice) for problem, choice in CASES]
    have = {item for source in sources for item in source.config.items()}
    assert have == {(name, value) for name, values in SPACE.parameters.items() for value in values}
    turns = [-(-each.problem.m // int(each.config["BM"])) / math.prod(each.launch.grid) for each in sources]
    assert max(turns) > 1.5


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (
            Problem(32768, 32768, 32768, math="3xfp16"),
            "what is split may take 4 GiB; give parts of the probl",
        ),
        (
            Problem(4096, 4096, 4096, math="3xfp16", batch=64),
            "what is split may take 4 GiB; give parts of the",
        ),
        (Problem(128, 128, 64, math="3xfp16"), "the kernel of 3xTF32, which computes what is out of range"),
    ],
    ids=str,
)
def test_what_it_does_not_compute_is_said(problem: Problem, why: str) -> None:
    with pytest.raises(NothingLegal, match=why):
        SPACE.fitted(PRESET, problem, H200)
    with pytest.raises(ConfigError, match=why):
        SPACE.require_legal(SPACE.config({**PRESET, "edge": "guarded"}), problem, H200)
    with pytest.raises(NothingLegal, match=f"{why}.*(math 3xtf32.|name another family)$"):
        SPACE.enumerate(problem, H200)


# -- accuracy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_within_the_contract_and_near_that_of_3xtf32(kind: str) -> None:
    """In units of 2^-24 |A||B|: each element, and the root of the mean square."""
    k = 300
    a, b = drawn(kind, k, np.random.default_rng(k))
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    exact, unit = wide_a @ wide_b, UNIT_ROUNDOFF * (np.abs(wide_a) @ np.abs(wide_b))
    errors, theirs, usual = (np.abs(each(a, b) - exact) / unit for each in (product, by_3xtf32, fp32))
    assert errors.max() <= BOUND * k
    mean, tf32_mean, usual_mean = (np.sqrt(np.square(each).mean()) for each in (errors, theirs, usual))
    assert mean <= 1.1 * tf32_mean
    assert mean <= usual_mean or kind == "elements of all sizes"


def test_one_product_is_as_exact_as_the_contract_says() -> None:
    """The terms but one are zero: what is left is the error of one product."""
    random = np.random.default_rng(1)
    a, b = np.zeros((24, 300), np.float32), np.zeros((300, 40), np.float32)
    a[:, 70], b[70] = random.uniform(1, 2, 24), random.uniform(1, 2, 40)
    a[:4, 70], b[70, :4] = 1 + 2.0**-11, 2 - 2.0**-23  # hard to split
    exact = a.astype(np.float64) @ b.astype(np.float64)
    check_one_product(a, b, exact)


@pytest.mark.parametrize("power", [-3, -2, -1, 0, 5, 13])
def test_one_product_is_as_exact_at_every_magnitude_or_is_left(power: int) -> None:
    """Beside an element that sets the scale, but multiplies a zero; lo is a tie, or just below one."""
    random = np.random.default_rng(3)
    a, b = np.zeros((24, 300), np.float32), np.zeros((300, 40), np.float32)
    a[:, 0], b[1] = 2.0**14, 2.0**14
    a[:, 70], b[70] = random.uniform(1, 1.05, 24) * 2.0**power, random.uniform(1, 1.05, 40) * 2.0**power
    for x in (a[:, 70], b[70]):
        x.view(np.uint32)[...] = x.view(np.uint32) & ~np.uint32(3) | 2
    if power == -3:  # lo would end too early
        np.testing.assert_array_equal(product(a, b), by_3xtf32(a, b))
    else:
        check_one_product(a, b, a.astype(np.float64) @ b.astype(np.float64))


def check_one_product(a: Floats, b: Floats, exact: NDArray[np.float64]) -> None:
    errors = np.abs(product(a, b) - exact) / exact / UNIT_ROUNDOFF
    assert (
        errors.max() <= 10
    )  # two units for each split, four for the product of the low parts, two to cut the sum off
    assert np.sqrt(np.square(errors).mean()) < 2


def test_integers_of_11_bits_are_multiplied_exactly() -> None:
    random = np.random.default_rng(2)
    a = random.integers(-2047, 2048, (24, 300)).astype(np.float32)
    b = random.integers(-3, 4, (300, 40)).astype(np.float32)
    np.testing.assert_array_equal(product(a, b), a @ b)


def test_subnormal_operands_lose_nothing() -> None:
    """Rows are brought to the same size whatever it was."""
    a, b = drawn("normal", 300, np.random.default_rng(4))
    tiny = a * np.float32(2.0**-140)
    assert (tiny != 0).any()
    assert np.abs(tiny[tiny != 0]).max() < 2.0**-126
    large = b * np.float32(2.0**120)
    exact = tiny.astype(np.float64) @ large.astype(np.float64)
    assert np.linalg.norm(product(tiny, large) - exact) < 2e-7 * np.linalg.norm(exact)


# -- range ---------------------------------------------------------------------------------------------------


def one_huge(a: Floats, b: Floats) -> None:
    a[3, 5] = 1e20


def infinite(a: Floats, b: Floats) -> None:
    b[7, 3] = np.inf


def no_number(a: Floats, b: Floats) -> None:
    a[2, 100] = np.nan


def few_large(a: Floats, b: Floats) -> None:
    a[:, 10:] *= 1e-6


def along_k(a: Floats, b: Floats) -> None:
    scale = np.exp2(np.linspace(-50, 50, a.shape[1], dtype=np.float32))
    a *= scale
    b /= scale[:, None]


@pytest.mark.parametrize("change", [one_huge, infinite, no_number, few_large, along_k])
def test_what_is_out_of_range_is_left_to_3xtf32(change: Callable[[Floats, Floats], None]) -> None:
    a, b = drawn("normal", 300, np.random.default_rng(5))
    assert not np.array_equal(product(a, b), by_3xtf32(a, b))
    change(a, b)
    np.testing.assert_array_equal(product(a, b), by_3xtf32(a, b))


def test_each_product_of_a_batch_is_in_range_or_not_on_its_own() -> None:
    problem = Problem(70, 66, 130, "tt", 1, "3xfp16", batch=3)
    random = np.random.default_rng(9)
    a, b, c = (random.standard_normal(shape, np.float32) for shape in problem.arrays)
    a[1, 3, 3] = 1e20
    source = source_of(problem, SMALL)
    out = multiply(source, a, b, c, 0.75, -0.5, times=2)
    alone = replace(problem, batch=1)
    fallback = SPACE.fallback(alone, H200)
    assert fallback is not None
    for index, one in enumerate((source_of(alone, SMALL), render(*fallback), source_of(alone, SMALL))):
        expected = multiply(one, a[index], b[index], c[index], 0.75, -0.5)
        np.testing.assert_array_equal(out[index], expected)


def rows_of_zeros(a: Floats, b: Floats) -> None:
    a[::2], b[:, 1] = 0, 0


def most_zeros(a: Floats, b: Floats) -> None:
    a[np.random.default_rng(6).random(a.shape) < 0.99] = 0


def rows_scaled(a: Floats, b: Floats) -> None:
    a *= np.exp2(np.linspace(-50, 50, len(a), dtype=np.float32))[:, None]
    b *= np.exp2(np.linspace(50, -50, b.shape[1], dtype=np.float32))


def tiny_rows(a: Floats, b: Floats) -> None:
    a[::3] *= np.float32(1e-38)
    a[1] = np.float32(2.0**-149)


def rectified(a: Floats, b: Floats) -> None:
    np.maximum(a, 0, out=a)


@pytest.mark.parametrize("change", [rows_of_zeros, most_zeros, rows_scaled, tiny_rows, rectified])
def test_what_is_in_range_is_not(change: Callable[[Floats, Floats], None]) -> None:
    a, b = drawn("normal", 300, np.random.default_rng(5))
    change(a, b)
    out = product(a, b)
    assert not np.array_equal(out, by_3xtf32(a, b))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    limit = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64))
    assert (np.abs(out - exact) <= 12 * UNIT_ROUNDOFF * limit + 2.0**-149).all()


@pytest.mark.parametrize("lost", [96, 97])
def test_so_many_elements_may_be_lost_as_two_large_factors_outweigh(lost: int) -> None:
    """With six places where both factors are large, 16 x 6 elements of A, and none of B, may be lost."""
    k, both = 300, 6
    random = np.random.default_rng(7)
    a, b = random.uniform(2.0**-5, 1, (24, k)), random.uniform(1, 1.5, (k, 40))
    a[:, 0], b[0] = 1.5, 1.5
    a[:, both : both + lost] = random.uniform(0.6, 1, (24, lost)) * 2.0**-18
    b[both + lost :] = 0
    a, b = a.astype(np.float32), b.astype(np.float32)
    a.view(np.uint32)[:, both : both + lost] |= 1  # so that no lo can hold the last bit
    out = product(a, b)
    assert np.array_equal(out, by_3xtf32(a, b)) == (lost > 16 * both)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    errors = np.abs(out - exact) / (np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)))
    assert errors.max() <= BOUND * UNIT_ROUNDOFF


def structured(random: np.random.Generator, shape: tuple[int, int], along: int) -> Floats:
    """N(0,1), changed in one of many ways: scaled by row, by element or as a whole, thinned out, spiked."""
    x, kind = random.standard_normal(shape, np.float32), random.integers(0, 8)
    if kind == 0:
        x *= powers(random, int(random.integers(1, 100)), *shape)
    elif kind == 1:
        x *= powers(random, 100, *(extent if axis == along else 1 for axis, extent in enumerate(shape)))
    elif kind == 2:
        x[random.random(shape) < random.random()] = 0
    elif kind == 3:
        x[random.random(shape) < random.random()] *= np.float32(2.0 ** -random.integers(1, 60))
    elif kind == 4:
        x *= np.float32(2.0 ** -random.integers(100, 149))
    elif kind == 5:
        x[tuple(random.integers(0, extent) for extent in shape)] = 2.0 ** random.integers(-100, 100)
    elif kind == 6:
        x = random.integers(-5000, 5000, shape).astype(np.float32)
    return x


def test_what_is_not_left_keeps_the_bound_whatever_the_operands() -> None:
    kept = 0
    for seed in range(8):
        random = np.random.default_rng(seed)
        a, b = structured(random, (24, 300), 0), structured(random, (300, 40), 1)
        out = product(a, b)
        if np.array_equal(out, by_3xtf32(a, b), equal_nan=True):
            continue
        kept += 1
        exact = a.astype(np.float64) @ b.astype(np.float64)
        limit = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64))
        inside = limit < 3e38
        error = np.abs(np.where(inside, out - exact, 0))
        assert (error <= BOUND * UNIT_ROUNDOFF * limit + 2.0**-149).all(), seed
    assert kept >= 4


# -- planted mistakes ----------------------------------------------------------------------------------------

FILLED = "            wait(filled + stage * 8, parity);\n"
MISTAKES = {
    "the tile is not waited for": (FILLED, "", "async|proxy|race"),
    "the buffer is not waited for": ("wait(emptied + stage * 8, parity);\n", "\n", "async|race|barrier"),
    "the buffer is given back too early": (
        FILLED,
        f"{FILLED}            if (lane == 0) arrive(emptied + stage * 8);\n",
        "async|race|barrier",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_simulator_finds_what_is_wrong(mistake: str) -> None:
    old, new, kinds = MISTAKES[mistake]
    problem = Problem(64, 64, 512, math="3xfp16")
    source = source_of(problem, {**SMALL, "stages": 2})
    assert old in source.text
    binary = compile_text(source.text.replace(old, new), source.entry, "sm_90", UNOPTIMISED)
    assert isinstance(binary, Binary), binary
    a, b = (np.random.default_rng(0).standard_normal(shape, np.float32) for shape in problem.arrays[:2])
    values = {"alpha": 1.0, "a": a, "b": b, "beta": 0.0, "c": np.zeros(problem.c_shape, np.float32)}
    report = run_launch(binary.ptx, source.launch, {**values, **workspace_of(source.launch)})
    assert report.faults
    assert any(kind in report.faults[0].kind for kind in kinds.split("|")), report.faults[0]


# -- prepare -------------------------------------------------------------------------------------------------


def test_a_prepared_b_gives_the_same_bits() -> None:
    random = np.random.default_rng(8)
    kernel = best_kernel(70, 140, 200, layout="nt", math="3xfp16", device="simulator")
    a, other = (random.standard_normal((70, 200), np.float32) for _ in range(2))
    b = random.standard_normal(kernel.problem.b_shape, np.float32)
    prepared = kernel.prepare(b)
    other[3, 3] = 1e30  # left to 3xTF32, which reads b itself
    for each in (a, other):
        np.testing.assert_array_equal(kernel(each, prepared), kernel(each, b))
    assert b.nbytes <= prepared.nbytes <= 2 * b.nbytes


def test_who_cannot_take_a_prepared_b_says_so() -> None:
    b = np.ones((140, 200), np.float32)
    kernel = best_kernel(70, 140, 200, layout="nt", math="3xfp16", device="simulator")
    prepared = kernel.prepare(b)
    plain = best_kernel(70, 140, 200, layout="nt", device="simulator")
    with pytest.raises(
        UsageError, match=r"b was prepared for sgemm_3xfp16_wgmma, n 140, k 200, .*; this kernel is s"
    ):
        plain(np.ones((70, 200), np.float32), prepared)
    square = np.ones((128, 128), np.float32)
    turned, straight = (
        best_kernel(64, 128, 128, layout=layout, math="3xfp16", device="simulator") for layout in ("nt", "nn")
    )
    with pytest.raises(UsageError, match=r"B as in layout nt, .*; this kernel is .* B as in layout nn"):
        straight(np.ones((64, 128), np.float32), turned.prepare(square))
    with pytest.raises(UsageError, match=r"a kernel of sgemm\w* prepares nothing: pass b itself"):
        plain.prepare(b)
    batched = best_kernel(70, 140, 200, layout="nt", batch=2, math="3xfp16", device="simulator")
    with pytest.raises(UsageError, match="a prepared B is that of one product: get a kernel without batch"):
        batched.prepare(b)
    with pytest.raises(UsageError, match=r"b has shape \(200, 140\)"):
        kernel.prepare(b.T)
    with pytest.raises(UsageError, match=r"^b is float64"):
        kernel.prepare(b.astype(np.float64))
    with pytest.raises(UsageError, match=r"^b is a list"):
        kernel.prepare(b.tolist())


def test_copies_of_a_prepared_b_are_the_same_and_none_is_pickled() -> None:
    kernel = best_kernel(70, 140, 200, math="3xfp16", device="simulator")
    a, b = np.ones((70, 200), np.float32), np.ones((200, 140), np.float32)
    prepared = kernel.prepare(b)
    copies = [copy.copy(prepared), copy.deepcopy(prepared)]
    del prepared
    for each in copies:
        np.testing.assert_array_equal(kernel(a, each), kernel(a, b))
    with pytest.raises(UsageError, match="a prepared B cannot be pickled: pickle B, and prepare it where"):
        pickle.dumps(copies[0])
    assert len(repr(copies[0])) < 200


# -- estimate ------------------------------------------------------------------------------------------------

MEASURED = [  # cubes: extent; BM, BN, stages, promote; us on an H200
    (4096, 128, 128, 3, 32, 660), (4096, 128, 192, 2, 64, 696), (4096, 128, 160, 3, 32, 697),
    (8192, 128, 128, 3, 32, 4895), (8192, 128, 192, 2, 64, 4512), (8192, 192, 128, 2, 32, 4762),
    (16384, 192, 128, 2, 64, 35043), (16384, 128, 128, 3, 32, 38990), (2048, 128, 128, 3, 32, 117),
    (2048, 128, 128, 2, 32, 119), (1536, 128, 96, 4, 64, 80), (1024, 128, 64, 4, 32, 30),
]  # fmt: skip


@pytest.mark.parametrize(("extent", "BM", "BN", "stages", "promote", "us"), MEASURED)
def test_the_estimate_is_near_what_was_measured(
    extent: int, BM: int, BN: int, stages: int, promote: int, us: float
) -> None:
    problem = Problem(extent, extent, extent, math="3xfp16")
    tile: Choice = {"BM": BM, "BN": BN, "stages": stages, "promote": promote, "edge": "guarded"}
    values = SPACE.values(SPACE.config({**PRESET, **tile}), problem, H200)
    found = estimate(SPACE, values, problem, H200)
    assert found.ms * 1e3 == pytest.approx(us, rel=0.15)
    assert found.bottleneck in ("tensor", "split")


def test_columns_say_what_single_configs_do() -> None:
    problem = Problem(1000, 1000, 1000, math="3xfp16")
    legal = SPACE.enumerate(problem, H200)
    columns = estimate_columns(SPACE, SPACE.columns(legal, problem, H200), problem, H200)
    for index in range(0, len(legal), len(legal) // 7):
        values = SPACE.values(legal.config(index), problem, H200)
        assert columns[index] == pytest.approx(estimate(SPACE, values, problem, H200).ms)
