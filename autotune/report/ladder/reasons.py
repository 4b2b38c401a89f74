"""Turns the counts of two kernels into the reasons why the second is slower."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.report.explain import Account

WORSE = 1.05  # a count that grew by this factor is worth naming
_FFMA = "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum"


def per_ffma(found: Account) -> dict[str, float]:
    """Give what a kernel does for each FFMA of a warp, counted in the simulator on a miniature.

    Returns:
        "load_accesses": global loads plus wavefronts of shared reads; "load_sectors": 32-byte sectors that
        global loads and cp.async touch; "instructions": of the main loop's machine code, where it can be
        disassembled. Nothing of a kernel on tensor cores.
    """
    if found.problem.math != "ffma":
        return {}
    ffmas = sum(metrics.get(_FFMA, 0) for metrics in found.lines.values()) / 32 or 1.0
    traffic = found.traffic
    loads = [traffic[name] for name in ("global ld", "global copy") if name in traffic]
    shared = traffic["shared ld"].units if "shared ld" in traffic else 0
    counts = {
        "load_accesses": (sum(each.requests for each in loads) + shared) / ffmas,
        "load_sectors": sum(each.units for each in loads) / ffmas,
    }
    if found.loop is not None and found.loop.share("FFMA"):
        counts["instructions"] = 1 / found.loop.share("FFMA")
    return counts


def why_slower(before: Account, now: Account) -> Sequence[str]:
    """Name what got worse from one kernel to the next, by their counts, the gravest first; never empty."""
    was, is_ = per_ffma(before), per_ffma(now)
    reasons = []
    if now.binary.spill_bytes > before.binary.spill_bytes:
        reasons.append(f"{now.binary.spill_bytes} bytes of registers spill to memory")
    if now.wave_efficiency * WORSE < before.wave_efficiency:
        blocks, sms = now.source.launch.grid[0], now.device.sm_count
        reasons.append(
            f"{blocks} blocks keep {now.wave_efficiency:.0%} of the {sms} SMs busy, "
            f"{before.wave_efficiency:.0%} before"
        )
    for name, what in (
        ("load_sectors", "global loads touch {now:.2f} sectors per FFMA of a warp, {before:.2f} before"),
        (
            "load_accesses",
            "the load-store unit serves {now:.2f} accesses per FFMA of a warp, {before:.2f} before",
        ),
        ("instructions", "the main loop issues {now:.2f} instructions per FFMA, {before:.2f} before"),
    ):
        if name in was and name in is_ and is_[name] > WORSE * was[name]:
            reasons.append(what.format(now=is_[name], before=was[name]))
    if now.occupancy.fraction * WORSE < before.occupancy.fraction:
        reasons.append(
            f"occupancy fell from {before.occupancy.fraction:.0%} to {now.occupancy.fraction:.0%} "
            f"({' and '.join(now.occupancy.limited_by)}), so fewer warps hide latency"
        )
    if now.shared_reads is not None and before.shared_reads is None:
        reasons.append(
            "copies to shared memory and barriers come on top, where the cache already gave the reuse"
        )
    if not reasons:
        reasons.append("no count says why: profile it")
    return reasons
