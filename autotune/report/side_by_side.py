"""Two records side by side: what differs in problem, config, time, resources and circumstances."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from autotune.records import Record
from autotune.values import typed

Part = Literal["problem", "config", "time", "resources", "circumstances"]
SHORT = 12  # characters of a digest that people read

FACTS: dict[Part, dict[str, str]] = {  # what people read, by the path in a record's JSON
    "problem": {f"problem.{name}": name for name in ("m", "n", "k", "batch", "layout", "beta", "math")},
    "config": {"family": "family"},
    "time": {
        "timing.median_ms": "ms",
        "timing.quantiles_ms": "10-90 %, ms",
        "gflops": "TFLOP/s",
        "cublas.median_ms": "cuBLAS, ms",
        "vs_cublas": "vs cuBLAS",
        "timing.noisy": "noisy",
        "sustained.mean_ms": "ms for long",
        "sustained.joules": "joules a launch",
    },
    "resources": {
        "resources.registers": "registers",
        "resources.spill_bytes": "bytes spilled",
        "resources.static_shared_bytes": "static smem bytes",
        "launch.shared_bytes": "dynamic smem bytes",
        "launch.threads": "threads of a block",
        "launch.blocks": "blocks",
        "launch.workspace_bytes": "workspace bytes",
    },
    "circumstances": {
        "evidence": "evidence",
        "device.name": "GPU",
        "device.sm_count": "SMs",
        "device.mig": "MIG slice",
        "gpu_uuid": "its UUID",
        "timing.clocks.sm_mhz_min": "lowest SM MHz",
        "timing.clocks.sm_mhz_max": "highest SM MHz",
        "timing.clocks.watts": "watts",
        "timing.clocks.throttle": "throttled by",
        "timing.clocks.other_processes": "other processes",
        "sustained.seconds": "seconds for long",
        "sustained.power_by": "joules by",
        "sustained.sm_mhz": "SM MHz for long",
        "sustained.throttle": "then held by",
        "timing.l2": "L2",
        "timing.method": "launched",
        "toolchain.driver": "driver",
        "toolchain.nvrtc": "NVRTC",
        "toolchain.flags": "flags",
        "cublas.version": "cuBLAS",
        "cublas.kernel": "its kernel",
        "verification.error": "relative error",
        "search.strategy": "searched by",
        "search.budget": "budget",
        "search.seen": "candidates seen",
        "search.legal": "legal ones",
        "code_digest": "code",
        "template_digest": "template",
        "space_digest": "space",
        "created": "created",
        "imported": "imported",
    },
}


@dataclass(frozen=True)
class Fact:
    """One fact of two records.

    Attributes:
        part: What it belongs to.
        path: Where a record's JSON has it, such as "timing.median_ms". Of a launch also "launch.threads" and
            "launch.blocks", products of what the JSON has of the last kernel.
        name: What people call it.
        values: Of A and of B, as in JSON; None where one has none.
    """

    part: Part
    path: str
    name: str
    values: tuple[Any, Any]

    @property
    def differs(self) -> bool:
        """Whether A and B differ in it."""
        return bool(self.values[0] != self.values[1])

    @property
    def ratio(self) -> float | None:
        """B / A of a time, a rate or a resource; None of anything else, or where A is 0."""
        a, b = self.values
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (a, b))
        return b / a if self.part in ("time", "resources") and numbers and a else None

    @property
    def shown(self) -> tuple[str, str]:
        """The values for people; rates in TFLOP/s."""
        a, b = (self._shown(value) for value in self.values)
        return a, b

    def _shown(self, value: Any) -> str:
        if value is None or value in ([], ()):
            return "-"
        if isinstance(value, bool):
            return "yes" if value else "no"
        if self.path == "gflops":
            return f"{value / 1000:.2f}"
        if self.path == "vs_cublas":
            return f"{value:.3f}"
        if self.path == "timing.quantiles_ms":
            return f"{value[0]:.5g}-{value[2]:.5g}"
        if self.path.endswith("_digest"):
            return str(value)[:SHORT]
        if self.path in ("created", "imported"):
            return str(value)[: len("2026-01-31T12:00")].replace("T", " ")
        if isinstance(value, list | tuple):
            return " ".join(map(str, value))
        return f"{value:.6g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class SideBySide:
    """Two records, fact by fact.

    Attributes:
        a: One.
        b: The other.
    """

    a: Record
    b: Record

    @property
    def facts(self) -> tuple[Fact, ...]:
        """All facts, part by part, in the order of `FACTS`; parameters in that of A, then of B."""
        a, b = _plain(self.a), _plain(self.b)
        found = []
        for part, names in FACTS.items():
            found += [Fact(part, path, name, (_at(a, path), _at(b, path))) for path, name in names.items()]
            if part == "config":
                for name in dict.fromkeys((*self.a.config, *self.b.config)):
                    values = (self.a.config.get(name), self.b.config.get(name))
                    found.append(Fact(part, f"config.{name}", name, values))
        return tuple(found)

    def alone(self, which: int) -> dict[str, Any]:
        """Return the parameters that only A (0) or only B (1) has."""
        own, other = ((self.a, self.b), (self.b, self.a))[which]
        return {name: value for name, value in own.config.items() if name not in other.config}

    def plain(self) -> dict[str, Any]:
        """Return both records and what differs, as plain values for JSON."""
        differences: dict[str, Any] = {part: {} for part in FACTS}
        for fact in self.facts:
            if fact.differs:
                a, b = fact.values
                ratio = {} if fact.ratio is None else {"ratio": float(f"{fact.ratio:.6g}")}
                differences[fact.part][fact.path] = {"a": a, "b": b, **ratio}
        return {"a": typed.plain(self.a), "b": typed.plain(self.b), "differences": differences}


def _plain(record: Record) -> dict[str, Any]:
    """Return a record as JSON has it, with the threads and blocks of its launch."""
    found: dict[str, Any] = typed.plain(record)
    found["problem"]["batch"] = record.problem.batch
    launch = record.launch
    found["launch"] |= {
        "shared_bytes": launch.shared_bytes,
        "threads": math.prod(launch.block),
        "blocks": math.prod(launch.grid),
    }
    return found


def _at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def parts(facts: tuple[Fact, ...]) -> Iterator[tuple[Part, list[Fact]]]:
    """Yield each part with its facts."""
    for part in FACTS:
        yield part, [fact for fact in facts if fact.part == part]
