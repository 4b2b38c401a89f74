"""The bench: stored winners timed against cuBLAS and the fastest algorithm of cuBLASLt, in one run."""

from __future__ import annotations

import math
import secrets
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autotune import records
from autotune.code import cubins
from autotune.code.compiler import Binary, nvrtc_version
from autotune.code.depot import Depot
from autotune.code.pool import default_workers
from autotune.errors import AutotuneError, DeviceError, MachineFault, Rejected, ToolchainError
from autotune.kernel.best import expected
from autotune.kernel.choices import Choice, Choices
from autotune.measure.comparison import LIBRARIES, Baseline, BenchFacts, Comparison, Library, libraries_for
from autotune.measure.worker import GpuWorker
from autotune.model.account import roofline_ms
from autotune.records import Filed, Store
from autotune.report.rows import Circumstances, Failure, Row, Rows, Winner
from autotune.tuning.limits import COMPILE_TIMEOUT_S, trial_limit
from autotune.tuning.meter import Meter
from autotune.tuning.quick import KeptWorkshop
from autotune.values import typed
from autotune.values.device import Device
from autotune.values.lazy import cached_property
from autotune.values.measurement import L2, POWER_CAP, Clocks, Method
from autotune.values.problem import MATHS, Math, Problem
from autotune.values.suite import Shape

SCHEMA = 1
STEP_TIMEOUT_S = 30.0  # more than a check or a sample of anything takes, beyond the limit of a trial
EVERYTHING = "all"  # the group that holds every shape
SLOWER = 0.97  # time of a library / time of the kernel: less is slower, whatever the noise


@dataclass(frozen=True)
class Mean:
    """Geometric means over a group of shapes.

    Attributes:
        group: Its name.
        shapes: Shapes of it that were timed.
        versus: By library, of time of the library / time of the kernel; None where no shape has both.
        floor: Of the share of the roofline floor.
    """

    group: str
    shapes: int
    versus: Mapping[Library, float | None]
    floor: float | None


@dataclass(frozen=True)
class Spread:
    """How the shapes of a run do against a library.

    Attributes:
        mean: Geometric mean of time of the library / time of the kernel.
        worst: The least of them.
        p10: Their first decile.
        slower: Share of the shapes where it is below `SLOWER`.
        choosing_ms: Median of the host time to find what serves, milliseconds.
        choosing_worst_ms: The longest, such as that of a process's first shape.
    """

    mean: float
    worst: float
    p10: float
    slower: float
    choosing_ms: float
    choosing_worst_ms: float


@dataclass(frozen=True)
class Report:
    """All shapes of one run.

    Attributes:
        facts: The GPU, its driver and libraries, and the speed of a copy within its memory.
        nvrtc: Version that compiled the kernels.
        seed: Of the operands.
        cold: Whether operands were kept out of the L2 cache.
        method: How all were launched.
        created: UTC.
        rows: In the order of the suite.
        predicted: Every shape was served as if it had no record.
        quick: Every shape was tuned as ``tune="quick"`` does.
        resumed: Shapes that an earlier run has timed, which was stopped.
    """

    facts: BenchFacts
    nvrtc: str
    seed: int
    cold: bool
    method: Method
    created: str
    rows: tuple[Row, ...]
    predicted: bool = False
    quick: bool = False
    resumed: int = 0

    @property
    def timed(self) -> tuple[Row, ...]:
        """The shapes that have a time."""
        return tuple(row for row in self.rows if row.measured is not None)

    @property
    def fastest(self) -> tuple[Row, ...]:
        """The shapes that have a time, each in the math that takes the least: what ``math="any"`` serves."""
        kept = in_fastest_math((row.shape.id, row.shape.problem.math, row.gflops) for row in self.timed)
        return tuple(row for row in self.timed if row.shape.id in kept)

    @property
    def capped(self) -> tuple[Row, ...]:
        """The shapes that were held at the power cap: another GPU, or a cooler one, has other times."""
        return tuple(
            row
            for row in self.timed
            if row.measured is not None and POWER_CAP in _reasons(row.measured.timing.clocks)
        )

    @property
    def l2(self) -> L2:
        """State of the L2 cache before each launch."""
        return "cold" if self.cold else "warm"

    def floor_ms(self, shape: Shape) -> float:
        """Return the time of the roofline: max(flops / peak, bytes / copy bandwidth), milliseconds.

        The peak is that of the shape's math (`Device.peak`) at the highest clock; the bandwidth was measured
        by a copy in this run, bytes read and written. A and B count once, C once, or twice where it is read.
        A launch and what caches keep are left out: a small problem in a warm L2 may take less.
        """
        measured = replace(self.facts.device, bandwidth_gbs=max(1, round(self.facts.copy_gbs)))
        return roofline_ms(shape.problem, measured)

    @property
    def libraries(self) -> tuple[Library, ...]:
        """What the shapes are compared with: those of any of them."""
        if self.predicted or self.quick:
            return ("cublas",)
        return max((libraries_for(row.shape.problem.math) for row in self.rows), key=len, default=LIBRARIES)

    def share(self, row: Row) -> float | None:
        """Return the floor / time of the kernel: 1 is the roofline."""
        return None if row.measured is None else self.floor_ms(row.shape) / row.measured.timing.median_ms

    @cached_property
    def means(self) -> tuple[Mean, ...]:
        """Geometric means of each group, in the order of the suite, then of all: of each its fastest math."""
        groups = dict.fromkeys(row.shape.group for row in self.rows if row.shape.group != EVERYTHING)
        of_groups = [
            self._mean(group, [row for row in self.fastest if row.shape.group == group]) for group in groups
        ]
        return (*of_groups, self._mean(EVERYTHING, self.fastest))

    def spread(self, name: Library) -> Spread | None:
        """Return how the shapes do against a library; None where nothing was compared."""
        ratios = sorted(value for row in self.fastest if (value := row.versus(name)) is not None)
        mean = geometric_mean(ratios)
        if mean is None:
            return None
        slower = sum(ratio < SLOWER for ratio in ratios) / len(ratios)
        choosing = [row.choosing_s * 1e3 for row in self.timed]
        median = statistics.median(choosing)
        return Spread(mean, ratios[0], ratios[len(ratios) // 10], slower, median, max(choosing))

    def worst(self, name: Library) -> Row | None:
        """Return the shape that does worst, in its fastest math, against a library; None without any."""
        compared = [(value, row) for row in self.fastest if (value := row.versus(name)) is not None]
        return min(compared, key=lambda pair: pair[0])[1] if compared else None

    def plain(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON: milliseconds, GFLOP/s, GB/s, ratios."""
        device = records.RecordedDevice.of(self.facts.device)
        return {
            "schema": SCHEMA,
            "created": self.created,
            "device": {each.name: getattr(device, each.name) for each in fields(device)},
            "driver": self.facts.driver,
            "cublas": self.facts.cublas,
            "cublaslt": self.facts.cublaslt,
            "nvrtc": self.nvrtc,
            "l2": self.l2,
            "seed": self.seed,
            "resumed": self.resumed,
            "peak_gflops": round(self.facts.device.peak_gflops, 1),
            "copy_gbs": round(self.facts.copy_gbs, 1),
            "shapes": [self._plain(row) for row in self.rows],
            "geometric_means": {
                mean.group: {
                    "shapes": mean.shapes,
                    **{f"vs_{name}": _digits(value) for name, value in mean.versus.items()},
                    "share_of_floor": _digits(mean.floor),
                }
                for mean in self.means
            },
            "worst": {
                f"vs_{name}": None if (row := self.worst(name)) is None else row.shape.id
                for name in self.libraries
            },
            "spread": {
                f"vs_{name}": {key: _digits(value) for key, value in asdict(spread).items()}
                for name in self.libraries
                if (spread := self.spread(name)) is not None
            },
        }

    def _mean(self, group: str, rows: Sequence[Row]) -> Mean:
        versus = {name: geometric_mean(row.versus(name) for row in rows) for name in self.libraries}
        return Mean(group, len(rows), versus, geometric_mean(self.share(row) for row in rows))

    def _plain(self, row: Row) -> dict[str, Any]:
        shape, problem = row.shape, row.shape.problem
        libraries = libraries_for(problem.math)
        value: dict[str, Any] = {
            **{"id": shape.id, "m": problem.m, "n": problem.n, "k": problem.k, "layout": problem.layout},
            **{"math": problem.math, "batch": problem.batch, "alpha": shape.alpha, "beta": shape.beta},
            "group": shape.group,
        }
        if row.winner is None and row.failure is None:
            command = f"autotune tune {problem.cli_flags()}"
            return {**value, "status": "missing", "why": row.missing, "command": command}
        if row.winner is not None:
            value |= {"family": row.winner.family, "config": row.winner.id}
            value |= {"served": row.winner.served, "choosing_ms": _digits(row.choosing_s * 1e3)}
        if row.measured is None:
            kind, why = (row.failure.kind, row.failure.why) if row.failure else ("", "")
            return {**value, "status": "failed", "kind": kind, "why": why}
        timing, verdict = row.measured.timing, row.measured.verdict
        return {
            **value,
            "status": "timed",
            **{
                "median_ms": _digits(timing.median_ms),
                "quantiles": [_digits(q) for q in timing.quantiles_ms],
            },
            **{"method": timing.method, "launches": timing.launches, "noisy": timing.noisy},
            "clocks": typed.plain(timing.clocks),
            **{"gflops": _digits(row.gflops), "gbs": _digits(row.gbs)},
            **{"floor_ms": _digits(self.floor_ms(shape)), "share_of_floor": _digits(self.share(row))},
            **{f"vs_{name}": _digits(row.versus(name)) for name in libraries},
            **{name: _plain_library(row.libraries.get(name)) for name in libraries},
            "verification": {"error": _digits(verdict.error), "bound": _digits(verdict.bound)},
            **({"sustained": _plain_sustained(row)} if row.sustained else {}),
        }


def _reasons(clocks: Clocks | None) -> tuple[object, ...]:
    found = None if clocks is None else clocks.get("throttle")
    return found if isinstance(found, tuple) else ()


def in_fastest_math(timed: Iterable[tuple[str, Math, float | None]]) -> set[str]:
    """Return the ids of the shapes that no other math computes faster, given each one's id, math and rate."""
    best = {
        name.removesuffix(f" {math}"): name
        for name, math, _ in sorted(timed, key=lambda each: each[2] or 0.0)
    }
    return set(best.values())


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Return the geometric mean of the values that are there; None when none is."""
    logarithms = [math.log(value) for value in values if value is not None]
    return math.exp(math.fsum(logarithms) / len(logarithms)) if logarithms else None


def bench(
    shapes: Sequence[Shape],
    *,
    ordinal: int = 0,
    cold: bool = False,
    method: Method = "graph",
    seed: int | None = None,
    root: Path | str | None = None,
    predicted: bool = False,
    quick: bool = False,
    resume: bool = True,
    sustained_s: float = 0.0,
    tell: Callable[[Row], None] = lambda row: None,
    say: Callable[[str], None] = lambda line: None,
    meter: Meter | None = None,
    service: str = "autotune.measure.service:serve",
    maths: Sequence[Math] = (),
) -> Report:
    """Time the stored winner of every shape against cuBLAS and the fastest algorithm of cuBLASLt, in FP32.

    Winners on tensor cores also meet cuBLAS in TF32, which is as inexact as TF32.

    All of a shape run on the same operands, are checked in full against float64 with the shape's scalars over
    a poisoned C, then timed in turns; medians. Kernels run in a child process: one that crashes, hangs or is
    wrong fails its own shape only. Nothing is tuned but where that is asked for.

    Args:
        shapes: What to time.
        ordinal: CUDA ordinal of the GPU.
        cold: Time with operands that are not in the L2 cache, all by graph replay.
        method: How all are launched: one by one, or as CUDA graphs, so that no gap between launches counts.
        seed: Of the operands; random when None.
        root: Folder of records; `autotune.paths.cache_dir` when not given.
        predicted: Serve every shape as if it had no record, and compare with cuBLAS's default alone.
        quick: Likewise, but tune every shape first as ``tune="quick"`` does, in a folder of its own; where
            that fails, what is predicted serves.
        resume: Go on where a run of the same shapes was stopped, if nothing has changed that times depend on.
        sustained_s: After the timing of a shape run each contestant back to back for so many seconds; 0: no.
        tell: Told of every shape when it is done.
        say: Told in a line whether this run goes on from another.
        meter: Counts the shapes.
        service: What the child runs.
        maths: Serve each shape in that of these which is predicted to be the fastest; none: in its own.

    Raises:
        DeviceError: No usable GPU.
        ToolchainError: CuPy or NVRTC is missing or does not serve this GPU.
    """
    method = "graph" if cold else method
    tf32 = any(math != "ffma" for math in (*(shape.problem.math for shape in shapes), *maths))
    home = Store(root)
    with ExitStack() as opened:
        asked = (cold, method, seed, predicted, quick, *([sustained_s] if sustained_s else ()))
        gpu = opened.enter_context(GpuWorker(ordinal, None, tf32=tf32, service=service))
        facts = gpu.bench_facts()
        if maths:
            shapes = [_expected(shape, maths, facts.device, _Unseen(root, shapes)) for shape in shapes]
        kept = opened.enter_context(Rows(home, shapes, *asked, resume=resume))
        if kept.seed is not None:
            seed = kept.seed
        seed = secrets.randbits(48) if seed is None else seed
        if len(shapes) > 1:
            kept.open(Circumstances.of(facts, home, seed))
            if kept.told:
                say(kept.told)
        store: Store = _Unseen(root, shapes) if predicted else home
        if quick:
            store = Store(opened.enter_context(TemporaryDirectory(prefix="autotune-")))
            shop = KeptWorkshop(ordinal)
            opened.callback(shop.close)
        rows = dict(kept.done)
        left = [shape for shape in shapes if shape.id not in rows]
        timing = meter or Meter()
        preparing = Meter() if quick else timing
        timing.begin("tuning and timing", len(left))
        for batch in [[shape] for shape in left] if quick else [left]:  # tuned right before it is timed
            choices, winners, seconds = [], [], []
            preparing.begin("choosing kernels", len(batch))
            for shape in batch:
                began = time.perf_counter()
                tuned = quick and _tuned(shape, store, shop)
                choices.append(Choices(shape.problem, facts.device, store))
                exact = tuned or not (predicted or quick)
                serving = choices[-1].exact() if exact else choices[-1].substitutes()
                winners.append(next(serving, None))
                seconds.append(time.perf_counter() - began)
                preparing.step()
            preparing.begin("compiling", len(batch))
            binaries = _compiled(winners, facts.device.arch, store.depot, preparing)
            preparing.begin("timing", len(batch))
            for index, (shape, winner) in enumerate(zip(batch, winners, strict=True)):
                if winner is None:
                    row = Row(shape, missing=choices[index].missing())
                else:
                    libraries = ("cublas",) if predicted or quick else libraries_for(shape.problem.math)
                    row = _row(
                        *(shape, winner, binaries[index], gpu, seed, cold, method, libraries),
                        sustained_s=sustained_s,
                    )
                row = rows[shape.id] = replace(row, choosing_s=seconds[index])
                kept.add(row)
                timing.step()
                tell(row)
    found = tuple(rows[shape.id] for shape in shapes)
    resumed = len(kept.done)
    return Report(facts, nvrtc_version(), seed, cold, method, records.now(), found, predicted, quick, resumed)


def _expected(shape: Shape, maths: Sequence[Math], device: Device, store: Store) -> Shape:
    """Return a shape in the math that is predicted to be the fastest."""
    problems = [replace(shape.problem, math=math) for math in maths]
    return replace(shape, problem=expected(problems, device, None, store))


class _Unseen(Store):
    """Records, of which those of some shapes are not listed, so that no prediction looks at them."""

    def __init__(self, root: Path | str | None, shapes: Sequence[Shape]) -> None:
        super().__init__(root)
        self._hidden = {self._whatever_math(shape.problem) for shape in shapes}

    def filed(self, device: Device | records.RecordedDevice | None = None) -> list[Filed]:
        return [
            file for file in super().filed(device) if self._whatever_math(file.problem) not in self._hidden
        ]

    @staticmethod
    def _whatever_math(problem: Problem) -> Problem:
        return replace(problem, math=MATHS[0])


def _tuned(shape: Shape, store: Store, shop: KeptWorkshop) -> bool:
    """Tune a shape quickly; return whether it has a record now.

    Raises:
        AutotuneError: No shape can be measured.
    """
    try:
        shop.tune(shape.problem, store)
    except AutotuneError:
        if not shop.known:
            raise
        return False
    return True


def _compiled(
    winners: Sequence[Choice | None], arch: str, depot: Depot, meter: Meter
) -> dict[int, Binary | Rejected | MachineFault]:
    """Find the machine code that serves each problem, or compile it in children.

    All of it before anything is timed: compilers would disturb the timing.
    """
    wanted = {}
    for index, winner in enumerate(winners):
        if winner is None:
            meter.step()
            continue
        measured_with = None if winner.record is None else winner.record.toolchain.nvrtc
        wanted[index] = winner.source.text, winner.source.entry, measured_with
    binaries = {}
    for index, binary in cubins.load_or_compile_all(
        wanted, arch, depot=depot, workers=default_workers(), timeout_s=COMPILE_TIMEOUT_S
    ):
        binaries[index] = binary
        meter.step()
    return binaries


def _row(
    shape: Shape,
    winner: Choice,
    binary: Binary | Rejected | MachineFault,
    gpu: GpuWorker,
    seed: int,
    cold: bool,
    method: Method,
    libraries: tuple[Library, ...],
    sustained_s: float,
) -> Row:
    served = Winner.of(winner)
    if isinstance(binary, Rejected):
        return Row(shape, served, failure=Failure(binary.kind, binary.why))
    if isinstance(binary, MachineFault):
        return Row(shape, served, failure=Failure("machine", binary.why))
    comparison = Comparison(
        problem=shape.problem,
        alpha=shape.alpha,
        beta=shape.beta,
        cubin=binary.cubin,
        launch=winner.source.launch,
        seed=seed,
        cold=cold,
        timeout_s=STEP_TIMEOUT_S + trial_limit(shape.problem),
        libraries=libraries,
        method=method,
        sustained_s=sustained_s,
    )
    try:
        compared = gpu.compare(comparison)
    except (DeviceError, ToolchainError) as error:
        return Row(shape, served, failure=Failure("device", str(error)))
    kernel = compared.kernel
    if isinstance(kernel, Rejected):
        return Row(shape, served, failure=Failure(kernel.kind, kernel.why), libraries=compared.libraries)
    return Row(shape, served, kernel, libraries=compared.libraries, sustained=compared.sustained)


def _plain_library(found: Baseline | Rejected | None) -> dict[str, Any] | None:
    if found is None:
        return None
    if isinstance(found, Rejected):
        return {"kind": found.kind, "why": found.why}
    return {
        "median_ms": _digits(found.timing.median_ms),
        "quantiles": [_digits(quantile) for quantile in found.timing.quantiles_ms],
        "kernel": found.kernel,
        "algorithms": found.algorithms,
        "error": _digits(found.error),
    }


def _plain_sustained(row: Row) -> dict[str, Any]:
    """Return what held for seconds, by "kernel" or library."""
    flops = row.shape.problem.flops
    return {
        name: {
            **typed.plain(each),
            "gflops": _digits(each.gflops(flops)),
            "watts": _digits(each.watts),
            "gflops_per_watt": _digits(each.gflops_per_watt(flops)),
        }
        for name, each in row.sustained.items()
    }


def _digits(value: float | None) -> float | None:
    """Keep six significant digits."""
    return None if value is None else float(f"{value:.6g}")
