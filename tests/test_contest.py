from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from tuning import PLAIN, PROBLEM

from autotune.code.render import render
from autotune.errors import SpaceError
from autotune.search import WAIT, Search
from autotune.search.candidates import Candidates, points_of
from autotune.search.contest import LEAST_SHARE, PATIENCE, Contest
from autotune.space.space import Space
from autotune.values.device import named_device

H200 = named_device("h200")
SPACE = Space.load(PLAIN)


@pytest.fixture(scope="module")
def candidates():
    return Candidates([SPACE, SPACE, SPACE], PROBLEM, H200)


# -- the list ------------------------------------------------------------------------------------------------


def test_candidates_of_several_families_are_numbered_through(candidates):
    count = len(SPACE.enumerate(PROBLEM, H200))
    assert len(candidates) == 3 * count
    assert [family.begin for family in candidates.families] == [0, count, 2 * count]
    assert candidates.place(0) == (0, 0)
    assert candidates.place(count - 1) == (0, count - 1)
    assert candidates.place(count) == (1, 0)
    assert candidates.place(3 * count - 1) == (2, count - 1)
    legal = candidates.families[1].legal
    assert candidates.config(count + 7) == legal.config(7)
    assert candidates.source(count + 7) == render(SPACE, legal.config(7), PROBLEM, H200)
    assert candidates.families[1].numbers([3, None, 4]) == [count + 3, count + 4]


def test_a_family_without_a_legal_config_is_left_out_unless_it_is_the_only_one(tmp_path):
    path = tmp_path / "none.toml"
    path.write_text(f'extends = "{PLAIN}"\n[constraints]\nno = {{ expr = "value > 99", reason = "none" }}\n')
    empty = Space.load(path)
    found = Candidates([empty, SPACE], PROBLEM, H200)
    assert [family.space for family in found.families] == [SPACE]
    assert len(found.without) == 1
    assert found.without[0].startswith("none.toml: no config is legal for 64 x 64 x 8 nn on NVIDIA H200")
    with pytest.raises(SpaceError, match="no config is legal"):
        Candidates([empty], PROBLEM, H200)
    with pytest.raises(SpaceError, match=r"no config is legal.*; .*no config is legal"):
        Candidates([empty, empty], PROBLEM, H200)
    with pytest.raises(
        SpaceError, match="no kernel family computes 64 x 64 x 8 nn on NVIDIA H200: sgemm_skinny needs"
    ):
        Candidates([], PROBLEM, H200)


def test_many_configs_are_found_in_a_list_at_once():
    legal = SPACE.enumerate(PROBLEM, H200)
    configs = [dict(legal.config(point)) for point in (5, 0, 59, 17)]
    strange = [{"value": 5}, {"value": 99, "num_threads": 64}, {"value": [1], "num_threads": 64}, {}]
    assert points_of(legal, [*configs, *strange]) == [5, 0, 59, 17, None, None, None, None]
    assert points_of(legal, []) == []


# -- who is asked --------------------------------------------------------------------------------------------


def contest(candidates, starts=(0, 0, 0)):
    firsts = [list(range(count)) for count in starts]
    searches = [
        Search(family.legal, seed=0, first=first, strategy="exhaustive")
        for family, first in zip(candidates.families, firsts, strict=True)
    ]
    return Contest(candidates, searches, starts)


def asked(contest, candidates, count, times):
    """Ask and tell at once; count the families, whose candidates all take the same time."""
    shares = Counter()
    for _ in range(count):
        number = contest.ask()
        place = candidates.place(number)[0]
        shares[place] += 1
        contest.tell(number, times[place], "measured" if times[place] else "compile")
    return shares


def test_starts_come_first_in_turn(candidates):
    search = contest(candidates, (3, 1, 2))
    places = [candidates.place(search.ask())[0] for _ in range(6)]
    assert places == [0, 1, 2, 0, 2, 0]


def test_equal_families_share_equally(candidates):
    assert asked(contest(candidates), candidates, 90, (1.0, 1.0, 1.0)) == {0: 30, 1: 30, 2: 30}


def test_a_family_that_is_a_third_slower_gets_one_in_eight(candidates):
    shares = asked(contest(candidates, (2, 2, 2)), candidates, 66, (1.0, 1.4, 5.0))
    assert shares[0] == pytest.approx(2 + 60 * 8 / 10, abs=2)
    assert shares[1] == pytest.approx(2 + 60 / 10, abs=1)
    assert shares[2] == pytest.approx(2 + 60 / 10, abs=1)


def test_the_share_falls_with_the_distance(candidates):
    shares = [
        asked(contest(candidates), candidates, 80, (1.0, ratio, None))[1] for ratio in (1.0, 1.05, 1.1, 1.2)
    ]
    assert all(more > less for more, less in pairwise(shares))


def test_a_family_of_which_nothing_works_gets_the_least(candidates):
    shares = asked(contest(candidates), candidates, 70, (1.0, None, 1.0))
    assert shares[1] == pytest.approx(PATIENCE + (70 - 3 * PATIENCE) * LEAST_SHARE / (2 + LEAST_SHARE), abs=2)


def test_a_family_that_becomes_fast_is_asked_more(candidates):
    search = contest(candidates)
    asked(search, candidates, 30, (1.0, 2.0, None))
    shares = asked(search, candidates, 30, (1.0, 0.5, None))
    assert shares[1] > 15


def test_every_candidate_is_proposed_once_and_then_none(candidates):
    search = contest(candidates, (1, 1, 1))
    numbers = []
    while (number := search.ask()) is not None:
        numbers.append(number)
        search.tell(number, 1.0 + candidates.place(number)[0])
    assert sorted(numbers) == list(range(len(candidates)))
    assert search.asked == len(candidates)
    assert search.ask() is None


def test_what_is_known_is_not_proposed(candidates):
    search = contest(candidates)
    for number in (0, 61, 130):
        search.take(number)
        search.tell(number, 1.0)
    assert search.asked == 3
    numbers = {search.ask() for _ in range(len(candidates) - 3)}
    assert numbers == set(range(len(candidates))) - {0, 61, 130}


def test_the_same_times_give_the_same_proposals(candidates):
    def proposals():
        search = contest(candidates, (2, 2, 2))
        numbers = []
        for step in range(100):
            numbers.append(search.ask())
            if step % 3 == 2:
                for number in numbers[-3:]:
                    search.tell(number, 1.0 + number % 7)
        return numbers

    assert proposals() == proposals()


class Shared:
    """A search of which others have all that is left, for a while."""

    best = None
    asked = 0

    def __init__(self, *answers):
        self._answers = list(answers)

    def ask(self):
        return self._answers.pop(0)


def test_waiting_for_others_is_not_the_end(candidates):
    search = Contest(candidates, [Shared(WAIT, WAIT, None), Shared(None), Shared(WAIT, None)])
    assert [search.ask(), search.ask(), search.ask()] == [WAIT, WAIT, None]
    search = Contest(candidates, [Shared(WAIT, WAIT, 3), Shared(5, WAIT), Shared(None)])
    assert [search.ask(), search.ask()] == [60 + 5, WAIT]
