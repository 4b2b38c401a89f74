"""The field's figures of a tile and a problem: traffic, arithmetic intensity, roofline.

Operands are float32. The figures are counted from the algorithm alone; what the hardware makes of them is
estimated in `autotune.families.estimate`.
"""

from __future__ import annotations

from autotune.errors import DeviceError
from autotune.values.device import Device
from autotune.values.problem import Math, Problem


def global_loads(k: int, BM: int, BN: int) -> float:
    """Count elements loaded from global memory per output: k (1/BM + 1/BN).

    The BM BN outputs of a block share k elements of each of BM rows of A and BN columns of B. BM = BN = 1 is
    the naive kernel, 2k.
    """
    return k * (1 / BM + 1 / BN)


def shared_reads(k: int, TM: int, TN: int) -> float:
    """Count elements read from shared memory per output: k (TM + TN) / (TM TN).

    A thread reads TM + TN operands for TM TN multiplications. TM = TN = 1 reads 2k; one column of TM outputs
    (TN = 1) reads k (1 + TM) / TM. One read of four floats counts four.
    """
    return k * (TM + TN) / (TM * TN)


def tile_intensity(BM: int, BN: int) -> float:
    """Return the FLOP per byte of global memory of a block tile: BM BN / (2 (BM + BN)).

    For each k, 2 BM BN FLOP against 4 (BM + BN) bytes; C, written once, is left out. BM = BN = 1 is the naive
    kernel, 0.25.
    """
    return BM * BN / (2 * (BM + BN))


def problem_intensity(problem: Problem) -> float:
    """Return the FLOP per byte of a problem whose operands move once: 2mnk / (4 (mk + kn + mn)).

    n / 6 for squares.
    """
    return problem.flops / problem.operand_bytes


def ridge(device: Device, math: Math = "ffma") -> float:
    """Return the FLOP per byte at which compute and memory take equally long: peak / memory bandwidth.

    Williams, Waterman and Patterson, "Roofline: an insightful visual performance model" (2009).

    Raises:
        DeviceError: The device's clock or bandwidth is unknown.
    """
    _require_speeds(device, math)
    return device.peak(math) / device.bandwidth_gbs


def roofline_ms(problem: Problem, device: Device) -> float:
    """Return the ms below which no kernel of the problem's math gets: max(flops / peak, bytes / bandwidth).

    The bytes are A and B once and C once, or twice where beta reads it. It counts neither a launch nor caches
    that still hold an operand.

    Raises:
        DeviceError: The device's clock or bandwidth is unknown.
    """
    _require_speeds(device, problem.math)
    compute = problem.flops / device.peak(problem.math)
    return max(compute, traffic_bytes(problem) / device.bandwidth_gbs) * 1e-6


def traffic_bytes(problem: Problem) -> int:
    """Count the bytes that device memory must move: A, B and C once, C twice with beta."""
    return problem.operand_bytes + (problem.c_bytes if problem.beta else 0)


def _require_speeds(device: Device, math: Math) -> None:
    if not device.peak(math) and device.clock_mhz:
        raise DeviceError(f"the peak of {math} on {device.name} is unknown: give a device that has TF32")
    if not (device.clock_mhz and device.bandwidth_gbs):
        raise DeviceError(
            f"the speed of {device.name} is unknown (clock {device.clock_mhz} MHz, "
            f"memory {device.bandwidth_gbs} GB/s): give a device that has both"
        )
