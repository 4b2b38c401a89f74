"""The skinny family in the simulator: every pair of choices on all kinds of problem, twice; its traffic."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pairwise import OPERANDS, SCALARS, all_pairs
from test_render import assert_tidy

from autotune.code.compiler import Binary, compile_text
from autotune.code.pool import CompilePool
from autotune.code.render import Source, render
from autotune.measure.proof import miniatures, prove, small_problem
from autotune.measure.verify import UNIT_ROUNDOFF
from autotune.simulator import Report, run_ptx
from autotune.simulator.counters import GLOBAL_REQUESTS, GLOBAL_SECTORS, SHARED_CONFLICTS
from autotune.simulator.launches import workspace_of
from autotune.space.space import Config, Space
from autotune.values.device import named_device
from autotune.values.measurement import Verdict
from autotune.values.problem import LAYOUTS, Layout, Problem, Strided

H200 = named_device("h200")
SKINNY = Space.load("sgemm_skinny")
CALL = "prefetch.global.L2 [%0];"
CHECKED_CALL = (
    "{ .reg .f32 called; ld.volatile.global.f32 called, [%0]; }"  # the simulator checks where it reads
)
UNOPTIMISED = ("-Xptxas=-O0",)  # the PTX is the same; of the machine code nothing is asked here
STRIDES = {  # floats added to each leading dimension; what the addresses are multiples of
    "tight": (0, 4),
    "plus1": (1, 4),
    "plus3": (3, 4),
    "plus64": (64, 4),
    "base1": (0, 1),
    "base2": (64, 2),
}
NARROW = (1, 2, 3, 5, 8, 16, 32)
WIDE = (1, 2, 31, 32, 33, 62, 64, 96, 126, 128, 132, 260)
DEPTHS = (1, 2, 3, 32, 33, 64, 130, 256, 516, 1023)
FEATURES = {  # what no parameter says alone
    "cut": lambda v: v["split_k"] > 1,
    "uneven": lambda v: v["tiles_k"] % v["split_k"] != 0,
    "rest": lambda v: v["k"] % v["BK"] != 0,
    "long": lambda v: v["tiles_k"] >= 2 * v["split_k"] + 1,
    "passes": lambda v: v["pass_rows"] < v["narrow"],
    "ragged": lambda v: v["narrow"] % v["pass_rows"] != 0,
    "over_the_edge": lambda v: v["wide"] % v["BW"] != 0,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A config, a problem, and how to run it."""

    config: Config
    problem: Problem
    scalars: str
    operands: str

    def __str__(self) -> str:
        p = self.problem
        more = "" if type(p) is Problem else f"-ld{p.lda}_{p.ldb}_{p.ldc}-base{p.align_a}"
        return f"{p.m}x{p.n}x{p.k}-{p.layout}-{self.scalars.replace(' ', '_')}-{self.operands}{more}"


# -- cases ---------------------------------------------------------------------------------------------------


def everything(folder: Path) -> Space:
    """The space without the rules that only narrow a search, with one against long simulations instead."""
    dropped = "\n".join(f"{rule.name} = false" for rule in SKINNY.rules if rule.narrows)
    path = folder / "everything.toml"
    path.write_text(
        'extends = "sgemm_skinny"\n[parameters]\nmin_blocks = [1]\nblocks_per_sm = [0, 1, 3]\n'
        f"[search]\n{dropped}\n"
        'cost = { expr = "tiles * BW * narrow * tiles_k * BK <= 300000", reason = "it takes too long" }\n'
        'code = { expr = "body_bytes <= 8000", reason = "it takes too long to compile" }\n'
        'copies = { expr = "narrow * BK <= 40 * num_threads", reason = "it takes too long to compile" }\n'
    )
    return Space.load(path)


def drawn_problems(random: random.Random, count: int) -> Iterator[tuple[Problem, str]]:
    for number in range(count):
        narrow, scalars = NARROW[number % len(NARROW)], random.choice(list(SCALARS))
        sizes = [(max(narrow, wide), k) for wide in WIDE for k in DEPTHS]
        wide, k = random.choice([(w, k) for w, k in sizes if narrow * w * max(k, 32) <= 100_000])
        m, n = (narrow, wide) if random.random() < 0.5 else (wide, narrow)
        problem = Problem(m, n, k, random.choice(LAYOUTS), SCALARS[scalars][0])
        yield strided(problem, random.choice(list(STRIDES))), scalars


def strided(problem: Problem, kind: str) -> Problem:
    added, align = STRIDES[kind]
    if kind == "tight":
        return problem
    names = {f"ld{x}": getattr(problem, f"ld{x}") + added for x in "abc"}
    return Strided(**vars(problem), **names, **{f"align_{x}": align for x in "abc"})


def drawn_cases(folder: Path) -> list[Case]:
    """Few points with every pair of choices, features and kinds of problem that many random ones have."""
    space, chance = everything(folder), random.Random(0)
    factors: list[list[Any]] = []
    cases: list[Case] = []
    for problem, scalars in drawn_problems(chance, 72):
        legal = space.enumerate(problem, H200)
        some = chance.sample(range(len(legal)), min(len(legal), 120))
        drawn = dataclasses.replace(legal, ordinals=legal.ordinals[some])
        columns = {"k": np.full(len(drawn), problem.k), **space.columns(drawn, problem, H200)}
        for i in range(len(drawn)):
            values = {name: column[i] for name, column in columns.items()}
            config, operands = drawn.config(i), chance.choice(OPERANDS)
            stride = "tight" if type(problem) is Problem else f"{problem.ldc - problem.n}, {problem.align_a}"
            kinds = [values["wide_is_n"], problem.layout, values["narrow"], scalars, operands, stride]
            features = [bool(feature(values)) for feature in FEATURES.values()]
            factors.append([*config.values(), *kinds, *features])
            cases.append(Case(config, problem, scalars, operands))
    codes = [np.unique(np.array(column, str), return_inverse=True) for column in zip(*factors, strict=True)]
    points = np.stack([code for _, code in codes], axis=1)
    return [cases[i] for i in all_pairs(points, [len(names) for names, _ in codes], 0)]


# -- running one kernel --------------------------------------------------------------------------------------


class Operand:
    """A matrix with no float in bounds before its first row and behind its last; between rows are NaNs."""

    def __init__(self, shape: tuple[int, int], ld: int, align: int) -> None:
        skipped = align % 4  # a new array is aligned to 16 bytes
        size = (shape[0] - 1) * ld + shape[1]
        self.memory = np.full(skipped + size, np.nan, np.float32)[skipped:]
        self.matrix = np.lib.stride_tricks.as_strided(self.memory, shape, (4 * ld, 4))

    def gaps(self) -> NDArray[np.float32]:
        """The floats between the rows."""
        rows, width = self.matrix.shape
        step = self.matrix.strides[0] // 4
        starts = range(width, (rows - 1) * step, step)
        return np.concatenate([self.memory[at : at + step - width] for at in starts] or [self.memory[:0]])


def wrong(case: Case, source: Source, binary: Binary) -> str:
    """Run a kernel twice with every check on; say what is wrong with it, or ""."""
    p = case.problem
    _, alpha, beta, start = SCALARS[case.scalars]
    weight = beta if p.beta else 0.0  # a kernel that does not read C has no use for beta
    chance = np.random.default_rng([p.m, p.n, p.k])
    a, b, c = (
        Operand(shape, ld, align)
        for shape, ld, align in (
            (p.a_shape, p.lda, p.align_a), (p.b_shape, p.ldb, p.align_b), (p.c_shape, p.ldc, p.align_c),
        )
    )  # fmt: skip
    for each in (a, b, c):
        each.matrix[:] = chance.standard_normal(each.matrix.shape, np.float32)
    op_a = a.matrix if p.layout[0] == "n" else a.matrix.T
    op_b = b.matrix if p.layout[1] == "n" else b.matrix.T
    if case.operands == "infinite":
        op_a[p.m // 2, 0] = op_b[p.k - 1, p.n // 2] = np.inf
        op_a[0, p.k // 2] = np.nan
    if start == "nan":
        c.matrix[:] = np.nan
    before = c.memory.copy()
    with np.errstate(all="ignore"):
        left, right = op_a.astype(np.float64), op_b.astype(np.float64)
        old = weight * c.matrix.astype(np.float64) if weight else np.zeros(p.c_shape)
        exact = alpha * (left @ right) + old
        size = abs(alpha) * (np.abs(left) @ np.abs(right)) + np.abs(old)
    workspace = tuple(workspace_of(source.launch).values())
    found: list[NDArray[np.float32]] = []
    for _ in range(2):  # the second launch finds the counters as the first one left them
        c.memory[:] = before
        arrays = np.float32(alpha), a.memory, b.memory, np.float32(beta), c.memory, *workspace
        report = run(source, binary, arrays)
        for found in report.faults + report.notes:
            return str(found)
        found.append(c.matrix.copy())
    if not np.isnan(np.concatenate([each.gaps() for each in (a, b, c)])).all():
        return "something was written between the rows"
    if (found[0].view(np.uint32) != found[1].view(np.uint32)).any():
        return "two launches differ"
    finite = np.isfinite(exact)
    if (np.isnan(found[0]) != np.isnan(exact)).any() or (np.isinf(found[0]) != np.isinf(exact)).any():
        return "infinities or NaNs are not where they should be"
    off = np.abs(found[0][finite] - exact[finite]) > (p.k + 3) * UNIT_ROUNDOFF * size[finite]
    return f"{np.count_nonzero(off)} of {off.size} elements are off" if off.any() else ""


def run(source: Source, binary: Binary, arguments: tuple[Any, ...], *, counters: bool = False) -> Report:
    launch = source.launch
    return run_ptx(
        binary.ptx, source.entry, launch.grid, launch.block, arguments,
        shared_bytes=launch.shared_bytes, counters=counters,
    )  # fmt: skip


# -- tests ---------------------------------------------------------------------------------------------------


def test_every_pair_of_choices_is_right_twice(tmp_path: Path) -> None:
    cases = drawn_cases(tmp_path)
    for name, values in everything(tmp_path).parameters.items():
        assert {case.config[name] for case in cases} == set(values)
    faults = []
    with CompilePool(workers=2, timeout_s=60) as pool:
        for case in cases:
            source = render(SKINNY, case.config, case.problem, H200)
            assert (CALL in source.text) == (case.config["ahead"] > 0)
            text = source.text.replace(CALL, CHECKED_CALL)
            pool.submit((case, source), text, source.entry, "sm_90", UNOPTIMISED)
        end = time.monotonic() + 240
        while pool.pending and time.monotonic() < end:
            for (case, source), binary in pool.collect(timeout=1):
                assert isinstance(binary, Binary), f"{case}: {binary}"
                if why := wrong(case, source, binary):
                    faults.append(f"{case} {case.config.id}: {why}")
    assert not faults, "\n".join(faults)


PROBLEMS = {
    "row": Problem(1, 4096, 4096),
    "rows": Problem(16, 4096, 4096, "nt"),
    "column": Problem(4096, 3, 4096, "tt"),
    "deep": Problem(512, 8, 500_000, "nn", 1),
    "odd": Problem(7, 4095, 4097, "nt"),
    "columns": Problem(18_944, 9, 3584, "tn"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_miniatures_keep_the_paths_and_are_right(name: str) -> None:
    problem = PROBLEMS[name]
    legal = SKINNY.enumerate(problem, H200)
    chance = random.Random(1)
    for index in (SKINNY.starts(legal)[0], chance.randrange(len(legal))):
        config = legal.config(index)
        full = SKINNY.values(config, problem, H200)
        for each, miniature in zip(count(), miniatures(SKINNY, config, problem, H200), strict=False):
            small = SKINNY.values(config, miniature, H200)
            for path in ("wide_is_n", "narrow", "vec_w", "vec_n", "pass_rows"):
                assert small[path] == full[path]
            assert (small["split_k"] > 1) == (full["split_k"] > 1)
            assert (miniature.k % small["BK"] == 0) == (problem.k % full["BK"] == 0) or each == 1
            assert small["tiles_k"] >= 2 * small["split_k"] or miniature.k == problem.k
        assert isinstance(prove(SKINNY, config, problem, H200), Verdict)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_text_is_tidy(name: str) -> None:
    legal = SKINNY.enumerate(PROBLEMS[name], H200)
    chance = random.Random(2)
    for _ in range(5):
        config = legal.config(chance.randrange(len(legal)))
        assert_tidy(render(SKINNY, config, PROBLEMS[name], H200).text)


GUARDED = {
    "vec_a": 1, "vec_b": 1, "LK": 8, "TW": 2, "warps_w": 1, "warps_k": 2, "blocks_per_sm": 1, "unroll_k": 1,
    "BK": 64, "stages": 1, "edge": "guarded", "min_blocks": 1,
}  # fmt: skip
WAIT = "cp_async_wait<0>();"
MISTAKES = {  # the line that is changed, what it becomes, and what is then found
    "no barrier before N is read": (f"{WAIT}\n        __syncthreads();", WAIT, "async-copy"),
    "no wait for N": (WAIT, "", "async-copy"),
    "N beyond k": ("kk < depth", "true", "out-of-bounds"),
    "W beyond k": ("at < left", "true", "out-of-bounds"),
    "W beyond the edge": ("wide - VW", "wide", "out-of-bounds"),
    "C beyond the edge": ("tile * BW + w >= wide", "false", "out-of-bounds"),
    "sums over N in use": ("__syncthreads();  // nobody reads shared memory any more", "", "shared-race"),
    "two lanes own a sum": ("owner = owner && !upper;", "", "shared-race"),
    "half a pair of lanes forgotten": ("first += upper ? sums / 2 : 0;", "", "shared-race"),
    "a warp's sums forgotten": ("other < warps_k", "other < warps_k - 1", "are off"),
    "a slice forgotten": ("other < split_k", "other < split_k - 1", "are off"),
    "a counter that is not reset": ("global.inc.u32", "global.add.u32", "differ"),
    "alpha forgotten": ("*to = alpha * sum;", "*to = sum;", "are off"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["nothing", *MISTAKES])
def test_a_planted_mistake_is_found(name: str) -> None:
    old, new, found = MISTAKES.get(name, ("", "", ""))
    case = Case(SKINNY.config(GUARDED), Problem(5, 35, 135, "nt"), "beta absent", "random")
    source = render(SKINNY, case.config, case.problem, H200)
    assert old in source.text
    text = source.text.replace(old, new)
    binary = compile_text(text, source.entry, "sm_90", ("-lineinfo", *UNOPTIMISED))
    assert isinstance(binary, Binary), binary
    why = wrong(case, source, binary)
    assert found in why if found else not why


@pytest.mark.parametrize("preset", ["row_across", "rows_across", "row_along", "rows_along", "deep_along"])
def test_memory_is_read_once_and_in_whole_sectors(preset: str) -> None:
    config = SKINNY.presets[preset]
    problem = {"deep_along": Problem(512, 8, 499_968), "rows_along": Problem(16, 4096, 4096, "nt")}.get(
        preset, Problem(1 if "row_" in preset else 16, 4096, 4096, "nt" if "along" in preset else "nn")
    )
    small = small_problem(SKINNY, config, problem, H200, tiles=1)
    source = render(SKINNY, config, small, H200)
    binary = compile_text(source.text, source.entry, "sm_90", UNOPTIMISED)
    assert isinstance(binary, Binary), binary
    a, b, c = (np.zeros(shape, np.float32) for shape in (small.a_shape, small.b_shape, small.c_shape))
    arguments = (np.float32(1), a, b, np.float32(0), c, *workspace_of(source.launch).values())
    counted = run(source, binary, arguments, counters=True).counters
    assert counted is not None
    sectors, requests = (
        counted[metric.format("ld")] - counted[metric.format("ldgsts")]
        for metric in (GLOBAL_SECTORS, GLOBAL_REQUESTS)
    )
    values = SKINNY.values(config, small, H200)
    partials = values["split_k"] * c.size * 4 if values["split_k"] > 1 else 0
    assert sectors * 32 == max(a.nbytes, b.nbytes) + partials
    assert requests * 512 == max(a.nbytes, b.nbytes) + partials or partials % 512
    assert counted[SHARED_CONFLICTS.format("ld")] == 0


def test_other_strides_and_addresses_get_a_variant_of_the_same_tile() -> None:
    for name, preset in SKINNY.presets.items():
        problem = Problem(7, 4095, 4097, "nt") if name == "odd_along" else Problem(3, 4096, 4096, "nt")
        config = SKINNY.fitted(preset, problem, H200)
        for kind in STRIDES:
            variant = SKINNY.fitted(config, strided(problem, kind), H200)
            tile = ("LK", "TW", "warps_w", "warps_k", "unroll_k", "BK", "blocks_per_sm")
            assert [variant[each] for each in tile] == [preset[each] for each in tile]


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 16, 32, 33])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_serves_few_rows_or_columns_and_always_has_configs(m: int, layout: Layout) -> None:
    for n, k in ((1, 1), (m, 3), (40, 1), (1000, 1000), (4096, 4096), (8, 500_000), (4099, 77)):
        for problem in (Problem(m, n, k, layout), Problem(n, m, k, layout, 1)):
            assert SKINNY.serves(problem, H200) == (min(m, n) <= 32)
            assert not SKINNY.serves(problem, named_device("t4"))
            if min(m, n) <= 32:
                assert len(SKINNY.enumerate(problem, H200)) >= 20
