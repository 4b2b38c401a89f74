"""What a multiplication launches: a sequence of kernels on named arguments, in the simulator."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.code.compiler import Binary, compile_text
from autotune.errors import RecordError
from autotune.simulator.launches import run_launch, workspace_of
from autotune.values.measurement import KernelLaunch, Launch

TEXT = """
extern "C" __global__ void sum_rows(const float* B, float* sums)
{
    float sum = 0.0f;
    for (int j = 0; j < 8; ++j)
        sum += B[blockIdx.x * 8 + j];
    if (threadIdx.x == 0)
        sums[blockIdx.x] = sum;
}

extern "C" __global__ void scale(float* C, float alpha, const float* sums)
{
    C[(blockIdx.z * gridDim.y + blockIdx.y) * blockDim.x + threadIdx.x] = alpha * sums[threadIdx.x];
}
"""
SCAN = KernelLaunch("sum_rows", (4, 1, 1), (32, 1, 1), 0, ("b", "workspace"))
PRODUCT = KernelLaunch("scale", (1, 2, 3), (4, 1, 1), 0, ("c", "alpha", "workspace"))


@pytest.fixture(scope="module")
def ptx():
    binary = compile_text(TEXT, "scale", "sm_90", ("-lineinfo",))
    assert isinstance(binary, Binary), binary
    return binary.ptx


def test_the_second_kernel_finds_what_the_first_wrote(ptx):
    launch = Launch((SCAN, PRODUCT), 16)
    b = np.arange(32, dtype=np.float32).reshape(4, 8)
    c = np.full((6, 4), np.nan, np.float32)
    run_launch(ptx, launch, {"alpha": 2.0, "b": b, "c": c, **workspace_of(launch)}).raise_if_faulty()
    np.testing.assert_array_equal(c, np.tile(2 * b.sum(axis=1), (6, 1)))
    assert (launch.grid, launch.block) == ((1, 2, 3), (4, 1, 1))


def test_a_fault_ends_the_sequence(ptx):
    launch = Launch((SCAN, PRODUCT), 16)
    c = np.zeros((6, 4), np.float32)
    values = {"alpha": 2.0, "b": np.zeros(31, np.float32), "c": c, **workspace_of(launch)}
    assert run_launch(ptx, launch, values).faults[0].kind == "out-of-bounds"
    assert not c.any()


def test_a_launch_says_who_takes_its_workspace():
    with pytest.raises(RecordError, match="at least one kernel"):
        Launch(())
    with pytest.raises(RecordError, match="a workspace of 0 bytes contradicts"):
        Launch((SCAN, PRODUCT))
    with pytest.raises(RecordError, match="a workspace of 8 bytes contradicts"):
        Launch(Launch.of("sgemm", (1, 1, 1), (32, 1, 1)).kernels, 8)
