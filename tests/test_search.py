import heapq
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import SpaceError, UsageError
from autotune.search import MISMATCH_COST, STRATEGIES, Projection, Search, require_strategy, strategy_name
from autotune.space.space import Legal
from autotune.sweep import read_sweep

# Every legal config of one SGEMM space measured on an H200 at 4096 cubed: parameters and median_ms.
SWEEP = Path(__file__).parent / "data" / "h200_sgemm_4096_sweep.csv.gz"


def legal_list(choices: dict[str, tuple[int | str, ...]], ordinals: list[tuple[int, ...]]) -> Legal:
    return Legal(tuple(choices), choices, np.array(ordinals, np.int16).reshape(-1, len(choices)), 0, ())


def triangle(side: int = 6) -> Legal:
    """Points (x, y) with x + y < side, and a parameter with one value."""
    choices: dict[str, tuple[int | str, ...]] = {
        "x": tuple(range(side)),
        "y": tuple(f"y{i}" for i in range(side)),
        "only": (7,),
    }
    return legal_list(choices, [(x, y, 0) for x in range(side) for y in range(side - x)])


@pytest.fixture(scope="module")
def sweep() -> tuple[Legal, list[float]]:
    read = read_sweep(SWEEP)
    return read.legal, read.time_ms.tolist()


def ended(search: Search) -> int:
    """Points with an outcome; one that was given back has none."""
    return search.asked - sum(not trial.state.is_finished() for trial in search.study.trials)


def ask(search: Search) -> int:
    index = search.ask()
    assert index is not None
    return index


def replay(search: Search, times: list[float], window: int) -> Iterator[float]:
    """Yield the times told, with `window` points under way; a point takes 0.5 to 1.5 units of time."""
    durations, now = np.random.default_rng(0), 0.0
    under_way: list[tuple[float, int]] = []
    while True:
        while len(under_way) < window:
            heapq.heappush(under_way, (now + durations.uniform(0.5, 1.5), ask(search)))
        now, index = heapq.heappop(under_way)
        search.tell(index, times[index])
        yield times[index]


def evaluations_to(share: float, search: Search, times: list[float], limit: int, window: int = 1) -> int:
    """Count points told until one is within this share of the optimum; `limit + 1` where none is."""
    told = replay(search, times, window)
    return next((n for n in range(1, limit + 1) if next(told) <= min(times) * (1 + share)), limit + 1)


def test_tpe_gets_near_the_optimum_of_a_real_sweep(sweep: tuple[Legal, list[float]]) -> None:
    legal, times = sweep
    to_2 = [evaluations_to(0.02, Search(legal, seed=s, strategy="tpe"), times, 200) for s in range(10)]
    to_5 = [evaluations_to(0.05, Search(legal, seed=s, strategy="tpe"), times, 150) for s in range(10)]
    assert statistics.median(to_2) <= 60
    assert max(to_5) <= 150


@pytest.mark.parametrize("strategy", ["gp", "tpe"])
def test_with_16_points_under_way(strategy: str, sweep: tuple[Legal, list[float]]) -> None:
    legal, times = sweep
    searches = (Search(legal, seed=seed, strategy=strategy) for seed in range(10))
    to_2 = [evaluations_to(0.02, search, times, 200, window=16) for search in searches]
    assert statistics.median(to_2) <= 100  # drawing at random takes 121, one at a time


def test_tpe_beats_random(sweep: tuple[Legal, list[float]]) -> None:
    legal, times = sweep
    counts = {
        name: [evaluations_to(0.02, Search(legal, seed=s, strategy=name), times, 300) for s in range(10)]
        for name in ("tpe", "random")
    }
    assert statistics.median(counts["tpe"]) < statistics.median(counts["random"])


def samplers() -> list[str | optuna.samplers.BaseSampler]:
    return [
        *STRATEGIES,
        "optuna:NSGAIISampler",
        optuna.samplers.RandomSampler(seed=1),
        optuna.samplers.TPESampler(seed=1, multivariate=False),
    ]


@pytest.mark.parametrize("strategy", samplers(), ids=strategy_name)
def test_every_point_is_proposed_once_then_none(strategy: str | optuna.samplers.BaseSampler) -> None:
    legal = triangle()
    search = Search(legal, seed=3, strategy=strategy)
    proposed = []
    while (index := search.ask()) is not None:
        proposed.append(index)
        search.tell(index, 1.0 + index % 5)
    assert sorted(proposed) == list(range(len(legal)))
    assert search.asked == ended(search) == len(legal)
    assert search.ask() is None
    assert [trial.params for trial in search.study.trials] == [dict(legal.config(i)) for i in proposed]


def test_orders_of_the_simple_strategies() -> None:
    legal = triangle()
    order = {}
    for name, seed in (("exhaustive", 0), ("random", 0), ("random", 1)):
        search = Search(legal, seed=seed, strategy=name)
        order[name, seed] = [search.ask() for _ in range(len(legal))]
    assert order["exhaustive", 0] == list(range(len(legal)))
    assert len(set(map(tuple, order.values()))) == 3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_first_comes_first_in_order_without_repeats(strategy: str) -> None:
    search = Search(triangle(), seed=0, first=(9, 4, 9, 0, 4), strategy=strategy)
    proposed = [search.ask() for _ in range(21)]
    assert proposed[:3] == [9, 4, 0]
    assert len(set(proposed)) == 21


@pytest.mark.parametrize("strategy", ["gp", "tpe", "neighbours", "random"])
def test_same_seed_and_tells_give_the_same_proposals(strategy: str, sweep: tuple[Legal, list[float]]) -> None:
    legal, times = sweep

    def told(seed: int) -> list[float]:
        steps = replay(Search(legal, seed=seed, strategy=strategy), times, window=4)
        return [next(steps) for _ in range(40)]

    assert told(5) == told(5)
    assert told(5) != told(6)


def test_points_under_way_are_running_trials_and_rejected_ones_fail() -> None:
    legal = triangle()
    search = Search(legal, seed=0)
    a, b, c = (ask(search) for _ in range(3))
    search.tell(b, None)
    search.tell(a, 2.0)
    running, failed, complete = (
        search.study.get_trials(states=[getattr(optuna.trial.TrialState, state)])
        for state in ("RUNNING", "FAIL", "COMPLETE")
    )
    assert [trial.params for trial in running] == [dict(legal.config(c))]
    assert [trial.params for trial in failed] == [dict(legal.config(b))]
    assert [(trial.params, trial.value) for trial in complete] == [(dict(legal.config(a)), np.log(2.0))]
    assert (search.asked, ended(search), search.best) == (3, 2, (a, 2.0))


def test_points_under_way_keep_proposals_away(sweep: tuple[Legal, list[float]]) -> None:
    """TPE does not see failed trials, so telling None at once shows the search without the constant liar."""
    legal, times = sweep

    def spread(seed: int, liar: bool) -> float:
        search = Search(legal, seed=seed, strategy="tpe")
        steps = replay(search, times, window=1)
        for _ in range(60):
            next(steps)
        batch = []
        for _ in range(40):
            batch.append(ask(search))
            if not liar:
                search.tell(batch[-1], None)
        return float(np.abs(legal.ordinals[batch][:, None] - legal.ordinals[batch]).sum(2).mean())

    assert sum(spread(seed, liar=True) for seed in range(3)) > sum(
        spread(seed, liar=False) for seed in range(3)
    )


def test_every_trial_has_the_same_distributions_over_the_values_that_occur() -> None:
    choices: dict[str, tuple[int | str, ...]] = {"a": (1, 2, 4, 8), "b": ("reg", "cp_async", "tma")}
    search = Search(legal_list(choices, [(a, b) for a in (0, 2, 3) for b in (0, 1)]), seed=0)
    while (index := search.ask()) is not None:
        search.tell(index, 1.0)
    seen = [{name: each.choices for name, each in t.distributions.items()} for t in search.study.trials]
    assert seen == [{"a": (1, 4, 8), "b": ("reg", "cp_async")}] * 6


def test_optunas_own_tools_read_the_study() -> None:
    search = Search(triangle(8), seed=0)
    while (index := search.ask()) is not None:
        x, y = search._legal.ordinals[index][:2]
        search.tell(index, 1.0 + x * x + 0.01 * y)
    importances = optuna.importance.get_param_importances(search.study)
    assert importances["x"] > importances["y"]
    assert search.study.best_params["x"] == 0


def test_a_list_of_one_point() -> None:
    search = Search(legal_list({"a": (5, 6), "b": (1,)}, [(1, 0)]), seed=0)
    assert [search.ask(), search.ask()] == [0, None]
    search.tell(0, 3.5)
    assert search.study.trials[0].params == {"a": 6, "b": 1}
    assert search.best == (0, 3.5)


def test_best_is_the_fastest_told() -> None:
    search = Search(triangle(), seed=0, strategy="exhaustive")
    assert search.best is None
    for median_ms in (3.0, None, 1.5, 2.0, 1.5):
        search.tell(ask(search), median_ms)
    assert search.best == (2, 1.5)


@pytest.mark.parametrize("median_ms", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_time_must_be_positive_and_finite(median_ms: float) -> None:
    search = Search(triangle(), seed=0)
    index = ask(search)
    with pytest.raises(ValueError, match=r"median_ms = .* is not a time"):
        search.tell(index, median_ms)
    search.tell(index, 1.0)  # the refused value left the point under way


def test_only_points_under_way_can_be_told() -> None:
    search = Search(triangle(), seed=0, first=[2])
    with pytest.raises(ValueError, match="point 2 is not under way"):
        search.tell(2, 1.0)
    search.ask()
    search.tell(2, 1.0)
    with pytest.raises(ValueError, match="point 2 is not under way"):
        search.tell(2, 1.0)


def test_requests_that_cannot_be_carried_out() -> None:
    known = ", ".join(STRATEGIES)
    with pytest.raises(UsageError, match=f"'genetic' is unknown: give one of {known}, or optuna:CLASS"):
        Search(triangle(), seed=0, strategy="genetic")
    with pytest.raises(UsageError, match="7 is neither a name nor a sampler"):
        Search(triangle(), seed=0, strategy=7)
    with pytest.raises(UsageError, match="'optuna:Genetic' is unknown: give a class of optuna"):
        Search(triangle(), seed=0, strategy="optuna:Genetic")
    with pytest.raises(UsageError, match="'optuna:PartialFixedSampler' cannot be made from a seed alone"):
        require_strategy("optuna:PartialFixedSampler")
    for seed in (-1, 2**32, 1.5, "7"):
        with pytest.raises(UsageError, match="out of range: give 0 to 2"):
            Search(triangle(), seed=seed)  # type: ignore[arg-type]
    for index in (-1, 21):
        with pytest.raises(ValueError, match=f"point {index} is not in the list: give 0 to 20"):
            Search(triangle(), seed=0).take(index)
    with pytest.raises(IndexError, match="first holds 21, but the legal list has 21 points"):
        Search(triangle(), seed=0, first=[3, 21])
    with pytest.raises(SpaceError, match="empty"):
        Search(legal_list({"a": (1, 2)}, []), seed=0)


@st.composite
def lists_and_targets(draw: st.DrawFn) -> tuple[Legal, list[int], np.ndarray]:
    sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=8))
    points = draw(st.sets(st.tuples(*(st.integers(0, size - 1) for size in sizes)), min_size=1, max_size=40))
    target = [draw(st.integers(0, size - 1)) for size in sizes]
    seen = np.array([draw(st.booleans()) for _ in points])
    seen[draw(st.integers(0, len(points) - 1))] = False
    return (
        legal_list({f"p{i}": tuple(range(size)) for i, size in enumerate(sizes)}, sorted(points)),
        target,
        seen,
    )


@settings(max_examples=100, deadline=None)
@given(lists_and_targets())
def test_projection_is_the_plain_distance(case: tuple[Legal, list[int], np.ndarray]) -> None:
    legal, target, seen = case
    scale = np.array([max(1, len(legal.choices[name]) - 1) for name in legal.names])
    gap = np.abs(legal.ordinals - np.array(target))
    distance = (gap / scale + MISMATCH_COST * (gap > 0)).sum(1)
    distance[seen] = np.inf
    expected = np.flatnonzero(np.isclose(distance, distance.min(), atol=1e-9))
    assert Projection(legal).nearest(target, seen).tolist() == expected.tolist()


def test_projection_of_a_space_that_needs_several_tables() -> None:
    rng = np.random.default_rng(0)
    sizes = [5, 9, 2, 30, 4, 3, 1, 6, 8]
    rows = np.unique(np.stack([rng.integers(0, size, 3000) for size in sizes], 1), axis=0)
    legal = legal_list({f"p{i}": tuple(range(size)) for i, size in enumerate(sizes)}, rows.tolist())
    projection = Projection(legal)
    assert len(legal.folded) > 1
    for index in rng.integers(0, len(legal), 20):
        assert projection.nearest(rows[index].tolist(), np.zeros(len(legal), bool)).tolist() == [index]


def test_constant_columns_of_the_sweep_cost_no_table(sweep: tuple[Legal, list[float]]) -> None:
    legal, _ = sweep
    varying = int((np.ptp(legal.ordinals, axis=0) > 0).sum())
    assert sum(len(columns) for columns, _ in legal.folded) == varying < len(legal.names)


def test_import_and_logging_stay_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys, autotune.search; assert not {'optuna', 'cupy', 'jinja2', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    verbosity = optuna.logging.get_verbosity()
    search = Search(triangle(), seed=0)
    for _ in range(15):
        search.tell(ask(search), 1.0)
    assert capfd.readouterr() == ("", "")
    assert optuna.logging.get_verbosity() == verbosity


def test_random_is_uniform_over_the_legal_list() -> None:
    legal = triangle(4)
    drawn = Counter(Search(legal, seed=seed, strategy="random").ask() for seed in range(400))
    assert set(drawn) == set(range(len(legal)))
    assert max(drawn.values()) < 3 * min(drawn.values())


def test_a_sampler_of_optuna_learns_from_the_projected_trials(sweep: tuple[Legal, list[float]]) -> None:
    legal, times = sweep
    counts = [
        evaluations_to(0.05, Search(legal, seed=s, strategy=optuna.samplers.TPESampler(seed=s)), times, 200)
        for s in range(5)
    ]
    assert statistics.median(counts) <= 60


@pytest.mark.parametrize(
    ("strategy", "sampler"),
    [
        ("optuna:GridSampler", optuna.samplers.GridSampler({"x": [1]})),
        ("optuna:BruteForceSampler", optuna.samplers.BruteForceSampler()),
    ],
)
def test_samplers_with_an_order_of_their_own(strategy: str, sampler: optuna.samplers.BaseSampler) -> None:
    words = (
        f"sampler {type(sampler).__name__} of Optuna goes through a grid of its own and cannot propose points"
    )
    for each in (strategy, sampler):
        with pytest.raises(UsageError, match=words):
            Search(triangle(), seed=0, strategy=each)


@pytest.mark.parametrize(
    ("sampler", "package"),
    [(optuna.samplers.QMCSampler(seed=0), "scipy"), (optuna.samplers.GPSampler(seed=0), "torch")],
    ids=["qmc", "gp"],
)
def test_samplers_that_need_a_package(
    sampler: optuna.samplers.BaseSampler, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.search.search.find_spec", lambda name: None)  # as where none is installed
    name = type(sampler).__name__
    for each in (f"optuna:{name}", sampler):
        with pytest.raises(UsageError, match=f"sampler {name} of Optuna needs {package}.*run 'pip install"):
            Search(triangle(), seed=0, strategy=each)


def test_a_sampler_that_fails_is_named() -> None:
    class Broken(optuna.samplers.RandomSampler):  # type: ignore[misc]
        def sample_independent(self, *of: object) -> object:
            raise LookupError("no more\nnumbers")

    with pytest.raises(UsageError, match=r"'optuna:Broken' made no proposal \(LookupError: no more numbers"):
        Search(triangle(), seed=0, strategy=Broken()).ask()


def test_searches_that_are_given_one_sampler_do_not_share_it() -> None:
    sampler = optuna.samplers.TPESampler(seed=1)
    for side in (6, 7):
        search = Search(triangle(side), seed=0, strategy=sampler)
        for _ in range(15):
            search.tell(ask(search), 1.0)


@pytest.mark.parametrize("strategy", ["gp", "neighbours", "tpe"])
def test_points_of_others_and_points_given_back(strategy: str) -> None:
    legal = triangle(9)
    search = Search(legal, seed=0, strategy=strategy)
    search.take(3)
    search.tell(3, 2.0, "measured")
    seen = {3}
    for turn in range(30):
        index = ask(search)
        assert index not in seen
        if turn % 5 == 4:
            search.give_back(index)
            assert ask(search) == index
        seen.add(index)
        search.tell(index, None if turn % 3 == 0 else 1.0 + index % 7)
    assert ended(search) == len(seen) == 31
