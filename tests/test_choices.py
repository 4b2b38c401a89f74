from __future__ import annotations

import dataclasses
import json
import math
import warnings
from pathlib import Path

import pytest
from made_records import H200, SGEMM, fitted, made, made_estimate

from autotune import records
from autotune.errors import RecordError, SpaceError, UsageError
from autotune.kernel.choices import Choices
from autotune.records import Store
from autotune.search.candidates import Candidates
from autotune.space.space import Space
from autotune.tuning.prediction import distance
from autotune.values import jsontext, typed
from autotune.values.device import named_device
from autotune.values.problem import Problem

PROBLEM = Problem(200, 136, 72)  # there is no record of it in cache/
A100, H100 = named_device("a100"), named_device("h100sxm")


def choices(root, problem=PROBLEM, device=H200, spaces=(SGEMM,)):
    return Choices(problem, device, Store(root), spaces=spaces)


def first(root, **words):
    return next(choices(root, **words).all())


# --- the order ---


def test_what_takes_its_time_begins_before_anything_is_predicted_anew(tmp_path):
    begun = []

    def served(problem):
        choices = Choices(problem, H200, Store(tmp_path), begin=lambda: begun.append(problem))
        return next(choices.all()).served

    assert served(PROBLEM) == "predicted"
    assert served(PROBLEM) == "predicted"  # kept
    assert begun == [PROBLEM]
    other = Problem(96, 96, 96)
    Store(tmp_path).write(made(other))
    assert served(other) == "exact"
    assert begun == [PROBLEM]


def test_the_record_of_this_problem_goes_first(tmp_path):
    record = made(PROBLEM)
    Store(tmp_path).write(record)
    Store(tmp_path).write(made(Problem(200, 136, 80)))
    choice = first(tmp_path)
    assert (choice.served, choice.record, dict(choice.config)) == ("exact", record, dict(record.config))
    assert choice.source.code_digest == record.code_digest
    assert choice.source.problem == PROBLEM


def test_the_fastest_of_several_families_serves(tmp_path):
    other = Space.load("shared_tile")
    Store(tmp_path).write(made(PROBLEM, ms=2.0))
    Store(tmp_path).write(made(PROBLEM, ms=1.0, space=other, preset="shared_tile"))
    found = list(choices(tmp_path, spaces=(SGEMM, other)).exact())
    assert [choice.space.family for choice in found] == ["shared_tile", "sgemm"]


def test_finalists_follow_the_winner(tmp_path):
    others = [fitted(PROBLEM, preset) for preset in ("small_block", "middle_block")]
    Store(tmp_path).write(made(PROBLEM, others=others))
    found = list(choices(tmp_path).exact())
    assert [choice.config for choice in found] == [fitted(PROBLEM), *others]
    assert [choice.place.partition(" of ")[0] for choice in found] == ["the record", *["a finalist"] * 2]


def test_then_what_the_model_expects_to_be_fastest(tmp_path):
    found = list(choices(tmp_path, spaces=None).all())
    assert {choice.served for choice in found} == {"predicted"}
    assert found[0].source.problem == PROBLEM
    assert not found[0].space.violations(found[0].config, PROBLEM, H200)
    expected = [point.config for point, _ in choices(tmp_path, spaces=None).prediction.points]
    assert [choice.config for choice in found[: len(expected)]] == expected


def test_of_the_predicted_points_a_stored_winner_is_named(tmp_path):
    best = choices(tmp_path).prediction.points[0][0].config
    record = made(Problem(200, 136, 80), config=SGEMM.fitted(best, Problem(200, 136, 80), H200))
    Store(tmp_path).write(record)
    choice = first(tmp_path)
    if record.config == choice.config:
        assert choice.record == record
        assert choice.place == "the record of 200 x 136 x 80 nn on NVIDIA H200"
    else:
        assert choice.record is None


def test_a_record_of_another_device_is_never_exact(tmp_path):
    Store(tmp_path).write(made(PROBLEM, device=A100))
    Store(tmp_path).write(made(PROBLEM, device=H100))  # with as many multiprocessors as an H200
    assert list(choices(tmp_path).exact()) == []


def test_a_gpu_that_was_not_learned_says_so(tmp_path):
    choice = first(tmp_path, device=named_device("t4"))
    assert (choice.served, choice.record) == ("predicted", None)
    assert choice.note.startswith("nothing was learned of Tesla T4")
    assert choice.config["loader"] == "reg"  # a T4 has no cp.async
    assert not SGEMM.violations(choice.config, PROBLEM, named_device("t4"))
    assert first(tmp_path).note == ""


def test_presets_come_last_and_first_where_there_is_no_model(tmp_path):
    asked = choices(tmp_path)
    assert len(list(asked.all())) > len(asked.prediction.points)
    small = Space.load("shared_tile")
    assert first(tmp_path, spaces=(small,)).place == "a preset of shared_tile"


@pytest.mark.parametrize("layout", ["nn", "tt"])
@pytest.mark.parametrize("size", [(1, 1, 1), (1, 5000, 3), (7, 1, 300), (33, 65, 1), (2**20, 8, 8)])
def test_something_always_answers(tmp_path, size, layout):
    for target in ("h200", "t4", "rtx4090"):
        problem, device = Problem(*size, layout, 1), named_device(target)
        choice = next(Choices(problem, device, Store(tmp_path)).all())
        assert not choice.space.violations(choice.config, problem, device)


def test_no_config_comes_twice(tmp_path):
    for k in (64, 80, 96):
        Store(tmp_path).write(made(Problem(200, 136, k)))
    found = [(choice.space.family, choice.config) for choice in choices(tmp_path).all()]
    assert len(found) == len(set(found))


def test_no_family_is_one_clear_error(tmp_path):
    with pytest.raises(UsageError, match="no kernel family computes 200 x 136 x 72 nn on NVIDIA H200"):
        list(choices(tmp_path, spaces=()).all())


def test_a_family_that_has_nothing_to_begin_with_is_told_how_to_get_it(tmp_path):
    (tmp_path / "bare.cu.jinja").touch()
    (tmp_path / "bare.toml").write_text(
        'family = "bare"\nsummary = ""\n[parameters]\nx = { values = [1], meaning = "" }\n'
        '[launch]\ngrid = "1"\nblock = "1"\nshared_bytes = "0"\n'
    )
    bare = Space.load(tmp_path / "bare.toml")
    with pytest.raises(UsageError, match=r"no record of .*, and bare has no preset: run 'autotune tune "):
        list(choices(tmp_path, spaces=(bare,)).all())


def narrowed(tmp_path, text):
    (tmp_path / "my.toml").write_text(f'extends = "sgemm"\n[parameters]\n{text}\n')
    return Space.load(tmp_path / "my.toml")


def test_a_space_in_which_nothing_is_legal_says_so_and_serves_no_preset_of_what_it_extends(tmp_path):
    space = narrowed(tmp_path, 'stages = [4]\nloader = ["reg"]')
    with pytest.raises(SpaceError, match=r"my\.toml: no config is legal for 200 x 136 x 72") as told:
        list(choices(tmp_path, spaces=(space,)).all())
    with pytest.raises(SpaceError) as searched:
        Candidates([space], PROBLEM, H200)
    assert str(told.value) == str(searched.value)
    record = made(PROBLEM)
    Store(tmp_path).write(record)  # was measured, whatever is searched now
    assert next(choices(tmp_path, spaces=(space,)).all()).record == record


def test_what_is_predicted_is_of_the_space_even_if_none_of_its_tiles_was_learned(tmp_path):
    space = narrowed(tmp_path, "BM = [192]\nBN = [48]")
    predicted = [each for each in choices(tmp_path, spaces=(space,)).all() if each.point]
    assert predicted
    assert {(each.config["BM"], each.config["BN"]) for each in predicted} == {(192, 48)}


def test_distance_is_symmetric_and_counts_each_extent():
    one, other = Problem(100, 100, 100), Problem(200, 50, 100)
    assert distance(one, other) == distance(other, one) == pytest.approx(2 * math.log(2))
    assert distance(one, one) == 0
    assert 0 < distance(one, Problem(100, 100, 100, beta=1)) < distance(one, Problem(100, 100, 100, "tn"))


# --- what never serves ---


def test_estimates_never_serve(tmp_path):
    Store(tmp_path).write(made_estimate(PROBLEM))
    assert list(choices(tmp_path).exact()) == []
    assert all(
        choice.record is None or choice.record.evidence == "measured" for choice in choices(tmp_path).all()
    )
    assert "there is an estimated one, which is never served" in choices(tmp_path).missing()


def test_a_stale_record_never_serves_as_exact(tmp_path):
    Store(tmp_path).write(made(PROBLEM, code_digest="0" * 64))
    assert list(choices(tmp_path).exact()) == []
    assert "the record is stale" in choices(tmp_path).missing()


def test_a_record_under_another_name_never_serves(tmp_path):
    path = Store(tmp_path).write(made(Problem(200, 136, 80)))
    wrong = Store(tmp_path).path(H200, "sgemm", PROBLEM)
    path.rename(wrong)
    with pytest.warns(UserWarning, match="its content belongs in"):
        found = list(choices(tmp_path).all())
    assert all(choice.record is None or choice.record.problem != Problem(200, 136, 80) for choice in found)


def test_a_newer_record_is_left_alone_and_passed_over(tmp_path):
    path = Store(tmp_path).write(made(PROBLEM))
    path.write_text('{"schema": 999}')
    assert first(tmp_path).served == "predicted"
    assert "schema 999 is newer" in choices(tmp_path).missing()
    assert path.read_text() == '{"schema": 999}'


# --- the package's own records ---


def test_the_users_own_records_lie_above_those_of_the_package(tmp_path):
    problem = Problem(1024, 1024, 1024)
    shipped = first(tmp_path, problem=problem)
    assert (shipped.served, shipped.record.device.name) == ("exact", "NVIDIA H200")
    slower = made(problem, ms=50.0)
    Store(tmp_path).write(slower)
    assert [choice.record for choice in choices(tmp_path, problem=problem).exact()][:2] == [
        slower,
        shipped.record,
    ]


# --- files that were cut or edited ---

# Without runners-up, so that the file is short: every byte of it is tried.
RECORD = made(PROBLEM)
RECORD = dataclasses.replace(RECORD, runners_up=())


def served(root: Path) -> list[object]:
    """What serves exactly; every failure other than a clear one is an error of this test."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = list(choices(root).exact())
    for warning in caught:
        message = str(warning.message)
        assert message.startswith(f"record ignored: {root}")
        assert "sgemm_f32_nn_m200_n136_k72_beta0_ffma.json: " in message
        assert "\n" not in message
    for choice in found:  # whatever serves is the kernel of its config, for this problem
        assert choice.source.problem == PROBLEM
        assert choice.source.code_digest == choice.record.code_digest
        assert vars(choice.source.launch) == vars(choice.record.launch)
    return found


def test_a_record_cut_at_every_byte_never_serves(tmp_path):
    path = Store(tmp_path).path(H200, "sgemm", PROBLEM)
    path.parent.mkdir()
    text = jsontext.compact(typed.plain(RECORD))
    path.write_text(text)
    assert len(served(tmp_path)) == 1
    for length in range(len(text)):
        path.write_text(text[:length])
        assert served(tmp_path) == [], length
        assert path.read_text() == text[:length]


def _paths(value, at=()):
    if at:
        yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _paths(item, (*at, key))


@pytest.mark.parametrize("wrong", [None, True, -7, 7, 1.5, "x", [], {}], ids=repr)
def test_a_record_with_any_field_of_another_value_never_serves_a_wrong_kernel(tmp_path, wrong):
    path = Store(tmp_path).path(H200, "sgemm", PROBLEM)
    path.parent.mkdir()
    plain = typed.plain(RECORD)
    identity = {"problem", "config", "launch", "code_digest", "family", "schema"}
    for at in _paths(plain):
        changed = json.loads(json.dumps(plain))
        inner = changed
        for key in at[:-1]:
            inner = inner[key]
        if inner[at[-1]] == wrong and type(inner[at[-1]]) is type(wrong):
            continue
        inner[at[-1]] = wrong
        path.write_text(json.dumps(changed))
        found = served(tmp_path)
        if at[0] in identity:
            assert found == [], at  # another kernel, or another problem


def test_a_broken_near_record_is_passed_over_and_the_next_serves(tmp_path):
    path = Store(tmp_path).write(made(Problem(200, 136, 80)))
    path.write_text(path.read_text()[:500])
    with pytest.warns(UserWarning, match=r"record ignored: .*k80_.*\.json: not JSON"):
        assert first(tmp_path).served == "predicted"


def test_files_of_any_content_are_one_line_each(tmp_path):
    path = Store(tmp_path).path(H200, "sgemm", PROBLEM)
    path.parent.mkdir()
    for content in (
        b"",
        b"\0" * 100,
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"null",
        b"NaN",
        b"[" * 100_000,
        b'{"schema": 2}',
    ):
        path.write_bytes(content)
        with pytest.raises(RecordError) as caught:
            records.read(path)
        assert "\n" not in str(caught.value)
        assert served(tmp_path) == []
