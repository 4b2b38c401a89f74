"""Searches that share a study: on real storages, in real processes, some of them killed."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import optuna
import postgres
import pytest
import share
from optuna.storages.journal import JournalFileSymlinkLock

from autotune.errors import UsageError
from autotune.paths import install_command
from autotune.records.schema import RecordedDevice
from autotune.search import WAIT
from autotune.sharing import SharedSearch, Storage, open_search
from autotune.sharing.journal import Lock
from autotune.sharing.pulse import BEAT_S, PATIENCE, Pulse
from autotune.space.space import Legal
from autotune.values.device import named_device

KINDS = ("journal", "sqlite", "postgresql")
LEGAL, TIMES = share.sweep(12)
H200 = share.HEADER.device


@pytest.fixture(scope="session")
def server() -> Iterator[postgres.Server]:
    if why := postgres.install():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    server = postgres.Server()
    server.start()
    yield server
    server.stop()
    server.remove()


@pytest.fixture(scope="session")
def tables(tmp_path_factory) -> Path:
    """Make an SQLite file that holds nothing but Optuna's tables, which takes half a second."""
    file = tmp_path_factory.mktemp("tables") / "a.db"
    Storage(f"sqlite:///{file}")
    return file


@pytest.fixture
def url_of(request, tmp_path):
    """Return the URL of a storage without a study; a fresh one is without tables too."""

    def url_of(kind: str, fresh: bool = False) -> str:
        if kind == "postgresql":
            return request.getfixturevalue("server").emptied(fresh)
        if kind == "journal":
            return f"journal:{tmp_path / 'a.log'}"
        if not fresh:
            shutil.copy(request.getfixturevalue("tables"), tmp_path / "a.db")
        return f"sqlite:///{tmp_path / 'a.db'}"

    return url_of


@pytest.fixture(params=KINDS)
def url(request, url_of) -> str:
    return url_of(request.param)


@pytest.fixture
def journal(url_of) -> str:
    return url_of("journal")


@pytest.fixture
def join():
    """Join a study; what is still open at the end of the test is closed."""
    searches: list[SharedSearch] = []
    said: list[str] = []

    def join(url: str, legal: Legal = LEGAL, name: str | None = None, header=share.HEADER, **options):
        words = {"strategy": "exhaustive", "beat_s": 0.05, "patience": 1000, "say": said.append, **options}
        searches.append(open_search(Storage(url), name, legal, header, **words))
        return searches[-1]

    join.said = said
    yield join
    for search in searches:
        search.close()


def until(condition, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def die(search: SharedSearch) -> None:
    """Show no more sign of life."""
    search._pulse.stop()


def has_outcome(trial: optuna.trial.FrozenTrial) -> bool:
    return trial.state.is_finished() and (trial.value is not None or "left" not in trial.user_attrs)


def study_of(search: SharedSearch) -> optuna.Study:
    """Open the study of a search as Optuna's own tools do."""
    return optuna.load_study(study_name=search._shared.name, storage=search._shared._storage)


def outcomes_of(url: str, name: str) -> Counter[int]:
    """Count the outcomes of each point, as Optuna reads them."""
    study = optuna.load_study(study_name=name, storage=Storage(url).optuna)
    return Counter(trial.user_attrs["index"] for trial in study.trials if has_outcome(trial))


# ------------------------------------------------------------------------------------ one of many


def test_no_point_goes_to_two_and_each_learns_from_both(url, join):
    one, other = join(url), join(url)
    given = []
    for turn in range(len(LEGAL)):
        search = (one, other)[turn % 2]
        index = search.ask()
        search.tell(index, TIMES[index], "measured")
        given.append(index)
    assert sorted(given) == list(range(len(LEGAL)))
    assert one.ask() is None
    assert other.ask() is None
    best = min(range(len(LEGAL)), key=TIMES.__getitem__)
    assert one.best == other.best == (best, pytest.approx(TIMES[best]))
    assert one.outcomes() == other.outcomes()
    assert Counter(trial.user_attrs["process"] for trial in study_of(one).trials) == {
        one.process: 6,
        other.process: 6,
    }
    assert one.asked == other.asked == 6


def test_a_trial_says_what_it_is(url, join):
    search = join(url)
    index = search.ask()
    search.tell(index, None, "crash", "it " + 1000 * "x")
    index = search.ask()
    search.tell(index, 2.5, "measured")
    first, second = study_of(search).trials
    assert first.state.name == "FAIL"
    assert first.user_attrs["outcome"] == "crash"
    assert len(first.user_attrs["why"]) == 500
    assert second.value == 2.5
    assert second.user_attrs == {"index": index, "process": search.process, "outcome": "measured"}
    assert [first.params, second.params] == [dict(LEGAL.config(0)), dict(LEGAL.config(1))]
    assert second.datetime_complete >= second.datetime_start


def test_it_goes_on_where_others_stopped(url, join):
    with join(url) as search:
        for _ in range(5):
            index = search.ask()
            search.tell(index, TIMES[index], "measured")
        left = search.ask()  # given back when it closes
    later = join(url)
    assert set(later.outcomes()) == {0, 1, 2, 3, 4}
    assert later.best[1] == pytest.approx(min(TIMES[:5]))
    assert later.ask() == left == 5
    assert [trial.user_attrs.get("left") for trial in study_of(later).trials[5:]] == ["abandoned", None]


def test_while_others_have_the_rest_it_waits(url, join):
    one, other = join(url), join(url)
    given = [one.ask() for _ in range(len(LEGAL) - 1)]
    last = other.ask()
    assert sorted([*given, last]) == list(range(len(LEGAL)))
    assert other.ask() == WAIT
    for index in given:
        one.tell(index, TIMES[index], "measured")
    assert one.ask() == WAIT
    assert other.ask() is None  # what is left is with the caller
    other.tell(last, None, "timeout", "never ended")
    assert one.ask() is None
    assert len(one.outcomes()) == len(LEGAL)


def test_the_points_of_a_dead_process_return(url, join):
    dead, alive = join(url), join(url, patience=3)
    lost = [dead.ask(), dead.ask()]
    dead.tell(lost[0], 1.0, "measured")
    die(dead)
    given = []
    while (index := alive.ask()) is not None:
        if index != WAIT:
            given.append(index)
            alive.tell(index, TIMES[index], "measured")
    assert sorted([lost[0], *given]) == list(range(len(LEGAL)))
    by = {
        trial.user_attrs["index"]: trial.user_attrs["process"]
        for trial in filter(has_outcome, study_of(alive).trials)
    }
    assert by == {index: dead.process if index == lost[0] else alive.process for index in range(len(LEGAL))}


def test_one_that_was_taken_for_dead_does_not_store_twice(url, join):
    asleep, alive = join(url), join(url, patience=3)
    index = asleep.ask()
    die(asleep)
    until(lambda: alive.ask() == index)
    asleep.tell(index, 9.0, "measured")
    alive.tell(index, 3.0, "measured")
    asleep.ask()
    assert outcomes_of(url, alive._shared.name)[index] == 1
    assert asleep.outcomes()[index].median_ms == alive.outcomes()[index].median_ms == 3.0


def test_one_that_was_taken_for_dead_stores_what_nobody_else_took(url, join):
    asleep, alive = join(url), join(url, patience=3)
    index = asleep.ask()
    die(asleep)
    until(lambda: asleep.process in alive._pulse.dead)
    alive._refresh()  # ends the trial of the other
    asleep.tell(index, 9.0, "measured")
    alive._refresh()
    assert alive.outcomes()[index].median_ms == 9.0
    states = [trial.state.name for trial in study_of(alive).trials]
    assert states == ["FAIL", "COMPLETE"]


def test_a_process_that_beats_is_never_taken_for_dead(journal, join):
    one, other = join(journal), join(journal, patience=10)
    index = one.ask()
    time.sleep(1.5)  # 30 beats
    assert other.ask() != index
    assert not other._pulse.dead


def test_own_beats_are_the_clock(journal, join):
    asleep, alive = join(journal, beat_s=3600, patience=3), join(journal)
    asleep._pulse.beat()
    time.sleep(0.5)
    asleep._pulse.beat()  # wakes up long after its last look
    assert not asleep._pulse.dead
    die(alive)
    beats = 0
    while not asleep._pulse.dead:
        asleep._pulse.beat()
        beats += 1
    assert beats in (3, 4)  # the last one alive may have been after our last
    assert asleep._pulse.dead == {alive.process}


@pytest.mark.parametrize("patience", [1, 3, PATIENCE])
def test_a_process_is_dead_after_exactly_so_many_beats_without_a_sign_of_life(journal, join, patience):
    study = join(journal)._shared
    watching, watched = Pulse(study, "watching", 3600, patience), Pulse(study, "watched", 3600, patience)

    def beats_until_dead() -> int:
        for beats in range(1, patience + 3):
            watching.beat()
            if "watched" in watching.dead:
                return beats
        return 0

    watched.beat()
    watching.beat()
    assert beats_until_dead() == patience
    watching.heard("watched")  # it began a trial
    watching.beat()
    assert "watched" not in watching.dead
    assert beats_until_dead() == patience
    watched.beat()
    watching.beat()
    assert "watched" not in watching.dead
    assert beats_until_dead() == patience


def test_a_process_may_be_silent_for_half_a_minute():
    """With 1.6 s, two of 30 runs on a machine with a load of 10 took a living process for dead."""
    assert BEAT_S * PATIENCE == 30


def test_a_trial_that_was_abandoned_while_it_ended_is_not_stored(journal, join, monkeypatch):
    slow, other = join(journal), join(journal)
    index = slow.ask()
    trials, number = slow._shared._trials, slow._given[index]
    other._sync()
    ended = trials._storage.set_trial_state_values

    def late(*words):
        other._leave(number, "abandoned")
        return ended(*words)

    monkeypatch.setattr(trials._storage, "set_trial_state_values", late)
    slow._pulse.stop()
    assert not trials.finish(number, None, {}, {"outcome": "crash"})


def test_outcomes_known_before_are_taken_over(url, join):
    one, other = join(url), join(url)
    theirs = other.ask()
    known = {theirs: 1.5, 4: 2.5, 7: None}
    for index, ms in known.items():  # what a pipeline recalls from its own log
        one.take(index)
        one.tell(index, ms, "measured" if ms else "crash")
    assert one.asked == 3
    other.tell(theirs, 1.0, "measured")
    assert outcomes_of(url, one._shared.name) == {theirs: 1, 4: 1, 7: 1}
    given = {other.ask() for _ in range(len(LEGAL) - 3)}
    assert given == set(range(len(LEGAL))) - set(known)
    with pytest.raises(ValueError, match="not under way"):
        one.tell(4, 2.5)


def test_a_creation_whose_answer_was_lost_counts_once(url, join):
    search, other = join(url), join(url)
    trials = search._shared._trials
    create = trials.create

    def twice(parameters, attributes):
        create(parameters, attributes)
        trials.create = create
        raise OSError("the connection broke before the answer came")

    trials.create = twice
    index = search.ask()
    search.tell(index, 2.0, "measured")
    assert other.ask() != index
    lefts = [trial.user_attrs.get("left") for trial in study_of(search).trials]
    assert lefts[:2] == [None, "duplicate"]
    assert outcomes_of(url, search._shared.name) == {index: 1}


@pytest.mark.parametrize("strategy", ["tpe", "random"])
def test_processes_do_not_all_want_the_same(journal, join, strategy):
    legal, times = share.sweep(400)
    one, other = join(journal, legal, strategy=strategy), join(journal, legal, strategy=strategy)
    for _ in range(20):
        for search in (one, other):
            index = search.ask()
            search.tell(index, times[index], "measured")
    lefts = [trial for trial in study_of(one).trials if "left" in trial.user_attrs]
    assert not lefts


# ------------------------------------------------------------------------------------ identity


def test_only_one_kind_of_gpu_shares_a_study(journal, join):
    mig = dataclasses.replace(H200, mig="1g.18gb", sm_count=16)
    others = [
        dataclasses.replace(share.HEADER, device=mig),
        dataclasses.replace(share.HEADER, nvrtc="12.9"),
        dataclasses.replace(share.HEADER, template_digest="d" * 64),
    ]
    ours = join(journal)
    searches = [join(journal, header=header) for header in others]
    assert [search.ask() for search in searches] == [0, 0, 0]
    assert ours.ask() == 0
    another_driver = dataclasses.replace(share.HEADER, driver="999.1")
    assert join(journal, header=another_driver).ask() == 1
    assert join(journal, legal=share.sweep(11)[0]).ask() == 0  # another list: an index means something else


def test_a_named_study_of_another_gpu_is_one_clear_error(journal, join):
    join(journal, name="mine")
    a100 = dataclasses.replace(share.HEADER, device=RecordedDevice.of(named_device("a100")))
    with pytest.raises(
        UsageError, match=r"study 'mine_sgemm' .* device name is NVIDIA H200 there and NVIDIA A100"
    ):
        join(journal, name="mine", header=a100)
    join(journal, name="mine")


def test_a_study_of_somebody_else_is_left_alone(journal, join, monkeypatch):
    monkeypatch.setattr("autotune.sharing.identity.WAIT_S", 0.1)
    theirs = optuna.create_study(study_name="mine_sgemm", storage=Storage(journal).optuna)
    theirs.add_trial(optuna.trial.create_trial(value=1.0))
    with pytest.raises(UsageError, match="was not made by autotune"):
        join(journal, name="mine")
    assert not optuna.load_study(study_name="mine_sgemm", storage=Storage(journal).optuna).user_attrs


def test_a_study_whose_creator_died_at_once_is_adopted(journal, join, monkeypatch):
    monkeypatch.setattr("autotune.sharing.identity.WAIT_S", 0.1)
    optuna.create_study(study_name="mine_sgemm", storage=Storage(journal).optuna)
    assert join(journal, name="mine").ask() == 0


# ------------------------------------------------------------------------------------ strange rows


ENDED = {"outcome": "measured", "process": "elsewhere:1:abc"}


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("-inf"), float("nan")])
def test_a_time_that_is_none_is_measured_again(url, join, value):
    search = join(url)
    storage, study_id = search._shared._storage, search._shared._id
    template = optuna.trial.create_trial(
        state=optuna.trial.TrialState.RUNNING, user_attrs={**ENDED, "index": 3}
    )
    storage.set_trial_state_values(
        storage.create_new_trial(study_id, template), optuna.trial.TrialState.COMPLETE, [value]
    )
    given = []
    while (index := search.ask()) is not None:
        given.append(index)
        search.tell(index, TIMES[index], "measured")
    assert sorted(given) == list(range(len(LEGAL)))
    assert search.outcomes()[3].median_ms == TIMES[3]
    assert search.best[1] == pytest.approx(min(TIMES))


@pytest.mark.parametrize(
    "attributes",
    [
        {"index": True},
        {"index": False},
        {"index": 1.0},
        {"index": "1"},
        {"index": None},
        {"index": [1]},
        {"index": -1},
        {"index": len(LEGAL)},
        {"index": 10**30},
        {},
        {"index": 1, "outcome": "won"},
        {"index": 1, "outcome": ["crash"]},
        {"index": 1, "outcome": {"a": 1}},
        {"index": 1, "outcome": "measured"},
    ],
)
@pytest.mark.parametrize("state", ["RUNNING", "FAIL", "WAITING", "PRUNED"])
def test_a_row_that_nobody_understands_costs_no_point(journal, join, attributes, state):
    search = join(journal, patience=3)
    template = optuna.trial.create_trial(
        state=optuna.trial.TrialState[state], user_attrs={"process": "elsewhere:1:abc", **attributes}
    )
    search._shared._storage.create_new_trial(search._shared._id, template)
    given = []
    while (index := search.ask()) is not None:
        if index != WAIT:
            given.append(index)
            search.tell(index, TIMES[index], "measured")
    assert sorted(given) == list(range(len(LEGAL)))


def test_a_process_that_never_beat_is_dead_all_the_same(url, join):
    search = join(url, patience=3)
    template = optuna.trial.create_trial(
        state=optuna.trial.TrialState.RUNNING, user_attrs={"process": "elsewhere:1:abc", "index": 5}
    )
    search._shared._storage.create_new_trial(search._shared._id, template)
    until(lambda: (search._refresh(), "elsewhere:1:abc" in search._pulse.dead)[1])
    assert {search.ask() for _ in LEGAL.ordinals} == set(range(len(LEGAL)))


def test_what_another_wrote_is_safe_to_print(url, join):
    search, other = join(url), join(url)
    index = other.ask()
    other._shared.finish(other._given[index], None, {}, {"outcome": "crash", "why": "\x1b[2J" + 5000 * "x"})
    search._refresh()
    why = search.outcomes()[index].why
    assert why.isprintable()
    assert len(why) == 500


def test_an_attribute_that_is_not_json_costs_no_point(url_of, join):
    import sqlalchemy

    search = join(url_of("sqlite"))
    index = search.ask()
    with search._shared._storage.engine.begin() as connection:
        connection.execute(sqlalchemy.text("UPDATE trial_user_attributes SET value_json = '{'"))
    assert join(f"sqlite:///{search._shared._storage.engine.url.database}").ask() == index


def test_no_password_reaches_the_study_or_a_note(url_of, join, request):
    plain, secret = url_of("postgresql"), "hunter2secret"
    login, server = plain.replace("postgres@", f"postgres:{secret}@"), request.getfixturevalue("server")
    searches = [join(login), join(f"{plain}?password={secret}")]
    for search in searches:
        search.tell(search.ask(), 1.0, "measured")
    study = study_of(searches[0])
    assert secret not in repr((study.user_attrs, study.study_name))
    assert secret not in repr([trial.__dict__ for trial in study.trials])
    server.stop()
    try:
        for search in searches:
            search.ask()
    finally:
        server.start()
    assert len(join.said) == 2
    assert secret not in repr(join.said)


# ------------------------------------------------------------------------------------ Optuna's tools


def test_optunas_tools_read_the_study(url, join):
    legal, times = share.sweep(25)
    search = join(url, legal, strategy="random")
    while (index := search.ask()) is not None:
        search.tell(index, None if index % 7 == 6 else times[index], "" if index % 7 else "measured")
    study = optuna.load_study(study_name=search._shared.name, storage=Storage(url).optuna)
    assert study.best_value == pytest.approx(search.best[1])
    assert study.best_params == dict(legal.config(search.best[0]))
    importance = optuna.importance.get_param_importances(study)
    assert sum(importance.values()) == pytest.approx(1.0)


# ------------------------------------------------------------------------------------ bad storages


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("postgresql://me:secret@127.0.0.1:{port}/x", r"me:\*\*\*@127.* refused"),
        ("sqlite:////{folder}/no/such/a.db", "there is no folder /.*/no/such"),
        ("sqlite:///{folder}/text.log", "file is not a database"),
        ("sqlite://", "in memory cannot be shared"),
        ("mysql://host/x", "mysql is not supported"),
        ("what is this", "it is not a URL"),
        ("journal:{folder}/no/such/a.log", "No such file"),
        ("{folder}/text.log", "no journal of Optuna"),
        ("{folder}/torn.log", "damaged"),
        ("journal:{folder}", "Is a directory"),
        ("journal:{folder}/fifo", "not seekable"),
        ("journal:/dev/zero", "no journal of Optuna"),
        ("journal:~nobody-here/a.log", "No such file"),
        ("sqlite:///{folder}/fifo", "storage sqlite"),
    ],
)
def test_a_storage_that_cannot_be_used_is_one_clear_line(url, why, tmp_path):
    (tmp_path / "text.log").write_text("my notes\nthey stay\n")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "torn.log").write_text('{"op_code": 0, "study\n{}\n')
    with pytest.raises(UsageError, match=why) as caught:
        Storage(url.format(folder=tmp_path, port=closed_port()))
    told = str(caught.value)
    assert "\n" not in told
    assert "secret" not in told
    assert told.startswith("storage ")
    assert told.endswith("journal:file")
    assert caught.value.exit_code == 2
    assert (tmp_path / "text.log").read_text() == "my notes\nthey stay\n"


def test_a_missing_driver_names_what_to_install():
    program = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from autotune.sharing import Storage\n"
        "Storage('postgresql://me:secret@127.0.0.1/x')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert "needs the Python package psycopg: " + install_command("postgres") in last
    assert "secret" not in last


@pytest.mark.parametrize("kind", ["journal", "postgresql"])
def test_a_storage_that_goes_away_costs_nothing(kind, url_of, join, request, tmp_path):
    url = url_of(kind)
    search = join(url)
    first = search.ask()
    if kind == "postgresql":
        server = request.getfixturevalue("server")
        leave, come_back = server.stop, server.start
    else:
        file, away = Path(url.removeprefix("journal:")), tmp_path / "away"
        leave, come_back = lambda: file.rename(away), lambda: away.rename(file)
    leave()
    try:
        search.tell(first, TIMES[first], "measured")
        second, third = search.ask(), search.ask()
        search.tell(second, TIMES[second], "measured")
        assert len({first, second, third}) == 3
        (lost,) = join.said  # once
        assert "is lost" in lost
        assert "\n" not in lost
    finally:
        come_back()
    until(search._reached)
    other = join(url)
    assert set(other.outcomes()) == {first, second}
    assert other.ask() not in {first, second, third}
    search.tell(third, TIMES[third], "measured")
    assert outcomes_of(url, search._shared.name) == {first: 1, second: 1, third: 1}
    assert "is back" in join.said[1]
    assert len(join.said) == 2


def test_a_storage_that_stays_away_ends_the_search_all_the_same(journal, join):
    search = join(journal)
    first = search.ask()
    Path(journal.removeprefix("journal:")).unlink()
    search.tell(first, 1.0, "measured")
    given = []
    while (index := search.ask()) is not None:
        search.tell(index, TIMES[index], "measured")
        given.append(index)
    assert sorted([first, *given]) == list(range(len(LEGAL)))
    assert len(search.outcomes()) == len(LEGAL)
    search.close()
    assert [line.split("(")[0].partition(" ")[0] for line in join.said] == ["storage", "12"]
    assert not Path(journal.removeprefix("journal:")).exists()


def test_a_deleted_study_is_a_lost_one(url, join):
    search = join(url)
    first = search.ask()
    optuna.delete_study(study_name=search._shared.name, storage=Storage(url).optuna)
    search.tell(first, 1.0, "measured")
    assert search.ask() not in (None, first)
    assert "was deleted" in join.said[0]


def test_a_line_that_a_killed_writer_left_is_cut_off(journal, join):
    search = join(journal)
    search.tell(search.ask(), 1.0, "measured")
    path = Path(journal.removeprefix("journal:"))
    die(search)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"op_code":4,"worker' + 6000 * b"x")
    assert search.ask() == 1
    assert join(journal).ask() == 2
    lines = path.read_bytes().splitlines()
    assert path.read_bytes().startswith(whole)
    assert all(json.loads(line) for line in lines)
    Storage(journal)


def test_a_lock_that_a_killed_writer_left_is_taken_away(journal, join, monkeypatch):
    monkeypatch.setattr("autotune.sharing.journal.STALE_S", 0.3)
    search = join(journal, beat_s=3600)
    os.symlink("nobody", journal.removeprefix("journal:") + ".lock")
    began = time.monotonic()
    assert search.ask() == 0
    assert time.monotonic() - began >= 0.3
    search.close()
    assert [path.name for path in Path(journal.removeprefix("journal:")).parent.iterdir()] == ["a.log"]


def test_a_lock_that_was_taken_away_is_not_given_back(tmp_path):
    path = tmp_path / "a.log"
    path.touch()
    slow, quick = Lock(path), Lock(path)
    slow.acquire()
    os.unlink(f"{path}.lock")
    quick.acquire()
    slow.release()
    assert os.path.islink(f"{path}.lock")
    slow._take_away((0, 0))  # found to be another's in the last moment
    assert os.path.islink(f"{path}.lock")
    quick.release()
    assert list(tmp_path.iterdir()) == [path]


def test_optunas_own_lock_and_ours_keep_each_other_out(tmp_path):
    path = tmp_path / "a.log"
    path.touch()
    ours, theirs = Lock(path), JournalFileSymlinkLock(str(path))
    for one, other in ((ours, theirs), (theirs, ours)):
        one.acquire()
        waiting = threading.Thread(target=other.acquire)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        one.release()
        waiting.join(5)
        assert not waiting.is_alive()
        other.release()


# ------------------------------------------------------------------------------------ many processes


def launch(url: str, folder: Path, *words: object) -> subprocess.Popen[str]:
    command = [sys.executable, share.__file__, url, str(folder), *map(str, words)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize("kind", KINDS)
def test_many_processes_that_want_the_same_points_measure_each_once(kind, url_of, tmp_path):
    url, (legal, _) = url_of(kind, fresh=True), share.sweep(16)
    launched = launch(url, tmp_path, 5, len(legal), 0, "exhaustive")
    told = launched.communicate(timeout=120)[0].splitlines()
    assert json.loads(told[1]) == 5 * [0]
    began, ended = share.read(tmp_path)
    assert sorted(began) == sorted(ended) == list(range(len(legal)))
    (name,) = optuna.get_all_study_names(Storage(url).optuna)
    assert outcomes_of(url, name) == dict.fromkeys(range(len(legal)), 1)


@pytest.mark.parametrize("kind", ["journal", "postgresql"])
def test_two_of_four_are_killed_and_nothing_is_lost_or_measured_twice(kind, url_of, tmp_path):
    url, count = url_of(kind), 80
    launched = launch(url, tmp_path, 4, count, 0.02, "random")
    children = json.loads(launched.stdout.readline())
    until(lambda: len(share.read(tmp_path)[1]) > count / 4, 60)
    for child in children[:2]:
        os.kill(child, signal.SIGKILL)
    told = launched.communicate(timeout=120)[0].splitlines()
    assert json.loads(told[0]) == [-9, -9, 0, 0]
    began, ended = share.read(tmp_path)
    (name,) = optuna.get_all_study_names(Storage(url).optuna)
    study = optuna.load_study(study_name=name, storage=Storage(url).optuna)
    stored = {trial.user_attrs["index"]: trial for trial in study.trials if has_outcome(trial)}
    assert outcomes_of(url, name) == dict.fromkeys(range(count), 1)  # all, none twice
    assert set(ended) <= set(stored)  # nothing told was lost
    assert len(began) <= count + 2  # what the killed had under way was begun again, nothing else
    _, times = share.sweep(count)
    for index, trial in stored.items():
        assert trial.value == (None if index % 7 == 6 else pytest.approx(times[index]))
    lefts = Counter(trial.user_attrs.get("left") for trial in study.trials)
    assert lefts["abandoned"] <= 2
    assert np.isclose(study.best_value, min(t for i, t in enumerate(times) if i % 7 != 6))


# ------------------------------------------------------------------------------------ cost


def test_an_ask_takes_few_statements_however_many_trials_there_are(url_of, join):
    import sqlalchemy

    legal, times = share.sweep(60)
    search = join(url_of("sqlite"), legal, strategy="random", beat_s=3600)
    statements: list[str] = []
    sqlalchemy.event.listen(
        search._shared._storage.engine, "after_cursor_execute", lambda *words: statements.append(words[2])
    )
    for _ in range(30):
        index = search.ask()
        search.tell(index, times[index], "measured")
    statements.clear()
    index = search.ask()
    assert len(statements) <= 12
    statements.clear()
    search.tell(index, times[index], "measured")
    assert len(statements) <= 6
