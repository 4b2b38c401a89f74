"""Rendered kernels in the simulator: choices, their pairs and every preset bit by bit; planted mistakes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pairwise
import pytest
from numpy.typing import NDArray
from pairwise import SCALARS, Case

from autotune.code.compiler import Binary, compile_text
from autotune.code.pool import CompilePool
from autotune.code.render import Source, render
from autotune.errors import Rejected
from autotune.measure.verify import verify_numpy
from autotune.simulator import Fault, machine, run_ptx
from autotune.simulator.fma import fma32
from autotune.simulator.launches import run_launch, workspace_of
from autotune.space.file import read_space_file
from autotune.space.space import Space
from autotune.values.device import named_device
from autotune.values.problem import Problem

Floats = NDArray[np.float32]
UNOPTIMISED = ("-Xptxas=-O0",)  # the PTX is the same; of the machine code nothing is asked here
ELSEWHERE = (
    "sgemm_3xfp16_wgmma",
    "sgemm_3xtf32",
    "sgemm_3xtf32_wgmma",
    "sgemm_skinny",
)  # their sums are no chain of FMAs, so they have tests of their own
FAMILIES = [
    path.stem
    for path in sorted((Path(__file__).parents[1] / "search_spaces").glob("*.toml"))
    if path.stem not in ELSEWHERE
]


@functools.cache
def space(family: str) -> Space:
    return Space.load(family)


# -- running one kernel --------------------------------------------------------------------------------------


def operands(problem: Problem, kind: str, start: str) -> tuple[Floats, Floats, Floats]:
    """A and B as stored, and C before the call; "infinite": with infinities in one row of A, one column of B.

    A kernel that reads beyond the depth of a tile and hopes for zeros in the other operand makes NaN of them.
    """
    random = np.random.default_rng([problem.m, problem.n, problem.k])
    a, b, c = (
        random.standard_normal(shape, np.float32)
        for shape in (problem.a_shape, problem.b_shape, problem.c_shape)
    )
    if kind == "infinite":
        op_a, op_b = (a if problem.layout[0] == "n" else a.T), (b if problem.layout[1] == "n" else b.T)
        for p in (0, min(5, problem.k - 1)):
            op_a[problem.m // 2, p] = op_b[p, problem.n // 2] = np.inf
    if start == "nan":
        c[:] = np.nan
    return a, b, c


SHARED = re.compile(r"constexpr int (tiles|sharers) = (\d+)[,;]")


def parts_of(values: Mapping[str, Any], tile: int) -> list[tuple[int, int]]:
    """First step of each part of a tile, and that behind its last."""
    steps, parts = int(values.get("tiles_k", 1)), int(values.get("split_k", 1))
    if parts:
        begins = [part * (steps // parts) + min(part, steps % parts) for part in range(parts + 1)]
    else:  # the last tiles are shared evenly
        cut, sharers = int(values["shared_tiles"]), int(values["shared_sharers"])
        place = (tile - (int(values["tiles"]) - cut)) * steps
        share, longer = divmod(cut * steps, sharers)
        shares = [number * share + min(number, longer) - place for number in range(sharers + 1)]
        least = int(values["stages"])  # of the steps of a part
        begins = [0, *(begin for begin in shares if place >= 0 and least <= begin <= steps - least), steps]
    return list(itertools.pairwise(begins))


def chains(values: Mapping[str, Any], k: int, tile: int) -> list[list[list[int]]]:
    """The k of every chain of FMAs: of each part of k, and in it of each of the warps that take turns.

    Every warp has its share of each step; the first step has the remainder of k.
    """
    BK, turns = int(values.get("BK", k)), int(values.get("warps_k", 1))
    before = -(-k // BK) * BK - k  # what the first step lacks at its end
    found = []
    for first, last in parts_of(values, tile):
        turn_of: list[list[int]] = [[] for _ in range(turns)]
        for step in range(first, last):
            for kk in range(BK if step else BK - before):
                turn_of[kk * turns // BK].append(step * BK - (before if step else 0) + kk)
        found.append(turn_of)
    return found


def areas(values: Mapping[str, Any], problem: Problem) -> list[tuple[int, slice, slice]]:
    """The tiles that are computed in ways of their own, each with the rows and columns that it writes."""
    if values.get("split_k") != 0:
        return [(0, slice(None), slice(None))]
    BM, BN, group_m, tiles_m, tiles_n = (
        int(values[name]) for name in ("BM", "BN", "group_m", "tiles_m", "tiles_n")
    )
    found = []
    for tile in range(tiles_m * tiles_n):
        group, inside = divmod(tile, group_m * tiles_n)
        rows = min(group_m, tiles_m - group * group_m)
        row, col = group * group_m + inside % rows, inside // rows
        found.append((tile, slice(row * BM, (row + 1) * BM), slice(col * BN, (col + 1) * BN)))
    return found


def summed(sums: list[Floats], group: int) -> Floats:
    """Add up in order, groups first where there are more than one."""
    if group < len(sums):
        sums = [summed(sums[i : i + group], group) for i in range(0, len(sums), group)]
    return functools.reduce(lambda one, other: one + other, sums)


def expected(source: Source, a: Floats, b: Floats, c: Floats, alpha: float, beta: float) -> list[Floats]:
    """What the kernel must give: chains of FMAs in the order of k, rounded once each, then alpha and beta.

    Of ``alpha * acc + beta * c`` the compiler fuses one product with the sum: both results are right.
    """
    problem = source.problem
    values = space(source.family).values(source.config, problem, named_device("h200"))
    if values.get("split_k") == 0:  # how tiles are shared depends on the device
        values |= {f"shared_{name}": int(each) for name, each in SHARED.findall(source.text)}
    op_a, op_b = (a if problem.layout[0] == "n" else a.T), (b if problem.layout[1] == "n" else b.T)
    scale, weight = np.float32(alpha), np.float32(beta)
    acc = np.zeros(problem.c_shape, np.float32)
    with np.errstate(all="ignore"):
        for tile, rows, cols in areas(values, problem):
            parts = []
            for part in chains(values, problem.k, tile):
                turns = []
                for turn in part:
                    sums = np.zeros(problem.c_shape, np.float32)[rows, cols]
                    for p in turn:
                        sums = fma32(op_a[rows, p : p + 1], op_b[p, cols], sums)
                    turns.append(sums)
                parts.append(summed(turns, len(turns)))
            group = int(values.get("sum_group", 1)) if values.get("split_k") != 0 else len(parts)
            if (blocks := int(values.get("cluster_k", 1))) > 1:  # a cluster's parts first
                group = blocks
            acc[rows, cols] = summed(parts, group)
        if not problem.beta:
            return [scale * acc]
        old = np.zeros_like(c) if beta == 0 else c
        return [fma32(scale, acc, weight * old), fma32(weight, old, scale * acc)]


def bits(values: Floats) -> NDArray[np.uint32]:
    """The bits, all NaNs alike."""
    return np.where(np.isnan(values), np.float32(np.nan), values).view(np.uint32)


def difference(
    source: Source, ptx: str, scalars: str, kind: str, shared_bytes: int | None = None
) -> Fault | str:
    """Run a kernel with every check on; return a fault or note, or how C differs from what it should be."""
    problem, launch = source.problem, source.launch
    _, alpha, beta, start = SCALARS[scalars]
    a, b, c = operands(problem, kind, start)
    arrays = a.copy(), b.copy(), c.copy()
    named: dict[Any, Any] = dict(zip("abc", arrays, strict=True))
    named |= {"alpha": np.float32(alpha), "beta": np.float32(beta), **workspace_of(launch)}
    if shared_bytes is not None:
        last = dataclasses.replace(launch.kernels[-1], shared_bytes=shared_bytes)
        launch = dataclasses.replace(launch, kernels=(*launch.kernels[:-1], last))
    report = run_launch(ptx, launch, named)
    for found in report.faults + report.notes:
        return found
    if (bits(arrays[0]) != bits(a)).any() or (bits(arrays[1]) != bits(b)).any():
        return "an operand was changed"
    wanted = expected(source, a, b, c, alpha, beta)
    wrong = min((bits(each) != bits(arrays[2]) for each in wanted), key=np.count_nonzero)
    if wrong.any():
        row, col = np.argwhere(wrong)[0]
        values = f"C[{row}, {col}] is {arrays[2][row, col]}, not {wanted[0][row, col]}"
        return f"{np.count_nonzero(wrong)} of {wrong.size} elements differ; {values}"
    if kind == "random":  # the chain of FMAs is itself right
        verdict = verify_numpy(
            problem, a, b, None if start == "nan" else c, arrays[2], alpha, beta if problem.beta else 0
        )
        return verdict.why
    return ""


def rendered(case: Case) -> Source:
    return render(space(case.family), case.config, case.problem, case.device)


class Compiler:
    """Compiles what the selected tests need, two at a time, while the first of them run."""

    def __init__(self, pool: CompilePool) -> None:
        self._pool = pool
        self._sources: dict[object, Source] = {}
        self._outcomes: dict[object, Binary | Rejected] = {}

    def submit(self, key: object, source: Source, arch: str) -> None:
        self._sources[key] = source
        self._pool.submit(key, source.text, source.entry, arch, UNOPTIMISED)

    def __call__(self, key: object) -> tuple[Source, Binary]:
        end = time.monotonic() + 600
        while key not in self._outcomes and time.monotonic() < end:
            self._outcomes.update(self._pool.collect(timeout=1))
        source, outcome = self._sources[key], self._outcomes[key]
        assert isinstance(outcome, Binary), f"{source.config.id}: {outcome}"
        return source, outcome


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[Compiler]:
    """The sources of the selected tests, by the value of their parameter."""
    items = [
        item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")
    ]
    keys = [key for item in items for key in item.callspec.params.values()]
    with CompilePool(workers=2, timeout_s=60) as pool:
        compiler = Compiler(pool)
        for key in keys:
            if isinstance(key, Case):
                compiler.submit(key, rendered(key), key.device.arch)
            elif isinstance(key, Mistake):
                compiler.submit(key, planted(key), "sm_90")
        yield compiler


def check(source: Source, binary: Binary, scalars: str, kind: str) -> None:
    """Fail with the fault and its line, or with how C differs."""
    found = difference(source, binary.ptx, scalars, kind)
    if isinstance(found, Fault):
        binary = compile_text(source.text, source.entry, binary.arch, ("-lineinfo",))
        found = f"{difference(source, binary.ptx, scalars, kind)}\n{source.text}"
    assert not found, f"{found}\nconfig {source.config.id}, {source.problem}, {scalars}, {kind} operands"


# -- choices and their pairs ---------------------------------------------------------------------------------

# What acts together in `sgemm`. Steps of the ladder get every pair with one of their parameters.
GROUPS = (
    "split_k cluster_k warps_k edge loader transpose_a transpose_b read_k layout stages fragment_pipeline",
    "spread_n loader layout transpose_b vec_b VN wide_b smem_pad edge",
    "loader layout edge vec_a transpose_a smem_pad wide_a rows",
    "loader layout edge vec_b transpose_b smem_pad wide_b cols",
    "stages loader unroll_stages fragment_pipeline first_step odd_steps edge depth",
    "edge group_m ragged_group rows",
    "TM VM warps_k read_k ffma_order transpose_a",
    "TN VN warps_k read_k ffma_order transpose_b",
    "scalars edge vec_c spread_n warps_k split_k cluster_k",
    "operands edge loader first_step layout",
    "target loader layout",
)
PAIRS = {
    family: pairwise.cases(read_space_file(family), groups=GROUPS if family == "sgemm" else None)
    for family in FAMILIES
}


def preset_cases() -> list[Case]:
    """Each preset at whole tiles, and fitted to odd sizes over the edge of C with a remainder of k."""
    found = []
    for family in FAMILIES:
        for number, config in enumerate(space(family).presets.values()):
            BM, BN, BK, stages = (int(config.get(name, 8)) for name in ("BM", "BN", "BK", "stages"))
            steps = max(1, int(config.get("split_k", 1))) * (stages + 2)
            layout = "nt" if config.get("transpose_b") == 0 or config.get("vec_b") == 1 else "nn"
            over = 4 if config.get("turn_a") == 1 else 1  # whole vectors of what is turned
            whole = Problem(BM, 2 * BN, steps * BK, layout, beta=number % 2)
            edge = Problem(BM + over, BN - 1, steps * BK - BK - 3, layout, beta=1 - number % 2)
            for problem in (whole, edge):
                choice = space(family).fitted(config, problem, named_device("h200"))
                scalars = "beta" if problem.beta else "beta absent"
                found.append(Case(family, choice, problem, "h200", scalars, "random"))
    return found


@pytest.mark.parametrize("case", [*itertools.chain(*PAIRS.values()), *preset_cases()], ids=str)
def test_a_kernel_gives_the_chain_of_fmas_bit_by_bit(compiled: Compiler, case: Case) -> None:
    check(*compiled(case), case.scalars, case.operands)


@pytest.mark.parametrize(
    "problem",
    [
        Problem(36, 132, 129, "nt"),
        Problem(64, 36, 300, "nt", 1),
        Problem(100, 64, 257, "nn"),
        Problem(40, 100, 128, "tt"),
    ],
    ids=str,
)
def test_operands_are_turned_over_the_edges_of_its_blocks(problem: Problem) -> None:
    device = named_device("h200")
    turns = {"turn_a": int(problem.layout[0] == "n"), "turn_b": int(problem.layout[1] == "t")}
    config = space("sgemm").config({**space("sgemm").presets["small_block"], **turns, "smem_pad": 0})
    source = render(space("sgemm"), space("sgemm").fitted(config, problem, device), problem, device)
    assert [name for name, turn in turns.items() if turn] == [
        each.entry for each in source.launch.kernels[:-1]
    ]
    binary = compile_text(source.text, source.entry, device.arch, UNOPTIMISED)
    check(source, binary, "beta" if problem.beta else "beta absent", "random")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_of_every_parameter_is_run(family: str) -> None:
    have = {f"{name}{value}" for case in PAIRS[family] for name, value in case.config.items()}
    want = {f"{name}{value}" for name, values in space(family).parameters.items() for value in values}
    assert want == have


@pytest.mark.parametrize(("asked", "most"), [("all", 200), ("of the first five", 60)])
def test_all_pairs_are_chosen(asked: str, most: int) -> None:
    """By brute force: the chosen points have every pair that any point has, and are few."""
    _, points = pairwise.draw(read_space_file("shared_tile"), 2000, 1)
    factors = points.shape[1]
    wanted = np.ones((factors, factors), bool)
    if asked != "all":
        wanted[5:] = wanted[:, 5:] = False
    chosen = points[pairwise.all_pairs(points, points.max(axis=0) + 1, 1, wanted)]
    for one, other in itertools.combinations_with_replacement(range(factors), 2):
        if wanted[one, other] or one == other:
            pairs = {tuple(pair) for pair in points[:, [one, other]].tolist()}
            assert pairs == {tuple(pair) for pair in chosen[:, [one, other]].tolist()}
    assert len(chosen) < most


def test_what_acts_together_is_there_together() -> None:
    factors = {*pairwise.CHOICES, *space("sgemm").parameters, *pairwise.FEATURES}
    assert {name for group in GROUPS for name in group.split()} <= factors
    configs = [{**case.config, "layout": case.problem.layout} for case in PAIRS["sgemm"]]
    for one, other, count in (
        ("spread_n", "loader", 4),
        ("spread_n", "layout", 8),
        ("split_k", "edge", 36),  # where the simulation is not too long
        ("warps_k", "read_k", 8),
    ):
        assert len({(config[one], config[other]) for config in configs}) >= count, (one, other)


def test_drawn_points_are_legal_and_of_all_kinds() -> None:
    assert {case.device.arch for case in PAIRS["sgemm"]} == {"sm_80", "sm_90", "sm_120"}
    for case in itertools.chain(*PAIRS.values()):
        assert not space(case.family).violations(case.config, case.problem, case.device)
    shapes = [case.problem for case in PAIRS["sgemm"]]
    for extent in (lambda p: p.lda, lambda p: p.ldb, lambda p: p.ldc):
        assert {extent(problem) % 4 for problem in shapes} == {0, 1, 2, 3}


# -- shared tiles --------------------------------------------------------------------------------------------

EVEN: dict[str, tuple[Problem, str, dict[str, int | str]]] = {  # what differs from a preset
    "fewer_tiles_than_blocks": (Problem(32, 64, 300), "tiny_block", {"edge": "exact"}),
    "whole_tiles_first": (Problem(160, 192, 128, "nt"), "tiny_block", {"vec_b": 1, "BK": 8, "stages": 2}),
    "shifted_with_a_rest_of_k": (
        Problem(100, 99, 203, "tn", 1),
        "tiny_block",
        {"vec_a": 1, "vec_b": 1, "vec_c": 1, "edge": "shifted", "group_m": 4},
    ),
    "one_buffer": (
        Problem(130, 70, 99, "nn", 1),
        "register_staged",
        {
            "BM": 32,
            "LM": 4,
            "TM": 4,
            "BN": 32,
            "TN": 4,
            "stages": 1,
            "vec_a": 1,
            "vec_b": 1,
            "vec_c": 1,
            "edge": "guarded",
            "fragment_pipeline": 0,
            "unroll_stages": 0,
        },
    ),
}


def even(name: str) -> tuple[dict[str, Any], Source]:
    problem, preset, changes = EVEN[name]
    few = dataclasses.replace(named_device("h200"), sm_count=3)
    family = space("sgemm")
    config = family.config({**family.presets[preset], "split_k": 0, "min_blocks": 1, **changes})
    return dict(family.values(config, problem, few)), render(family, config, problem, few)


@pytest.mark.parametrize("name", EVEN)
def test_blocks_that_run_at_a_time_share_the_last_tiles(name: str) -> None:
    values, source = even(name)
    binary = compile_text(source.text, source.entry, "sm_90", UNOPTIMISED)
    assert isinstance(binary, Binary), binary
    check(source, binary, "beta" if source.problem.beta else "beta absent", "random")
    shared = {"shared_tiles": values["cut_tiles"], "shared_sharers": values["sharers"]}
    parts = [parts_of(values | shared, tile) for tile in range(int(values["tiles"]))]
    assert min(last - first for tile in parts for first, last in tile) >= values["stages"]
    whole = values["tiles"] - values["cut_tiles"]
    assert (whole > 0) == (name == "whole_tiles_first")
    assert all(len(tile) == 1 for tile in parts[:whole])
    assert 1 < max(map(len, parts)) <= values["most_parts"]


def test_a_sum_that_no_block_kept_is_found() -> None:
    """It would be zero if more than the counters were."""
    values, source = even("fewer_tiles_than_blocks")
    assert source.launch.zeroed_bytes == 128 >= 4 * values["cut_tiles"]
    assert source.text.count("part < parts;") == 1
    binary = compile_text(
        source.text.replace("part < parts;", "part < most_parts;"), source.entry, "sm_90", UNOPTIMISED
    )
    assert isinstance(binary, Binary), binary
    assert "] is nan, not " in str(difference(source, binary.ptx, "beta absent", "random"))


# -- planted mistakes ----------------------------------------------------------------------------------------

FIRST = {
    name: values[0] for name, values in space("sgemm").parameters.items()
}  # of parameters not named here
TILE = {
    **FIRST,
    "BM": 32,
    "TM": 4,
    "LM": 8,
    "BN": 32,
    "TN": 4,
    "VM": 4,
    "VN": 4,
    "transpose_a": 1,
    "smem_pad": 4,
}
STAGED = {**TILE, "edge": "guarded", "stages": 2, "vec_b": 4, "vec_c": 4}
ASYNC = {**STAGED, "loader": "cp_async", "stages": 3}
BASES = {  # 64 threads, 4 x 4 outputs each
    "single": (Problem(37, 45, 19), {**TILE, "edge": "guarded", "group_m": 4}),
    "staged": (Problem(37, 44, 44, beta=1), STAGED),
    "async": (Problem(37, 44, 44, beta=1), ASYNC),
    "pipelined": (Problem(37, 44, 44, beta=1), {**ASYNC, "fragment_pipeline": 1, "unroll_stages": 1}),
}
BASES |= {
    "turns": (
        Problem(37, 44, 64),
        {**ASYNC, "stages": 2, "BK": 16, "warps_k": 2, "fragment_pipeline": 1, "unroll_stages": 1},
    ),
    "shifted": (Problem(37, 44, 44), {**ASYNC, "edge": "shifted"}),
    "parts": (Problem(32, 32, 96), {**ASYNC, "edge": "exact", "stages": 2, "split_k": 3}),
    "cluster": (Problem(37, 44, 128, beta=1), {**ASYNC, "stages": 2, "split_k": 4, "cluster_k": 2}),
    "spread": (Problem(37, 45, 44, "nt"), {**ASYNC, "VN": 2, "vec_b": 1, "vec_c": 1, "spread_n": 1}),
}
DIFFERS = "differs"


class Mistake(NamedTuple):
    """A change of a rendered kernel, and the faults of which it must show one; `DIFFERS`: a wrong result."""

    name: str
    base: str
    old: str
    new: str
    faults: str
    operands: str = "random"

    def __str__(self) -> str:
        return f"{self.base}-{self.name}".replace(" ", "_")


COMPLETE, LEFT = (
    "__syncthreads();  // the tile is complete",
    "__syncthreads();  // nobody reads the tile any more",
)
WAIT, SYNC = "cp_async_wait<stages - 2>();\n", "__syncthreads();\n"
STEP, DEEP = " " * 8, " " * 16  # indents of the step's end, without and with a pipeline of fragments
MISTAKES = [
    Mistake("no barrier before reading", "single", COMPLETE, "", "shared-race"),
    Mistake("no barrier before writing", "single", LEFT, "", "shared-race"),
    Mistake(
        "a barrier for one warp",
        "single",
        COMPLETE,
        f"if (warp == 0) {COMPLETE}",
        "shared-race divergent-barrier",
    ),
    Mistake(
        "no barrier after the first tile",
        "staged",
        f"store_tile(0);\n    {SYNC}",
        "store_tile(0);\n",
        "shared-race",
    ),
    Mistake(
        "no barrier at the end of a step",
        "staged",
        f"store_tile(next);\n{STEP}{SYNC}",
        "store_tile(next);\n",
        "shared-race",
    ),
    Mistake(
        "written to the buffer being read", "staged", "store_tile(next)", "store_tile(stage)", "shared-race"
    ),
    Mistake(
        "one group too many left",
        "async",
        f"{WAIT}{STEP}{SYNC}",
        f"cp_async_wait<stages - 1>();\n{STEP}{SYNC}",
        "async-copy",
    ),
    Mistake("no wait in the step", "async", f"{WAIT}{STEP}{SYNC}", SYNC, "async-copy"),
    Mistake("no wait for the first tile", "async", f"{WAIT}    {SYNC}", SYNC, "async-copy"),
    Mistake("waits after the barrier", "async", f"{WAIT}{STEP}{SYNC}", f"{SYNC}{STEP}{WAIT}", "async-copy"),
    Mistake("no barrier after the wait", "async", f"{WAIT}{STEP}{SYNC}", WAIT, "async-copy shared-race"),
    Mistake(
        "no commit",
        "async",
        f"load_tile(vacant);\n{STEP}cp_async_commit();",
        "load_tile(vacant);",
        "async-copy",
    ),
    Mistake(
        "copied to the buffer being read",
        "async",
        "load_tile(vacant)",
        "load_tile(stage)",
        "shared-race async-copy",
    ),
    Mistake("a tile too many", "async", "if (more)", "if (true)", "out-of-bounds"),
    Mistake(
        "one group too many left",
        "pipelined",
        f"{WAIT}{DEEP}{SYNC}",
        f"cp_async_wait<stages - 1>();\n{DEEP}{SYNC}",
        "async-copy",
    ),
    Mistake("no barrier after the wait", "pipelined", f"{WAIT}{DEEP}{SYNC}", WAIT, "async-copy shared-race"),
    Mistake(
        "fragments into the half in use",
        "pipelined",
        "load_fragments((kk + 1) % 2, stage",
        "load_fragments(kk % 2, stage",
        DIFFERS,
    ),
    Mistake(
        "fragments of a stage too early",
        "pipelined",
        "load_fragments((kk + 1) % 2, next, 0)",
        "load_fragments((kk + 1) % 2, stage, 0)",
        "shared-race",
    ),
    Mistake("one row too many", "single", "block_row + a_m, m,", "block_row + a_m, m + 1,", "out-of-bounds"),
    Mistake("no guard for the columns of B", "single", "block_col + b_n, n)", "0, BN)", "out-of-bounds"),
    Mistake("no guard for the depth of A", "single", "a_k, depth)", "0, BK)", DIFFERS, "infinite"),
    Mistake("no guard for the depth of B", "single", "b_k, depth,", "0, BK,", DIFFERS, "infinite"),
    Mistake(
        "copies more than is inside",
        "async",
        "row * ld + col, inside);",
        "row * ld + col);",
        "out-of-bounds",
    ),
    Mistake("one row of C too many", "single", "c_row + row < m", "c_row + row <= m", "out-of-bounds"),
    Mistake(
        "no guard for the columns of C", "single", " && c_col + col < n", "", "out-of-bounds write-conflict"
    ),
    Mistake("every block the same columns", "single", "in_group / group_rows * BN", "0", "write-conflict"),
    Mistake(
        "a ragged group taken for a whole one",
        "single",
        "min(group_m, tiles_m - group * group_m)",
        "group_m",
        DIFFERS,
    ),
    Mistake("a tile too few", "single", "tile < tiles_k", "tile < tiles_k - 1", DIFFERS),
    Mistake("a tile too many", "single", "tile < tiles_k", "tile <= tiles_k", "out-of-bounds"),
    Mistake(
        "shared rows shifted",
        "single",
        "place(row_of(i), col_of(i) + v)) = across",
        "place(row_of(i) + 4, col_of(i) + v)) = across",
        "uninitialised-read",
    ),
    Mistake(
        "pad forgotten", "single", "shared + stages * As_stage", "shared + stages * BK * BM", "shared-race"
    ),
    Mistake(
        "vectors shifted",
        "staged",
        "b_n = TileB::first_col(thread);",
        "b_n = TileB::first_col(thread) + 1;",
        "misaligned",
    ),
    Mistake("C read though beta is zero", "staged", "if (beta != 0.0f)", "", DIFFERS),
    Mistake("alpha forgotten", "single", "alpha * sums[v]", "sums[v]", DIFFERS),
    Mistake(
        "no barrier before tiles become sums",
        "turns",
        "__syncthreads();  // nobody reads the last tile any more",
        "",
        "shared-race",
    ),
    Mistake(
        "no barrier before adding",
        "turns",
        f"{SYNC}    #pragma unroll\n    for (int i = 0; i < own_rows",
        "#pragma unroll\n    for (int i = 0; i < own_rows",
        "shared-race",
    ),
    Mistake(
        "every turn the same k", "turns", "As + warp_k * (BK / warps_k)", "As + 0 * (BK / warps_k)", DIFFERS
    ),
    Mistake(
        "rows of the tile before written", "shifted", "c_row + row >= tile_row && ", "", "write-conflict"
    ),
    Mistake("the last tile not shifted", "shifted", "min(tile_col, n - BN)", "tile_col", "out-of-bounds"),
    Mistake(
        "the first step taken for a whole one",
        "shifted",
        "stage == 0 ? first_k : BK",
        "BK",
        "out-of-bounds",
    ),
    Mistake(
        "a part begins a step late", "parts", "part * steps;", "part * steps + (part > 0);", "out-of-bounds"
    ),
    Mistake("one part left out", "parts", "add(0, split_k)", "add(0, split_k - 1)", DIFFERS),
    Mistake("a meeting that nobody came to", "cluster", "    cluster_arrive();", "", "deadlock"),
    Mistake("sums read before they are there", "cluster", "    wait_for(all_received);", "", "async-copy"),
    Mistake(
        "fewer bytes than are sent",
        "cluster",
        "(cluster_k - 1) * sizeof",
        "(cluster_k - 1) / 2 * sizeof",
        "async-copy",
    ),
    Mistake("rows of another block", "cluster", "my_first = rank", "my_first = (1 - rank)", DIFFERS),
    Mistake("columns of C side by side", "spread", "j % VN * LN;", "j % VN;", "global-race"),
    Mistake("columns of B side by side", "spread", "spread(row)", "row", DIFFERS),
    Mistake(
        "a column in another lane",
        "spread",
        "col % LN * VN + col / LN % VN",
        "col % VN * LN + col / VN % LN",
        DIFFERS,
    ),
    Mistake("columns exchanged", "single", "reg_n[half][j];", "reg_n[half][j ^ 1];", DIFFERS),
]


def planted(mistake: Mistake) -> Source:
    problem, config = BASES[mistake.base]
    source = render(space("sgemm"), space("sgemm").config(config), problem, named_device("h200"))
    return dataclasses.replace(source, text=source.text.replace(mistake.old, mistake.new, 1))


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_planted_mistake_is_named(compiled: Compiler, mistake: Mistake) -> None:
    right, (source, binary) = planted(mistake._replace(old="", new="")), compiled(mistake)
    assert right.text.count(mistake.old) == 1, (
        f"{mistake.old!r} is not once in the kernel: plant another mistake"
    )
    scalars = "beta zero" if source.problem.beta else "beta absent"
    found = difference(source, binary.ptx, scalars, mistake.operands)
    kind = found.kind if isinstance(found, Fault) else DIFFERS if found else "nothing"
    assert kind in mistake.faults.split(), found


@pytest.mark.parametrize(
    "base",
    [Mistake("right", base, "", "", "", kind) for base in BASES for kind in pairwise.OPERANDS],
    ids=str,
)
def test_without_a_mistake_nothing_is_found(compiled: Compiler, base: Mistake) -> None:
    source, binary = compiled(base)
    check(source, binary, "beta zero" if source.problem.beta else "beta absent", base.operands)


@pytest.mark.parametrize(
    ("old", "new", "right"),
    [
        ("", "", True),
        ("part = blockIdx.x / tiles", "part = split_k - 1 - blockIdx.x / tiles", True),
        ("== count - 1)", "== 0)", False),
        ("keep(part);", "if (part < split_k - 1) keep(part);", False),
    ],
    ids=["as it is", "in reverse", "the first block adds", "the last block keeps nothing"],
)
def test_parts_add_up_alike_whichever_block_comes_last(
    monkeypatch: pytest.MonkeyPatch, old: str, new: str, right: bool
) -> None:
    monkeypatch.setattr(machine, "MAX_LANES", 64)  # one block after the other
    source = planted(Mistake("", "parts", old, new, ""))
    binary = compile_text(source.text, source.entry, "sm_90")
    assert isinstance(binary, Binary)
    assert (difference(source, binary.ptx, "beta absent", "random") == "") == right


def test_too_little_shared_memory_and_a_misaligned_operand_are_named() -> None:
    source = planted(Mistake("", "staged", "", "", ""))
    binary = compile_text(source.text, source.entry, "sm_90")
    assert isinstance(binary, Binary)
    found = difference(source, binary.ptx, "beta", "random", shared_bytes=source.launch.shared_bytes - 4)
    assert isinstance(found, Fault)
    assert (found.kind, found.where) == ("out-of-bounds", "shared")
    a, b, c = operands(source.problem, "random", "numbers")
    shifted = np.append(np.float32(0), b)[1:].reshape(b.shape)  # four bytes off
    args = [np.float32(1), a, shifted, np.float32(0), c]
    launch = source.launch
    report = run_ptx(
        binary.ptx, source.entry, launch.grid, launch.block, args, shared_bytes=launch.shared_bytes
    )
    assert [fault.kind for fault in report.faults] == ["misaligned"]
