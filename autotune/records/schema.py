"""What a record file holds: `Record` and its parts, whose fields are the keys of the file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Annotated, Any, Final, Literal

from autotune.errors import REJECTION_KINDS, RecordError
from autotune.values.device import Device, known_devices, slug_of
from autotune.values.limits import Count, Limit, Milliseconds, Name, Quantiles, ReadOnly, Size
from autotune.values.measurement import ARGUMENTS, Launch, Sustained, Timing
from autotune.values.problem import Problem

SCHEMA: Final = 5
AGREE = 1e-3  # how far a number may be from what others in the record make it: they are rounded
LAUNCH_MS = 5e-4  # no launch takes less than half a microsecond
FASTEST_MHZ = 4000  # no GPU has a higher clock
CLOCK_SLACK = 1.02
LONGEST_NAME = 120  # characters of a family or GPU: a file's name has at most 255, with the problem's facts
OUTCOMES = ("measured", "estimated", *REJECTION_KINDS)

Seconds = Annotated[float, Limit(least=0)]
Text = Annotated[str, Limit(pattern=".+")]
Digest = Annotated[str, Limit(pattern="[0-9a-f]{8,64}")]
Config = Mapping[Name, int | str]
Instant = Annotated[str, Limit(pattern="[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")]


@dataclass(frozen=True)
class RecordedDevice:
    """The GPU that a record was made on, or for: `Device` without the limits that no reader needs.

    Attributes:
        name: As the driver reports it.
        compute_capability: "major.minor".
        sm_count: Streaming multiprocessors.
        shared_per_block: Shared memory of one block with opt-in, bytes.
        l2_bytes: L2 cache.
        mig: Name of the MIG slice, None for a whole GPU.
    """

    name: Text
    compute_capability: Annotated[str, Limit(pattern=r"[0-9]{1,2}\.[0-9]")]
    sm_count: Size
    shared_per_block: Size
    l2_bytes: Count
    mig: Text | None

    @classmethod
    def of(cls, device: Device) -> RecordedDevice:
        """Take the recorded facts from a `Device`."""
        return cls(**{field.name: getattr(device, field.name) for field in fields(cls)})

    @property
    def slug(self) -> str:
        """The folder of this device's records; the same as `Device.slug`."""
        return slug_of(self.name, self.mig)


def identity_of(device: Device | RecordedDevice) -> tuple[str, str, int, str | None]:
    """Return what tells GPUs apart: name, compute capability, SM count and MIG slice."""
    return device.name, device.compute_capability, device.sm_count, device.mig


@dataclass(frozen=True)
class Toolchain:
    """What compiled and ran the kernel.

    Attributes:
        nvrtc: Build of NVRTC, such as "13.0.88"; older records say "13.0", which matches every build of it.
        driver: Version of the driver, such as "580.95.05"; None without a GPU.
        flags: What NVRTC was told.
    """

    nvrtc: Text
    driver: Text | None
    flags: tuple[Text, ...]


@dataclass(frozen=True)
class Resources:
    """What the compiler reports.

    Attributes:
        registers: Registers of one thread.
        spill_bytes: Bytes of local memory that one thread spills.
        static_shared_bytes: Static shared memory of a block; ``shared_bytes`` of a launch is the dynamic one.
    """

    registers: Size
    spill_bytes: Count
    static_shared_bytes: Count


@dataclass(frozen=True)
class Cublas:
    """The baseline, interleaved with the winner in one run.

    Attributes:
        median_ms: Median of the samples, per launch.
        kernel: What it launched; None where the driver does not tell.
        version: Of the library, such as "13.1.0"; None where it was not asked.
    """

    median_ms: Milliseconds
    kernel: Text | None
    version: Text | None = None


@dataclass(frozen=True)
class Verification:
    """How far the result was from a float64 reference.

    Attributes:
        error: ``||C - reference||_F / ||reference||_F``, as `autotune.values.measurement.Verdict` defines it.
        bound: Largest error allowed.
        inputs: What it was checked on, in words.
    """

    error: Annotated[float, Limit(least=0)]
    bound: Annotated[float, Limit(above=0)]
    inputs: Text

    def __post_init__(self) -> None:
        if self.error > self.bound:
            raise RecordError(
                f"error {self.error:.6g} exceeds its bound {self.bound:.6g}: not a verified kernel"
            )


QUICK: Final = "quick"  # the strategy of a search that measures the first points of the model alone


@dataclass(frozen=True)
class Searched:
    """What the search did.

    Attributes:
        strategy: Its name.
        budget: As asked for: a number of candidates, those of earlier runs included, or a time such as "60s".
        seconds: Wall-clock time of the run's search.
        complete: Every legal candidate has an outcome: a longer search cannot find more.
        seen: Candidates evaluated, those of earlier runs included.
        legal: Legal candidates there are, of all families; where the strategy is `QUICK`, those that were to
            be measured: it does not list the others.
        outcomes: Candidates by what became of them: "measured" (or "estimated") and the rejection kinds.
        seed: Of its random choices.
        resumed: Candidates among the seen whose outcome came from the log of earlier runs, or from other
            processes of a shared study.
        stages_s: Seconds of each stage of the run. One after the other: "start" (from the command's start to
            the first proposal: imports, processes, listing, reading logs), "search", "finals". Parts of them:
            "first_outcome" (from the command's start to the first outcome of a GPU), "propose" and "render"
            (of the searching process), "compile" (summed over processes), "gpu" (on candidates, summed over
            GPUs).
    """

    strategy: Text
    budget: Count | Text
    seconds: Seconds
    complete: bool
    seen: Count
    legal: Count
    outcomes: Mapping[Name, Count]
    seed: int | None
    resumed: Count = 0
    stages_s: Mapping[Name, Seconds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = [name for name in self.outcomes if name not in OUTCOMES]
        if unknown:
            raise RecordError(f"unknown outcome {unknown[0]!r}: expected one of {', '.join(OUTCOMES)}")
        object.__setattr__(self, "outcomes", ReadOnly(self.outcomes))
        object.__setattr__(self, "stages_s", ReadOnly(self.stages_s))

    @property
    def extent(self) -> str:
        """How many candidates were seen, and of how many."""
        return f"{self.seen} of {'the first ' * (self.strategy == QUICK)}{self.legal}"


@dataclass(frozen=True)
class RunnerUp:
    """Another config that was timed in turns with the winner in the finals.

    Attributes:
        config: Parameter names to values.
        code_digest: SHA-256 of its rendered text without comments; None in records of schema 2.
        median_ms: Median of the samples, milliseconds per launch.
        quantiles_ms: 10, 50 and 90 % quantiles of the samples, milliseconds per launch.
        tied: It cannot be told from the fastest: see `autotune.values.measurement.Timing.ties`.
    """

    config: Config
    code_digest: Digest | None
    median_ms: Milliseconds
    quantiles_ms: Quantiles
    tied: bool

    def __post_init__(self) -> None:
        _around(self.median_ms, self.quantiles_ms)
        object.__setattr__(self, "config", ReadOnly(self.config))


@dataclass(frozen=True, kw_only=True)
class Record:
    """The stored winner of one search; its fields are the keys of the file, in this order.

    Attributes:
        evidence: "measured" on a GPU, or "estimated" without one (then every time below is None or empty).
        gpu_uuid: UUID of the GPU, such as "GPU-1b2c..."; None without one, or if the driver does not tell.
        config: Parameter names to values.
        code_digest: SHA-256 of the rendered text without comments.
        machine_code_digest: SHA-256 of the cubin that was measured; None in records of schema 2.
        template_digest: Of the templates that rendered it.
        space_digest: Of the search-space file.
        sustained: The kernel run back to back, for its energy; left out where it was not, as before schema 5.
        gflops: 2 m n k / median_ms, in 10^9 operations per second.
        vs_cublas: Time of cuBLAS / time of this kernel; None where cuBLAS is absent.
        runners_up: The other finalists of the family, the fastest first.
        created: UTC, such as "2026-01-31T12:00:00Z".
        imported: When it was taken in from elsewhere, UTC; None where it was measured for this folder.

    Raises:
        RecordError: The parts contradict each other, or a time is shorter than the GPU can be.
    """

    schema: Literal[5] = SCHEMA
    evidence: Literal["measured", "estimated"]
    problem: Problem
    device: RecordedDevice
    gpu_uuid: Text | None = None
    family: Name
    config: Config
    launch: Launch
    code_digest: Digest
    machine_code_digest: Digest | None = None
    template_digest: Digest
    space_digest: Digest
    toolchain: Toolchain
    resources: Resources
    timing: Timing | None
    sustained: Annotated[Sustained, Limit(omitted=True)] | None = None
    gflops: Annotated[float, Limit(above=0, decimals=1)] | None
    vs_cublas: Annotated[float, Limit(above=0, decimals=4)] | None
    cublas: Cublas | None
    verification: Verification
    search: Searched
    runners_up: tuple[RunnerUp, ...]
    created: Instant
    imported: Instant | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", ReadOnly(self.config))
        times = (self.timing, self.sustained, self.gflops, self.vs_cublas, self.cublas)
        if self.evidence == "estimated":
            if self.runners_up or any(time is not None for time in times):
                raise RecordError(
                    "an estimated record holds no timing, sustained, gflops, vs_cublas, cublas or runners_up"
                )
        elif self.timing is None or self.gflops is None:
            raise RecordError("a measured record needs timing and gflops")
        else:
            self._check_times(self.timing, self.gflops)
        if any(each.config == self.config for each in self.runners_up):
            raise RecordError("the record's own config is among its runners_up")
        for what, name in (("family", self.family), ("device", self.device.slug)):
            if len(name) > LONGEST_NAME:
                raise RecordError(
                    f"{what} has a name of {len(name)} characters: files are named by it, "
                    f"give {LONGEST_NAME} at most"
                )
        for name in ("created", "imported"):
            try:
                datetime.fromisoformat(getattr(self, name) or "2026-01-01")
            except ValueError as error:
                raise RecordError(f"{name} is not a time: {error}") from None

    def _check_times(self, timing: Timing, gflops: float) -> None:
        """Check what can be computed again, and that no time is shorter than the GPU can be."""
        _around(timing.median_ms, timing.quantiles_ms, "timing.")
        rate = self.problem.flops / timing.median_ms / 1e6
        if not math.isclose(gflops, rate, rel_tol=AGREE):
            raise RecordError(f"gflops {gflops:.6g} is not 2mnk / median_ms, which is {rate:.6g}")
        if (self.vs_cublas is None) != (self.cublas is None):
            raise RecordError("vs_cublas and cublas go together: both or neither")
        if self.cublas is not None and self.vs_cublas is not None:
            ratio = self.cublas.median_ms / timing.median_ms
            if not math.isclose(self.vs_cublas, ratio, rel_tol=AGREE):
                raise RecordError(f"vs_cublas {self.vs_cublas:.6g} is not cuBLAS / ours, {ratio:.6g}")
        least = least_ms(self.problem, self.device, timing)
        shortest = min([timing.median_ms, *(each.median_ms for each in self.runners_up)])
        if self.sustained is not None:
            shortest = min(shortest, self.sustained.mean_ms)
        if shortest < least:
            raise RecordError(
                f"median_ms {shortest:.6g} is impossible: {self.device.name} takes {least:.3g} ms for "
                f"{self.problem} at its peak"
            )


def least_ms(problem: Problem, device: RecordedDevice, timing: Timing) -> float:
    """Return the ms below which no launch can be: the FLOPs at the peak of the math, or the launch itself.

    The clock is the highest that the table of GPUs or the record itself states, and `FASTEST_MHZ` where none
    does. Memory is no bound: a kernel whose operands are in L2 may beat a copy.
    """
    known = next((each for each in known_devices().values() if each.name == device.name), None)
    stated = (timing.clocks or {}).get("sm_mhz_max")
    told = min(int(stated), FASTEST_MHZ) if isinstance(stated, int | float) else 0
    clock = max(known.clock_mhz if known is not None else 0, told) or FASTEST_MHZ
    facts: dict[str, Any] = {each.name: getattr(device, each.name) for each in fields(device)}
    facts |= dict.fromkeys(("shared_per_sm", "max_threads_per_sm", "max_blocks_per_sm", "memory_bytes"), 0)
    peak = Device(**facts, clock_mhz=clock).peak(problem.math)  # GFLOP/s
    return max(LAUNCH_MS, problem.flops / peak / 1e6 / CLOCK_SLACK) if peak else LAUNCH_MS


def migrated(value: object) -> object:
    """Bring the parsed content of an older record to this schema; what is none of them stays as it is.

    Schema 1 knew no workspace, no version of cuBLAS, no resumed search and no stages. Schema 2 listed the
    winner again as the first of its finalists, and knew no digest of machine code or of a finalist's code,
    no UUID and no import; its names said less of their units. Up to schema 3 a launch was that of one kernel,
    of the family's name. Schema 4 knew no energy.

    Raises:
        RecordError: The first finalist is not the winner.
    """
    if not (isinstance(value, dict) and type(value.get("schema")) is int and 1 <= value["schema"] < SCHEMA):
        return value
    if value["schema"] < 3:
        value = _of_schema_3(value)
    launch = value.get("launch")
    if value["schema"] > 3 or not isinstance(launch, dict):
        return value | {"schema": SCHEMA}
    workspace_bytes = launch.get("workspace_bytes")
    kernel = {"entry": value.get("family")}
    kernel |= {name: each for name, each in launch.items() if name != "workspace_bytes"}
    kernel["arguments"] = list(ARGUMENTS if workspace_bytes else ARGUMENTS[:-1])
    launch = {"kernels": [kernel], "workspace_bytes": workspace_bytes}
    return value | {"launch": launch, "schema": SCHEMA}


def _of_schema_3(value: dict[str, Any]) -> dict[str, Any]:
    added = {
        "launch": {"workspace_bytes": 0},
        "cublas": {"version": None},
        "search": {"resumed": 0, "stages": {}},
    }
    parts = {name: new | value[name] for name, new in added.items() if isinstance(value.get(name), dict)}
    whole = {"gpu_uuid": None, "machine_code_digest": None, "imported": None} | value | parts
    for part, old, new in (
        ("timing", "quantiles", "quantiles_ms"),
        ("resources", "shared_bytes", "static_shared_bytes"),
        ("search", "stages", "stages_s"),
    ):
        if part in whole:
            whole[part] = _renamed(whole[part], old, new)
    for part, inner, old, new in (
        ("search", "stages_s", "first", "first_outcome"),
        ("timing", "clocks", "others", "other_processes"),
    ):
        if isinstance(whole.get(part), dict) and inner in whole[part]:
            whole[part][inner] = _renamed(whole[part][inner], old, new)
    listed = whole.pop("finalists", None)
    if isinstance(listed, list):
        first = listed[0] if listed else None
        if isinstance(first, dict) and first.get("config") != value.get("config"):
            raise RecordError("$.finalists[0].config is not the record's config")
        listed = [_renamed(each, "quantiles", "quantiles_ms") for each in listed[1:]]
        whole["runners_up"] = [
            {"code_digest": None, **each} if isinstance(each, dict) else each for each in listed
        ]
    elif "finalists" in value:
        whole["runners_up"] = listed
    return whole


def _renamed(value: Any, old: str, new: str) -> Any:
    """Return a JSON object with a key renamed in its place; what is no object, or lacks it, as it is."""
    if not isinstance(value, dict):
        return value
    return {new if key == old else key: item for key, item in value.items()}


def _around(median_ms: float, quantiles_ms: Quantiles, name: str = "") -> None:
    if list(quantiles_ms) != sorted(quantiles_ms):
        told = ", ".join(f"{each:.6g}" for each in quantiles_ms)
        raise RecordError(f"{name}quantiles_ms must ascend, got {told}")
    low, _, high = quantiles_ms
    if not low * (1 - AGREE) <= median_ms <= high * (1 + AGREE):
        raise RecordError(
            f"{name}median_ms {median_ms:.6g} is not between its quantiles {low:.6g} and {high:.6g}"
        )
