"""Turns the registers of whole warps into matrices of the tensor cores, and products back into registers.

The lower 13 bits of TF32 operands are ignored. Products are exact and added in float64, and each sum of an
instruction is rounded to float32 towards zero, as the tensor cores do; that they also cut the terms at some
bits below the largest one is not modelled (Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA
tensor cores", 2021).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autotune.simulator.lanes import WARP

_TF32_BITS = np.uint32(0xFFFFE000)


def tf32(bits: Any) -> Any:
    """Return what the tensor cores see of 32-bit registers, as float64."""
    return (np.ascontiguousarray(bits) & _TF32_BITS).view(np.float32).astype(np.float64)


def tf32_fragments(registers: Any) -> Any:
    """Put together A, `[warps, 16, 8]` float64, from the 4 registers of each lane, `[4, lanes]` uint32.

    Register q of lane l holds row l / 4 + 8 (q % 2), column l % 4 + 4 (q / 2): PTX ISA, m16n8k8 with .tf32.
    """
    table = tf32(registers).reshape(2, 2, -1, 8, 4)
    return table.transpose(2, 1, 3, 0, 4).reshape(-1, 16, 8)


def sum_fragments(registers: Any) -> Any:
    """Put together C, `[warps, 16, n]` float64, from `[n / 2, lanes]` float32.

    Register 4 j + q of lane l holds row l / 4 + 8 (q / 2), column 8 j + 2 (l % 4) + q % 2.
    """
    count = len(registers)
    table = np.asarray(registers, np.float64).reshape(count // 4, 2, 2, -1, 8, 4)
    return table.transpose(3, 1, 4, 0, 5, 2).reshape(-1, 16, 2 * count)


def sum_registers(matrix: Any) -> Any:
    """Take apart D, `[warps, 16, n]`, into `[n / 2, lanes]`: the reverse of `sum_fragments`."""
    warps, _, n = matrix.shape
    table = matrix.reshape(warps, 2, 8, n // 8, 4, 2)
    return np.ascontiguousarray(table.transpose(3, 1, 5, 0, 2, 4)).reshape(n // 2, warps * WARP)


def to_zero(total: Any) -> Any:
    """Round float64 to float32 towards zero; what is too large becomes infinite."""
    nearest = total.astype(np.float32)
    beyond = np.abs(nearest.astype(np.float64)) > np.abs(total)
    beyond &= np.isfinite(nearest)
    return np.where(beyond, np.nextafter(nearest, np.float32(0)), nearest)


def mma_m16n8k8_tf32(lanes: int, a: list[Any], b: list[Any], c: list[Any]) -> Any:
    """Multiply A[16, 8] by B[8, 8] and add C[16, 8] in every warp; the fragments are those of PTX's m16n8k8.

    Args:
        lanes: Threads.
        a: 4 registers with TF32 bits, each `[lanes]`, or one number for all.
        b: 2 such registers: number q of lane l holds row l % 4 + 4 q, column l / 4.
        c: 4 registers, float32.

    Returns:
        D, `[4, lanes]` float32.
    """
    left, right, addend = (
        np.stack([np.broadcast_to(each, lanes) for each in registers]) for registers in (a, b, c)
    )
    matrix = tf32(right).reshape(2, -1, 8, 4).transpose(1, 0, 3, 2).reshape(-1, 8, 8)
    return sum_registers(to_zero(tf32_fragments(left) @ matrix + sum_fragments(addend)))
