"""What is measured of a kernel on a GPU: how it is launched, whether it was right, and how long it took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from autotune.errors import MachineFault, RecordError, Rejected
from autotune.values.device import Device
from autotune.values.limits import Count, Limit, Milliseconds, Name, Quantiles, ReadOnly, Scalar, Size

L2 = Literal["warm", "cold"]
Method = Literal["back-to-back", "graph"]
Argument = Literal["alpha", "a", "b", "beta", "c", "workspace", "prepared"]
ARGUMENTS: tuple[Argument, ...] = get_args(Argument)[:-1]  # of a product that works in a workspace
Clocks = Mapping[Name, Scalar | tuple[Scalar, ...]]
PowerBy = Literal["energy counter", "power readings"]

POWER_CAP = "power cap"  # in a list of what throttles: it is met by every large multiplication
TIE_MEDIAN = 1.01
TIE_OVERLAP = 1.03


@dataclass(frozen=True)
class KernelLaunch:
    """How one kernel is launched.

    Attributes:
        entry: Its name in the machine code.
        grid: Blocks in x, y, z.
        block: Threads of a block in x, y, z.
        shared_bytes: Dynamic shared memory of a block.
        arguments: What it takes, in the order of its parameters: scalars, and addresses of the operands as
            stored, of the workspace, and of what B was prepared into.
    """

    entry: Name
    grid: tuple[Size, Size, Size]
    block: tuple[Size, Size, Size]
    shared_bytes: Count
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Launch:
    """What one multiplication launches.

    Attributes:
        kernels: Launched one after the other, of the same machine code; the last one computes the product.
        workspace_bytes: Device memory that the kernels work in, for one multiplication at a time; 0 for none.
        scratch_bytes: So many of its last bytes may hold anything; all others are zero before the first
            multiplication.
        prepared_bytes: Device memory that B is prepared into, by this launch or by one before; 0 for none.
        waits: Each kernel first waits for those before it on the stream (griddepcontrol.wait), so that it may
            be launched while they run.

    Raises:
        RecordError: There is no kernel, or the workspace is taken by none, or has no size.
    """

    kernels: tuple[KernelLaunch, ...]
    workspace_bytes: Count = 0
    scratch_bytes: Annotated[int, Limit(least=0, omitted=True)] = 0
    prepared_bytes: Annotated[int, Limit(least=0, omitted=True)] = 0
    waits: Annotated[bool, Limit(omitted=True)] = False

    def __post_init__(self) -> None:
        if not self.kernels:
            raise RecordError("launch.kernels is empty: at least one kernel is launched")
        if any("workspace" in each.arguments for each in self.kernels) != (self.workspace_bytes > 0):
            raise RecordError(
                f"a workspace of {self.workspace_bytes} bytes contradicts the arguments of the kernels"
            )
        if self.scratch_bytes > self.workspace_bytes:
            raise RecordError(
                f"scratch_bytes {self.scratch_bytes} is more than workspace_bytes {self.workspace_bytes}"
            )

    @classmethod
    def of(
        cls,
        entry: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int = 0,
        workspace_bytes: int = 0,
    ) -> Launch:
        """Return the launch of one kernel: on alpha, A, B, beta, C, and a workspace if it has a size."""
        arguments = ARGUMENTS if workspace_bytes else ARGUMENTS[:-1]
        return cls((KernelLaunch(entry, grid, block, shared_bytes, arguments),), workspace_bytes)

    @property
    def zeroed_bytes(self) -> int:
        """First bytes of the workspace, which are zero before the first multiplication."""
        return self.workspace_bytes - self.scratch_bytes

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of the product in x, y, z."""
        return self.kernels[-1].grid

    @property
    def block(self) -> tuple[int, int, int]:
        """Threads of a block of the product in x, y, z."""
        return self.kernels[-1].block

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block of the product."""
        return self.kernels[-1].shared_bytes


@dataclass(frozen=True)
class Timing:
    """How long one launch takes on the GPU.

    Attributes:
        median_ms: Median of the samples, milliseconds per launch.
        quantiles_ms: 10, 50 and 90 % quantiles of the samples, milliseconds per launch.
        repeats: Samples.
        launches: Launches of one sample.
        l2: "warm": every launch uses the same operands; "cold": launches rotate through copies of the
            operands that together exceed three times the L2 cache.
        method: How the launches of a sample were issued: one after the other, or replayed as a CUDA graph.
        clocks: {"sm_mhz_min", "sm_mhz_max", "throttle": reasons} around the timing, and where known "watts"
            and "other_processes", how many others kept the GPU busy; None where not asked for or unknown.
        noisy: The 10 to 90 % spread exceeds 5 % of the median, another process kept the GPU busy, or the GPU
            was throttled by more than its power cap, under which every large multiplication runs.
    """

    median_ms: Milliseconds
    quantiles_ms: Quantiles
    repeats: Size
    launches: Size
    l2: L2
    method: Method
    clocks: Clocks | None
    noisy: bool

    def __post_init__(self) -> None:
        if self.clocks is not None:
            object.__setattr__(self, "clocks", ReadOnly(self.clocks))

    def ties(self, best: Timing) -> bool:
        """Return whether this timing and the fastest of the same rounds cannot be told apart.

        They tie when the medians differ by 1 % at most, or by 3 % at most while this one's 10 % quantile
        lies below the faster one's 90 % quantile.

        Args:
            best: The one with the lowest median.
        """
        ratio = self.median_ms / best.median_ms
        return ratio <= TIE_MEDIAN or (ratio <= TIE_OVERLAP and self.quantiles_ms[0] <= best.quantiles_ms[2])


@dataclass(frozen=True)
class Sustained:
    """How fast launches are that follow each other for seconds, once the GPU has met its limits.

    Attributes:
        seconds: For how long it ran back to back, as asked for; what follows is of the second half.
        launches: In that half.
        mean_ms: Mean over it, milliseconds per launch.
        joules: Energy of one launch, of the whole GPU: mean power times ``mean_ms``; None where NVML does not
            tell.
        power_by: Where the power is from: NVML's counter of energy, between two of its changes, or the mean
            of the readings of power where there is no counter; None where there is neither.
        sm_mhz: Mean SM clock; None where NVML does not tell.
        throttle: What slowed the GPU down, as far as NVML tells.
    """

    seconds: Annotated[float, Limit(above=0)]
    launches: Size
    mean_ms: Milliseconds
    joules: Annotated[float, Limit(above=0)] | None = None
    power_by: PowerBy | None = None
    sm_mhz: Annotated[float, Limit(least=0)] | None = None
    throttle: tuple[Annotated[str, Limit(pattern=".+")], ...] = ()

    def __post_init__(self) -> None:
        if (self.joules is None) != (self.power_by is None):
            raise RecordError("joules and power_by go together: both or neither")

    @property
    def watts(self) -> float | None:
        """Mean power; None where it is not known."""
        return None if self.joules is None else self.joules / self.mean_ms * 1e3

    def gflops(self, flops: int) -> float:
        """Return the rate of launches of so many operations, 10^9 per second."""
        return flops / self.mean_ms / 1e6

    def gflops_per_watt(self, flops: int) -> float | None:
        """Return 10^9 operations per joule; None where the power is not known."""
        return None if self.joules is None else flops / self.joules / 1e9

    def words(self, flops: int) -> str:
        """Return it in words, such as "52.5 TFLOP/s, 698 W, 1.83 J per launch, 75.2 GFLOP/s per W"."""
        parts = [f"{self.gflops(flops) / 1000:.2f} TFLOP/s"]
        efficiency = self.gflops_per_watt(flops)
        if self.watts is not None and efficiency is not None:
            parts += [f"{self.watts:.0f} W", f"{self.joules:.4g} J per launch"]
            parts += [f"{efficiency:.1f} GFLOP/s per W"]
        if self.sm_mhz is not None:
            parts.append(f"{self.sm_mhz:.0f} MHz")
        parts += [f"limited by {each}" for each in self.throttle]
        by = f", by NVML's {self.power_by}" if self.power_by else ""
        return f"{', '.join(parts)}; second half of {self.seconds:g} s back to back{by}"


@dataclass(frozen=True)
class Verdict:
    """Whether a product is right.

    Attributes:
        ok: It passed every rule.
        error: ``||C - reference||_F`` / the norm of rule 1, which is ``||reference||_F`` unless C has few
            elements that happen to be small; may be infinite or NaN.
        bound: Largest error allowed.
        why: The first rule it broke with the numbers, one line; "" when ok.
        inputs: What it was checked on.
    """

    ok: bool
    error: float
    bound: float
    why: str
    inputs: str


@dataclass(frozen=True)
class MeasuredTrial:
    """A candidate that was right, and how long it takes.

    Attributes:
        timing: Of its launches.
        verdict: On its result.
        seconds: That the worker spent on it; not part of equality.
    """

    timing: Timing
    verdict: Verdict
    seconds: float = field(default=0.0, compare=False)


Trial = MeasuredTrial | Rejected
Tried = Trial | MachineFault


@dataclass(frozen=True)
class Finals:
    """Finalists checked in full and timed in turns with cuBLAS.

    Attributes:
        outcomes: By key, in the order they were given.
        cublas: None where cuBLAS is absent or failed its check.
        cublas_kernel: What cuBLAS launched, if the driver tells.
        cublas_version: Version of cuBLAS, if it tells.
    """

    outcomes: dict[Any, Trial]
    cublas: Timing | None
    cublas_kernel: str | None
    cublas_version: str | None = None

    def vs_cublas(self, median_ms: float) -> float | None:
        """Return the time of cuBLAS over that of a finalist; None where cuBLAS has none."""
        return None if self.cublas is None else self.cublas.median_ms / median_ms


@dataclass(frozen=True)
class GpuFacts:
    """What the worker reports when it is ready.

    Attributes:
        device: The GPU.
        driver: Version of the driver, such as "580.95.05".
        memory_free: Bytes free after the inputs were allocated.
        input_sets: Sets of inputs that candidates are checked on in turn.
        pci_bus_id: Such as "0000:04:00.0".
        uuid: Such as "GPU-1b2c..."; None if the driver does not tell.
        start_s: Seconds of each part of the worker's start.
    """

    device: Device
    driver: str
    memory_free: int
    input_sets: int
    pci_bus_id: str
    uuid: str | None = None
    start_s: Mapping[str, float] = field(default_factory=dict)
