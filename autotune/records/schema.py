"""Says what a record file holds: `Record` and its parts, whose fields are the keys of the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Annotated, Final, Literal

from autotune.errors import REJECTION_KINDS, RecordError
from autotune.values.device import Device, slug_of
from autotune.values.limits import Count, Limit, Milliseconds, Name, Quantiles, ReadOnly, Size
from autotune.values.measurement import Launch, Timing
from autotune.values.problem import Problem

SCHEMA: Final = 2
OUTCOMES = ("measured", "estimated", *REJECTION_KINDS)

Seconds = Annotated[float, Limit(least=0)]
Text = Annotated[str, Limit(pattern=".+")]
Digest = Annotated[str, Limit(pattern="[0-9a-f]{8,64}")]
Config = Mapping[Name, int | str]


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


@dataclass(frozen=True)
class Toolchain:
    """What compiled and ran the kernel: NVRTC ("13.5") and its flags; the driver, None without a GPU."""

    nvrtc: Text
    driver: Text | None
    flags: tuple[Text, ...]


@dataclass(frozen=True)
class Resources:
    """What the compiler reports: registers of a thread, spilled bytes, bytes of static shared memory."""

    registers: Size
    spill_bytes: Count
    shared_bytes: Count


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
    """How far the output was from the reference: error and bound as in `Verdict`, the inputs in words."""

    error: Annotated[float, Limit(least=0)]
    bound: Annotated[float, Limit(above=0)]
    inputs: Text

    def __post_init__(self) -> None:
        if self.error > self.bound:
            raise RecordError(
                f"error {self.error:.6g} exceeds its bound {self.bound:.6g}: not a verified kernel"
            )


@dataclass(frozen=True)
class Searched:
    """What the search did.

    Stages that follow each other: "start" (from the command's start to the first proposal: imports,
    processes, listing, reading logs), "search", and "finals". Parts of them: "first" (from the command's
    start to the first outcome of a GPU), "propose" and "render" (of the searching process), "compile" (summed
    over processes), and "gpu" (spent on candidates, summed over GPUs).

    Attributes:
        strategy: Its name.
        budget: As asked for: a number of candidates, those of earlier runs included, or a time such as "60s".
        seconds: Wall-clock time of the run's search.
        complete: Every legal candidate has an outcome: a longer search cannot find more.
        seen: Candidates evaluated, those of earlier runs included.
        legal: Legal candidates there are, of all families.
        outcomes: Candidates by what became of them: "measured" (or "estimated") and the rejection kinds.
        seed: Of its random choices.
        resumed: Candidates among the seen whose outcome came from the log of earlier runs, or from other
            processes of a shared study.
        stages: Seconds of each stage of the run.
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
    stages: Mapping[Name, Seconds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = [name for name in self.outcomes if name not in OUTCOMES]
        if unknown:
            raise RecordError(f"unknown outcome {unknown[0]!r}: expected one of {', '.join(OUTCOMES)}")
        object.__setattr__(self, "outcomes", ReadOnly(self.outcomes))
        object.__setattr__(self, "stages", ReadOnly(self.stages))


@dataclass(frozen=True)
class Finalist:
    """One config of the last, interleaved comparison; tied when it cannot be told from the winner."""

    config: Config
    median_ms: Milliseconds
    quantiles: Quantiles
    tied: bool

    def __post_init__(self) -> None:
        _ascending(self.quantiles)
        object.__setattr__(self, "config", ReadOnly(self.config))


@dataclass(frozen=True, kw_only=True)
class Record:
    """The stored winner of one search; its fields are the keys of the file, in this order.

    Attributes:
        evidence: "measured" on a GPU, or "estimated" without one (then every time below is None or empty).
        config: Parameter names to values.
        code_digest: SHA-256 of the rendered text without comments.
        template_digest: Of the templates that rendered it.
        space_digest: Of the search-space file.
        gflops: 2 m n k / median_ms, in 10^9 operations per second.
        vs_cublas: Time of cuBLAS / time of this kernel; None where cuBLAS is absent.
        finalists: Best first.
        created: UTC, such as "2026-01-31T12:00:00Z".

    Raises:
        RecordError: The parts contradict each other.
    """

    schema: Literal[2] = SCHEMA
    evidence: Literal["measured", "estimated"]
    problem: Problem
    device: RecordedDevice
    family: Name
    config: Config
    launch: Launch
    code_digest: Digest
    template_digest: Digest
    space_digest: Digest
    toolchain: Toolchain
    resources: Resources
    timing: Timing | None
    gflops: Annotated[float, Limit(above=0, decimals=1)] | None
    vs_cublas: Annotated[float, Limit(above=0, decimals=4)] | None
    cublas: Cublas | None
    verification: Verification
    search: Searched
    finalists: tuple[Finalist, ...]
    created: Annotated[str, Limit(pattern="[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")]

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", ReadOnly(self.config))
        if self.evidence == "measured" and (self.timing is None or self.gflops is None):
            raise RecordError("a measured record needs timing and gflops")
        times = (self.timing, self.gflops, self.vs_cublas, self.cublas)
        if self.evidence == "estimated" and (self.finalists or any(time is not None for time in times)):
            raise RecordError("an estimated record holds no timing, gflops, vs_cublas, cublas or finalists")
        if (self.vs_cublas is None) != (self.cublas is None):
            raise RecordError("vs_cublas and cublas go together: both or neither")
        if self.timing is not None:
            _ascending(self.timing.quantiles, "timing.quantiles")
        try:
            datetime.fromisoformat(self.created)
        except ValueError as error:
            raise RecordError(f"created is not a time: {error}") from None


def migrated(value: object) -> object:
    """Bring the parsed content of an older record to this schema; what is none of them stays as it is.

    Schema 1 knew no workspace, no version of cuBLAS, no resumed search and no stages.
    """
    if not (isinstance(value, dict) and type(value.get("schema")) is int and value["schema"] == 1):
        return value
    added = {
        "launch": {"workspace_bytes": 0},
        "cublas": {"version": None},
        "search": {"resumed": 0, "stages": {}},
    }
    return value | {
        "schema": SCHEMA,
        **{name: value[name] | parts for name, parts in added.items() if isinstance(value.get(name), dict)},
    }


def _ascending(quantiles: tuple[float, ...], name: str = "quantiles") -> None:
    if list(quantiles) != sorted(quantiles):
        raise RecordError(f"{name} must ascend, got {', '.join(f'{q:.6g}' for q in quantiles)}")
