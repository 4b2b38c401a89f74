"""The same machine-independent PTX on the GPU and in the simulator: every bit must agree."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.code.compiler import Binary, compile_text
from autotune.simulator import run_ptx
from autotune.values.device import current_device

pytestmark = pytest.mark.gpu

COUNT = 1 << 16
KERNELS = {
    "fma": "o[i] = __float_as_uint(fmaf(f(a[i]), f(b[i]), f(c[i])));",
    "sum": "o[i] = __float_as_uint(f(a[i]) + f(b[i]));",
    "product": "o[i] = __float_as_uint(f(a[i]) * f(b[i]));",
    "quotient": "o[i] = __float_as_uint(__fdiv_rn(f(a[i]), f(b[i])));",
    "square root": "o[i] = __float_as_uint(__fsqrt_rn(fabsf(f(a[i]))));",
    "reciprocal": "o[i] = __float_as_uint(__frcp_rn(f(a[i])));",
    "fma towards zero": "o[i] = __float_as_uint(__fmaf_rz(f(a[i]), f(b[i]), f(c[i])));",
    "fma downwards": "o[i] = __float_as_uint(__fmaf_rd(f(a[i]), f(b[i]), f(c[i])));",
    "fma upwards": "o[i] = __float_as_uint(__fmaf_ru(f(a[i]), f(b[i]), f(c[i])));",
    "minimum": "o[i] = __float_as_uint(fminf(f(a[i]), f(b[i])));",
    "maximum": "o[i] = __float_as_uint(fmaxf(f(a[i]), f(b[i])));",
    "to integers": "o[i] = __float2int_rz(f(a[i])) * 3 + __float2uint_rn(f(b[i])) * 5"
    " + __float2int_rd(f(c[i]));",
    "from integers": "o[i] = __float_as_uint((float)(int)a[i]) ^ ~__float_as_uint((float)b[i]) << 1;",
    "to TF32": "float x = f(a[i]); if (!(fabsf(x) < 1e38f)) x = 1.0f;"
    'unsigned r; asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x)); o[i] = r;',
    "double fma": "double x = (int)a[i] * 1e-3, y = (int)b[i] * 1e-5;"
    "o[i] = __double2loint(fma(x, y, -x * y));",
    "division": "o[i] = (int)a[i] / (int)(b[i] | 1) + a[i] % (c[i] | 1);",
    "bits": "o[i] = __brev(a[i]) + __clz(b[i]) * 3 + __popc(c[i]) * 7 + __byte_perm(a[i], b[i], c[i]);",
    "funnel shifts": "o[i] = __funnelshift_l(a[i], b[i], c[i]) ^ __funnelshift_rc(a[i], b[i], c[i]);",
    "high products": "o[i] = __umulhi(a[i], b[i]) + __mulhi((int)a[i], (int)c[i]) * 3;",
    "shuffles": "o[i] = __shfl_xor_sync(~0u, a[i], 9) + __shfl_up_sync(~0u, b[i], 3, 8)"
    " + __shfl_sync(~0u, c[i], c[i], 16);",
    "votes": "o[i] = __ballot_sync(~0u, a[i] & 1) + __reduce_add_sync(~0u, b[i])"
    " + __match_any_sync(~0u, c[i] & 3);",
}


@pytest.mark.parametrize("name", KERNELS)
def test_every_bit_agrees(name: str) -> None:
    import cupy

    text = f"""
        #define f __uint_as_float
        extern "C" __global__ void k(const unsigned* a, const unsigned* b, const unsigned* c, unsigned* o) {{
            const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
            {KERNELS[name]}
        }}"""
    binary = compile_text(text, "k", current_device().arch)
    assert isinstance(binary, Binary), binary
    rng = np.random.default_rng(3)
    inputs = [rng.integers(0, 1 << 32, COUNT, dtype=np.uint32) for _ in range(3)]
    for array in inputs:  # numbers of like size, for sums that cancel and ties; small ones, for subnormals
        exponents = (rng.integers(118, 132, COUNT // 2) << 23).astype(np.uint32)
        array[: COUNT // 2] = (array[: COUNT // 2] & 0x807FFFFF) | exponents
        array[: COUNT // 4] &= 0xFFFFF000
    for array in inputs[:2]:
        array[-COUNT // 8 :] = (array[-COUNT // 8 :] & 0x807FFFFF) | np.uint32(60 << 23)
    simulated = np.zeros(COUNT, np.uint32)
    run_ptx(binary.ptx, "k", (COUNT // 256, 1, 1), (256, 1, 1), [*inputs, simulated]).raise_if_faulty()
    module = cupy.cuda.function.Module()
    module.load(binary.cubin)
    out = cupy.zeros(COUNT, cupy.uint32)
    module.get_function("k")((COUNT // 256,), (256,), (*(cupy.asarray(array) for array in inputs), out))
    measured = cupy.asnumpy(out)
    different = measured != simulated
    if "__float_as_uint" in KERNELS[name]:  # the sign and payload of a NaN are nobody's promise
        different &= ~(np.isnan(measured.view(np.float32)) & np.isnan(simulated.view(np.float32)))
    where = np.flatnonzero(different)
    shown = [[f"{array[i]:#x}" for array in (*inputs, measured, simulated)] for i in where[:5]]
    assert not len(where), f"{len(where)} of {COUNT} differ; a, b, c, GPU, simulator: {shown}"
