"""Makes the `Record` of a compiled kernel from what was measured of it, or proved without a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autotune.code.compiler import Binary
from autotune.code.render import Source
from autotune.records.files import now
from autotune.records.schema import (
    Cublas,
    Record,
    RecordedDevice,
    Resources,
    RunnerUp,
    Searched,
    Toolchain,
    Verification,
)
from autotune.values.device import Device
from autotune.values.measurement import Finals, GpuFacts, MeasuredTrial, Sustained, Verdict


def measured(
    source: Source,
    binary: Binary,
    won: MeasuredTrial,
    finals: Finals,
    facts: GpuFacts,
    others: Iterable[tuple[Source, MeasuredTrial]],
    search: Searched,
    sustained: Sustained | None = None,
) -> Record:
    """Make the record of a kernel that passed its finals.

    Args:
        source: Its text.
        binary: Its machine code.
        won: Its measurement.
        finals: That it was in, with cuBLAS.
        facts: Of the GPU.
        others: The other finalists to list, the fastest first.
        search: How it was found.
        sustained: What it did back to back.
    """
    timing, cublas = won.timing, finals.cublas
    outcomes = (each for each in finals.outcomes.values() if isinstance(each, MeasuredTrial))
    best = min((each.timing for each in outcomes), key=lambda each: each.median_ms)
    return Record(
        **_kernel(source, binary, facts.device, facts.driver, won.verdict),
        evidence="measured",
        gpu_uuid=facts.uuid,
        timing=timing,
        sustained=sustained,
        gflops=source.problem.flops / timing.median_ms / 1e6,
        vs_cublas=finals.vs_cublas(timing.median_ms),
        cublas=None
        if cublas is None
        else Cublas(cublas.median_ms, finals.cublas_kernel, finals.cublas_version),
        search=search,
        runners_up=tuple(
            RunnerUp(
                config=each.config,
                code_digest=each.code_digest,
                median_ms=trial.timing.median_ms,
                quantiles_ms=trial.timing.quantiles_ms,
                tied=trial.timing.ties(best),
            )
            for each, trial in others
        ),
    )


def estimated(source: Source, binary: Binary, device: Device, verdict: Verdict, search: Searched) -> Record:
    """Make the record of a kernel that was chosen and proved without a GPU; it holds no time."""
    return Record(
        **_kernel(source, binary, device, None, verdict),
        evidence="estimated",
        timing=None,
        gflops=None,
        vs_cublas=None,
        cublas=None,
        search=search,
        runners_up=(),
    )


def _kernel(
    source: Source, binary: Binary, device: Device, driver: str | None, verdict: Verdict
) -> dict[str, Any]:
    """Return the fields that say what the kernel is, what made it, and how far off it was."""
    return {
        "problem": source.problem,
        "device": RecordedDevice.of(device),
        "family": source.family,
        "config": source.config,
        "launch": source.launch,
        "code_digest": source.code_digest,
        "machine_code_digest": binary.digest,
        "template_digest": source.template_digest,
        "space_digest": source.space_digest,
        "toolchain": Toolchain(nvrtc=binary.nvrtc, driver=driver, flags=binary.options),
        "resources": Resources(binary.registers, binary.spill_bytes, binary.shared_bytes),
        "verification": Verification(verdict.error, verdict.bound, verdict.inputs),
        "created": now(),
    }
