"""What `audit` makes of a worker's answers; tests/gpu has the worker itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_records import H200, SGEMM, fitted, made
from stub_gpu import FACTS, measured

from autotune.code import cubins
from autotune.code.depot import Depot
from autotune.code.render import render
from autotune.errors import Rejected, SpaceError
from autotune.records.schema import Cublas
from autotune.tuning.audit import TOLERANCE, OneWorker, audit, compile_ahead, staleness
from autotune.tuning.meter import Meter
from autotune.values.measurement import Finals, Sustained
from autotune.values.problem import Problem

PROBLEM = Problem(64, 64, 64)
WINNER, OTHER = fitted(PROBLEM), fitted(PROBLEM, "small_block")


class Answering:
    """A worker that knows how long each shape of launch takes, and notes what it is asked."""

    def __init__(self, **outcomes):
        self.outcomes = outcomes
        self.asked = []
        self.started = []

    def __call__(self, problem, cold):
        self.started.append((problem, cold))
        return self

    def __enter__(self):
        return self

    def __exit__(self, *details):
        return None

    def ready(self):
        return FACTS

    def finals(self, entries, timeout_s):
        names = {
            render(SGEMM, config, PROBLEM, H200).launch: name
            for name, config in (("winner", WINNER), ("other", OTHER))
        }
        self.asked.append([names[launch] for _, _, launch in entries])
        outcomes = {key: self.outcomes[names[launch]] for key, _, launch in entries}
        return Finals(outcomes, measured(2.0).timing, "their_kernel")

    def sustained(self, binary, launch, timing, seconds, timeout_s):
        self.held = Sustained(seconds, 9, 1.1 * timing.median_ms, 0.5, "energy counter")
        return self.held


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("records")


def record(**changes):
    return made(PROBLEM, config=WINNER, ms=1.0, others=[OTHER], **changes)


def test_what_holds_stays_as_it_is(root):
    worker, stored = Answering(winner=measured(1.0 + 0.9 * TOLERANCE)), record()
    finding = audit(stored, worker, Depot(root))
    assert (finding.state, finding.why, finding.now_ms) == ("holds", "", 1.0 + 0.9 * TOLERANCE)
    assert finding.renewed is stored
    assert worker.asked == [["winner"]]
    assert worker.started == [(PROBLEM, False)]


@pytest.mark.parametrize(("now", "state"), [(1.2, "slower"), (0.8, "faster")])
def test_another_time_is_recorded_anew_beside_the_finalists(root, now, state):
    worker, stored = Answering(winner=measured(now), other=measured(1.1)), record()
    finding = audit(stored, worker, Depot(root))
    assert finding.state == state
    assert finding.why == f"by more than 5 %: 1 ms then, {now:g} ms now"
    assert worker.asked == [["winner"], ["winner", "other"]]
    best, ms = (WINNER, now) if now < 1.1 else (OTHER, 1.1)
    renewed = finding.renewed
    assert renewed.config == best
    assert renewed.sustained == worker.held
    assert renewed.sustained.mean_ms == pytest.approx(1.1 * ms)
    assert renewed.timing.median_ms == ms
    assert [renewed.timing.median_ms, *(each.median_ms for each in renewed.runners_up)] == sorted([now, 1.1])
    assert renewed.vs_cublas == pytest.approx(2.0 / ms)
    assert renewed.cublas.kernel == "their_kernel"
    assert renewed.gflops == pytest.approx(PROBLEM.flops / ms / 1e6)
    assert renewed.search == stored.search
    assert renewed.created > stored.created


@pytest.mark.parametrize(("then", "state"), [(2.4, "slower"), (2.02, "holds"), (1.7, "faster")])
def test_another_speed_over_cublas_is_recorded_anew_though_the_time_holds(root, then, state):
    worker, baseline = Answering(winner=measured(1.0), other=measured(1.1)), Cublas(then, None, "13.1.0")
    stored = record(vs_cublas=then, cublas=baseline)
    finding = audit(stored, worker, Depot(root))
    assert (finding.state, finding.now_ms) == (state, 1.0)
    if state == "holds":
        assert finding.renewed is stored
    else:
        assert finding.why == f"by more than 5 %: {then} x cuBLAS then, 2 x cuBLAS now"
        assert (finding.renewed.config, finding.renewed.vs_cublas) == (WINNER, 2.0)


def test_a_stale_record_is_proved_and_timed_without_a_search(root):
    stored = record(code_digest="0" * 64, template_digest="1" * 64)
    worker = Answering(winner=measured(1.0), other=measured(3.0))
    finding = audit(stored, worker, Depot(root))
    source = render(SGEMM, WINNER, PROBLEM, H200)
    assert finding.state == "stale"
    assert worker.asked == [["winner", "other"]]  # once: nobody needs the winner's time alone
    assert finding.renewed.config == WINNER
    assert finding.renewed.code_digest == source.code_digest
    assert finding.renewed.template_digest == source.template_digest
    assert finding.renewed.toolchain.driver == FACTS.driver
    assert finding.renewed.resources.registers > 16  # compiled


def test_a_finalist_takes_the_place_of_a_winner_that_fails(root):
    wrong = Rejected("correctness", "C[0, 0] is off by 3")
    finding = audit(record(), Answering(winner=wrong, other=measured(1.5)), Depot(root))
    assert finding.state == "failed"
    assert finding.why == "correctness: C[0, 0] is off by 3; its best finalist takes its place"
    assert finding.now_ms is None
    assert finding.renewed.config == OTHER
    assert (finding.renewed.config, finding.renewed.runners_up) == (OTHER, ())


def test_nothing_is_left_when_all_fail(root):
    crash = Rejected("crash", "illegal address")
    finding = audit(record(), Answering(winner=crash, other=crash), Depot(root))
    assert (finding.state, finding.why, finding.renewed) == ("failed", "crash: illegal address", None)


def test_a_config_that_is_not_legal_any_more_is_not_run(root):
    illegal = made(PROBLEM, config=WINNER, others=[])
    config = {**illegal.config, "vec_b": 4, "BK": 8, "stages": 4, "BM": 256, "TM": 1}
    worker = Answering(other=measured(1.0))
    finding = audit(
        type(illegal)(**{**vars(illegal), "config": config, "runners_up": ()}), worker, Depot(root)
    )
    assert finding.state == "failed"
    assert finding.why.startswith("constraint: ")
    assert worker.asked == []


def test_cold_records_are_timed_cold(root):
    stored = record()
    worker = Answering(winner=measured(1.0))
    audit(replace(stored, timing=replace(stored.timing, l2="cold")), worker, Depot(root))
    assert worker.started == [(PROBLEM, True)]


def kept(config, depot):
    """Return the machine code on disk."""
    source = render(SGEMM, config, PROBLEM, H200)
    return cubins.load(source.text, source.entry, H200.arch, depot=depot)


def test_only_what_will_be_measured_is_compiled_ahead(tmp_path):
    depot = Depot(tmp_path)
    meter = Meter()
    compile_ahead([record(), replace(record(), family="mine")], H200, depot, meter)
    assert (meter.stage, meter.done, meter.steps) == ("compiling", 1, 1)
    assert kept(WINNER, depot) is not None
    assert kept(OTHER, depot) is None  # the winner may well hold
    compile_ahead([record(code_digest="0" * 64)], H200, depot, meter)
    assert (meter.done, meter.steps) == (2, 2)
    assert kept(OTHER, depot) is not None
    before = kept(WINNER, depot)
    audit(record(), Answering(winner=measured(1.0)), depot)
    assert kept(WINNER, depot) == before  # compile_s too: and seconds: it was not compiled again


def test_a_finalist_that_is_no_config_any_more_is_compiled_by_nobody(tmp_path):
    stored = record(code_digest="0" * 64)
    gone = replace(stored.runners_up[0], config={**OTHER, "TM": 3})
    compile_ahead([replace(stored, runners_up=(gone,))], H200, Depot(tmp_path), Meter())
    assert kept(WINNER, Depot(tmp_path)) is not None


def test_a_depot_that_keeps_nothing_has_nothing_compiled_ahead(tmp_path):
    compile_ahead([record()], H200, Depot(tmp_path, limit_bytes=0), Meter())
    assert list(tmp_path.iterdir()) == []


def test_one_process_serves_record_after_record_until_l2_is_to_be_cold(tmp_path, monkeypatch):
    starts = tmp_path / "starts"
    monkeypatch.setenv("STUB_GPU", str(starts))
    with OneWorker(0, "stub_gpu:serve_counting") as workers:
        for cold in (False, False, True, True):
            for problem in (PROBLEM, Problem(32, 32, 32)):
                with workers(problem, cold) as gpu:
                    assert gpu.ready() == FACTS
    assert len(starts.read_text().split()) == 2


def test_a_worker_that_has_turned_proves_the_next_record_too(tmp_path, monkeypatch):
    monkeypatch.setenv("STUB_GPU", str(tmp_path / "measured"))
    with OneWorker(0, "stub_gpu:serve_hashed") as workers:  # whose times are 1 to 2 ms
        for problem in (PROBLEM, Problem(64, 64, 128)):
            stored = made(problem, ms=0.1)
            finding = audit(stored, workers, Depot(tmp_path))
            assert (finding.state, finding.renewed.problem) == ("slower", problem)
            assert finding.renewed.timing.median_ms == finding.now_ms
            assert finding.renewed.sustained.mean_ms == pytest.approx(1.25 * finding.now_ms)


def test_staleness_needs_no_gpu(root):
    assert staleness(record(), Depot(root)) is None
    assert "the record is stale" in staleness(record(code_digest="0" * 64), Depot(root))
    unknown = replace(record().device, name="A GPU of the future", sm_count=999)
    assert staleness(replace(record(code_digest="0" * 64), device=unknown), Depot(root)) is None
    with pytest.raises(SpaceError, match="family 'mine' is unknown"):
        staleness(replace(record(), family="mine"), Depot(root))
