"""What CUDA refuses, what does not fit, what never ends, and PTX that no compiler writes: one line each."""

from __future__ import annotations

import math
import time
from itertools import product

import numpy as np
import pytest
from ptx_mutations import LAUNCHABLES, launchable, mutations
from test_simulator import SCALE, ptx_of

from autotune.code.published import compiled
from autotune.errors import AutotuneError, UsageError
from autotune.simulator import UnsupportedPTX, run_ptx, simulate

FILL = 'extern "C" __global__ void k(float* a) { a[blockIdx.x * blockDim.x + threadIdx.x] = 1.0f; }'
SHARED = """extern "C" __global__ void k(float* a) {
    extern __shared__ float s[]; __shared__ float t[32];
    s[threadIdx.x] = t[threadIdx.x] = 1.0f; a[threadIdx.x] = s[threadIdx.x] + t[threadIdx.x];
}"""
ENDLESS = (
    """extern "C" __global__ void k(volatile int* a) { while (a[threadIdx.x] == 0) a[threadIdx.x] = 0; }"""
)


def one_line(error: BaseException) -> str:
    text = str(error)
    assert text.isprintable()
    assert len(text) < 300
    return text


def refused(
    ptx: str, message: str, *args: object, grid: object = 1, block: object = 32, **options: object
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        run_ptx(ptx, "k", grid, block, list(args), **options)
    one_line(caught.value)


@pytest.mark.parametrize(
    ("grid", "block"),
    [(2, 64), ((2,), (64,)), (np.int64(2), np.array([64, 1])), ([2, 1], [64, 1, 1]), (np.array(2), (8, 8))],
)
def test_what_is_plainly_a_launch_is_one(grid: object, block: object) -> None:
    a = np.zeros(128, np.float32)
    text = FILL.replace("threadIdx.x", "threadIdx.y * blockDim.x + threadIdx.x").replace(
        "blockIdx.x * blockDim.x", "blockIdx.x * blockDim.x * blockDim.y"
    )
    run_ptx(ptx_of(text), "k", grid, block, [a]).raise_if_faulty()
    assert a.all()
    a[:] = 0
    simulate(text, grid, block, [a]).raise_if_faulty()
    assert a.all()


# fmt: off
NO_LAUNCHES = (
    "1", "abc", b"abc", "", None, {}, object(), (), 1.0, math.nan, np.float32(4), np.ones(3), (1.5, 1, 1),
    (1, None), (1, "2"), ("1", "1", "1"), [[1]], (1, 1, 1, 1), -1, 0, (1, 0), 2**70, (1, 1, 2**31),
)
# fmt: on


@pytest.mark.parametrize(("name", "extents"), list(product(("grid", "block"), NO_LAUNCHES)))
def test_what_is_no_launch_is_refused(name: str, extents: object) -> None:
    refused(ptx_of(FILL), f"^{name} ", np.zeros(32, np.float32), **{name: extents})
    with pytest.raises(UsageError, match=f"^{name} "):
        simulate(FILL, **{"grid": 1, "block": 32, "args": [], name: extents})


@pytest.mark.parametrize(
    ("grid", "block", "message"),
    [
        ((1, 100_000), 1, "grid .*at most 65535 along y"),
        ((1, 1, 65536), 1, "grid .*at most 65535 along z"),
        (2**31, 1, "grid .*at most 2147483647 along x"),
        (1, (1, 1, 128), "block .*at most 64 along z"),
        (1, (1, 1025), "block .*at most 1024 along y"),
        (1, 1025, "block .*at most 1024 along x"),
        (1, (32, 32, 2), "2048 threads; kernel k allows 1024"),
    ],
)
def test_extents_beyond_cuda_are_refused(grid: object, block: object, message: str) -> None:
    refused(ptx_of(FILL), message, np.zeros(1, np.float32), grid=grid, block=block)


@pytest.mark.parametrize(
    ("arch", "most"),
    [("sm_75", 65536), ("sm_80", 166912), ("sm_89", 101376), ("sm_90", 232448), ("sm_120", 101376)],
)
def test_shared_memory_beyond_the_gpu_is_refused(arch: str, most: int) -> None:
    a, ptx = np.zeros(32, np.float32), ptx_of(SHARED, arch=arch)
    run_ptx(ptx, "k", 1, 32, [a], shared_bytes=most - 128).raise_if_faulty()
    for dynamic in (most - 124, 300_000, 10**15):
        refused(
            ptx,
            f"needs {dynamic + 128} bytes of shared memory; {arch} allows {most}",
            a,
            shared_bytes=dynamic,
        )


def test_an_architecture_without_a_table_has_the_limit_of_its_major() -> None:
    a, ptx = np.zeros(32, np.float32), ptx_of(SHARED)
    for target, most in (("sm_87", 166912), ("sm_121a", 101376), ("sm_110", 232448)):
        other = ptx.replace(".target sm_90", f".target {target}")
        assert other != ptx
        refused(other, f"allows {most}", a, shared_bytes=most)
        run_ptx(other, "k", 1, 32, [a], shared_bytes=most - 128).raise_if_faulty()
    refused(ptx.replace(".target sm_90", ""), "any GPU allows 232448", a, shared_bytes=300_000)


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        (".shared .align 4 .b8 t[60000];", "60000 bytes of static shared memory; CUDA allows 49152"),
        (".local .align 4 .b8 t[600000];", r"600000 bytes; \.local memory allows 524288"),
        (".local .align 4 .b8 t[999999999999][999999999];", r"\.local memory allows 524288"),
    ],
)
def test_variables_beyond_cuda_are_refused(declaration: str, message: str) -> None:
    ptx = ptx_of(FILL)
    at = ptx.index("{") + 1
    refused(f"{ptx[:at]}\n{declaration}\n{ptx[at:]}", message, np.zeros(32, np.float32))


def test_module_variables_that_fit_nowhere_are_refused() -> None:
    ptx = ptx_of(FILL)
    at = ptx.index(".visible")
    for declaration, message in (
        (".const .align 4 .b8 t[70000];", "const memory allows 65536"),
        (".global .align 4 .b8 t[9999999999999];", "global memory allows"),
        (".global .align 4 .b8 t[9999999999999999999999];", "not supported"),
    ):
        with pytest.raises(AutotuneError, match=message) as caught:
            run_ptx(f"{ptx[:at]}{declaration}\n{ptx[at:]}", "k", 1, 32, [np.zeros(32, np.float32)])
        one_line(caught.value)


def test_more_memory_than_there_is_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("autotune.simulator.machine.Machine.allocate", none_left)
    refused(ptx_of(FILL), "does not fit into this machine's memory", np.zeros(32, np.float32))


def test_a_block_with_too_many_registers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.simulator.machine.BLOCK_BYTES", 1000)
    refused(
        ptx_of(FILL), "one block of kernel k needs .* the simulator allows 1000", np.zeros(32, np.float32)
    )


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("shared_bytes", 1.5, "shared_bytes = 1.5 is not an integer"),
        ("shared_bytes", "1", "shared_bytes = '1' is not an integer"),
        ("max_steps", 0, "max_steps = 0"),
        ("max_steps", None, "max_steps = None is not an integer"),
        ("max_seconds", np.float32(-1), "max_seconds = .*-1.0.* is not a positive number"),
        ("max_seconds", 0, "max_seconds = 0 is not a positive number"),
        ("max_seconds", math.nan, "max_seconds = nan"),
        ("max_seconds", "60s", "max_seconds = '60s'"),
    ],
)
def test_options_of_a_wrong_kind_are_refused(option: str, value: object, message: str) -> None:
    refused(ptx_of(FILL), message, np.zeros(32, np.float32), **{option: value})


@pytest.mark.parametrize("seconds", [np.int64(60), np.float32(60.0), 60])
def test_a_limit_of_time_may_be_any_number(seconds: float) -> None:
    run_ptx(ptx_of(FILL), "k", 1, 32, [np.zeros(32, np.float32)], max_seconds=seconds).raise_if_faulty()


@pytest.mark.parametrize("args", [np.zeros(1, np.float32), "a", None, {1: 2}, 5, iter([1])])
def test_arguments_that_are_no_list_are_refused(args: object) -> None:
    with pytest.raises(UsageError, match="give a list"):
        run_ptx(ptx_of(FILL), "k", 1, 32, args)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (10**400, "the integer is too large"),
        (1 + 2j, "give a number"),
        (np.complex64(1), "complex64 was given"),
        (None, "give a number"),
        ([1.0], "give a number"),
    ],
)
def test_scalars_that_are_no_float_are_refused(value: object, message: str) -> None:
    refused(ptx_of(SCALE), message, np.zeros(32, np.float32), value, 1, 1.0)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ma.masked_array(np.zeros(32, np.float32), mask=[True] * 32), "masked"),
        (np.zeros(32, ">f4"), "byte order"),
        (np.zeros(32, [("x", ">f4"), ("y", "i4")]), "byte order"),
        (np.zeros(64, np.float32)[::2], "not C-contiguous"),
        (np.broadcast_to(np.float32(1), (10**15,)), "not C-contiguous"),
    ],
)
def test_arrays_whose_bytes_are_not_their_values_are_refused(array: object, message: str) -> None:
    refused(ptx_of(FILL), f"argument 1 .*{message}", array)


def test_a_large_integer_is_named_short() -> None:
    refused(
        ptx_of(SCALE), "argument 3 .* does not fit into 32 bits", np.zeros(32, np.float32), 1.0, 10**4000, 1.0
    )


@pytest.mark.parametrize("wrong", [{"ptx": b""}, {"entry": None}])
def test_texts_are_strings(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="give a str"):
        run_ptx(**{"ptx": ptx_of(FILL), "entry": "k", "grid": 1, "block": 1, "args": [], **wrong})


@pytest.mark.parametrize("wrong", [{"source": None}, {"source": FILL.encode()}, {"arch": 90}, {"arch": None}])
def test_sources_and_architectures_are_strings(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="give a str"):
        simulate(**{"source": FILL, "grid": 1, "block": 1, "args": [], **wrong})


def test_endless_loops_end_by_seconds() -> None:
    start = time.thread_time()
    report = run_ptx(ptx_of(ENDLESS), "k", 1, 32, [np.zeros(32, np.int32)], max_steps=10**12, max_seconds=0.5)
    assert time.thread_time() - start < 30
    (fault,) = report.faults
    assert fault.kind == "time-limit"
    assert "did not end within 0.5 s of CPU time" in fault.message
    assert "raise max_seconds" in fault.message


@pytest.mark.parametrize("grid", [2**31 - 1, (2**31 - 1, 65535, 65535)])
def test_the_largest_grid_ends_by_seconds(grid: object) -> None:
    text = 'extern "C" __global__ void k(float* a) { if (blockIdx.x == 5) a[threadIdx.x] = gridDim.x; }'
    a = np.zeros(32, np.float32)
    report = simulate(text, grid, 32, [a], max_seconds=0.5)
    assert a[0] == 2**31
    assert report.faults[0].kind == "time-limit"
    assert f"of {math.prod(np.atleast_1d(grid).tolist())} blocks done" in report.faults[0].message


def test_no_limit_of_seconds_can_be_asked_for() -> None:
    a = np.zeros(32, np.float32)
    run_ptx(ptx_of(FILL), "k", 1, 32, [a], max_seconds=math.inf).raise_if_faulty()
    assert a.all()


def test_text_that_compiles_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.code.published.COMPILE_SECONDS", 1.0)
    macros = [f"#define M{n}(x) {' + '.join([f'M{n - 1}(x)'] * 8)}" for n in range(1, 12)]
    text = "\n".join(["#define M0(x) x", *macros, FILL.replace("1.0f", "M11(1.0f)")])
    with pytest.raises(
        UsageError, match="kernel k does not compile: no binary after 1 s of compiling"
    ) as caught:
        simulate(text, 1, 32, [np.zeros(32, np.float32)])
    one_line(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("template <int n> " + FILL.replace('extern "C" ', ""), "kernel k is a template: name an instance"),
        ("", "the text has no kernel: write one as"),
        ("#error stop\n" + FILL, "does not compile: .*stop"),
        (FILL.replace("a[", "q["), "does not compile: .*q"),
        (
            FILL.replace("{", "{ __shared__ float s[20000]; s[a[0] > 0] = a[1]; a[2] = s[(int)a[3]];"),
            "too much shared",
        ),
    ],
)
def test_texts_without_a_kernel_are_one_line(text: str, message: str) -> None:
    with pytest.raises(AutotuneError, match=message) as caught:
        simulate(text, 1, 32, [np.zeros(32, np.float32)])
    one_line(caught.value)


def test_where_no_process_can_be_started_texts_are_compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "")
    a = np.zeros(32, np.float32)
    simulate(f"// here\n{FILL}", 1, 32, [a]).raise_if_faulty()
    assert a.all()


def test_a_text_is_compiled_once() -> None:
    compiled.cache_clear()
    a = np.zeros(32, np.float32)
    for _ in range(3):
        simulate(FILL, 1, 32, [a]).raise_if_faulty()
    assert compiled.cache_info().misses == 1


def with_line(line: str) -> str:
    """Put one line before the store of a kernel that has registers of every kind."""
    ptx = ptx_of("""extern "C" __global__ void k(float* a, double b, int n) {
        a[threadIdx.x] = n > 3 ? a[threadIdx.x] + n : (float)b; }""")
    at = ptx.index("st.global")
    return f"{ptx[:at]}{line}\n{ptx[at:]}"


def test_a_line_that_is_right_runs() -> None:
    a = np.zeros(32, np.float32)
    run_ptx(with_line("add.s32 %r1, %r1, 1;"), "k", 1, 32, [a, 1.0, 5]).raise_if_faulty()
    assert (a == 5).all()


NO_LINES = """
bra $L__nowhere;
bra;
bra %r1;
@%r1 bra $L__nowhere;
@%nothing add.s32 %r1, %r1, 1;
@%r1 add.s32 %r1, %r1, 1;
brx.idx %r1, $L__nothing;
ret 5;
bar.sync;
bar.sync x;
bar.sync %rd1;
bar.sync %tid.x;
bar.red.popc.u32 %r1, 0;
bar.red.popc.u32 %p1, 0, %p1;
bar.arrive 1;
bar.warp.sync;
bar.warp.sync %rd1;
vote.sync.most.pred %p1, %p1, 1;
shfl.sync.idx.b32 %r1, %r1;
match.any.sync.b32 %r1, %r1;
redux.sync.mul.s32 %r1, %r1, 1;
add.f32 %p1, %f1, %f1;
add.s32 %r1, %p1, 1;
add.s32 %r1, %r1;
add.s32 %r1, %r1, 1, 1;
add.s32 %r1, %r1, 1e5;
add.s32 %r1, %r1, 99999999999999999999;
add.s32 %r1, %r1, 1_0;
add.s32 %r1, %r1, ٥;
add.s32 %r1, %r1, !!!!!%p1;
add.s32 %r1, %r1, 0f;
add.f99 %f1, %f1, %f1;
and.f32 %f1, %f1, %f1;
shl.f32 %f1, %f1, 1;
popc.f32 %r1, %f1;
fma.rn.s32 %r1, %r1, %r1, %r1;
mov.u32 %r1, nothing;
mov.u32 %r1, %nothing;
mov.b64 {%r1, %r1, %r1}, %rd1;
mov.u99 %r1, %r1;
cvt.u32.f32 %r1, %f1;
cvt.rn.b32.f32 %r1, %f1;
cvt.rni.rzi.u32.f32 %r1, %f1;
setp.lt %p1, %r1, 1;
setp.most.s32 %p1, %r1, 1;
selp.f32 %f1, %f1, %f1, %r1;
isspacep.moon %p1, %rd1;
ld.param.f32 %f1, [nothing];
ld.param.f32 %f1, [k_param_0+8];
ld.param.f32 %f1, [k_param_0-8];
ld.global.v4.f32 {%f1, %f1}, [%rd1];
ld.global.f32 {%f1, %f1}, [%rd1];
ld.global.f32 %f1, [%f1+];
ld.global.pred %p1, [%rd1];
st.global.v2.f32 [%rd1], %f1;
st.global.f32 [%rd1], %f1, %f1;
atom.global.cas.b32 %r1, [%rd1], %r1;
atom.global.and.f32 %f1, [%rd1], %f1;
cp.async.wait_group -1;
cp.async.wait_group x;
mma.sync %f1, %f1, %f1, %f1;
wgmma.fence;
wgmma.wait_group.sync.aligned -1;
frobnicate.f32 %f1;
call (), printf;
}
{
{ .reg .b32 x; .reg .b32 x; }
{ x: x: }
$L__a: $L__a: mov.u32 %r1, 1;
.reg .b32 %r1;
.reg .b32 %q<9999999>;
.reg .b99 %q;
.what 5;
.loc;
.loc 1 x 2
.local .b8 t[5000000];
.shared .pred t;
.shared .align 0 .b8 t[4];
.shared .b99 t[4];
add.s32 %r1, %r1, 1
@;
é
"""


@pytest.mark.parametrize(
    "line",
    [
        *NO_LINES.strip().splitlines(),
        *(f"{before}{'9' * 5000};" for before in ("add.s32 %r1, %r1, ", ".shared .b8 t[4] = {", "r")),
        *(f"mov.u32 %r1, {word};" for word in ("%r" * 5000, "\x1b[2J", "\0", "%\u202e", "!" * 5000 + "%p1")),
    ],
)
def test_a_line_that_no_compiler_writes_is_refused(line: str) -> None:
    with pytest.raises(AutotuneError) as caught:
        run_ptx(with_line(line), "k", 1, 32, [np.zeros(32, np.float32), 1.0, 5], max_seconds=5)
    assert isinstance(caught.value, UnsupportedPTX | UsageError)
    one_line(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        *("", "k", ".entry k", ".entry k(", ".entry k() {", ".entry k(.param .x y) { ret; }"),
        *(".entry k(.param) {}", ".entry k(,) {}", ".entry k(.param .u64 a[99999999999]) {}"),
    ],
)
def test_texts_without_a_whole_kernel_are_refused(text: str) -> None:
    with pytest.raises(AutotuneError) as caught:
        run_ptx(text, "k", 1, 32, [])
    one_line(caught.value)


def test_a_kernel_without_a_statement_does_nothing() -> None:
    run_ptx(".entry k() { }", "k", 1, 32, []).raise_if_faulty()


@pytest.mark.parametrize("name", LAUNCHABLES)
def test_changed_ptx_runs_faults_or_is_refused(name: str) -> None:
    """Whatever is done to the text, no exception is foreign and nothing hangs; seeded, so it repeats."""
    kernel = launchable(name)
    outcomes = set()
    for what, changed in mutations(kernel, 25, seed=20):
        start = time.thread_time()
        try:
            report = run_ptx(
                changed.ptx,
                changed.entry,
                changed.grid,
                changed.block,
                changed.arguments(),
                shared_bytes=changed.shared_bytes,
                max_steps=2000,
                max_seconds=5,
            )
            outcomes.add("faulty" if report.faults else "ran")
        except AutotuneError as error:
            one_line(error)
            outcomes.add("refused")
        assert time.thread_time() - start < 20, what
    assert {"ran", "refused"} <= outcomes
