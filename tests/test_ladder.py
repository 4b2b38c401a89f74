"""The ladder: its data, the kernels of its own families, their counts, and the table without a GPU."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from made_records import made

from autotune.cli.ladder import floats, show
from autotune.code.compiler import Binary, compile_text
from autotune.code.pool import CompilePool
from autotune.code.render import Source, render
from autotune.errors import ConfigError, Rejected, SpaceError
from autotune.measure.worker import GpuWorker
from autotune.records import Store
from autotune.report.kept_steps import keep, recalled
from autotune.report.ladder import Ladder, _rung, describe, measure, per_ffma, why_slower
from autotune.report.problem_page import Candidate, roofline_figure
from autotune.report.steps import WINNER, fitted_step, step_config, steps
from autotune.simulator import run_ptx
from autotune.space.space import Config, Space
from autotune.tuning.meter import Meter
from autotune.tuning.trial import Trial
from autotune.values.device import named_device
from autotune.values.measurement import MeasuredTrial, Timing
from autotune.values.problem import LAYOUTS, Problem

H200 = named_device("h200")
CUBE = Problem(4096, 4096, 4096)
ODD = Problem(100, 70, 33, "tt", 1)
NAMES = [step.name for step in steps()]
OWN = [step.name for step in steps() if step.family != "sgemm"]
POINTS = [step.name for step in steps() if step.family == "sgemm" and step.name != WINNER]


def source(name: str, problem: Problem, device=H200) -> Source:
    space, config = step_config(name)
    return render(space, space.fitted(config, problem, device), problem, device)


# -- data ----------------------------------------------------------------------------------------------------


def test_the_steps_stand_in_the_order_of_the_tutorials():
    assert " ".join(NAMES) == (
        "naive coalesced flattened shared_tile register_tile one_dimensional "
        "two_dimensional transposed vectorised warp_tile double_buffered winner"
    )
    for step in steps():
        assert step.changed.endswith(".")
        assert not step.changed[:-1].count(". ")


def test_every_step_of_a_space_is_on_the_ladder():
    assert list(Space.load("sgemm").ladder) == POINTS
    for name in OWN:
        assert list(Space.load(name).presets) == [name]


def test_no_search_sees_the_steps():
    space = Space.load("sgemm")
    assert not set(space.ladder) & set(space.presets)
    text = space.path.read_text()
    assert text.count("[ladder.") == len(POINTS)


@pytest.mark.parametrize(("before", "now"), list(pairwise(POINTS)))
def test_a_step_changes_little(before, now):
    (_, one), (_, other) = step_config(before), step_config(now)
    assert 1 <= sum(one[name] != other[name] for name in one) <= 5


# -- what a space file may say -------------------------------------------------------------------------------

SMALL = """
family = "small"
[parameters]
BM = { values = [8, 16] }
BN = { values = [8, 16] }
edge = { values = ["exact", "guarded"] }
[constraints]
fits = { expr = "edge == 'guarded' or m % BM == 0", reason = "whole tiles" }
[search]
large = { expr = "BM == 16", reason = "faster" }
[launch]
grid = "1"
block = "BM * BN"
shared_bytes = "0"
"""
LADDER = """
[ladder.first]
BM = 8
BN = 8
edge = "exact"
[ladder.second]
BN = 16
"""


@pytest.fixture
def small(tmp_path):
    def small(more: str = "", text: str = SMALL) -> Space:
        path = tmp_path / "small.toml"
        path.write_text(text + more)
        return Space.load(path)

    return small


def test_a_step_states_what_it_changes(small):
    ladder = small(LADDER).ladder
    assert dict(ladder["first"]) == {"BM": 8, "BN": 8, "edge": "exact"}
    assert dict(ladder["second"]) == {"BM": 8, "BN": 16, "edge": "exact"}


def test_the_ladder_is_no_part_of_what_a_search_depends_on(small):
    assert small(LADDER).digest == small().digest
    assert small('[presets.one]\nBM = 8\nBN = 8\nedge = "exact"').digest != small().digest


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("[ladder.first]\nBM = 8", r"small\.toml: ladder\.first: the config misses BN, edge"),
        (LADDER + "[ladder.third]\nBN = 7", r"ladder\.third: BN = 7: give one of 8, 16"),
        ("[ladder]\nfirst = 3", r"ladder\.first must be a table, not 3"),
    ],
)
def test_a_faulty_ladder_is_refused(small, more, says):
    with pytest.raises(SpaceError, match=says):
        small(more)


def test_blocks_in_rows(small):
    space = small(text=SMALL.replace('shared_bytes = "0"', 'shared_bytes = "0"\nblock_y = "BM"'))
    config = space.config({"BM": 8, "BN": 16, "edge": "exact"})
    assert space.launch(config, CUBE, H200).block == (16, 8, 1)
    assert small().launch(config, CUBE, H200).block == (128, 1, 1)
    assert source("naive", CUBE).launch.block == (32, 32, 1)
    assert source("flattened", CUBE).launch.block == (1024, 1, 1)


def test_a_config_is_fitted_by_the_fewest_changes(small):
    space = small()
    config = space.config({"BM": 8, "BN": 8, "edge": "exact"})
    assert space.fitted(config, Problem(16, 1, 1), H200) is config
    assert dict(space.fitted(config, Problem(17, 1, 1), H200)) == {**config, "edge": "guarded"}
    with pytest.raises(SpaceError, match=r"no variant of BM8-BN8-exact is legal .* needs "):
        space.fitted(config, Problem(17, 1, 1), H200, keep=config)


@pytest.mark.parametrize("name", POINTS)
@pytest.mark.parametrize("target", ["h200", "t4"])
def test_a_step_fits_any_problem(name, target):
    device = named_device(target)
    space, config = step_config(name)
    for problem in (Problem(1, 1, 1), Problem(130, 70, 33), Problem(1000, 1002, 5, "tt", 1), ODD):
        fitted = space.fitted(config, problem, device)
        space.require_legal(fitted, problem, device)
        tile = ("BM", "BN", "BK", "TM", "TN", "LM", "VM", "VN")
        assert [fitted[each] for each in tile] == [config[each] for each in tile]
    assert space.fitted(config, Problem(4096, 4096, 4096), device) == config


def test_vectors_shrink_to_what_is_aligned():
    space, config = step_config("vectorised")
    fitted = space.fitted(config, Problem(128, 130, 33), H200)
    assert [fitted[each] for each in ("vec_a", "vec_b", "vec_c", "edge")] == [1, 2, 2, "guarded"]


# -- text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN)
def test_the_text_says_what_it_is(name):
    made = source(name, ODD)
    formula, config, template = made.text.splitlines()[:3]
    assert formula == (
        f"// {name}: C[m,n] = alpha op(A)[m,k] op(B)[k,n] + beta C, float32, row-major, layout tt"
    )
    assert (config, template) == (
        f"// config   {made.config.id}",
        f"// template {made.template_digest[:16]}",
    )
    assert made.entry == made.family == name


def test_two_lines_make_the_difference_of_coalescing():
    def code(name: str) -> list[str]:
        text = source(name, CUBE).text.replace(name, "kernel")
        return [line for line in text.splitlines() if not line.lstrip().startswith("//")]

    pairs = list(zip(code("naive"), code("coalesced"), strict=True))
    assert sum(one != other for one, other in pairs) == 2


def test_emit_finds_every_step_whatever_its_family():
    words = ["--m", "100", "--n", "70", "--k", "33", "--target", "h200"]
    program = (
        "import sys; from autotune.cli import cli\n"
        "for name in sys.argv[1].split():\n"
        "    cli.main(['emit', '--preset', name, *sys.argv[2:]], standalone_mode=False)"
    )
    names = [name for name in NAMES if name != WINNER]
    command = [sys.executable, "-c", program, " ".join(names), *words]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert {line.partition(":")[0] for line in told.stderr.splitlines()} == {"adapted to the problem"}
    assert told.stdout == "".join(source(name, Problem(100, 70, 33)).text for name in names)


# -- machine code --------------------------------------------------------------------------------------------

ARCHS = ("sm_75", "sm_80", "sm_90", "sm_120")
COMPILES = {
    **{(name, str(problem)): (name, problem) for name in OWN for problem in (Problem(256, 256, 256), ODD)},
    **{(name, "cube"): (name, Problem(256, 256, 256)) for name in POINTS},
}


@pytest.fixture(scope="module")
def compiled() -> Mapping[object, Binary | Rejected]:
    with CompilePool(workers=2, timeout_s=60) as pool:
        for key, (name, problem) in COMPILES.items():
            made = source(name, problem)
            for arch in ARCHS if name in OWN else ARCHS[::3]:
                pool.submit((key, arch), made.text, made.entry, arch)
        outcomes = {}
        while pool.pending:
            outcomes.update(pool.collect(timeout=60))
    return outcomes


@pytest.mark.parametrize(
    ("key", "arch"),
    [(key, arch) for key in COMPILES for arch in (ARCHS if key[0] in OWN else ARCHS[::3])],
    ids=str,
)
def test_every_step_compiles(compiled, key, arch):
    binary = compiled[key, arch]
    assert isinstance(binary, Binary), binary
    assert "error" not in binary.log
    assert (
        "177-D" in binary.log or "warning" not in binary.log
    )  # 177-D: a constant that only the reader needs
    name, problem = COMPILES[key]
    assert binary.registers * np.prod(source(name, problem).launch.block) <= 65536


# -- results -------------------------------------------------------------------------------------------------


def assert_right(made: Source, beta: float = 2.0) -> None:
    """Run a kernel in the simulator, every check on; C holds NaN where it must not be read."""
    problem = made.problem
    binary = compile_text(made.text, made.entry, "sm_90", ("-lineinfo",))
    assert isinstance(binary, Binary), binary
    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal(shape).astype(np.float32) for shape in (problem.a_shape, problem.b_shape))
    c = draw.standard_normal(problem.c_shape).astype(np.float32)
    read = bool(problem.beta and beta)
    left, right = (a.T if problem.layout[0] == "t" else a), (b.T if problem.layout[1] == "t" else b)
    expected = 0.5 * (left.astype(np.float64) @ right)
    if read:
        expected += beta * c.astype(np.float64)
    else:
        c[:] = np.nan
    launch = made.launch
    run_ptx(
        binary.ptx,
        made.entry,
        launch.grid,
        launch.block,
        (0.5, a, b, beta, c),
        shared_bytes=launch.shared_bytes,
    ).raise_if_faulty()
    np.testing.assert_allclose(c, expected, rtol=1e-4, atol=1e-4)


SHAPES = [(1, 1, 1), (33, 70, 31), (64, 65, 40), (65, 32, 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OWN)
def test_the_families_are_right_at_the_edges(name, layout):
    for index, shape in enumerate(SHAPES):
        assert_right(source(name, Problem(*shape, layout, index % 2)))


@pytest.mark.parametrize("name", OWN)
def test_a_beta_of_zero_does_not_read_c(name):
    assert_right(source(name, Problem(33, 35, 5, "nn", 1)), beta=0.0)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (name, problem)
        for name in POINTS
        for problem in (Problem(129, 70, 17, "nn", 1), Problem(5, 131, 8, "tt"))
    ],
    ids=str,
)
def test_the_steps_of_sgemm_are_right_at_the_edges(name, problem):
    assert_right(source(name, problem))


@pytest.mark.parametrize("family", ["shared_tile", "register_tile"])
def test_other_points_of_the_families_are_right(family):
    space, pick = Space.load(family), random.Random(0)
    for layout in LAYOUTS:
        problem = Problem(37, 130, 19, layout)
        legal = space.enumerate(problem, H200)
        assert_right(render(space, legal.config(pick.randrange(len(legal))), problem, H200))


def test_a_block_takes_tile_after_tile():
    small = replace(H200, sm_count=1)
    problem = Problem(100, 70, 33)
    made = source("shared_tile", problem, small)
    assert made.launch.grid == (2, 1, 1)  # of 4 x 3 tiles
    assert_right(made)


def test_tiles_of_shapes_that_do_not_match_the_threads():
    """More threads than elements of a tile, and a number that does not divide it."""
    space = Space.load("shared_tile")
    for BM, BN, BK in ((8, 128, 8), (64, 8, 8), (8, 8, 64), (32, 8, 16)):
        config = space.config({"BM": BM, "BN": BN, "BK": BK})
        assert_right(render(space, config, Problem(70, 135, 21), H200))


def test_a_family_says_why_a_point_is_not_legal():
    space = Space.load("shared_tile")
    with pytest.raises(ConfigError, match="a block is made of whole warps, and has no more threads"):
        render(space, Config({"BM": 64, "BN": 64, "BK": 8}), CUBE, H200)


# -- counts --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ladder(tmp_path_factory) -> Ladder:
    return describe(CUBE, H200, root=tmp_path_factory.mktemp("records"))


def account(ladder, name):
    found = ladder.rungs[NAMES.index(name)].account
    assert found is not None
    return found


def test_loads_and_reads_are_those_of_the_tutorials(ladder):
    found = {rung.step.name: (rung.global_loads, rung.shared_reads) for rung in ladder.rungs}
    assert found["naive"] == found["coalesced"] == found["flattened"] == (2 * 4096, 0)
    assert found["shared_tile"] == (
        256,
        8192,
    )  # 32 x 32: two reads per multiplication, as many as loads before
    assert found["register_tile"] == (2048, 0)  # k (1/4 + 1/4), by each thread for itself
    assert found["one_dimensional"] == (128, 4608)  # 64 x 64; 4096 * 9 / 8
    assert found["two_dimensional"] == found["double_buffered"] == (64, 1024)  # 128 x 128; k / 4


def test_the_simulator_counts_the_loads_of_the_formula(ladder):
    for name in ("naive", "shared_tile", "register_tile", "one_dimensional", "two_dimensional"):
        found, rung = account(ladder, name), ladder.rungs[NAMES.index(name)]
        mini = found.miniature
        loaded = found.traffic["global ld"].requests * 32 / (mini.m * mini.n) * (4096 / mini.k)
        assert loaded == rung.global_loads


def test_coalescing_turns_33_sectors_into_5(ladder):
    assert per_ffma(account(ladder, "naive"))["load_sectors"] == 33  # A 32, B 1: a pair of requests
    assert per_ffma(account(ladder, "coalesced"))["load_sectors"] == 5  # A 1, B 4
    assert per_ffma(account(ladder, "flattened"))["load_sectors"] == 5
    for name in ("naive", "coalesced"):
        assert per_ffma(account(ladder, name))["load_accesses"] == 2
    # 128 bytes used of those that move: of what is scattered in naive, A and C, and is not any more.
    assert 128 / (32 * account(ladder, "naive").traffic["global st"].per_request) == 0.125
    assert 128 / (32 * account(ladder, "coalesced").traffic["global st"].per_request) == 1.0
    loads = account(ladder, "naive").traffic["global ld"]
    assert 128 / (32 * (2 * loads.per_request - 1)) == 0.125  # less the one sector of B


def test_shared_memory_is_free_of_conflicts_from_transposed_stores(ladder):
    for name in ("shared_tile", "transposed", "vectorised", "warp_tile", "double_buffered"):
        assert account(ladder, name).traffic["shared st"].conflict_factor == 1, name
    for name in ("vectorised", "warp_tile", "double_buffered"):
        assert account(ladder, name).traffic["shared ld"].conflict_factor == 1, name


def test_nothing_spills_that_matters(ladder):
    spills = {rung.step.name: rung.account.binary.spill_bytes for rung in ladder.rungs if rung.account}
    assert len(spills) == len(NAMES)
    assert max(spills.values()) <= 16, spills


# -- reasons -------------------------------------------------------------------------------------------------


def test_why_shared_memory_may_not_pay(ladder):
    told = " ".join(why_slower(account(ladder, "flattened"), account(ladder, "shared_tile")))
    assert "copies to shared memory and barriers come on top, where the cache already gave the reuse" in told
    assert "sectors" not in told  # those fell


def test_why_one_column_per_thread_may_be_slower_than_the_cache(ladder):
    told = why_slower(account(ladder, "register_tile"), account(ladder, "one_dimensional"))
    assert any("accesses per FFMA of a warp, 0.50 before" in reason for reason in told)


def test_scattered_lanes_are_named_first(ladder):
    told = why_slower(account(ladder, "coalesced"), account(ladder, "naive"))
    assert told[0] == "global loads touch 33.00 sectors per FFMA of a warp, 5.00 before"


def test_spills_idle_sms_and_occupancy_are_named(ladder):
    before = account(ladder, "vectorised")
    spilled = replace(before, binary=replace(before.binary, spill_bytes=64))
    assert why_slower(before, spilled) == ["64 bytes of registers spill to memory"]
    idle = replace(before, wave_efficiency=0.48)
    (told,) = why_slower(before, idle)
    assert told.startswith("1024 blocks keep 48% of the 132 SMs busy, ")
    fewer = replace(before, occupancy=replace(before.occupancy, warps=before.occupancy.warps // 2))
    (told,) = why_slower(before, fewer)
    assert told.startswith("occupancy fell from 25% to 12% (registers)")
    assert why_slower(before, before) == ["no count says why: profile it"]


# -- climbing ------------------------------------------------------------------------------------------------


def standing_in(ladder: Ladder, outcomes: Mapping[str, str]) -> Ladder:
    """The ladder with kernels that the stub of a GPU answers for: a time in ms, or a fault."""
    rungs = []
    for rung in ladder.rungs:
        assert rung.account is not None
        source = rung.account.source
        (kernel,) = source.launch.kernels
        launch = replace(source.launch, kernels=(replace(kernel, entry=outcomes[rung.step.name]),))
        rungs.append(replace(rung, account=replace(rung.account, source=replace(source, launch=launch))))
    return replace(ladder, rungs=tuple(rungs))


METER = Meter()


@pytest.fixture(scope="module")
def measured(ladder) -> Ladder:
    times = ("300", "wrong", "40", "60", "20", "30", "refused", "8", "7.9", "8", "4", "0.5")
    with GpuWorker(0, CUBE, seed=1, service="stub_gpu:serve") as gpu:
        return measure(standing_in(ladder, dict(zip(NAMES, times, strict=True))), gpu, meter=METER)


def rung(ladder, name):
    return ladder.rungs[NAMES.index(name)]


def test_a_step_that_fails_says_why_and_the_ladder_goes_on(measured):
    assert [each.step.name for each in measured.rungs if each.rejected] == ["coalesced", "two_dimensional"]
    assert rung(measured, "coalesced").rejected.kind == "correctness"
    assert rung(measured, "coalesced").timing is None
    assert measured.speedup(rung(measured, "coalesced")) is None
    assert measured.speedup(rung(measured, "flattened")) == 300 / 40  # over the last that was timed
    assert measured.speedup(rung(measured, "naive")) is None


def test_the_meter_knows_the_best_step(measured):
    assert (METER.stage, METER.steps) == ("timing in turns with cuBLAS", 0)
    assert METER.best == f"{CUBE.flops / 0.5e9:.2f} TFLOP/s, {NAMES[-1]}"


def test_a_slow_step_is_timed_alone(measured):
    assert [each.step.name for each in measured.rungs if each.alone] == ["naive"]
    assert rung(measured, "naive").timing.median_ms == 300


def test_rates_and_shares(measured):
    assert measured.cublas.median_ms == 0.5
    assert measured.vs_cublas(rung(measured, "double_buffered")) == 0.125
    assert measured.gflops(rung(measured, "double_buffered")) == pytest.approx(2 * 4096**3 / 4e6)


def test_a_slower_step_says_why(measured):
    assert measured.slower(rung(measured, "naive")) == measured.slower(rung(measured, "flattened")) == ""
    assert measured.slower(rung(measured, "shared_tile")).startswith("slower than flattened: ")
    assert measured.slower(rung(measured, "warp_tile")) == "as fast as vectorised, within 3%"


def test_the_table_of_times(measured, capsys):
    show(measured)
    out = capsys.readouterr().out
    assert out.startswith("4096 x 4096 x 4096 nn on NVIDIA H200; cuBLAS 0.5 ms\n")
    lines = {line.split()[1]: line.split() for line in out.splitlines()[2:15]}
    assert lines["naive"][2:6] == ["300*", "0.46", "0.2%", "-"]
    assert lines["coalesced"][2:6] == ["-", "-", "-", "-"]
    assert lines["flattened"][2:6] == ["40", "3.44", "1.2%", "7.50"]
    words = " ".join(out.split())
    assert "*: timed alone, the others in turns with cuBLAS" in words
    assert "FAILED, correctness: C[0, 0] is nan" in words
    assert "slower than flattened: " in words
    for step in steps():
        assert step.changed in words
    assert max(map(len, out.splitlines())) <= 160
    json.dumps(measured.plain())


# -- the command ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_without_a_gpu(ladder, tmp_path):
    words = ["--m", "4096", "--n", "4096", "--k", "4096", "--target", "h200", "--cache", str(tmp_path)]
    svg = tmp_path / "ladder.svg"
    command = [sys.executable, "-m", "autotune", "ladder", *words, "--json", "--svg", str(svg)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    content = json.loads(told.stdout)
    expected = json.loads(json.dumps(ladder.plain()))
    for step, counted in zip(content["steps"], expected["steps"], strict=True):
        # Now and then the compiler schedules a step differently: its instruction mix moves a little.
        assert step.pop("per_ffma") == pytest.approx(counted.pop("per_ffma"), rel=0.1)
    assert content == expected
    assert content["evidence"] == "counted"
    assert [step["name"] for step in content["steps"]] == NAMES
    assert {step["median_ms"] for step in content["steps"]} == {None}
    assert content["steps"][-1]["note"] == ""  # the winner that comes with the package
    first, *alive = told.stderr.splitlines()
    assert first == "compiling 12 steps for NVIDIA H200 and counting what they do"
    assert all(line.startswith("compiling and counting: ") for line in alive)
    drawing = svg.read_text()
    assert all(f">{name}<" in drawing for name in ("one_dimensional", "two_dimensional", "winner"))
    assert "hollow: estimated" in drawing


def test_times_of_a_climb_are_kept_for_pages(measured, ladder, tmp_path, monkeypatch):
    monkeypatch.setattr("autotune.records.store.data_dir", lambda name: tmp_path / "none")
    store = Store(tmp_path)
    assert recalled(ladder, store) is ladder
    assert keep(measured, store) == ""
    again = recalled(ladder, store)
    assert [(each.timing, each.alone) for each in again.rungs] == [
        (each.timing, each.alone) for each in measured.rungs
    ]
    assert (again.measured, again.cublas) == (False, measured.cublas)
    assert recalled(replace(ladder, device=named_device("a10")), store).rungs == ladder.rungs
    (path,) = tmp_path.glob("ladders/*.json")
    digest = account(ladder, "naive").source.code_digest
    path.write_text(path.read_text().replace(digest, "0" * 64))
    assert [each.step.name for each in recalled(ladder, store).rungs if each.timing] == [
        each.step.name for each in measured.rungs if each.timing and each.step.name != "naive"
    ]
    path.write_text(path.read_text()[:-9])
    assert recalled(ladder, store) is ladder
    assert "cannot be written" in keep(measured, Store(path))


def test_a_page_shows_the_steps_as_they_were_timed(measured, ladder, tmp_path):
    """A climb first, then the trial log, then an estimate, which is a hollow mark."""
    record = made(CUBE, ms=2.5)
    slow = MeasuredTrial(Timing(7.0, (7.0, 7.0, 7.0), 7, 1, "warm", "back-to-back", None, False), None)
    tried = [
        Candidate(number, 1.0, Trial.of(source(name, CUBE), None, slow))
        for number, name in enumerate(("double_buffered", "transposed"))
    ]
    climbed = replace(
        ladder,
        rungs=tuple(
            replace(each, timing=timed.timing if each.step.name != "transposed" else None)
            for each, timed in zip(ladder.rungs, measured.rungs, strict=True)
        ),
    )
    figure = roofline_figure(record, H200, [account(ladder, "winner")], "", climbed, tried)
    rows = {row[0]: row[2:] for row in figure.rows}
    assert rows["transposed"] == [f"{CUBE.flops / 7e9:.2f}", "measured"]
    assert rows["double_buffered"] == [f"{CUBE.flops / 4e9:.2f}", "measured"]
    assert rows["two_dimensional"][1] == "estimated"
    hollow = {each.label for each in figure.charts[0].series if each.shape == "ring"}
    assert hollow == {name for name, (_, evidence) in rows.items() if evidence == "estimated"}


def test_the_table_without_a_gpu(ladder, capsys):
    show(ladder)
    out = capsys.readouterr().out
    assert out.startswith("4096 x 4096 x 4096 nn on NVIDIA H200: counted, not timed\n")
    header, *rows = out.splitlines()[2:15]
    assert header.split() == ["step", "registers", "spilled", "occupancy", "loads", "reads"]
    assert rows[0].split()[:2] == ["1", "naive"]
    assert rows[0].split()[-3:] == ["100%", "8,192", "0"]
    assert rows[5].split()[-2:] == ["128", "4,608"]


def test_few_loads_of_a_short_k_are_not_none():
    assert [floats(each) for each in (0.234, 1.875, 9.5, 4608.0, 0.0)] == ["0.23", "1.9", "9.5", "4,608", "0"]


def test_the_stored_winner_is_the_last_step():
    store = Store(Path(__file__).resolve().parents[1] / "cache")
    problem = Problem(1024, 1024, 1024)
    record = store.find(H200, "sgemm", problem)
    assert record is not None
    fit = fitted_step(steps()[-1], problem, H200, store)
    assert fit.config == Space.load("sgemm").config(record.config)  # which may be older than a parameter
    assert (fit.note, fit.record) == ("", record)
    fit = fitted_step(steps()[-1], problem, named_device("t4"), store)
    assert (fit.config["loader"], fit.record) == ("reg", None)
    assert fit.note.startswith(
        "a prediction of sgemm stands in: no record of 1024 x 1024 x 1024 nn on Tesla T4, run "
    )


def test_the_ladder_of_3xfp16_ends_on_its_family(tmp_path):
    problem = replace(CUBE, math="3xfp16")
    *usual, last = steps(problem.math)
    assert tuple(usual) == steps()
    rung = _rung(last, replace(problem, m=256, n=256, k=256), H200, Store(tmp_path))
    assert (rung.account.problem.math, rung.account.source.family) == ("3xfp16", "sgemm_3xfp16_wgmma")


def test_the_ladder_of_3xtf32_ends_on_the_tensor_cores(tmp_path):
    problem = replace(CUBE, math="3xtf32")
    *usual, last = steps(problem.math)
    assert tuple(usual) == steps()
    store = Store(Path(__file__).resolve().parents[1] / "cache")
    fit = fitted_step(last, problem, H200, store)
    stored = store.find(H200, fit.space.family, problem)
    assert (fit.space.family, dict(fit.config)) == ("sgemm_3xtf32_wgmma", dict(stored.config))
    assert (fit.note, fit.record) == (fit.space.family, stored)
    fit = fitted_step(last, problem, named_device("a100"), Store(tmp_path))
    assert fit.space.family == "sgemm_3xtf32"
    assert fit.note.startswith("sgemm_3xtf32; a prediction of sgemm_3xtf32 stands in: no record of ")
    assert fit.note.endswith("--math 3xtf32'")
    small = replace(problem, m=256, n=256, k=256)
    rungs = [_rung(step, small, H200, Store(tmp_path)) for step in (usual[0], last)]
    assert [rung.account.problem.math for rung in rungs] == ["ffma", "3xtf32"]
    assert [rung["family"] for rung in Ladder(small, H200, tuple(rungs)).plain()["steps"]] == [
        "naive",
        rungs[1].account.source.family,
    ]
    assert rungs[1].account.source.family.startswith("sgemm_3xtf32")
    assert per_ffma(rungs[1].account) == {}
    none = _rung(last, small, named_device("t4"), Store(tmp_path))
    assert "no kernel family computes" in none.rejected.why


def test_an_impossible_step_is_a_row():
    """Rows beyond 2^31: no step can count them in 32 bits."""
    huge = Problem(2**31 - 1, 1, 1)
    found = describe(huge, H200, root=Path("/nonexistent"))
    for each in found.rungs:
        assert each.rejected is not None
        assert each.rejected.kind == "constraint"
        assert "counted in 32 bits" in each.rejected.why
    show(found)
