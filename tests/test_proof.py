from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from autotune.errors import Rejected, UsageError
from autotune.measure.proof import miniatures, prove
from autotune.measure.verify import error_bound
from autotune.paths import data_dir
from autotune.space.space import Config, Space
from autotune.values.device import known_devices
from autotune.values.measurement import Verdict
from autotune.values.problem import Problem, Strided

H200, T4 = known_devices()["h200"], known_devices()["t4"]
SGEMM = Space.load("sgemm")
PLANTED = Space.load(Path(__file__).parent / "data" / "planted" / "planted.toml")


def choice(preset, **changes):
    return SGEMM.config({**SGEMM.presets[preset], **changes})


ODD = {"edge": "guarded", "vec_a": 1, "vec_b": 1, "vec_c": 1}
CASES = {
    "exact": (Problem(4096, 4096, 4096), choice("long_block"), H200),
    "remainder": (Problem(4096, 4096, 1020), choice("square_block"), H200),
    "guarded": (Problem(1000, 1001, 1003), choice("small_block", **ODD), H200),
    "half_guarded": (Problem(1000, 1024, 1024), choice("small_block", edge="guarded"), H200),
    "deep": (Problem(4096, 4096, 4096, "tn", 1), choice("middle_block", stages=4, vec_a=4), H200),
    "turing": (Problem(2048, 2048, 2048, "nt"), choice("register_staged", vec_b=1), T4),
    "shifted": (Problem(1000, 1001, 1003), choice("small_block", **{**ODD, "edge": "shifted"}), H200),
    "split": (Problem(1536, 1536, 4000, "tt"), choice("split_block", split_k=3), H200),
    "many_parts": (Problem(64, 70, 60000, "nt"), choice("deep_block", edge="shifted", split_k=24), H200),
    "spread": (Problem(1021, 1021, 1021, "nt", 1), choice("odd_split"), H200),
    "batch": (Problem(256, 256, 256, "nt", 1, batch=64), choice("small_block", vec_b=1), H200),
    "tiny": (Problem(20, 36, 44), choice("tiny_block", edge="guarded", stages=2), H200),
}


def test_longer_rows_are_refused():
    strided = Strided(64, 64, 64, lda=128)
    with pytest.raises(UsageError, match="only problems whose rows lie side by side"):
        prove(SGEMM, SGEMM.config(SGEMM.presets["tiny_block"]), strided, H200)


@pytest.mark.parametrize("name", CASES)
def test_a_miniature_keeps_what_decides_the_code(name):
    problem, config, device = CASES[name]
    tiles = {"m": int(config["BM"]), "n": int(config["BN"]), "k": int(config["BK"])}
    parts = int(config["split_k"])
    period = {"m": int(config["group_m"]), "n": 1, "k": parts * int(config["stages"])}
    first, *others = miniatures(SGEMM, config, problem, device)
    assert (first.layout, first.beta) == (problem.layout, problem.beta)
    assert first.batch == min(problem.batch, 2)
    for extent, tile in tiles.items():
        full, small = getattr(problem, extent), getattr(first, extent)
        assert (full - small) % (tile * period[extent]) == 0
        assert small > (2 if extent == "k" else 1) * tile or small == full or (parts > 4 and small == tile)
        assert (
            config["edge"] != "shifted" or extent == "k" or small > tile or small == full or small % tile == 0
        )
    rounds = 1 if parts > 4 else 2
    assert first.k > tiles["k"] * (rounds * period["k"] - 1) or first.k == problem.k
    assert first.m > tiles["m"] * period["m"] or first.m == problem.m or parts > 4
    assert first.flops <= 2 * 2048 * 1024 * 512
    assert len(others) == (problem.k % tiles["k"] == 0)
    for other in others:
        assert other.k % tiles["k"] != 0
        assert not SGEMM.violations(config, other, device)


@pytest.mark.parametrize(
    "name",
    ["exact", "guarded", "deep", "turing", "tiny", "shifted", "split", "many_parts", "spread", "batch"],
)
def test_a_right_kernel_is_proven(name):
    problem, config, device = CASES[name]
    verdict = prove(SGEMM, config, problem, device)
    assert isinstance(verdict, Verdict), verdict
    assert verdict.ok
    assert 0 < verdict.error < verdict.bound
    assert verdict.bound in {error_bound(each.k) for each in miniatures(SGEMM, config, problem, device)}
    for each in miniatures(SGEMM, config, problem, device):
        assert f"{each.m} x {each.n} x {each.k}" in verdict.inputs


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("garbage", "correctness", "is off by"),
        ("half", "correctness", "is nan"),
        ("stray_near", "correctness", "out-of-bounds: "),
        ("endless", "correctness", "endless-loop: "),
        ("broken_text", "compile", "error"),
    ],
)
def test_a_wrong_kernel_is_rejected_by_name(fault, kind, says):
    outcome = prove(PLANTED, Config({"fault": fault, "num_threads": 64}), Problem(70, 30, 50), H200)
    assert isinstance(outcome, Rejected)
    assert outcome.kind == kind
    assert says in outcome.why


def test_a_planted_kernel_that_is_right():
    assert isinstance(prove(PLANTED, PLANTED.presets["right"], Problem(70, 30, 50), H200), Verdict)


def altered(folder, part, old, new):
    """The built-in family with one line of a template part changed."""
    shutil.copytree(data_dir("templates"), folder, dirs_exist_ok=True)
    shutil.copy(data_dir("search_spaces") / "sgemm.toml", folder)
    (path,) = folder.glob(f"parts/*/{part}")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return Space.load(folder / "sgemm.toml")


@pytest.mark.parametrize(
    ("preset", "part", "old", "new", "says"),
    [
        ("register_staged", "main_loop_staged.cu.jinja", "__syncthreads();", "", "shared-race: "),
        ("tiny_block", "main_loop_staged.cu.jinja", "cp_async_wait<stages - 2>();", "", "async-copy: "),
        (
            "tiny_block",
            "raster.cu.jinja",
            "in_group % group_rows",
            "in_group / group_rows",
            "] is nan",
        ),
    ],
)
def test_a_fault_of_a_template_is_named(tmp_path, preset, part, old, new, says):
    space = altered(tmp_path, part, old, new)
    outcome = prove(space, choice(preset, group_m=8), Problem(512, 512, 512), H200)
    assert isinstance(outcome, Rejected)
    assert outcome.kind == "correctness"
    assert says in outcome.why


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "reinterpret_cast<unsigned*>(workspace)",
            "reinterpret_cast<unsigned*>(workspace + counters)",
            "global-race: ",
        ),  # counters that are sums
        ("count - 1) == count - 1)", "count) == count - 1)", "a second launch on the same workspace"),
        ("keep(part);", "keep(0);", "write-conflict: "),
        ("keep(part);", "if (part != 5) keep(part);", "] is nan"),  # what is kept is zero at no time
        ("first + other", "other", "global-race: "),
    ],
)
def test_a_fault_in_adding_up_parts_is_named(tmp_path, old, new, says):
    space = altered(tmp_path, "add_parts.cu.jinja", old, new)
    config = choice("deep_block", edge="shifted", split_k=24, stages=2)  # in two rounds
    outcome = prove(space, config, Problem(64, 70, 12000, "nt"), H200)
    assert isinstance(outcome, Rejected)
    assert outcome.kind == "correctness"
    assert says in outcome.why


def test_a_space_without_small_problems(tmp_path):
    path = tmp_path / "large.toml"
    path.write_text(
        'extends = "sgemm"\n[constraints]\nlarge = { expr = "m >= 4096", reason = "only large" }\n'
    )
    outcome = prove(Space.load(path), choice("tiny_block"), Problem(4096, 512, 512), H200)
    assert outcome == Rejected("constraint", "it is legal on no small problem, so it cannot be simulated")
