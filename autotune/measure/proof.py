"""Verifies a config without a GPU: executes it in the simulator on small problems with the same edges.

A miniature is the problem without most of its whole tiles. What remains decides the kernel's code: the same
remainder of every extent (so the same guards and alignments), the same number of tiles modulo the pipeline's
stages, the slices of k and the raster's groups. Every access, barrier and element of C is checked; what the
simulator does not model (see `autotune.simulator`) is left to a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from autotune.code.render import render
from autotune.code.single import compile_bounded
from autotune.errors import Rejected, SpaceError, UsageError
from autotune.measure.verify import draw_scalars, verify_numpy
from autotune.simulator.launches import run_launch, workspace_of
from autotune.space.space import Config, Space
from autotune.values.device import Device
from autotune.values.measurement import Verdict
from autotune.values.problem import Problem, Strided

MOST_STEPS = 20_000  # basic blocks; a miniature takes some hundreds
MOST_SECONDS = 300.0  # of CPU time; a miniature takes some tenths
MOST_PRODUCTS = 2  # of a batch: all are computed alike
MANY_PARTS = 4  # of k, beyond which each is as short as it may be, and tiles are as few
# Extents that are tried for a tile that a family does not call BM, BN or BK, until the config is legal.
UNNAMED_TILES = (32, 48, 64, 96, 128, 192, 256, 384, 512)


def miniatures(space: Space, config: Config, problem: Problem, device: Device) -> list[Problem]:
    """Return the small problems that cover a config's edges on its problem.

    The first runs the very code of the problem's kernel: at least two tiles each way, a second group of the
    raster, the main loop more than once (where k is cut into many parts, one tile, and once). Where its tiles
    fill k there is a second with a remainder of k.

    Returns:
        Those on which the config is legal, as few as one; the problem itself where it is small.
    """
    first = small_problem(space, config, problem, device)
    found = [first]
    BK = int(space.values(config, problem, device).get("BK", 1))
    if problem.k % BK == 0 and BK > 1 and first.k > BK:
        few = small_problem(space, config, problem, device, groups=False)
        found.append(replace(few, k=first.k - BK // 2))
    return [each for each in found if not space.violations(config, each, device)]


def small_problem(
    space: Space, config: Config, problem: Problem, device: Device, *, tiles: int = 2, groups: bool = True
) -> Problem:
    """Return one small problem with a config's edges, alignments and remainders; it runs the main loop twice.

    Tiles that a family calls otherwise than BM, BN and BK are taken to be the smallest that make it legal.

    Args:
        space: The config's family.
        config: Legal for the problem and device.
        problem: Full size.
        device: Where.
        tiles: Block tiles along m and n, at least, as far as the problem has them.
        groups: Whether there must be tiles for a second group of the raster.
    """
    values = space.values(config, problem, device)
    tried = ((int(values[name]),) if name in values else UNNAMED_TILES for name in ("BM", "BN", "BK"))
    small = [
        _miniature(config, values, problem, tile, tiles, groups)
        for tile in sorted(product(*tried), key=math.prod)
    ]
    return next((each for each in small if not space.violations(config, each, device)), small[0])


def _miniature(
    config: Config,
    values: Mapping[str, Any],
    problem: Problem,
    tile: Sequence[int],
    tiles: int,
    groups: bool,
) -> Problem:
    """Return the problem without most of its whole tiles (along m, n and k)."""
    BM, BN, BK = tile
    stages, group_m, split_k = (int(values.get(name, 1)) for name in ("stages", "group_m", "split_k"))
    parts = max(split_k, 1) if "split_k" in config else min(split_k, 2)  # what is derived follows the problem
    if parts > MANY_PARTS:
        tiles = 1
    raster = groups and tiles > 1 and group_m > 1
    shifts = config.get("edge") == "shifted"  # a tile that begins earlier needs one before it
    least_m, least_n = (1 + (shifts and e % t > 0) for e, t in ((problem.m, BM), (problem.n, BN)))
    m = _shortened(problem.m, BM, group_m + 1 if raster else max(tiles, least_m), group_m if raster else 1)
    n = _shortened(problem.n, BN, max(tiles, least_n))
    steps = stages + 1 if parts > MANY_PARTS else max(3, 2 * stages)
    k = _shortened(problem.k, BK, parts * steps, parts * stages)
    return replace(problem, m=m, n=n, k=k, batch=min(problem.batch, MOST_PRODUCTS))


def prove(
    space: Space, config: Config, problem: Problem, device: Device, seed: int = 0
) -> Verdict | Rejected:
    """Execute a config on its miniatures, with all checks, on operands drawn from N(0,1).

    Args:
        space: Its family.
        config: Legal for the problem and device.
        problem: What the kernel is for.
        device: Where; it decides the architecture whose PTX is executed.
        seed: Of the operands.

    Returns:
        The verdict nearest to its bound; or why the config is rejected: "correctness" with the fault,
        "constraint" where CUDA refuses the launch.

    Raises:
        UsageError: The problem is strided.
        UnsupportedPTX: The kernel holds an instruction that the simulator does not support.
        ToolchainError: NVRTC is missing or does not know the device.
    """
    if isinstance(problem, Strided):
        raise UsageError(f"{problem}: only problems whose rows lie side by side can be proven")
    small = miniatures(space, config, problem, device)
    if not small:
        return Rejected("constraint", "it is legal on no small problem, so it cannot be simulated")
    verdicts = []
    for each in small:
        verdict = _executed(space, config, each, device, seed)
        if isinstance(verdict, Rejected):
            return verdict
        verdicts.append(verdict)
    nearest = max(verdicts, key=lambda verdict: verdict.error / verdict.bound)
    sizes = " and ".join(each.extents for each in small)
    inputs = f"N(0,1), simulated at {sizes} with all checks: all elements"
    return Verdict(True, nearest.error, nearest.bound, "", inputs)


def _executed(
    space: Space, config: Config, problem: Problem, device: Device, seed: int
) -> Verdict | Rejected:
    try:
        source = render(space, config, problem, device)
    except SpaceError as error:  # the template fails on this small problem
        return Rejected("compile", str(error))
    binary = compile_bounded(source.text, source.entry, device.arch, ("-lineinfo",))
    if isinstance(binary, Rejected):
        return binary
    random = np.random.default_rng(seed)
    a, b, c0 = (random.standard_normal(shape, np.float32) for shape in problem.arrays)
    alpha, beta = draw_scalars(problem, random)
    workspace = workspace_of(source.launch)
    results = []
    for _ in range(2 if workspace else 1):  # a second launch finds what the first one left
        c = c0.copy() if problem.beta else np.full_like(c0, np.nan)
        try:
            report = run_launch(
                binary.ptx,
                source.launch,
                {"alpha": alpha, "a": a, "b": b, "beta": beta, "c": c, **workspace},
                max_steps=MOST_STEPS,
                max_seconds=MOST_SECONDS,
                c_unwritten=not problem.beta,
            )
        except UsageError as error:  # CUDA would refuse the launch
            return Rejected("constraint", f"simulated at {problem}: {error}")
        if report.faults:
            return Rejected("correctness", f"simulated at {problem}: {report.faults[0]}")
        results.append(c)
    verdict = verify_numpy(problem, a, b, c0 if problem.beta else None, results[0], alpha, beta)
    if not verdict.ok:
        return Rejected("correctness", f"simulated at {problem}: {verdict.why}")
    if not np.array_equal(results[0], results[-1]):
        why = "a second launch on the same workspace gives another result: it must leave its counters at zero"
        return Rejected("correctness", f"simulated at {problem}: {why}")
    return verdict


def _shortened(extent: int, tile: int, least: int, period: int = 1) -> int:
    """Shorten an extent to `least` tiles or more; keep the remainder, and the tiles modulo `period`."""
    tiles = -(-extent // tile)
    kept = least + (tiles - least) % period
    return extent - max(0, tiles - kept) * tile
