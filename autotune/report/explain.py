"""The account of a kernel: what it loads, issues and occupies, which resource limits it, what would help."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.code import cubins, sass
from autotune.code.banks import BankReads
from autotune.code.compiler import Binary
from autotune.code.depot import Depot
from autotune.code.render import Source, render
from autotune.code.single import compile_bounded
from autotune.errors import ConfigError, Rejected, ToolchainError
from autotune.families import estimate
from autotune.measure.proof import small_problem
from autotune.model import account
from autotune.model.occupancy import Occupancy, occupancy
from autotune.report.limit import limit_of, wave_efficiency
from autotune.simulator.launches import run_launch, workspace_of
from autotune.space.space import Config, Space
from autotune.values import typed
from autotune.values.device import Device
from autotune.values.measurement import Sustained
from autotune.values.problem import Problem

if TYPE_CHECKING:
    from autotune.records import Record

_GLOBAL = "l1tex__t_{}_pipe_lsu_mem_global_op_{}.sum"
_SHARED_REQUESTS = "smsp__inst_executed_op_shared_{}.sum"
_SHARED_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{}.sum"
_SHARED_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{}.sum"
_LINE_METRICS = (
    ("executed", ("smsp__inst_executed.sum",)),
    ("sectors", tuple(f"l1tex__t_sectors_pipe_lsu_mem_global_op_{kind}.sum" for kind in ("ld", "st"))),
    (
        "wavefronts",
        tuple(f"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{kind}.sum" for kind in ("ld", "st", "ldgsts")),
    ),
    (
        "conflicts",
        tuple(
            f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{kind}.sum" for kind in ("ld", "st", "ldgsts")
        ),
    ),
)


@dataclass(frozen=True)
class Traffic:
    """Memory accesses of one kind in a miniature launch, counted in the simulator.

    Attributes:
        requests: Warp instructions.
        units: Sectors of 32 bytes (global memory), or wavefronts (shared memory).
        conflicts: Wavefronts beyond those a conflict-free layout needs; 0 for global memory.
    """

    requests: int
    units: int
    conflicts: int = 0

    @property
    def per_request(self) -> float:
        """Sectors or wavefronts of one request."""
        return self.units / self.requests if self.requests else 0.0

    @property
    def conflict_factor(self) -> float:
        """Wavefronts over those a conflict-free layout needs; 1 is free of conflicts."""
        ideal = self.units - self.conflicts
        return self.units / ideal if ideal else 1.0


@dataclass(frozen=True)
class Account:
    """Everything that explains one kernel. Times in ms; rates per second; None where it cannot be known here.

    Attributes:
        title: Name of the kernel in the report: a preset, a record or a config.
        global_loads: Floats loaded from global memory per output.
        shared_reads: Floats read from shared memory per output; None where it uses none.
        tile_intensity: FLOP per byte of a block tile.
        problem_intensity: FLOP per byte of the problem, operands moved once.
        ridge: FLOP per byte above which the device computes rather than moves.
        roofline_ms: Floor: no kernel of the problem's math is faster on this device.
        loop: Instruction mix of the main loop, from the machine code.
        banks: Register reads of its FFMAs; None where something else multiplies, or banks limit no FFMA.
        traffic: "global ld", "global st", "shared ld", "shared st" and "copy" (cp.async) of the miniature.
        miniature: The small problem that the traffic was counted on.
        lines: Source line to its share of the miniature's counters.
        waves: Blocks of the grid over those resident on the whole GPU.
        wave_efficiency: Mean work of an SM over that of the busiest.
        estimate_ms: Static estimate, an order and no claim; None for families it does not model.
        estimate_parts: Its parts, ms.
        median_ms: Measured time, from the record.
        sustained: What it did back to back, from the record.
        predicted_ms: What a model expects where nothing was measured.
        bottleneck, because, relief: The limit: see `autotune.report.limit.Limit`.
    """

    title: str
    problem: Problem
    device: Device
    source: Source
    binary: Binary
    global_loads: float
    shared_reads: float | None
    tile_intensity: float
    problem_intensity: float
    ridge: float
    roofline_ms: float
    occupancy: Occupancy
    waves: float
    wave_efficiency: float
    loop: sass.Loop | None
    banks: BankReads | None
    traffic: Mapping[str, Traffic]
    miniature: Problem
    lines: Mapping[int, Mapping[str, int]]
    miniature_source: Source
    estimate_ms: float | None
    estimate_parts: Mapping[str, float]
    median_ms: float | None
    sustained: Sustained | None
    vs_cublas: float | None
    predicted_ms: float | None
    bottleneck: str
    because: str
    relief: str

    @property
    def gflops(self) -> float | None:
        """Measured rate."""
        return None if self.median_ms is None else self.problem.flops / self.median_ms / 1e6

    @property
    def costed_source(self) -> list[str]:
        """The miniature's kernel with the cost of each line in its margin, below a line that heads them."""
        lines = ["".join(f"{name:>11}" for name, _ in _LINE_METRICS)]
        for number, line in enumerate(self.miniature_source.text.splitlines(), 1):
            found = self.lines.get(number, {})
            sums = [sum(found.get(metric, 0) for metric in metrics) for _, metrics in _LINE_METRICS]
            lines.append("".join(f"{total or '':>11}" for total in sums) + f"  {line}".rstrip())
        return lines

    def plain(self) -> dict[str, Any]:
        """Return the account as plain values for JSON."""
        loop, banks = self.loop, self.banks
        return {
            "title": self.title,
            "problem": asdict(self.problem),
            "device": self.device.name,
            "family": self.source.family,
            "config": dict(self.source.config),
            "global_loads_per_output": self.global_loads,
            "shared_reads_per_output": self.shared_reads,
            "tile_intensity": self.tile_intensity,
            "problem_intensity": self.problem_intensity,
            "ridge": self.ridge,
            "roofline_ms": self.roofline_ms,
            "registers": self.binary.registers,
            "spill_bytes": self.binary.spill_bytes,
            "shared_bytes": self.source.launch.shared_bytes + self.binary.shared_bytes,
            "threads": math.prod(self.source.launch.block),
            "blocks": math.prod(self.source.launch.grid),
            "blocks_per_sm": {**self.occupancy.limits, "resident": self.occupancy.blocks},
            "limited_by": list(self.occupancy.limited_by),
            "occupancy": self.occupancy.fraction,
            "waves": self.waves,
            "wave_efficiency": self.wave_efficiency,
            "main_loop": None
            if loop is None
            else {
                "instructions": loop.instructions,
                "code_bytes": loop.code_bytes,
                "multiply": loop.multiply,
                "multiply_share": loop.share(loop.multiply),
                "lds_per_multiply": loop.ratio("LDS"),
                "opcodes": dict(loop.opcodes),
                "register_banks": None
                if banks is None
                else {
                    "reads_per_ffma": banks.per_ffma,
                    "ffmas_waiting_share": banks.waiting_share,
                    "clocks_waited_share": banks.waited_share,
                    "ffmas_per_clock": banks.ffmas_per_clock,
                },
            },
            "traffic": {
                name: {
                    **asdict(each),
                    "per_request": each.per_request,
                    "conflict_factor": each.conflict_factor,
                }
                for name, each in self.traffic.items()
            },
            "miniature": asdict(self.miniature),
            "estimate_ms": self.estimate_ms,
            "estimate_parts": dict(self.estimate_parts),
            "median_ms": self.median_ms,
            "gflops": self.gflops,
            "sustained": None if self.sustained is None else typed.plain(self.sustained),
            "vs_cublas": self.vs_cublas,
            "predicted_ms": self.predicted_ms,
            "bottleneck": self.bottleneck,
            "because": self.because,
            "relief": self.relief,
        }


def explain(
    space: Space,
    config: Config,
    problem: Problem,
    device: Device,
    *,
    title: str = "",
    record: Record | None = None,
    predicted_ms: float | None = None,
    depot: Depot | None = None,
) -> Account:
    """Return the account of one config.

    Args:
        space: Its family.
        config: The value of each tuning parameter.
        problem: The multiplication that it computes.
        device: The GPU.
        title: Its name in the report.
        record: The source of the measured time; of this very config, problem and device.
        predicted_ms: What a model expects.
        depot: Where compiled kernels are kept; they are compiled anew when not given.

    Raises:
        ConfigError: The config is not legal here, or does not compile.
        DeviceError: The device's clock or bandwidth is unknown.
        ToolchainError: NVRTC is missing or does not know the device.
    """
    source = render(space, config, problem, device)
    binary = _compiled(source, device, depot)
    values = space.values(config, problem, device)
    BM, BN = (int(values.get(name, 1)) for name in ("BM", "BN"))
    TM, TN = estimate.reading_tile(space, values)
    shared = source.launch.shared_bytes + binary.shared_bytes
    if not shared:
        BM, BN = TM, TN  # threads share nothing but what the cache keeps
    threads, blocks = math.prod(source.launch.block), math.prod(source.launch.grid)
    held = occupancy(device, binary.registers, threads, shared)
    if not held.blocks:
        raise ConfigError(
            f"config {config.id} cannot start on {device.name}: {', '.join(held.limited_by)} allow no block"
        )
    traffic, lines, miniature, miniature_source = _counted(space, config, problem, device, depot)
    try:
        modelled = estimate.estimate(space, values, problem, device, binary.registers, binary.spill_bytes)
    except ConfigError:
        modelled = None
    measured = record if record is not None and record.timing is not None else None
    loop = _loop(binary)
    banks = loop.banks if loop and loop.multiply == "FFMA" and device.banks_limit_ffmas else None
    limit = limit_of(space, problem, device, blocks, shared, modelled, banks)
    return Account(
        title=title or config.id,
        problem=problem,
        device=device,
        source=source,
        binary=binary,
        global_loads=account.global_loads(problem.k, BM, BN),
        shared_reads=account.shared_reads(problem.k, TM, TN) if shared else None,
        tile_intensity=account.tile_intensity(BM, BN),
        problem_intensity=account.problem_intensity(problem),
        ridge=account.ridge(device, problem.math),
        roofline_ms=account.roofline_ms(problem, device),
        occupancy=held,
        waves=held.waves(blocks),
        wave_efficiency=wave_efficiency(blocks, device),
        loop=loop,
        banks=banks,
        traffic=traffic,
        miniature=miniature,
        lines=lines,
        miniature_source=miniature_source,
        estimate_ms=None if modelled is None else modelled.ms,
        estimate_parts={} if modelled is None else modelled.parts,
        median_ms=measured.timing.median_ms if measured and measured.timing else None,
        sustained=measured.sustained if measured else None,
        vs_cublas=measured.vs_cublas if measured else None,
        predicted_ms=predicted_ms,
        bottleneck=limit.name,
        because=limit.because,
        relief=limit.relief,
    )


def differing(a: Account, b: Account) -> list[str]:
    """Return the parameters in which two configs differ: "BM 64 | 128"."""
    names = dict.fromkeys([*a.source.config, *b.source.config])
    pairs = [(name, a.source.config.get(name, "-"), b.source.config.get(name, "-")) for name in names]
    return [f"{name} {one} | {other}" for name, one, other in pairs if one != other]


def _compiled(source: Source, device: Device, depot: Depot | None, *options: str) -> Binary:
    kernel = source.text, source.entry, device.arch
    if depot is None:
        binary = compile_bounded(*kernel, options)
    else:
        binary = cubins.load_or_compile(*kernel, options=options, depot=depot)
    if isinstance(binary, Rejected):
        raise ConfigError(f"config {source.config.id} does not compile: {binary.why}")
    return binary


def _loop(binary: Binary) -> sass.Loop | None:
    try:
        return sass.main_loop(binary.cubin, binary.entry)
    except ToolchainError:
        return None


def _counted(
    space: Space, config: Config, problem: Problem, device: Device, depot: Depot | None
) -> tuple[dict[str, Traffic], Mapping[int, Mapping[str, int]], Problem, Source]:
    """Run the config on a miniature of the problem in the simulator, and count its memory accesses."""
    miniature = small_problem(space, config, problem, device, tiles=1)
    source = render(space, config, miniature, device)
    binary = _compiled(source, device, depot, "-lineinfo")
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape, np.float32) for shape in miniature.arrays[:2])
    c, beta = np.zeros(miniature.arrays[2], np.float32), float(miniature.beta)
    report = run_launch(
        binary.ptx,
        source.launch,
        {"alpha": 1.0, "a": a, "b": b, "beta": beta, "c": c, **workspace_of(source.launch)},
        counters=True,
    ).raise_if_faulty()
    counters = report.counters
    assert counters is not None, "they were asked for"
    metrics = counters.metrics
    loads, stores, copies = (
        [metrics[_GLOBAL.format(unit, kind)] for unit in ("requests", "sectors")]
        for kind in ("ld", "st", "ldgsts")
    )
    traffic = {
        "global ld": Traffic(loads[0] - copies[0], loads[1] - copies[1]),  # copies count as loads too
        "global st": Traffic(*stores),
        "global copy": Traffic(*copies),
    }
    for kind, name in (("ld", "shared ld"), ("st", "shared st"), ("ldgsts", "shared copy")):
        traffic[name] = Traffic(
            metrics[_SHARED_REQUESTS.format(kind)],
            metrics[_SHARED_WAVEFRONTS.format(kind)],
            metrics[_SHARED_CONFLICTS.format(kind)],
        )
    return {name: each for name, each in traffic.items() if each.requests}, counters.lines, miniature, source
