"""What the short way of `matmul` remembers of operands; tests/gpu has the arrays of CuPy and PyTorch."""

from __future__ import annotations

import pytest

from autotune.kernel.operands import Operand
from autotune.kernel.short import Way


def operand(address, shape, strides=None):
    return Operand(address, shape, strides or (shape[1], 1), 0)


A, B, C = operand(4096, (3, 8), (16, 1)), operand(8192, (8, 4)), operand(12288, (3, 4))


def launch(*words):
    pass


def test_operands_at_odd_addresses_are_not_remembered():
    """A variant was made for them, and others of these strides may lie better or worse."""
    assert Way.of(launch, A, B, C, (1, 3, 4)).shape == (1, 3, 4)
    for odd in (
        (A._replace(address=4100), B, C),
        (A, B._replace(address=8200), C),
        (A, B, C._replace(address=4)),
    ):
        assert Way.of(launch, *odd, (3, 4)) is None


@pytest.mark.parametrize(
    ("addresses", "well"),
    [
        ((4096, 8192, 12288), True),
        ((0, 8192, 12288), False),
        ((4096, 8192, 0), False),
        ((4096, 8196, 12288), False),
        ((4096, 8192, 8192 + 128), True),  # right behind B
        ((4096, 8192, 8192 + 112), False),
        ((4096, 8192, 4096 - 48), True),  # right before A
        ((4096, 8192, 4096 - 32), False),
        ((4096, 8192, 4096 + 160), True),  # A ends with its last row, not with that row's stride
        ((4096, 8192, 4096 + 144), False),
    ],
)
def test_only_operands_that_lie_apart_take_the_short_way(addresses, well):
    assert Way.of(launch, A, B, C, (3, 4)).apart(*addresses) is well
