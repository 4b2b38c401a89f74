"""Turns a compiled kernel, and what was measured of it or proved without a GPU, into its `Record`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autotune.code.compiler import Binary
from autotune.code.render import Source
from autotune.records.files import now
from autotune.records.schema import (
    Cublas,
    Finalist,
    Record,
    RecordedDevice,
    Resources,
    Searched,
    Toolchain,
    Verification,
)
from autotune.values.device import Device
from autotune.values.measurement import Finals, GpuFacts, MeasuredTrial, Verdict


def measured(
    source: Source,
    binary: Binary,
    won: MeasuredTrial,
    finals: Finals,
    facts: GpuFacts,
    passed: Iterable[tuple[Source, MeasuredTrial]],
    search: Searched,
) -> Record:
    """Make the record of a kernel that passed its finals.

    Args:
        source: Its text.
        binary: Its machine code.
        won: Its measurement.
        finals: That it was in, with cuBLAS.
        facts: Of the GPU.
        passed: The finalists to list, itself first.
        search: How it was found.
    """
    timing, cublas = won.timing, finals.cublas
    outcomes = (each for each in finals.outcomes.values() if isinstance(each, MeasuredTrial))
    best = min((each.timing for each in outcomes), key=lambda each: each.median_ms)
    return Record(
        **_kernel(source, binary, facts.device, facts.driver, won.verdict),
        evidence="measured",
        timing=timing,
        gflops=source.problem.flops / timing.median_ms / 1e6,
        vs_cublas=None if cublas is None else cublas.median_ms / timing.median_ms,
        cublas=None
        if cublas is None
        else Cublas(cublas.median_ms, finals.cublas_kernel, finals.cublas_version),
        search=search,
        finalists=tuple(
            Finalist(
                config=each.config,
                median_ms=trial.timing.median_ms,
                quantiles=trial.timing.quantiles,
                tied=trial.timing.ties(best),
            )
            for each, trial in passed
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
        finalists=(),
    )


def _kernel(
    source: Source, binary: Binary, device: Device, driver: str | None, verdict: Verdict
) -> dict[str, Any]:
    """Give the fields that say what the kernel is, what made it, and how far off it was."""
    return {
        "problem": source.problem,
        "device": RecordedDevice.of(device),
        "family": source.family,
        "config": source.config,
        "launch": source.launch,
        "code_digest": source.code_digest,
        "template_digest": source.template_digest,
        "space_digest": source.space_digest,
        "toolchain": Toolchain(nvrtc=binary.nvrtc, driver=driver, flags=binary.options),
        "resources": Resources(binary.registers, binary.spill_bytes, binary.shared_bytes),
        "verification": Verification(verdict.error, verdict.bound, verdict.inputs),
        "created": now(),
    }
