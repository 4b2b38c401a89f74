from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_proof import altered

from autotune import records
from autotune.code.render import render
from autotune.errors import RecordMissing, TuningError, UsageError
from autotune.families.estimate import estimate_columns
from autotune.kernel import best_kernel
from autotune.records import Store
from autotune.records.trials import read_trials, trials_path
from autotune.search.candidates import Candidates
from autotune.space.space import Space
from autotune.tuning import foresight
from autotune.tuning.budget import Budget
from autotune.tuning.ranking import ordered
from autotune.tuning.request import Request
from autotune.tuning.tuner import run
from autotune.values.device import known_devices
from autotune.values.problem import Problem

H200, T4 = known_devices()["h200"], known_devices()["t4"]
SGEMM = Space.load("sgemm")


def foresee(problem, device, *, budget, **asked):
    return run(problem, Request(budget=Budget.of(budget), target=device, **asked))


CUBE, SMALL, TINY = Problem(4096, 4096, 4096), Problem(130, 96, 72), Problem(34, 36, 40)
FEW = """
extends = "sgemm"
[parameters]
BM = [16, 32]
BN = [32]
BK = [8]
TM = [2, 4]
TN = [4]
split_k = [1]
warps_k = [1]
loader = ["reg"]
stages = [1, 2]
read_k = [1]
"""


@pytest.fixture
def few(tmp_path):
    """Six kernels that compile fast."""
    (tmp_path / "few.toml").write_text(FEW)
    return Space.load(tmp_path / "few.toml")


@pytest.fixture
def one_proof(monkeypatch):
    """The simulator is asked of the best alone, where proofs are not what is tested."""
    monkeypatch.setattr(foresight, "PROOFS", 1)


# -- order ---------------------------------------------------------------------------------------------------


def test_the_order_takes_every_estimate_once_before_any_twice():
    legal = SGEMM.enumerate(CUBE, H200)
    order = list(ordered(Candidates([SGEMM], CUBE, H200), 0))
    assert sorted(order) == list(range(len(legal)))
    cost = estimate_columns(SGEMM, SGEMM.columns(legal, CUBE, H200), CUBE, H200).astype(np.float32)
    distinct = len(np.unique(cost))
    first = cost[order[:distinct]]
    assert (np.diff(first) > 0).all()
    assert 1000 < distinct < len(legal)
    assert cost[order[distinct]] == cost[order[0]]  # the second round begins with the best again


def test_ties_go_to_the_point_nearest_to_a_preset_and_then_to_chance():
    legal = SGEMM.enumerate(CUBE, H200)
    one, same, other = (list(ordered(Candidates([SGEMM], CUBE, H200), seed)) for seed in (0, 0, 1))
    assert one == same
    assert one != other
    winner = legal.index(SGEMM.presets["long_block"])
    assert winner in one[:60]  # stages and all: the preset itself, behind points that share tiles
    assert {legal.config(index)["ffma_order"] for index in one[:50]} <= {"serpentine", "row"}


# -- a whole run ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("records")
    seen = []
    record = foresee(SMALL, T4, budget="6", seed=3, root=root, watch=lambda p: seen.append((p.stage, p.seen)))
    return root, record, seen


def test_a_record_without_a_time(made):
    root, record, _ = made
    assert record.evidence == "estimated"
    assert (record.timing, record.gflops, record.vs_cublas, record.cublas) == (None,) * 4
    assert record.toolchain.driver is None
    path = root / "Tesla_T4" / "estimated" / f"sgemm_{SMALL.key}.json"
    assert records.to_json(records.read(path)) == records.to_json(record)
    assert "_ms" not in path.read_text()
    assert Store(root).find(T4, "sgemm", SMALL) is None
    assert Store(root).find(T4, "sgemm", SMALL, estimated=True) == records.read(path)


def test_the_record_is_of_a_kernel_for_that_gpu(made):
    _, record, _ = made
    source = render(SGEMM, SGEMM.config(record.config), SMALL, T4)
    assert record.code_digest == source.code_digest
    assert "--gpu-architecture=sm_75" in record.toolchain.flags
    assert record.resources.registers > 16
    assert "simulated at" in record.verification.inputs


def test_the_record_says_what_was_done(made):
    _, record, _ = made
    search = record.search
    assert (search.strategy, search.budget, search.seen, search.seed) == ("estimate", 6, 6, 3)
    assert sum(search.outcomes.values()) == 6
    assert not search.complete


def test_the_log_has_every_candidate_and_every_proof(made):
    root, record, _ = made
    path = Store(root).path(T4, "sgemm", SMALL, estimated=True)
    _, trials = read_trials(trials_path(path))
    kinds = [trial["outcome"] for trial in trials]
    assert kinds.count("estimated") == record.search.outcomes["estimated"]
    assert kinds.count("proven") == foresight.PROOFS
    best = min((trial for trial in trials if trial["outcome"] == "estimated"), key=lambda t: t["estimate"])
    assert best["config"] == dict(record.config)
    assert "median_ms" not in json.dumps(trials)


def test_presets_come_first(made):
    root, _, _ = made
    path = Store(root).path(T4, "sgemm", SMALL, estimated=True)
    _, trials = read_trials(trials_path(path))
    legal = SGEMM.enumerate(SMALL, T4)
    tried = {legal.index(trial["config"]) for trial in trials}
    assert set(SGEMM.starts(legal)[: len(tried)]) == tried


def test_the_watcher_is_told(made):
    _, _, seen = made
    assert seen[0] == ("compiling in the order of the estimate", 0)
    assert seen[-1] == ("done", 6)
    assert "proving the best in the simulator" in {stage for stage, _ in seen}


def test_a_miss_tells_of_the_estimated_record(made):
    root, _, _ = made
    exact = {"device": "simulator:t4", "policy": "exact", "root": root}
    with pytest.raises(RecordMissing, match=r"there is an estimated one, .*: run 'autotune tune --m 130"):
        best_kernel(130, 96, 72, **exact)
    with pytest.raises(
        RecordMissing, match=r"^no record of 131 x 96 x 72 nn on Tesla T4: run 'autotune tune"
    ):
        best_kernel(131, 96, 72, **exact)


def test_a_time_ends_the_compiling(tmp_path, one_proof):
    record = foresee(TINY, H200, budget="2s", root=tmp_path)
    assert 2 <= record.search.seconds < 60
    assert 0 < record.search.seen < record.search.legal


# -- failures ------------------------------------------------------------------------------------------------


def test_a_template_that_is_wrong_leaves_no_record_and_is_not_proven_again(tmp_path):
    space = altered(tmp_path / "space", "output.cu.jinja", "alpha * sums", "2.0f * alpha * sums")
    root = tmp_path / "records"
    best = r"none of the 2 best estimates proved right in the simulator: sgemm:turn_a0.*is off by"
    for says in (best, "none of the 2 best estimates|0 of 2 candidates are usable"):
        with pytest.raises(TuningError, match=says):
            foresee(TINY, H200, space=space, budget="2", root=root)
        assert not list(root.glob("**/*.json"))
        _, trials = read_trials(next(root.glob("*/estimated/*.trials.jsonl")))
        assert [trial["outcome"] for trial in trials] == ["estimated"] * 2 + ["correctness"] * 2


PLANTED = Space.load(Path(__file__).parent / "data" / "planted" / "planted.toml")


def test_of_a_family_that_the_model_does_not_know_a_preset_is_proven(tmp_path):
    notes = []
    record = foresee(
        SMALL, H200, space=PLANTED, budget="3", root=tmp_path, watch=lambda p: notes.append(list(p.notes))
    )
    assert record.config == PLANTED.presets["right"]
    assert notes[-1] == ["the model does not know planted: its presets first"]
    assert "simulated at" in record.verification.inputs


def test_families_that_the_model_knows_are_preferred(tmp_path, monkeypatch, one_proof):
    monkeypatch.setattr("autotune.tuning.foresight.families", lambda problem, device: [PLANTED, SGEMM])
    notes = []
    record = foresee(TINY, H200, budget="2", root=tmp_path, watch=lambda p: notes.append(list(p.notes)))
    assert record.family == "sgemm"
    assert record.search.legal == len(SGEMM.enumerate(TINY, H200))
    assert notes[-1] == ["the model does not know planted: left out"]


def test_several_families_share_one_order(tmp_path):
    path = tmp_path / "other.toml"
    path.write_text('extends = "sgemm"\n')
    candidates = Candidates([SGEMM, Space.load(path)], SMALL, H200)
    numbers = list(ordered(candidates, 0))
    assert sorted(numbers) == list(range(len(candidates)))
    legal = candidates.families[0].legal
    own = [number for number in numbers if number < len(legal)]
    assert own == list(ordered(Candidates([SGEMM], SMALL, H200), 0))
    assert {candidates.place(number)[0] for number in numbers[:20]} == {0, 1}


def test_a_bad_budget(tmp_path):
    with pytest.raises(UsageError, match="budget 'soon' is not understood"):
        foresee(SMALL, H200, budget="soon", root=tmp_path)
    assert not list(tmp_path.iterdir())


def test_families_take_turns_with_their_presets(tmp_path, one_proof):
    foresee(Problem(5, 512, 64), H200, budget="4", root=tmp_path)
    tried = {}
    for path in tmp_path.glob("*/*/*.trials.jsonl"):
        header, lines = read_trials(path)
        tried[header.family] = sum("outcome" in line for line in lines)
    assert tried["sgemm"] >= 2
    assert tried["sgemm_skinny"] >= 2


# -- again ---------------------------------------------------------------------------------------------------


def estimated(root):
    """List the configs that were compiled and estimated, of every run."""
    (path,) = root.glob("*/estimated/*.trials.jsonl")
    return [json.dumps(line["config"]) for line in read_trials(path)[1] if line["outcome"] == "estimated"]


def test_what_was_estimated_is_not_compiled_again(tmp_path, few, one_proof):
    first = foresee(TINY, T4, space=few, budget="3", root=tmp_path)
    assert len(estimated(tmp_path)) == 3
    second = foresee(TINY, T4, space=few, budget="5", root=tmp_path)
    assert (second.search.seen, second.search.resumed, second.search.outcomes) == (5, 3, {"estimated": 5})
    assert len(set(estimated(tmp_path))) == len(estimated(tmp_path)) == 5
    third = foresee(TINY, T4, space=few, budget="5", root=tmp_path)
    assert (third.search.resumed, third.config) == (5, second.config)
    assert len(estimated(tmp_path)) == 5
    anew = foresee(TINY, T4, space=few, budget="3", root=tmp_path, resume=False)
    assert anew.search.resumed == 0
    assert first.search.resumed == 0


def test_an_interrupted_estimate_goes_on(tmp_path, few, one_proof):
    def interrupt(progress):
        if progress.seen == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        foresee(TINY, T4, space=few, budget="6", root=tmp_path, workers=1, watch=interrupt)
    before = estimated(tmp_path)
    assert 3 <= len(before) < 6
    record = foresee(TINY, T4, space=few, budget="6", root=tmp_path, resume=True)
    assert (record.search.seen, record.search.resumed) == (6, len(before))
    assert estimated(tmp_path)[: len(before)] == before
    assert len(set(estimated(tmp_path))) == 6


PART = 'extends = "sgemm"\n[parameters]\nloader = ["reg"]\nBM = [64]\n'


def test_a_part_of_a_space_does_not_displace_a_better_estimate_of_the_whole(tmp_path, one_proof):
    whole = foresee(TINY, H200, budget="4", root=tmp_path)
    (tmp_path / "part.toml").write_text(PART)
    part, notes = Space.load(tmp_path / "part.toml"), []
    record = foresee(
        TINY,
        H200,
        space=part,
        budget="1",
        root=tmp_path,
        watch=lambda p: notes.append(list(p.notes)),
    )
    assert record.config == whole.config
    assert notes[-1] == [
        "the stored estimate, of a candidate that was not looked at now, is better: it stays"
    ]
    (path,) = tmp_path.glob("*/estimated/*.json")
    assert records.to_json(records.read(path)) == records.to_json(whole)


def test_the_whole_displaces_the_estimate_of_a_part(tmp_path, one_proof):
    (tmp_path / "part.toml").write_text(PART)
    part = foresee(TINY, H200, space=Space.load(tmp_path / "part.toml"), budget="1", root=tmp_path)
    whole = foresee(TINY, H200, budget="4", root=tmp_path)
    assert whole.config != part.config
    (path,) = tmp_path.glob("*/estimated/*.json")
    assert records.to_json(records.read(path)) == records.to_json(whole)
