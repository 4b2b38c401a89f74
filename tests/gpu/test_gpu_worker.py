"""The worker on a real GPU, with naive kernels that are right, slow, wrong or harmful."""

from __future__ import annotations

import pytest

from autotune.code.compiler import compile_text
from autotune.errors import Rejected
from autotune.measure.worker import GpuWorker
from autotune.values.device import current_device
from autotune.values.measurement import Launch, MeasuredTrial
from autotune.values.problem import LAYOUTS, Problem

pytestmark = pytest.mark.gpu

KERNEL = """
constexpr long long M = {m}, N = {n}, K = {k};
extern "C" __global__ void sgemm(float alpha, const float* A, const float* B, float beta, float* C) {{
    extern __shared__ float scratch[];
    const long long row = blockIdx.y, col = blockIdx.x * 128LL + threadIdx.x;
    if (col >= N) return;
    float sum = 0.0f;
    for (long long p = 0; p < K; ++p) sum += A[{a}] * B[{b}];
    C[row * N + col] = {value};
    {mistake}
}}
"""
OLD = " + (beta != 0.0f ? beta * C[row * N + col] : 0.0f)"
INDICES = {"an": "row * K + p", "at": "p * M + row", "bn": "p * N + col", "bt": "col * K + p"}


@pytest.fixture(scope="module")
def device():
    return current_device(0)


def candidate(device, problem, mistake="", globals_="", shared_bytes=0, value=""):
    text = globals_ + KERNEL.format(
        m=problem.m,
        n=problem.n,
        k=problem.k,
        a=INDICES["a" + problem.layout[0]],
        b=INDICES["b" + problem.layout[1]],
        value=value or ("alpha * sum" + (OLD if problem.beta else "")),
        mistake=mistake,
    )
    binary = compile_text(text, "sgemm", device.arch)
    assert not isinstance(binary, Rejected), binary.why
    return binary, Launch.of("sgemm", (-(-problem.n // 128), problem.m, 1), (128, 1, 1), shared_bytes)


def measure(worker, *candidates, timeout_s=20.0):
    for key, (binary, launch) in enumerate(candidates):
        worker.submit(key, binary, launch, None, timeout_s)
    outcomes = {}
    while worker.pending:
        outcomes.update(worker.collect(60))
    return [outcomes[key] for key in range(len(candidates))]


@pytest.mark.parametrize("beta", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_right_kernels_are_measured_beside_cublas(device, layout, beta):
    problem = Problem(300, 520, 130, layout, beta)
    with GpuWorker(0, problem) as worker:
        facts = worker.ready()
        assert facts.device == device
        assert facts.input_sets == 2
        (trial,) = measure(worker, candidate(device, problem))
        assert isinstance(trial, MeasuredTrial), trial
        assert 0 < trial.verdict.error < trial.verdict.bound / 3
        assert 1e-4 < trial.timing.median_ms < 10
        finals = worker.finals([("only", *candidate(device, problem))], 20)
    assert isinstance(finals.outcomes["only"], MeasuredTrial), finals
    assert "all elements" in finals.outcomes["only"].verdict.inputs
    assert (finals.cublas is None) == (finals.cublas_version is None)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 4096, 4096), (65000, 64, 64), (64, 64, 64000), (257, 8, 100000)]
)
def test_odd_shapes_are_verified(device, shape):
    problem = Problem(*shape)
    with GpuWorker(0, problem) as worker:
        (trial,) = measure(worker, candidate(device, problem), timeout_s=60.0)
    assert isinstance(trial, MeasuredTrial), trial


HARM = {
    "wrong": ("if (row == 7 && col == 300) C[row * N + col] += 1.0f;", "correctness"),
    "unwritten": (
        "if (row == 7 && col == 300) C[row * N + col] = __int_as_float(0x7FC00000);",
        "correctness",
    ),
    "one past the end": ("if (row == M - 1 && col == N - 1) C[M * N] = 1.0f;", "correctness"),
    "into an operand": ("if (row == 0 && col == 0) const_cast<float*>(A)[5] = 1.0f;", "correctness"),
    "illegal address": ("if (row == 0 && col == 0) *(volatile float*)(16) = 1.0f;", "crash"),
    "trap": ('if (row == 0) asm("trap;");', "crash"),
    "endless": ("while (*(volatile float*)(C) == *(volatile float*)(C)) ;", "timeout"),
}


@pytest.mark.parametrize("harm", HARM)
def test_harm_is_named_and_the_next_candidate_measured(device, harm):
    problem = Problem(256, 512, 64)
    mistake, kind = HARM[harm]
    with GpuWorker(0, problem) as worker:
        worker.ready()
        good = candidate(device, problem)
        first, bad, second, third = measure(
            worker, good, candidate(device, problem, mistake), good, good, timeout_s=5
        )
    assert isinstance(bad, Rejected)
    assert bad.kind == kind, bad
    for trial in (first, second, third):
        assert isinstance(trial, MeasuredTrial), trial


BROKEN = {
    "C is read at beta 0": "alpha * sum + beta * C[row * N + col]",
    "alpha is built in": "0.75f * sum" + OLD,
    "alpha is ignored": "sum" + OLD,
    "beta is built in": "alpha * sum + (beta != 0.0f ? -0.5f * C[row * N + col] : 0.0f)",
    "beta is a flag": "alpha * sum + (beta != 0.0f ? C[row * N + col] : 0.0f)",
}


@pytest.mark.parametrize("value", BROKEN.values(), ids=BROKEN.keys())
def test_a_contract_broken_by_the_scalars_is_found_in_both_checks(device, value):
    problem = Problem(256, 512, 64, beta=1)
    broken = candidate(device, problem, value=value)
    with GpuWorker(0, problem) as worker:
        (trial,) = measure(worker, broken)
        finals = worker.finals([("broken", *broken), ("good", *candidate(device, problem))], 20)
    assert trial.kind == "correctness"
    assert finals.outcomes["broken"].kind == "correctness"
    assert isinstance(finals.outcomes["good"], MeasuredTrial), finals


def test_a_finalist_that_is_wrong_once_in_fifty_launches_is_found(device):
    problem = Problem(256, 512, 64)
    # Threads count, so a launch makes 256 x 512: only the first 48 launches are right throughout.
    rare = candidate(
        device,
        problem,
        "if (atomicAdd(&threads, 1u) == 48u * 256u * 512u) C[row * N + col] += 1.0f;",
        "__device__ unsigned threads;\n",
    )
    with GpuWorker(0, problem) as worker:
        finals = worker.finals([("rare", *rare), ("good", *candidate(device, problem))], 20)
    assert "repeats over NaN" in finals.outcomes["rare"].why
    assert isinstance(finals.outcomes["good"], MeasuredTrial), finals


@pytest.mark.parametrize("beta", [0, 1])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 2), (2, 1)])
def test_right_kernels_pass_where_terms_cancel(device, m, n, beta):
    problem = Problem(m, n, 256, beta=beta)
    for seed in range(5):
        with GpuWorker(0, problem, seed=seed) as worker:
            trials = measure(worker, *[candidate(device, problem)] * 4)
            finals = worker.finals([("only", *candidate(device, problem))], 20)
        for trial in (*trials, finals.outcomes["only"]):
            assert isinstance(trial, MeasuredTrial), trial


def test_stray_writes_are_named(device):
    problem = Problem(256, 512, 64)
    with GpuWorker(0, problem) as worker:
        past = candidate(device, problem, HARM["one past the end"][0])
        operand = candidate(device, problem, HARM["into an operand"][0])
        outcomes = measure(worker, past, operand)
    assert outcomes[0].why == "wrote outside C: changed 1 word after C"
    assert outcomes[1].why.startswith("wrote outside C: changed the contents of A of input set ")


def test_dynamic_shared_memory_up_to_the_limit_and_beyond(device):
    problem = Problem(64, 128, 64)
    with GpuWorker(0, problem) as worker:
        fits = candidate(device, problem, shared_bytes=device.shared_per_block)
        too_much = candidate(device, problem, shared_bytes=device.shared_per_block + 1024)
        most, beyond, after = measure(worker, fits, too_much, candidate(device, problem))
        facts = worker.ready()
    assert isinstance(most, MeasuredTrial), most
    assert isinstance(beyond, Rejected)
    assert beyond.kind == "crash"
    assert isinstance(after, MeasuredTrial)
    assert facts.device.shared_per_block == device.shared_per_block


def test_a_harmful_finalist_is_rejected_and_the_others_timed(device):
    problem = Problem(256, 512, 64)
    entries = [
        ("good", *candidate(device, problem)),
        ("illegal", *candidate(device, problem, HARM["illegal address"][0])),
        ("wrong", *candidate(device, problem, HARM["wrong"][0])),
        ("stray", *candidate(device, problem, HARM["one past the end"][0])),
        ("endless", *candidate(device, problem, HARM["endless"][0])),
    ]
    with GpuWorker(0, problem) as worker:
        finals = worker.finals(entries, 5)
    kinds = {key: getattr(outcome, "kind", "measured") for key, outcome in finals.outcomes.items()}
    assert kinds == {
        "good": "measured",
        "illegal": "crash",
        "wrong": "correctness",
        "stray": "correctness",
        "endless": "timeout",
    }


def test_device_memory_stays_flat(device):
    from cupy.cuda import runtime

    problem = Problem(64, 128, 64)
    # Every module holds 16 MiB of its own: 100 that are not unloaded would hold 1.6 GB.
    ballast = "__device__ float ballast[1 << 22];\n"
    binary, launch = candidate(device, problem, "if (row < 0) C[0] = ballast[col];", ballast)
    with GpuWorker(0, problem) as worker:
        (first,) = measure(worker, (binary, launch))
        before = runtime.memGetInfo()[0]
        trials = measure(worker, *[(binary, launch)] * 100)
        assert runtime.memGetInfo()[0] > before - (200 << 20)
    assert all(isinstance(trial, MeasuredTrial) for trial in (first, *trials))


def test_cold_and_warm_are_told_apart(device):
    problem = Problem(1024, 1024, 256)
    timings = {}
    for cold in (False, True):
        with GpuWorker(0, problem, cold=cold) as worker:
            (trial,) = measure(worker, candidate(device, problem))
        timings[trial.timing.l2] = trial.timing.median_ms
    assert set(timings) == {"warm", "cold"}
