from __future__ import annotations

import json
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from stub_gpu import TOO_LARGE
from tuning import PLAIN, Bench

from autotune import records
from autotune.errors import DeviceError, SpaceError, UsageError
from autotune.kernel.best import fastest, search_missing
from autotune.measure.worker import GpuWorker
from autotune.records import Store
from autotune.space.space import Space
from autotune.tuning import tuner
from autotune.tuning.budget import Budget
from autotune.tuning.campaign import tune_all
from autotune.tuning.request import Request
from autotune.tuning.tuner import Workshop
from autotune.values.device import chosen_gpus, named_device
from autotune.values.problem import MATHS, Problem
from autotune.values.suite import Shape

H200 = named_device("h200")


@pytest.fixture
def bench(tmp_path, monkeypatch):
    return Bench(tmp_path, monkeypatch)


def shape(name, m):
    return Shape(name, Problem(m, 64, 8))


# -- suites --------------------------------------------------------------------------------------------------


def test_every_shape_gets_its_winner(bench):
    shapes = [shape("a", 64), shape("b", 96), shape("twin", 64), shape("c", 128)]
    found = bench.campaign(shapes, "60s")
    assert [(tuned.shape.id, tuned.settled, tuned.why) for tuned in found] == [
        ("a", True, ""),
        ("b", True, ""),
        ("c", True, ""),
    ]
    assert bench.measured.total() == 3 * 15  # each space was searched to its end, long before the time was up
    for tuned in found:
        assert tuned.record.search.complete
        stored = Store(bench.root).find(H200, "plain", tuned.shape.problem)
        assert records.to_json(stored) == records.to_json(tuned.record)


def test_a_shape_that_fails_leaves_the_others(bench):
    found = bench.campaign([shape("a", 64), shape("b", TOO_LARGE), shape("c", 128)], "60s")
    assert [(tuned.shape.id, tuned.record is None) for tuned in found] == [
        ("a", False),
        ("b", True),
        ("c", False),
    ]
    assert "needs 2 bytes of device memory and 1 are free" in found[1].why


def test_a_shape_whose_time_is_up_goes_on_with_what_others_leave_over(bench, monkeypatch):
    monkeypatch.setattr("autotune.tuning.campaign.OVERHEAD_S", 0.5)
    monkeypatch.setattr("autotune.tuning.campaign.LEAST_S", 1.0)
    monkeypatch.setenv("STUB_SECONDS", "0.15")  # more than 2 s for 15 candidates
    found = bench.campaign([shape("slow", 64), shape("same", 96), shape("third", 128)], "9s")
    assert all(tuned.record is not None for tuned in found)
    assert max(bench.measured.values()) == 1
    seen = {tuned.shape.id: tuned.record.search.seen for tuned in found}
    settled = {tuned.shape.id: tuned.settled for tuned in found}
    assert settled == {name: count == 15 for name, count in seen.items()}
    assert sum(seen.values()) == bench.measured.total()


def test_a_suite_needs_a_time_and_shapes(bench):
    with pytest.raises(UsageError, match="budget 300 is a number of candidates: give a time for all shapes"):
        bench.campaign([shape("a", 64)], "300")
    with pytest.raises(UsageError, match="no shape"):
        bench.campaign([], "10s")


# -- GPUs ----------------------------------------------------------------------------------------------------


def test_several_gpus_share_one_search(bench):
    record = bench.tune(gpus=[0, 1])
    assert (record.search.seen, record.search.complete) == (60, True)
    assert set(bench.measured.values()) == {1}
    assert {line["gpu"] for line in bench.lines() if line.get("event") == "started"} == {0, 1}


def test_a_gpu_that_fails_leaves_its_candidates_to_the_others(bench, monkeypatch):
    monkeypatch.setattr("autotune.measure.worker.RETRY_SECONDS", 0.01)
    notes = []

    def start(ordinal, problem, cold):
        service = "stub_gpu:no_memory" if ordinal else "stub_gpu:serve_hashed"
        return GpuWorker(ordinal, problem, cold=cold, service=service)

    monkeypatch.setattr(tuner, "GpuWorker", lambda ordinal, problem, cold: start(ordinal, problem, cold))
    monkeypatch.setattr(Workshop, "identity", lambda shop: shop.gpus[0].identity())
    record = bench.tune(gpus=[0, 1], watch=lambda progress: notes.append(list(progress.notes)))
    assert (record.search.seen, record.search.complete) == (60, True)
    assert notes[-1] == [
        "going on without GPU 1 of 2: 64 x 64 x 8 nn needs 2 bytes of device memory and 1 are free"
    ]


def test_gpus_of_two_kinds_do_not_share_a_search(monkeypatch):
    services = {0: "stub_gpu:serve", 1: "stub_gpu:serve_other"}
    monkeypatch.setattr(
        tuner, "GpuWorker", lambda n, problem, cold: GpuWorker(n, problem, service=services[n])
    )
    with (
        Workshop(Problem(64, 64, 8), Request(budget=Budget(), gpus=(0, 1), workers=1)) as shop,
        pytest.raises(
            UsageError, match=r"^GPU 0 is NVIDIA H200 with 132 SMs and GPU 1 is NVIDIA A10 with 72 SMs: "
        ),
    ):
        shop.identity()


@pytest.mark.parametrize(
    ("text", "count", "ordinals"),
    [("all", 2, [0, 1]), ("1", 2, [0]), ("2", 2, [0, 1]), ("1,0", 2, [1, 0]), ("0,", 2, None), ("0", 2, [0])],
)
def test_gpus_are_named_in_three_ways(text, count, ordinals):
    if ordinals is None:
        with pytest.raises(UsageError, match="are not understood"):
            chosen_gpus(text, count)
    else:
        assert chosen_gpus(text, count) == ordinals


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("9", r"^9 GPUs were asked for, and this process sees 2 \(ordinals 0 to 1\)$"),
        ("0,2", r"^GPU 2 does not exist: this process sees 2 \(ordinals 0 to 1\)$"),
        ("1,1", r"^GPUs '1,1' name one twice: give each once$"),
        ("-1", "are not understood: give all, a number, or ordinals such as 0,1"),
        ("many", "are not understood"),
        ("²", "are not understood"),
    ],
)
def test_gpus_that_are_not_there(text, says):
    with pytest.raises(UsageError, match=says):
        chosen_gpus(text, 2)


def test_no_gpu_at_all():
    with pytest.raises(DeviceError, match="NVIDIA"):
        chosen_gpus("all", 0)


# -- the command ---------------------------------------------------------------------------------------------


@pytest.fixture
def command(bench, monkeypatch, capsys):
    """Run the command line on the stub: (exit code, stdout, stderr)."""
    from autotune.cli import main
    from autotune.cli import tune as module

    monkeypatch.setattr(module, "gpu_count", lambda: 2)
    monkeypatch.setattr(module, "has_gpu", lambda: True)
    monkeypatch.setattr(tuner, "GpuWorker", partial(GpuWorker, service="stub_gpu:serve_hashed"))
    monkeypatch.setenv("COLUMNS", "200")

    def command(*words):
        common = ["--cache", bench.root, "--space", bench.few]
        monkeypatch.setattr(sys, "argv", ["autotune", "tune", *map(str, [*words, *common])])
        with pytest.raises(SystemExit) as end:
            main()
        told = capsys.readouterr()
        return end.value.code, told.out, told.err

    return command


ONE = ("--m", 64, "--n", 64, "--k", 8)
RANDOM = ("--strategy", "random")


def test_tuning_on_two_gpus_and_again(command, bench):
    status, out, err = command(*ONE, *RANDOM, "--gpus", "all", "--budget", "8")
    assert status == 0, err
    assert "search    random, 8 of 15 candidates in " in out
    status, out, err = command(*ONE, *RANDOM, "--gpus", "0,1", "--budget", "12", "--resume")
    assert status == 0, err
    assert "search    random, 12 of 15 candidates, 8 of them before in " in out
    assert "  seconds   " in out
    assert bench.measured.total() == 12


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpus", "9"], "9 GPUs were asked for, and this process sees 2 (ordinals 0 to 1)"),
        (["--gpus", "all", "--device", "0"], "--device names one GPU and --gpus several: give one of them"),
        (["--gpus", "2", "--target", "a10"], "--gpus is a GPU here and --target one of the table"),
        (["--study", "mine"], "--study names a study of a storage: give --storage too"),
        (["--target", "a10", "--cold"], "--cold is for measuring, and nothing is measured with --target"),
        (["--suite"], "give either --suite, or --m, --n and --k"),
        (["--only", "P01"], "--only chooses among the shapes of --suite"),
    ],
)
def test_options_that_do_not_go_together(command, words, says):
    status, out, err = command(*ONE, *words)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith(f"autotune: {says}")


def test_a_suite_as_a_table_and_as_json(command, tmp_path):
    path = tmp_path / "suite.toml"
    path.write_text(
        '[[shape]]\nid = "a"\nm = 64\nn = 64\nk = 8\n[[shape]]\nid = "b"\nm = 99999\nn = 64\nk = 8\n'
    )
    status, out, err = command("--suite", path, *RANDOM, "--budget", "20s")
    assert status == 0, err
    assert "1 of 2 shapes stored in " in out
    assert "b: 99999 x 64 x 8 nn needs 2 bytes" in err
    status, out, err = command("--suite", path, *RANDOM, "--budget", "20s", "--json")
    assert status == 0, err
    one, other = json.loads(out)
    assert (one["id"], one["settled"]) == ("a", True)
    assert 0 < one["record"]["search"]["resumed"] <= 15  # as many as a busy machine let the first run measure
    assert other["record"] is None
    assert "needs 2 bytes" in other["why"]
    status, out, err = command("--suite", path, *RANDOM, "--only", "b", "--budget", "20s")
    assert status == 1
    assert err.splitlines()[-1].startswith(
        "autotune: none of 1 shapes has a winner; the first: 99999 x 64 x 8 nn needs"
    )


# -- any math ------------------------------------------------------------------------------------------------


def test_each_math_is_stored_under_its_own_name(bench, tmp_path, monkeypatch):
    """By families of one name, of which each other one says that it computes on tensor cores."""
    spaces = {"ffma": Space.load(bench.few)}
    for math in ("3xtf32", "3xfp16"):
        (tmp_path / math).mkdir()
        for file in PLAIN.parent.iterdir():
            text = file.read_text().replace("[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]", "[3]")
            (tmp_path / math / file.name).write_text(text)
        tensor = tmp_path / math / PLAIN.name
        tensor.write_text(f'{tensor.read_text()}\n[serves]\nmath = "{math}"\n')
        spaces[math] = Space.load(tensor)
    monkeypatch.setattr(tuner, "families", lambda problem, device: [spaces[problem.math]])
    problems = [Problem(64, 64, 8, math=math) for math in MATHS]
    request = Request(budget=Budget.of("60s"), strategy="random", workers=2, root=bench.root)
    found = tune_all([Shape.of(problem) for problem in problems], request)
    assert [tuned.record.problem.math for tuned in found] == ["ffma", "3xtf32", "3xfp16"]
    names = {path.name for path in bench.root.glob("*/*.json")}
    assert names == {f"plain_{problem.key}.json" for problem in problems}


def test_a_family_of_another_math_is_not_searched(bench):
    for family, math in (("sgemm_3xtf32", "ffma"), ("sgemm", "3xtf32")):
        with pytest.raises(SpaceError, match=f"{family} computes .*, not {math}: "):
            bench.tune(space=Space.load(family), problem=Problem(64, 64, 64, math=math))
    assert not list(bench.root.glob("*/*.json"))


def test_a_kernel_of_any_math_searches_for_those_that_have_no_record(bench):
    """`best_kernel` on a GPU that a stub stands for."""
    machine = SimpleNamespace(device=H200, ordinal=0)
    problems = [Problem(64, 64, 8, math=math) for math in MATHS]
    space = Space.load(bench.few)
    search_missing(problems, machine, Store(bench.root), budget="20s", spaces=[space])
    assert fastest(problems, machine, "exact", [space], Store(bench.root)) == problems[0]
    assert [path.name for path in bench.root.glob("*/*.json")] == [f"plain_{problems[0].key}.json"]
    count = bench.measured.total()
    search_missing(problems, machine, Store(bench.root), budget="20s", spaces=[space])
    assert bench.measured.total() == count == 15
