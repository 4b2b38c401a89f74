"""The bench without a GPU: the guarded child by a stub, the records and the compiler as they are."""

from __future__ import annotations

import fcntl
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from functools import partial

import pytest
import stub_bench
from click.testing import CliRunner
from made_records import made
from stub_bench import measured, timing
from stub_gpu import TOO_LARGE

from autotune import records
from autotune.cli import bench as command
from autotune.code.render import render
from autotune.errors import DeviceError, Rejected, UsageError
from autotune.kernel.choices import Choice
from autotune.measure.comparison import LIBRARIES, Baseline, BenchFacts, Compared, Comparison
from autotune.measure.timing import fastest, timed_beta
from autotune.measure.worker import GpuWorker
from autotune.records import Store
from autotune.report.bench import Report, bench, geometric_mean
from autotune.report.rows import Circumstances, Failure, Row, Winner
from autotune.space.space import Space
from autotune.tuning import quick, tuner
from autotune.values.device import named_device
from autotune.values.measurement import Launch
from autotune.values.problem import Problem
from autotune.values.suite import Shape

H200 = named_device("h200")
SMALL = Problem(64, 64, 64)
COMPARISON = Comparison(SMALL, 1.0, 0.0, b"ELF", Launch.of("sgemm", (1, 1, 1), (32, 1, 1)), 1, False, 20.0)
STUB = "stub_bench:serve"


# -- the guarded child ---------------------------------------------------------------------------------------


def comparison(act=1, **changes):
    return replace(COMPARISON, alpha=float(act), **changes)


def test_a_comparison_comes_back_with_all_timings():
    with GpuWorker(0, None, service=STUB) as gpu:
        assert gpu.bench_facts().copy_gbs == 4150.4
        outcome = gpu.compare(comparison())
    assert outcome.kernel == measured(1.0)
    assert outcome.libraries == {
        "cublas": Baseline(timing(2.0), "cublas_kernel"),
        "cublaslt": Baseline(timing(1.5), "cublaslt_kernel", 7),
    }


@pytest.mark.parametrize(
    ("act", "kind", "why"),
    [
        (stub_bench.CRASH, "crash", "the GPU worker died: killed by SIGSEGV"),
        (stub_bench.FAULT, "crash", "cudaErrorIllegalAddress"),
        (stub_bench.WRONG, "correctness", "C[0, 0] is nan"),
    ],
)
def test_a_kernel_at_fault_fails_its_own_comparison_only(act, kind, why):
    with GpuWorker(0, None, service=STUB) as gpu:
        assert gpu.compare(comparison(act)).kernel == Rejected(kind, why)
        assert gpu.compare(comparison()).kernel == measured(1.0)


def test_a_kernel_that_hangs_is_killed():
    start = time.monotonic()
    with GpuWorker(0, None, service=STUB) as gpu:
        outcome = gpu.compare(comparison(stub_bench.HANG, timeout_s=0.5))
        assert gpu.compare(comparison()).kernel == measured(1.0)
    assert outcome == Compared(Rejected("timeout", "no sign of life for 0.5 s"), {})
    assert time.monotonic() - start < 50  # the kernel would take 60 s


def test_a_library_that_crashes_or_hangs_is_left_out_and_the_others_timed(tmp_path, monkeypatch):
    monkeypatch.setenv("STUB_BENCH", str(tmp_path / "pids"))
    with GpuWorker(0, None, service="stub_bench:serve_counting") as gpu:
        crashed = gpu.compare(comparison(stub_bench.CUBLAS_CRASHES))
        hung = gpu.compare(comparison(stub_bench.LT_HANGS, timeout_s=0.5))
    assert crashed.kernel == hung.kernel == measured(1.0)
    assert crashed.libraries["cublas"] == Rejected("crash", "the GPU worker died: exit code 3")
    assert isinstance(crashed.libraries["cublaslt"], Baseline)
    assert hung.libraries["cublaslt"] == Rejected("timeout", "no sign of life for 0.5 s")
    assert isinstance(hung.libraries["cublas"], Baseline)
    assert len((tmp_path / "pids").read_text().split()) == 3


def test_operands_that_do_not_fit_leave_the_child_alive(tmp_path, monkeypatch):
    monkeypatch.setenv("STUB_BENCH", str(tmp_path / "pids"))
    with GpuWorker(0, None, service="stub_bench:serve_counting") as gpu:
        with pytest.raises(DeviceError, match="8 bytes are needed"):
            gpu.compare(comparison(stub_bench.MEMORY))
        assert gpu.compare(comparison()).kernel == measured(1.0)
    assert len((tmp_path / "pids").read_text().split()) == 1


def test_a_child_that_dies_in_its_own_work_is_nobodys_fault():
    with GpuWorker(0, None, service=STUB) as gpu:
        with pytest.raises(DeviceError, match="failed before a kernel ran: the GPU worker died: exit code 5"):
            gpu.compare(comparison(stub_bench.SETUP_DIES))
        assert gpu.compare(comparison()).kernel == measured(1.0)


def test_an_error_of_the_start_is_raised_as_it_was():
    with GpuWorker(0, None, service="stub_bench:no_gpu") as gpu:
        for _ in range(2):
            with pytest.raises(DeviceError, match=r"^there is no NVIDIA driver$"):
                gpu.bench_facts()


def test_a_child_that_never_starts_is_given_up():
    with (
        GpuWorker(0, None, service="stub_bench:never_starts") as gpu,
        pytest.raises(DeviceError, match=r"failed 3 times before it could measure.*libsomething"),
    ):
        gpu.bench_facts()


# -- choosing an algorithm -----------------------------------------------------------------------------------


def test_the_fastest_is_chosen_among_those_that_run():
    assert fastest("abc", lambda name, best: {"a": 3.0, "b": 1.0, "c": None}[name]) == "b"
    assert fastest("abc", lambda name, best: None) is None
    assert fastest("", lambda name, best: 1.0) is None


def test_those_near_the_best_are_timed_again():
    times = {"a": [1.00, 1.04], "b": [1.03, 1.02], "c": [1.2]}
    assert fastest("abc", lambda name, best: times[name].pop(0)) == "b"
    assert times == {"a": [], "b": [], "c": []}


def test_each_is_told_the_best_so_far():
    seen = []
    times = iter([3.0, 1.0, 2.0])
    fastest("abc", lambda name, best: (seen.append(best), next(times))[1])
    assert seen == [None, 3.0, 1.0]


@pytest.mark.parametrize("beta", [0.0, 1.0, -1.0, 0.5, 2.0, -1e30])
def test_c_stays_finite_over_many_launches(beta):
    scalar = timed_beta(beta)
    assert (scalar == 0) == (beta == 0)
    c = 1.0
    for _ in range(10_000):
        c = 100.0 + scalar * c
    assert abs(c) < 1e7


# -- means and the report ------------------------------------------------------------------------------------


FACTS = BenchFacts(H200, "580.95.05", "13.1.1", "13.1.1", 4100.0)


def winner(problem=SMALL):
    space = Space.load("sgemm")
    config = space.fitted(space.presets["tiny_block"], problem, H200)
    source = render(space, config, problem, H200)
    return Choice("exact", space, config, made(problem, config=config), source)


def row(ident, group, ours, cublas, cublaslt, problem=SMALL):
    libraries = {}
    if cublas is not None:
        libraries["cublas"] = Baseline(timing(cublas), "a_kernel")
    if cublaslt is not None:
        libraries["cublaslt"] = Baseline(timing(cublaslt), "b_kernel + splitKreduce", 9)
    served = Winner.of(winner(problem))
    return Row(Shape(ident, problem, group=group), served, measured(ours), libraries=libraries)


def report(*rows, cold=False, method="graph"):
    return Report(FACTS, "13.0", 7, cold, method, "2026-01-31T12:00:00Z", rows)


def test_geometric_means():
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([2.0, None, 8.0, 0.5]) == pytest.approx(2.0)
    assert geometric_mean([None]) is None
    assert geometric_mean([]) is None


def test_means_are_of_each_group_then_of_all():
    made = report(
        row("A", "x", 1.0, 2.0, 1.0),
        row("B", "y", 1.0, 8.0, 1.5),
        row("C", "x", 2.0, 4.0, None),
        Row(Shape("D", SMALL, group="y"), missing="no record"),
        Row(Shape("E", SMALL, group="z"), missing="no record"),
    )
    found = {mean.group: (mean.shapes, mean.versus["cublas"], mean.versus["cublaslt"]) for mean in made.means}
    assert list(found) == ["x", "y", "z", "all"]
    assert found["x"] == (2, pytest.approx(2.0), pytest.approx(1.0))
    assert found["y"] == (1, pytest.approx(8.0), pytest.approx(1.5))
    assert found["z"] == (0, None, None)
    assert found["all"] == (3, pytest.approx(32 ** (1 / 3)), pytest.approx(math.sqrt(1.5)))
    assert made.worst("cublas").shape.id == "A"
    assert made.worst("cublaslt").shape.id == "A"


def test_means_are_of_the_fastest_math_of_each_shape():
    def of(math, ident, ours):
        made = row(ident, "x", ours, 2.0, None)
        return replace(made, shape=replace(made.shape, problem=replace(SMALL, math=math)))

    made = report(
        of("ffma", "A", 1.0),
        of("3xtf32", "A 3xtf32", 0.5),
        of("3xfp16", "A 3xfp16", 4.0),
        of("ffma", "B", 2.0),
    )
    assert [each.shape.id for each in made.fastest] == ["A 3xtf32", "B"]
    assert [(mean.group, mean.shapes, mean.versus["cublas"]) for mean in made.means] == [
        ("x", 2, pytest.approx(2.0)),
        ("all", 2, pytest.approx(2.0)),
    ]
    assert made.worst("cublas").shape.id == "B"


def test_the_floor_is_compute_or_the_measured_copy():
    square, thin = Problem(4096, 4096, 4096), Problem(1, 4096, 4096)
    made = report()
    assert made.floor_ms(Shape.of(square)) == pytest.approx(2 * 4096**3 / 66.9e9, rel=1e-3)
    assert made.floor_ms(Shape.of(thin)) == pytest.approx(4 * (4096**2 + 2 * 4096) / 4100e6)
    reads_c = Shape.of(Problem(4096, 4096, 1, beta=1))
    assert made.floor_ms(reads_c) == pytest.approx(4 * (2 * 4096**2 + 2 * 4096) / 4100e6)
    half = row("T", "x", 2 * made.floor_ms(Shape.of(thin)), None, None, thin)
    assert made.share(half) == pytest.approx(0.5)
    assert half.gbs == pytest.approx(2050, rel=1e-3)


def test_the_markdown_table_has_what_the_readme_shows():
    made = report(
        row("P01", "square", 0.5, 1.0, 0.75, Problem(256, 256, 256)),
        row("P02", "square", 0.5, None, None, Problem(512, 512, 512, beta=1)),
        Row(Shape("P03", SMALL, group="skinny"), missing="no record"),
        Row(
            Shape("P04", SMALL, group="skinny"),
            Winner.of(winner()),
            failure=Failure("timeout", "no result after 30 s"),
        ),
    )
    head, blank, *table = command.table(made).splitlines()
    assert head == (
        "NVIDIA H200, driver 580.95.05, cuBLAS 13.1.1, NVRTC 13.0, 2026-01-31; operands warm, "
        "replayed as CUDA graphs, medians, in turns in "
        "one run; copy 4,100 GB/s."
    )
    assert blank == ""
    assert table[0] == "| shape | ms | TFLOP/s | vs cuBLAS | vs best cuBLASLt | % of floor |"
    assert table[2] == "| P01 256 x 256 x 256 nn | 0.5 | 0.1 | 2.00 | 1.50 | 0% |"
    assert table[3] == "| P02 512 x 512 x 512 nn beta | 0.5 | 0.5 | - | - | 1% |"
    assert table[4] == "| P03 64 x 64 x 64 nn | no record | | | | |"
    assert table[5] == "| P04 64 x 64 x 64 nn | failed: timeout | | | | |"
    assert table[6] == "| geometric mean, square (2) | | | 2.00 | 1.50 | 0% |"
    assert table[7] == "| geometric mean, all (2) | | | 2.00 | 1.50 | 0% |"
    assert {line.count("|") for line in table} == {7}


def test_the_screen_shows_shapes_means_and_kernels(capsys):
    command.show(report(row("P01", "square", 0.5, 1.0, 0.75), Row(Shape("P02", SMALL), missing="no record")))
    text = capsys.readouterr().out
    assert "P01 64 x 64 x 64 nn  square" in text
    assert "geometric mean of 1" in text
    assert "worst against best cuBLASLt: P01 64 x 64 x 64 nn, 1.500" in text
    assert "cuBLAS 1 ms: a_kernel" in text
    assert "best cuBLASLt 0.75 ms, of 9 algorithms: b_kernel + splitKreduce" in text
    assert "P02: 64 x 64 x 64 nn: no record: run 'autotune tune --m 64 --n 64 --k 64'" in text


TENSOR = Problem(256, 256, 256, math="3xtf32")


def tensor_row():
    found = row("P01", "square", 0.5, 1.0, 0.75, TENSOR)
    libraries = {
        **found.libraries,
        "cublas": Baseline(timing(1.0), "a_kernel", 1, 1.2e-6),
        "cublas_tf32": Baseline(timing(0.25), "c_kernel", 1, 4.2e-4),
    }
    return replace(found, libraries=libraries)


def test_kernels_on_tensor_cores_meet_cublas_in_tf32_and_show_errors(capsys):
    made = report(tensor_row(), Row(Shape("P02", TENSOR), missing="no record"))
    table = command.table(made).splitlines()[2:]
    assert table[0] == (
        "| shape | ms | TFLOP/s | vs cuBLAS | vs best cuBLASLt | vs cuBLAS TF32 | % of floor | error "
        "| of cuBLAS | of cuBLAS TF32 |"
    )
    assert table[2].startswith("| P01 256 x 256 x 256 nn 3xtf32 | 0.5 | 0.1 | 2.00 | 1.50 | 0.50 | ")
    assert table[2].endswith(" | 1.0e-07 | 1.2e-06 | 4.2e-04 |")
    assert {line.count("|") for line in table} == {11}
    command.show(made)
    text = capsys.readouterr().out
    assert "vs cuBLAS TF32" in text
    assert "cuBLAS TF32 0.25 ms: c_kernel" in text
    assert "a third of the tensor cores' TF32" in text
    plain = made.plain()["shapes"][0]
    assert (plain["math"], plain["vs_cublas_tf32"]) == ("3xtf32", 0.5)
    assert (plain["verification"]["error"], plain["cublas"]["error"]) == (1e-7, 1.2e-6)
    assert plain["cublas_tf32"]["error"] == 4.2e-4


def test_fp32_alone_is_not_compared_with_tf32():
    made = report(row("P01", "square", 0.5, 1.0, 0.75))
    assert made.libraries == LIBRARIES
    assert "TF32" not in command.table(made)
    assert "vs_cublas_tf32" not in made.plain()["shapes"][0]


def test_a_table_that_cannot_be_written_is_told_before_anything_is_timed(tmp_path):
    words = ["--m", "64", "--n", "64", "--k", "64", "--markdown", str(tmp_path / "none" / "x.md")]
    done = CliRunner().invoke(command.command, words)
    assert isinstance(done.exception, UsageError)
    assert f"there is no folder {tmp_path / 'none'}" in str(done.exception)


def test_a_cold_run_says_so():
    assert "operands cold, replayed as CUDA graphs" in command.caption(report(cold=True))
    assert report(cold=True).plain()["l2"] == "cold"


# -- the whole run -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with records of 64 cubed, with and without beta, and of nothing else."""
    folder = tmp_path_factory.mktemp("records")
    for beta in (0, 1):
        Store(folder).write(winner(replace(SMALL, beta=beta)).record)
    return folder


def shape(ident, act=1, problem=SMALL):
    return Shape(ident, problem, float(act), float(problem.beta))


def test_only_kernels_on_tensor_cores_run_where_tf32_is_allowed(tmp_path, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    monkeypatch.setenv("STUB_BENCH", str(tmp_path / "overrides"))
    space = Space.load("sgemm_3xtf32")
    tensor = replace(SMALL, math="3xtf32")
    config = space.fitted(space.presets["two_warps"], tensor, H200)
    Store(tmp_path).write(made(tensor, space=space, config=config))
    Store(tmp_path).write(winner().record)
    service = "stub_bench:serve_telling_the_override"
    (first,) = bench([shape("fp32")], root=tmp_path, service=service).timed
    both = bench([shape("fp32"), shape("tensor", problem=tensor)], root=tmp_path, service=service).timed
    assert [set(each.libraries) for each in (first, *both)] == [
        {"cublas", "cublaslt"},
        {"cublas", "cublaslt"},
        {"cublas", "cublaslt", "cublas_tf32"},
    ]
    assert (tmp_path / "overrides").read_text().split() == ["0", "None"]


def test_every_shape_is_told_and_reported_whatever_happens(root, monkeypatch):
    monkeypatch.setattr("autotune.report.bench.STEP_TIMEOUT_S", 1.0)
    monkeypatch.setattr("autotune.report.bench.trial_limit", lambda problem: 0.0)
    shapes = [
        shape("good"),
        shape("hang", stub_bench.HANG),
        shape("crash", stub_bench.CRASH),
        shape("wrong", stub_bench.WRONG),
        shape("memory", stub_bench.MEMORY),
        shape("missing", problem=Problem(65, 64, 64)),
        shape("beta", problem=replace(SMALL, beta=1)),
    ]
    told = []
    made = bench(shapes, root=root, tell=told.append, service=STUB, seed=3)
    assert told == list(made.rows)
    assert [row.shape.id for row in made.timed] == ["good", "beta"]
    kinds = {row.shape.id: row.failure.kind for row in made.rows if row.failure}
    assert kinds == {"hang": "timeout", "crash": "crash", "wrong": "correctness", "memory": "device"}
    assert made.rows[5].missing == "no record of 65 x 64 x 64 nn on NVIDIA H200"

    plain = json.loads(json.dumps(made.plain()))
    assert plain["schema"] == 1
    assert (plain["driver"], plain["cublas"], plain["seed"]) == ("580.95.05", "13.1.1", 3)
    assert plain["device"]["name"] == "NVIDIA H200"
    first, *_, last = plain["shapes"]
    assert first["status"] == "timed"
    assert (first["vs_cublas"], first["vs_cublaslt"]) == (2.0, 1.5)
    assert first["cublaslt"]["algorithms"] == 7
    assert first["family"] == "sgemm"
    assert last["beta"] == 1.0
    missing = plain["shapes"][5]
    assert (missing["status"], missing["command"]) == ("missing", "autotune tune --m 65 --n 64 --k 64")
    assert plain["shapes"][1]["kind"] == "timeout"
    assert plain["geometric_means"]["all"]["vs_cublas"] == 2.0
    assert plain["worst"]["vs_cublas"] == "good"


def test_a_gpu_that_is_lost_for_good_fails_the_rest_without_ending_the_run(root, tmp_path, monkeypatch):
    monkeypatch.setenv("STUB_BENCH", str(tmp_path / "pids"))
    shapes = [shape("good"), shape("crash", stub_bench.CRASH), shape("late"), shape("later")]
    made = bench(shapes, root=root, service="stub_bench:dies_for_good")
    assert [row.shape.id for row in made.timed] == ["good"]
    assert [row.failure.kind for row in made.rows[1:]] == ["crash", "device", "device"]
    assert "failed 3 times" in made.rows[3].failure.why


def test_a_record_whose_code_changed_is_not_timed(tmp_path):
    stale = winner().record
    Store(tmp_path).write(replace(stale, code_digest="0" * 64))
    made = bench([shape("stale")], root=tmp_path, service=STUB)
    assert made.timed == ()
    assert "stale" in made.rows[0].missing


def test_the_machine_code_is_kept_and_found_again(root):
    compared = []

    def compare(self, comparison):
        compared.append(comparison.cubin)
        raise DeviceError("seen")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GpuWorker, "compare", compare)
        bench([shape("first")], root=root, service=STUB)
        patch.setattr("autotune.code.pool.CompilePool.submit", None)
        bench([shape("second")], root=root, service=STUB)
    assert compared[0] == compared[1]
    assert compared[0].startswith(b"\x7fELF")


# -- the command ---------------------------------------------------------------------------------------------


def run_command(*words, monkeypatch):
    monkeypatch.setattr(
        "autotune.report.bench.bench.__kwdefaults__", {**bench.__kwdefaults__, "service": STUB}
    )
    return CliRunner().invoke(command.command, [str(word) for word in words])


def test_one_shape_by_its_sizes(root, monkeypatch, tmp_path):
    file = tmp_path / "table.md"
    words = ["--m", 64, "--n", 64, "--k", 64, "--cache", root, "--markdown", file]
    done = run_command(*words, monkeypatch=monkeypatch)
    assert done.exit_code == 0, done.output
    assert "2.000 x cuBLAS; 1.500 x best cuBLASLt" in done.stderr
    assert "| 64 x 64 x 64 nn | 1 |" in file.read_text()


def test_a_suite_file_as_json(root, monkeypatch, tmp_path):
    suite = tmp_path / "mine.toml"
    suite.write_text(
        '[[shape]]\nid = "a"\nm = 64\nn = 64\nk = 64\n[[shape]]\nid = "b"\nm = 9\nn = 9\nk = 9\n'
    )
    done = run_command("--suite", suite, "--json", "--cache", root, monkeypatch=monkeypatch)
    assert done.exit_code == 0, done.output
    assert [each["status"] for each in json.loads(done.stdout)["shapes"]] == ["timed", "missing"]


def test_a_suite_in_every_math(root, monkeypatch, tmp_path):
    suite = tmp_path / "mine.toml"
    suite.write_text('[[shape]]\nid = "a"\nm = 64\nn = 64\nk = 64\n')
    words = ["--suite", suite, "--json", "--cache", root, "--math", "any"]
    done = run_command(*words, monkeypatch=monkeypatch)
    assert done.exit_code == 0, done.output
    found = [(each["id"], each["math"], each["status"]) for each in json.loads(done.stdout)["shapes"]]
    assert found == [
        ("a", "ffma", "timed"),
        ("a 3xtf32", "3xtf32", "missing"),
        ("a 3xfp16", "3xfp16", "missing"),
    ]
    assert "autotune tune --m 64 --n 64 --k 64 --math 3xtf32" in done.stderr


def test_nothing_to_time_is_a_failure_that_lists_the_commands(tmp_path, monkeypatch):
    words = ["--m", 65, "--n", 64, "--k", 64, "--beta", 1, "--cache", tmp_path]
    done = run_command(*words, monkeypatch=monkeypatch)
    assert done.exit_code == 1
    assert "autotune tune --m 65 --n 64 --k 64 --beta 1" in done.stdout
    assert "none of 1 shapes could be timed: 1 have no record, 0 failed" in str(done.exception)


# -- tuned quickly before ------------------------------------------------------------------------------------


@pytest.fixture
def quickly(monkeypatch, tmp_path):
    """Quick tuning of one point of each shape, on a stub."""
    monkeypatch.setenv("STUB_GPU", str(tmp_path / "measured"))
    monkeypatch.setattr(tuner, "GpuWorker", partial(GpuWorker, service="stub_gpu:serve_hashed"))
    monkeypatch.setattr(quick, "FIRST", 1)
    monkeypatch.setattr(quick, "SEARCH_S", 60.0)


def test_random_shapes_are_tuned_quickly_in_a_folder_of_their_own(quickly, monkeypatch, tmp_path):
    words = ["--random", 2, "--quick", "--cache", tmp_path / "records"]
    done = run_command(*words, monkeypatch=monkeypatch)
    assert done.exit_code == 0, done.output
    assert "2 shapes tuned by tune='quick', time of the library over ours:" in done.stdout
    heads, figures = done.stdout.splitlines()[-2:]
    assert heads.split("  ")[-2:] == ["ms to tune, median", "longest"]
    assert re.fullmatch(r" vs cuBLAS +2\.000 +2\.00 +2\.00 +0\.0% +\d+ +\d+", figures)
    assert len((tmp_path / "measured").read_text().split()) == 2
    assert [path for path in (tmp_path / "records").rglob("*") if path.is_file()] == []


def test_a_shape_that_cannot_be_tuned_quickly_is_served_by_prediction(quickly, tmp_path):
    shapes = [Shape.of(Problem(m, 64, 64)) for m in (TOO_LARGE, 68)]
    report = bench(shapes, quick=True, root=tmp_path / "records", service=STUB)
    assert [row.winner.served for row in report.rows] == ["predicted", "exact"]
    assert report.libraries == ("cublas",)
    assert all(row.versus("cublas") == 2.0 for row in report.rows)


def test_where_nothing_can_be_tuned_quickly_it_is_an_error(quickly, monkeypatch, tmp_path):
    monkeypatch.setattr(tuner, "GpuWorker", partial(GpuWorker, service="stub_gpu:no_memory"))
    with pytest.raises(DeviceError, match="needs 2 bytes of device memory and 1 are free"):
        bench([Shape.of(SMALL)], quick=True, root=tmp_path / "records", service=STUB)


def test_only_random_shapes_are_tuned_quickly(monkeypatch):
    done = run_command("--m", 64, "--n", 64, "--k", 64, "--quick", monkeypatch=monkeypatch)
    assert str(done.exception) == "--quick tunes random shapes: give --random N too, or run 'autotune tune'"


# -- a run that was stopped ----------------------------------------------------------------------------------

SIX = [Shape.of(Problem(m, 64, 64)) for m in range(66, 72)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A folder in which the kernels of the six shapes are kept."""
    folder = tmp_path_factory.mktemp("compiled")
    bench(SIX, root=folder, predicted=True, service=STUB)
    return folder / "compiled"


@pytest.fixture
def folder(tmp_path, compiled):
    shutil.copytree(compiled, tmp_path / "compiled")
    return tmp_path


def stopped(folder, after=2, **words):
    """Time some shapes as if they had no record, until a number of them is done; return what was done."""
    told = []

    def tell(row):
        told.append(row.shape)
        if len(told) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench(SIX, root=folder, predicted=True, service=STUB, tell=tell, seed=1, **words)
    (file,) = (folder / "bench").iterdir()
    return told, file


def again(folder, **words):
    told, said = [], []
    words = {"seed": 1, "predicted": True, **words}
    found = bench(
        SIX, root=folder, service=STUB, tell=lambda row: told.append(row.shape), say=said.append, **words
    )
    assert [row.shape for row in found.rows] == SIX
    return told, said, found


def test_a_stopped_run_goes_on_and_leaves_nothing(folder):
    before, file = stopped(folder)
    rows = [json.loads(line)["shape"] for line in file.read_text().splitlines()[1:]]
    assert rows == [shape.id for shape in before] == [shape.id for shape in SIX[:2]]
    told, said, report = again(folder)
    assert told == SIX[2:]
    assert re.fullmatch(
        r"going on: 2 of 6 shapes were timed in a run .* \(--no-resume begins anew\)", said[0]
    )
    assert (report.resumed, len(report.timed), report.spread("cublas").mean) == (2, 6, 2.0)
    kept, fresh = report.rows[0], report.rows[-1]
    assert (kept.measured, kept.libraries) == (fresh.measured, fresh.libraries)
    assert (kept.winner.served, kept.choosing_s > 0) == ("predicted", True)
    assert "in turns in one run, 2 of them in an earlier one; copy" in command.caption(report)
    assert report.plain()["resumed"] == 2
    assert not file.exists()
    assert again(folder)[0] == SIX  # a whole run is no stopped one


def killed(folder):
    """Time two of the shapes, and die."""
    bench(
        SIX,
        root=folder,
        predicted=True,
        service=STUB,
        seed=1,
        tell=lambda row: row.shape == SIX[1] and os.kill(os.getpid(), signal.SIGKILL),
    )


def test_a_killed_run_goes_on(folder):
    process = multiprocessing.get_context("fork").Process(target=killed, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert again(folder)[0] == SIX[2:]


def test_a_line_that_a_killed_run_left_half_is_timed_again(folder):
    _, file = stopped(folder, after=3)
    file.write_bytes(file.read_bytes()[:-40])
    before, file = stopped(folder, after=1)
    assert before == SIX[2:3]
    assert len([json.loads(line) for line in file.read_text().splitlines()]) == 4
    assert again(folder)[0] == SIX[3:]


def test_a_line_of_a_shape_that_is_not_asked_for_is_none(folder):
    _, file = stopped(folder)
    file.write_text(file.read_text().replace(SIX[1].id, "another"))
    assert again(folder)[0] == SIX[1:]


def test_a_record_that_leads_nowhere_counts_as_none(tmp_path):
    none = Circumstances.of(FACTS, Store(tmp_path), 1)
    path = Store(tmp_path).path(FACTS.device, "sgemm", SIX[0].problem)
    path.parent.mkdir(parents=True)
    path.symlink_to("nowhere")
    assert none.differences(Circumstances.of(FACTS, Store(tmp_path), 1)) == ""


def test_other_circumstances_begin_anew_with_one_line(folder):
    _, file = stopped(folder)
    first, *lines = file.read_text().splitlines(keepends=True)
    file.write_text(
        json.dumps({**json.loads(first), "driver": "1.2", "nvrtc": "12.0"}) + "\n" + "".join(lines)
    )
    told, said, report = again(folder)
    assert told == SIX
    assert said == ["2 shapes that were timed before are timed anew: the driver, NVRTC changed"]
    assert report.resumed == 0


def test_circumstances_differ_in_all_that_times_depend_on(tmp_path):
    now = Circumstances.of(FACTS, Store(tmp_path), 1)
    assert now.differences(replace(now, created="earlier", seed=2)) == ""
    others = {"driver": "1.2", "nvrtc": "12.0", "cublas": "", "model": "0", "families": "0", "records": "0"}
    device = records.RecordedDevice.of(named_device("a100"))
    for name, value in {**others, "device": device}.items():
        assert len(now.differences(replace(now, **{name: value})).split(", ")) == 1


def test_another_record_begins_anew(folder):
    stopped(folder)
    Store(folder).write(winner().record)
    assert again(folder)[1] == ["2 shapes that were timed before are timed anew: records changed"]


def test_a_run_of_other_shapes_or_of_another_kind_is_another_run(folder):
    stopped(folder)
    for words in ({"predicted": False}, {"seed": 2}, {"cold": True}, {"resume": False}):
        assert again(folder, **words)[:2] == (SIX, [])


def test_a_stopped_run_that_tunes_goes_on_too(quickly, tmp_path):
    told, said = [], []

    def stop(row):
        raise KeyboardInterrupt

    words = {"root": tmp_path, "quick": True, "service": STUB}
    with pytest.raises(KeyboardInterrupt):
        bench(SIX[:2], tell=stop, **words)
    report = bench(SIX[:2], tell=lambda row: told.append(row.shape), say=said.append, **words)
    assert (told, report.resumed) == (SIX[1:2], 1)
    assert [row.winner.served for row in report.rows] == ["exact", "exact"]
    assert len((tmp_path / "measured").read_text().split()) == 2  # each once


def test_what_was_not_timed_is_tried_again(folder, monkeypatch):
    def fails(self, comparison):
        raise DeviceError("the GPU is gone")

    with monkeypatch.context() as patch:
        patch.setattr(GpuWorker, "compare", fails)
        _, file = stopped(folder)
    assert len(file.read_text().splitlines()) == 1
    assert again(folder)[0] == SIX


def test_two_processes_do_not_write_one_file(folder):
    _, file = stopped(folder)
    with file.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another process times these shapes, and has locked"):
            again(folder)
    assert again(folder)[0] == SIX[2:]


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_rows(folder):
    (folder / "bench").write_text("")
    told, said, _ = again(folder)
    assert told == SIX
    assert re.fullmatch(r"what is timed is not kept: .*\.jsonl cannot be written \(.*\)", said[0])


def test_the_command_says_that_it_can_go_on(tmp_path, monkeypatch):
    def stop(row):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(command, "told", stop)
        done = run_command("--random", 2, "--seed", 3, "--cache", tmp_path, monkeypatch=monkeypatch)
    assert "what was timed so far is kept: the same command goes on from there\n" in done.stderr
    done = run_command("--random", 2, "--seed", 3, "--cache", tmp_path, monkeypatch=monkeypatch)
    assert "going on: 1 of 2 shapes" in done.stderr


# -- as if there were no record ------------------------------------------------------------------------------


def test_records_are_hidden_when_asked(root, monkeypatch, tmp_path):
    words = ["--m", 64, "--n", 64, "--k", 64, "--cache", root, "--json"]
    seen = json.loads(run_command(*words, monkeypatch=monkeypatch).stdout)["shapes"][0]
    done = run_command(*words, "--unseen", monkeypatch=monkeypatch)
    plain = json.loads(done.stdout)
    unseen = plain["shapes"][0]
    assert (seen["served"], unseen["served"]) == ("exact", "predicted")
    assert unseen["choosing_ms"] > 0
    spread = plain["spread"]["vs_cublas"]
    assert (spread["mean"], spread["worst"], spread["p10"], spread["slower"]) == (2.0, 2.0, 2.0, 0.0)
    assert spread["choosing_ms"] == spread["choosing_worst_ms"] == unseen["choosing_ms"]
    file = tmp_path / "table.md"
    done = run_command(*words[:-1], "--unseen", "--markdown", file, monkeypatch=monkeypatch)
    assert "1 shapes served by prediction, time of the library over ours:" in done.stdout
    assert "\n| vs cuBLAS | 2.000 | 2.00 | 2.00 | 0.0% | " in file.read_text()
    done = run_command("--random", 2, "--unseen", monkeypatch=monkeypatch)
    assert str(done.exception).endswith("leave out --unseen")


def test_random_shapes_are_timed_in_the_math_that_was_asked_for_or_is_predicted(monkeypatch, tmp_path):
    words = ["--random", 2, "--seed", 5, "--json", "--cache", tmp_path]  # 683 x 1496 x 2126, 1872 x 48 x 16
    maths = {}
    for asked in ("3xtf32", "any"):
        done = run_command(*words, "--math", asked, monkeypatch=monkeypatch)
        assert done.exit_code == 0, done.output
        shapes = json.loads(done.stdout)["shapes"]
        assert [each["id"] for each in shapes] == ["R000", "R001"]
        maths[asked] = [each["math"] for each in shapes]
    assert maths["3xtf32"] == ["3xtf32", "3xtf32"]
    assert (maths["any"][0] != "ffma", maths["any"][1]) == (True, "ffma")


def test_a_prediction_does_not_look_at_hidden_records(root, monkeypatch):
    looked = []
    monkeypatch.setattr("autotune.tuning.prediction._config_of", lambda _, file: looked.append(file))
    near = Shape.of(replace(SMALL, m=60))
    bench([near, Shape.of(SMALL)], root=root, predicted=True, service=STUB)
    assert looked
    assert SMALL not in {file.problem for file in looked}


# -- for seconds ---------------------------------------------------------------------------------------------


def test_what_is_sustained_stands_beside_the_short_timing(root, monkeypatch, tmp_path):
    file = tmp_path / "table.md"
    sizes = ["--m", 64, "--n", 64, "--k", 64, "--cache", root, "--sustained"]
    done = run_command(*sizes, "3s", "--markdown", file, monkeypatch=monkeypatch)
    assert done.exit_code == 0, done.output
    flops = 2 * 64**3
    rates = [f"{flops / 1e9:.2f}", f"{flops / 1.25e9:.2f}", "690", "1650", f"{flops / 1.25e6 / 690.5:.1f}"]
    assert f"; sustained {rates[1]} TFLOP/s at 690 W" in done.stderr
    assert "over the second half of 3 s back to back" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.endswith("power cap")]
    assert [row[6] for row in rows] == ["ours", "cuBLAS", "best"]
    assert rows[0][7:] == [*rates, "power", "cap"]
    table = file.read_text()
    assert f"| 64 x 64 x 64 nn | ours | {' | '.join(rates)} | power cap |" in table
    ratio = f"{2.0 / 1.25:.2f}"
    assert f"% | {flops / 1.25e9:.1f} | {ratio} | 690 | 690 |" in table
    heads, dashes, row, *_ = table.splitlines()[2:]
    assert heads.count("|") == dashes.count("|") == row.count("|")
    done = run_command(*sizes, "2s", "--json", monkeypatch=monkeypatch)
    (shape,) = json.loads(done.stdout)["shapes"]
    assert list(shape["sustained"]) == ["kernel", "cublas", "cublaslt"]
    kernel = shape["sustained"]["kernel"]
    assert kernel["gflops_per_watt"] == pytest.approx(flops / 1.25e6 / 690.5, rel=1e-5)
    assert kernel["joules"] == pytest.approx(690.5 * 1.25e-3, rel=1e-5)
    assert (kernel["seconds"], kernel["sm_mhz"], kernel["throttle"]) == (2.0, 1650.0, ["power cap"])


def test_nothing_is_sustained_unless_asked(root):
    report = bench([Shape.of(Problem(64, 64, 64))], root=root, service=STUB, seed=1)
    assert "sustained" not in report.plain()["shapes"][0]
    assert "back to back" not in command.table(report)


def test_shapes_at_the_power_cap_are_named(root, capsys):
    report = bench([Shape.of(Problem(64, 64, 64))], root=root, service=STUB, seed=1)
    assert "power cap" not in command.table(report)
    (row,) = report.rows
    hot = replace(row.measured.timing, clocks={"throttle": ("power cap",), "watts": 699})
    report = replace(report, rows=(replace(row, measured=replace(row.measured, timing=hot)),))
    told = f"held at the power cap, with all that was timed in turns: {row.shape.id} (--sustained 3s"
    assert told in command.table(report)
    command.show(report)
    assert told in " ".join(capsys.readouterr().out.split())
    assert report.plain()["shapes"][0]["clocks"] == {"throttle": ["power cap"], "watts": 699}


@pytest.mark.parametrize("words", ["3", "0.1s", "11m", "fast"])
def test_a_time_to_sustain_is_refused(root, monkeypatch, words):
    sizes = ["--m", 64, "--n", 64, "--k", 64, "--cache", root]
    done = run_command(*sizes, "--sustained", words, monkeypatch=monkeypatch)
    assert isinstance(done.exception, UsageError)
    assert "--sustained" in str(done.exception)
    assert "such as 3s" in str(done.exception)


def test_a_run_that_goes_on_knows_what_was_sustained(folder):
    stopped(folder, sustained_s=1.0)
    told, _, report = again(folder, sustained_s=1.0)
    assert told == SIX[2:]
    assert report.rows[0].sustained == report.rows[-1].sustained != {}
    stopped(folder)
    assert again(folder, sustained_s=2.0)[0] == SIX, "another run"
