"""What a multiplication launches: a sequence of kernels on named arguments, in the simulator."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.code.compiler import Binary, compile_text
from autotune.errors import RecordError, Rejected, SpaceError
from autotune.measure.proof import prove
from autotune.simulator.launches import run_launch, workspace_of
from autotune.space.space import Space
from autotune.values import typed
from autotune.values.device import named_device
from autotune.values.measurement import KernelLaunch, Launch, Verdict
from autotune.values.problem import Problem

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


WAITS = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
COPY = """
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4; cp.async.wait_all;"
        :: "r"((unsigned)__cvta_generic_to_shared(s)), "l"(C) : "memory");"""


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (f"{WAITS} C[threadIdx.x] = 1.0f;", None),
        (f"float* const to = C + threadIdx.x; {WAITS} *to = 1.0f;", None),
        (f"C[threadIdx.x] = 1.0f; {WAITS}", "st.global.u32 stands before"),
        (
            f"const float x = *(volatile float*)C; {WAITS} C[threadIdx.x] = x;",
            "ld.volatile.global.f32 stands",
        ),
        (f"if (blockIdx.x > 7) return; {WAITS} C[threadIdx.x] = 1.0f;", "bra stands before"),
        ("C[threadIdx.x] = 1.0f;", "st.global.u32 stands before griddepcontrol.wait"),
        (f"__shared__ float s[1]; {COPY} {WAITS} C[threadIdx.x] = s[0];", "cp.async.ca.shared.global stands"),
    ],
)
def test_a_kernel_that_is_launched_early_waits_first(body, why):
    text = f'extern "C" __global__ void fill(float* C) {{ {body} }}'
    binary = compile_text(text, "fill", "sm_90", ("-lineinfo",))
    assert isinstance(binary, Binary), binary
    kernels = (KernelLaunch("fill", (1, 1, 1), (1, 1, 1), 0, ("c",)),)
    c = np.zeros(32, np.float32)
    assert not run_launch(binary.ptx, Launch(kernels), {"c": c}).faults
    faults = run_launch(binary.ptx, Launch(kernels, waits=True), {"c": c}).faults
    assert [each.kind for each in faults] == ([] if why is None else ["early-access"])
    assert why is None or why in faults[0].message


def test_a_launch_says_who_takes_its_workspace():
    with pytest.raises(RecordError, match="at least one kernel"):
        Launch(())
    with pytest.raises(RecordError, match="a workspace of 0 bytes contradicts"):
        Launch((SCAN, PRODUCT))
    with pytest.raises(RecordError, match="a workspace of 8 bytes contradicts"):
        Launch(Launch.of("sgemm", (1, 1, 1), (32, 1, 1)).kernels, 8)
    with pytest.raises(RecordError, match="scratch_bytes 32 is more than workspace_bytes 16"):
        Launch((SCAN, PRODUCT), 16, 32)


# -- of a family ---------------------------------------------------------------------------------------------

SPACE = """
family = "columns"
[parameters]
threads = { values = [32, 64] }
turn = { values = [0, 1] }
[before.turn_b]
grid = "turn * n"
block = "threads"
shared_bytes = "0"
arguments = "b workspace"
[launch]
grid = "n"
block = "threads"
shared_bytes = "0"
workspace_bytes = "4 * k * n"
scratch_bytes = "4 * k * n"
[presets.turned]
threads = 32
turn = 1
"""
TEMPLATE = """
constexpr int b_col = {{ k if turn else 1 }}, b_row = {{ 1 if turn else n }};

extern "C" __global__ void turn_b(const float* B, float* workspace)
{
    for (int l = threadIdx.x; l < {{ k }}; l += {{ threads }})
        workspace[blockIdx.x * {{ k }} + l] = B[l * {{ n }} + blockIdx.x];
}

extern "C" __global__ void {{ family }}(
    float alpha, const float* A, const float* B, float beta, float* C, const float* workspace)
{
    for (int row = threadIdx.x; row < {{ m }}; row += {{ threads }}) {
        float sum = 0.0f;
        for (int l = 0; l < {{ k }}; ++l)
            sum += A[row * {{ k }} + l] * {{ "workspace" if turn else "B" }}[blockIdx.x * b_col + l * b_row];
        C[row * {{ n }} + blockIdx.x] = alpha * sum;
    }
}
"""
H200 = named_device("h200")


@pytest.fixture
def columns(tmp_path):
    def loaded(text=SPACE, template=TEMPLATE):
        (tmp_path / "columns.toml").write_text(text)
        (tmp_path / "columns.cu.jinja").write_text(template)
        return Space.load(tmp_path / "columns.toml")

    return loaded


def test_a_family_launches_what_stands_before_its_product(columns):
    space, problem = columns(), Problem(5, 6, 7)
    launch = space.launch(space.presets["turned"], problem, H200)
    assert launch.kernels[0] == KernelLaunch("turn_b", (6, 1, 1), (32, 1, 1), 0, ("b", "workspace"))
    assert (launch.kernels[1].entry, launch.grid, len(launch.kernels)) == ("columns", (6, 1, 1), 2)
    assert (launch.workspace_bytes, launch.zeroed_bytes) == (168, 0)
    assert typed.build(Launch, typed.plain(launch), "launch") == launch
    verdict = prove(space, space.presets["turned"], problem, H200)
    assert isinstance(verdict, Verdict), verdict


def test_a_kernel_without_blocks_is_not_launched(columns):
    space = columns()
    config = space.config({"threads": 64, "turn": 0})
    assert [each.entry for each in space.launch(config, Problem(5, 6, 7), H200).kernels] == ["columns"]


@pytest.mark.parametrize(
    ("family", "preset", "changes", "problem", "counters"),
    [
        ("sgemm", "tiny_block", {"split_k": 4}, Problem(96, 352, 4096), 33),
        ("sgemm", "deep_block", {}, Problem(64, 64, 64000, "nt"), 18),
        ("sgemm", "cluster_small", {}, Problem(64, 512, 2048), 64),
        ("sgemm", "square_block", {"turn_b": 1}, Problem(512, 512, 512, "nt"), 0),
        ("sgemm", "thin_shared", {}, Problem(32, 18944, 3584, "nt"), 296),
        ("sgemm_skinny", "rows_across", {}, Problem(5, 4096, 4096), 64),
        ("sgemm_3xtf32", "two_warps", {"split_k": 2}, Problem(64, 64, 4096, "nn", 0, "3xtf32"), 2),
        ("sgemm_3xtf32_wgmma", "small_block", {"split_k": 2}, Problem(64, 64, 4096, "nn", 0, "3xtf32"), 1),
    ],
)
def test_of_a_workspace_whole_lines_of_counters_are_zero_at_first(family, preset, changes, problem, counters):
    space = Space.load(family)
    launch = space.launch(
        space.fitted(space.config({**space.presets[preset], **changes}), problem, H200), problem, H200
    )
    assert launch.zeroed_bytes == 128 * -(-counters // 32)
    assert launch.workspace_bytes > 128 * counters


def test_scratch_memory_that_nobody_wrote_gives_a_wrong_product(columns):
    space = columns(
        template=TEMPLATE.replace("l < {{ k }}; l += {{ threads }}", "l < {{ k - 1 }}; l += {{ threads }}")
    )
    verdict = prove(space, space.presets["turned"], Problem(5, 6, 7), H200)
    assert isinstance(verdict, Rejected)
    assert verdict.kind == "correctness"


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (
            '"b workspace"',
            '"b d"',
            r"before\.turn_b\.arguments: 'd' is none of alpha, a, b, beta, c, workspace",
        ),
        ('arguments = "b workspace"\n', "", r"before\.turn_b\.arguments must be a non-empty string"),
        (
            "[launch]",
            'speed = "1"\n[launch]',
            r"before\.turn_b\.speed is unknown; known are grid, block, shar",
        ),
    ],
)
def test_what_stands_before_a_product_says_what_it_takes(columns, old, new, why):
    with pytest.raises(SpaceError, match=why):
        columns(SPACE.replace(old, new))
