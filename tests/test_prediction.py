from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from made_records import H200, SGEMM, made

from autotune.errors import RecordError, SpaceError, UsageError
from autotune.families import family_of
from autotune.families.estimate import estimate_columns
from autotune.model.correction import Correction
from autotune.paths import data_dir
from autotune.records import Store
from autotune.records.files import LEARNED
from autotune.records.learned import holds, read_learned, write_learned
from autotune.search.prediction import predicted
from autotune.space.space import Config, Space, families
from autotune.tuning import prediction as module
from autotune.tuning.held import reads_of
from autotune.tuning.learn import TABLE, Measured, learn, read_table, trials, write_table
from autotune.tuning.prediction import prediction
from autotune.values.device import named_device
from autotune.values.problem import Problem, Strided
from autotune.values.suite import random_shapes

PROBLEM = Problem(200, 136, 72)
SHIPPED = data_dir("cache") / H200.slug / LEARNED


def served(root, problem=PROBLEM, device=H200, spaces=None):
    spaces = families(problem, device) if spaces is None else spaces
    return prediction(problem, device, spaces, Store(root))


# --- the order ---


def test_without_a_correction_it_is_the_order_of_the_estimate():
    points = predicted(SGEMM, PROBLEM, H200, most=50)
    legal = SGEMM.enumerate(PROBLEM, H200)
    times = estimate_columns(SGEMM, SGEMM.columns(legal, PROBLEM, H200), PROBLEM, H200)
    assert [point.ms for point in points] == sorted(times)[:50]
    assert all(point.ms == point.estimate_ms for point in points)


def test_a_correction_changes_the_order():
    plain = predicted(SGEMM, PROBLEM, H200, most=300)
    wide = Correction([["TM", 4, 0.0, -3.0]])
    points = predicted(SGEMM, PROBLEM, H200, correction=wide, most=300)
    assert {point.config for point in points} == {point.config for point in plain}
    assert points[0].config["TM"] > 4
    assert points[0].ms == pytest.approx(points[0].estimate_ms * np.exp(-3.0))


def test_only_points_of_the_given_tiles_are_looked_at():
    tiles = [{"BM": 32, "BN": 64}, {"BM": 64, "BN": 32}, {"BM": 4096, "BN": 1}]  # the last is not searched
    legal = SGEMM.enumerate(PROBLEM, H200, tiles=tiles)
    every = SGEMM.enumerate(PROBLEM, H200)
    configs = [every.config(i) for i in range(len(every))]
    wanted = [config for config in configs if (config["BM"], config["BN"]) in {(32, 64), (64, 32)}]
    assert [legal.config(i) for i in range(len(legal))] == wanted
    assert wanted


def test_no_model_and_nothing_legal_predict_nothing():
    assert predicted(Space.load("naive"), PROBLEM, H200) == []
    assert predicted(SGEMM, PROBLEM, H200, tiles=[{"BM": 4096}]) == []


# --- what serves ---


@pytest.mark.parametrize("problem", [PROBLEM, Problem(17, 3000, 401, "tt", 1), Problem(8, 4096, 4096)])
def test_it_is_legal_deterministic_and_kept(tmp_path, problem, monkeypatch):
    first = served(tmp_path, problem)
    for point, _ in first.points:
        assert not point.space.violations(point.config, problem, H200)
    assert [point.ms for point, _ in first.points] == sorted(point.ms for point, _ in first.points)
    assert served(tmp_path / "other", problem) == first
    monkeypatch.setattr(module, "predicted", None)  # what is kept is not predicted again
    assert served(tmp_path, problem) == first


@pytest.mark.parametrize("layout", ["nn", "nt", "tt"])
def test_of_long_kernels_that_are_alike_the_one_that_reads_least_is_first(tmp_path, layout):
    points = [point for point, _ in served(tmp_path, Problem(4096, 4096, 4096, layout)).points]
    first, *others = points
    best_ms = min(point.ms for point in points)
    assert best_ms > module.LONG_MS
    alike = [point for point in points if point.ms <= module.WITHIN * best_ms]
    assert reads_of(first.config) == min(reads_of(point.config) for point in alike) < 1 / 64 + 1 / 128
    assert [point.ms for point in others] == sorted(point.ms for point in others)


@pytest.mark.parametrize("problem", [Problem(2272, 16, 5280, "tn"), Problem(640, 144, 6704, "nt")])
def test_no_more_than_two_points_are_alike(tmp_path, problem):
    spaces = families(problem, H200)
    points = [point for point, _ in prediction(problem, H200, spaces, Store(tmp_path)).points]
    kinds = Counter(
        (point.space.family, *(point.config.get(n) for n in ("BM", "BN", "BK", "warps_k")))
        for point in points
    )
    assert len(points) == module.MOST
    assert max(kinds.values()) == module.ALIKE
    times = [point.ms for point in points]
    assert times == sorted(times)


def test_strided_and_misaligned_operands_are_predicted_too(tmp_path):
    problem = Strided(200, 136, 72, lda=101, align_b=1)
    config = served(tmp_path, problem).points[0][0].config
    assert config["vec_a"] == config["vec_b"] == 1


def test_what_was_learned_makes_the_first_choice_better_than_the_estimate_does():
    """On the shapes that were measured: not held out, so this only shows that the correction is applied."""
    table = trials(H200, [SGEMM], Store(data_dir("cache")))["sgemm"]
    correction = read_learned(SHIPPED).families["sgemm"].correction
    regrets = {None: [], correction: []}
    for each in table[::8]:
        times = dict(zip(each.configs, each.times, strict=True))
        tiles = [dict(config) for config in each.configs]
        for way in regrets:
            points = predicted(SGEMM, each.problem, H200, correction=way, tiles=tiles, most=1)
            if points:
                regrets[way].append(times[points[0].config] / each.times.min())
    plain, corrected = (np.exp(np.mean(np.log(found))) for found in regrets.values())
    assert len(regrets[None]) >= 15
    assert corrected < plain
    assert corrected < 1.06


def test_a_batch_is_predicted_by_the_blocks_of_all_products(tmp_path):
    one, several = (Problem(256, 256, 256, batch=batch) for batch in (1, 64))
    first, batched = (served(tmp_path, problem).points[0][0] for problem in (one, several))
    assert 15 * first.estimate_ms < batched.estimate_ms < 64 * first.estimate_ms
    values = SGEMM.values(batched.config, one, H200)
    assert (
        values["tiles"]
        < values["tiles_m"] * values["tiles_n"] * 64
        == SGEMM.values(batched.config, several, H200)["all_tiles"]
    )
    assert first.config["BM"] * first.config["BN"] < batched.config["BM"] * batched.config["BN"]
    assert module.distance(one, several) > module.distance(one, Problem(256, 256, 256, batch=2)) > 0


def test_a_stored_winner_is_among_the_candidates(tmp_path):
    mine = SGEMM.presets["tiny_block"]
    shutil.rmtree(tmp_path / "none", ignore_errors=True)
    store = Store(tmp_path)
    store.write(made(Problem(200, 136, 80), config=SGEMM.fitted(mine, Problem(200, 136, 80), H200)))
    near = module._nearest(PROBLEM, H200, [SGEMM], store)
    assert near[0].problem == Problem(200, 136, 80)
    assert len(near) == module.NEAR


def test_a_winner_older_than_a_parameter_is_the_record_of_its_point(tmp_path):
    problem = Problem(1004, 1000, 1000)
    points = prediction(problem, H200, [SGEMM], Store(tmp_path)).points
    store = Store(tmp_path / "own")
    record = made(Problem(1004, 1000, 1001), config=points[0][0].config)
    path = store.write(record)
    value = json.loads(path.read_text())
    assert value["config"].pop("cluster_k") == 1
    path.write_text(json.dumps(value))
    [found] = [
        kept for point, kept in prediction(problem, H200, [SGEMM], store).points if point == points[0][0]
    ]
    assert found is not None
    assert found.problem == record.problem


def test_learned_tiles_of_a_parameter_that_a_space_does_not_have_are_not_looked_at(tmp_path):
    learned = read_learned(SHIPPED)
    family = learned.families["sgemm"]
    tiles = tuple({"another": 1, **tile} for tile in family.tiles)
    families_ = {"sgemm": dataclasses.replace(family, tiles=tiles)}
    write_learned(tmp_path / H200.slug / LEARNED, dataclasses.replace(learned, families=families_))
    assert served(tmp_path).points


def test_another_winner_predicts_anew(tmp_path):
    before = served(tmp_path)
    Store(tmp_path).write(made(Problem(200, 136, 80)))
    kept = len(Store(tmp_path).depot.entries())
    assert served(tmp_path).points[0][0] == before.points[0][0]
    assert len(Store(tmp_path).depot.entries()) == kept + 1


def test_a_gpu_that_was_not_learned_has_the_tiles_and_the_plain_estimate(tmp_path):
    found = served(tmp_path, device=named_device("a100"))
    assert found.note.startswith("nothing was learned of NVIDIA A100")
    assert all(point.ms == point.estimate_ms for point, _ in found.points)
    assert served(tmp_path).note == ""


@pytest.mark.parametrize("name", ["sgemm", "sgemm_skinny"])  # the first and the last that are looked at
def test_a_changed_family_leaves_all_to_the_plain_estimate_in_one_line(tmp_path, monkeypatch, name):
    learned = read_learned(SHIPPED)
    family, space, problem = learned.families[name], Space.load(name), Problem(17, 3000, 401)
    probes = tuple(dataclasses.replace(probe, code_digest="0" * 64) for probe in family.fitted_on.probes)
    tidied = dataclasses.replace(family.fitted_on, template_digest="0" * 64)
    changed = dataclasses.replace(tidied, probes=probes)
    assert holds(tidied, space, H200, Store(tmp_path).depot)  # the code is the same
    assert not holds(changed, space, H200, Store(tmp_path).depot)
    families_ = {**learned.families, name: dataclasses.replace(family, fitted_on=changed)}
    write_learned(tmp_path / H200.slug / LEARNED, dataclasses.replace(learned, families=families_))
    found = served(tmp_path, problem)
    assert found.note.startswith(f"{name} has changed since it was learned")
    assert "\n" not in found.note
    assert all(point.ms == point.estimate_ms for point, _ in found.points)
    monkeypatch.setattr(module, "holds", None)  # what is known of the family is kept for other problems
    assert served(tmp_path, Problem(18, 3000, 401)).note == found.note


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 1}', '{"schema": 99}', "[" * 10_000])
def test_a_broken_file_is_one_line_and_serves_all_the_same(tmp_path, content):
    path = tmp_path / H200.slug / LEARNED
    path.parent.mkdir()
    path.write_text(content)
    found = served(tmp_path)
    assert found.points
    assert str(path) in found.note
    assert "\n" not in found.note


def test_a_feature_that_no_model_has_is_one_line_and_the_plain_estimate(tmp_path):
    learned = read_learned(SHIPPED)
    strange = Correction([["of another version", 1.0, 0.0, 0.5]])
    families_ = {"sgemm": dataclasses.replace(learned.families["sgemm"], correction=strange)}
    write_learned(tmp_path / H200.slug / LEARNED, dataclasses.replace(learned, families=families_))
    found = served(tmp_path)
    assert found.note == (
        "what was learned of sgemm asks for an unknown 'of another version': kernels without a record are "
        "chosen by the static estimate alone; run 'autotune learn' again"
    )
    assert all(point.ms == point.estimate_ms for point, _ in found.points)


# --- the file and the table ---


def test_the_shipped_file_is_of_the_families_as_they_are():
    """Otherwise every kernel without a record is chosen by the plain estimate: run `autotune learn`."""
    learned = read_learned(SHIPPED)
    assert set(learned.families) == {"sgemm", "sgemm_skinny"}
    for name, family in learned.families.items():
        assert holds(family.fitted_on, Space.load(name), H200, Store(data_dir("cache")).depot)
        assert family.fitted_on.corrected.mean < family.fitted_on.estimate.mean


def test_a_file_reads_back_as_it_was_written(tmp_path):
    learned, path = read_learned(SHIPPED), tmp_path / LEARNED
    write_learned(path, learned)
    assert path.read_text() == SHIPPED.read_text()
    again = read_learned(path)
    assert again.families.keys() == learned.families.keys()
    for name, family in learned.families.items():
        assert again.families[name].correction.trees == family.correction.trees
        assert again.families[name].tiles == family.tiles
        assert again.families[name].fitted_on == family.fitted_on


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda family: family.pop("trees"), "trees must be a list"),
        (lambda family: family.update(trees=[["a"]]), "tree 0 is neither a number nor"),
        (lambda family: family["tiles"].update(parameters=["BM"]), "every tile must have 1 values"),
        (lambda family: family["fitted_on"].update(trials=-1), r"\$.families.sgemm.fitted_on.trials"),
    ],
)
def test_a_wrong_file_names_the_place(tmp_path, change, why):
    plain = json.loads(SHIPPED.read_text())
    change(plain["families"]["sgemm"])
    path = tmp_path / LEARNED
    path.write_text(json.dumps(plain))
    with pytest.raises(RecordError, match=why):
        read_learned(path)


def test_the_table_that_was_fitted_on_is_shipped_and_reads_back(tmp_path):
    spaces = [SGEMM, Space.load("sgemm_skinny")]
    found = trials(H200, spaces, Store(data_dir("cache")))
    learned = read_learned(SHIPPED)
    for name, family in learned.families.items():
        assert family.fitted_on.problems == len(found[name])
        assert family.fitted_on.trials == sum(len(each.configs) for each in found[name])
    path = tmp_path / TABLE
    write_table(path, {"sgemm": found["sgemm"][:2]}, spaces)
    digests = {"sgemm": {(SGEMM.digest, found_digest())}}
    rows = list(read_table(path, digests))
    assert len(rows) == sum(len(each.configs) for each in found["sgemm"][:2])
    assert list(read_table(path, {"sgemm": {("0", "0")}})) == []  # of another space
    batch = replace(found["sgemm"][0], problem=Problem(64, 64, 64, "tt", 1, batch=9))
    write_table(path, {"sgemm": [batch]}, spaces)
    assert {problem for _, problem, *_ in read_table(path, digests)} == {batch.problem}


def found_digest():
    from autotune.code.render import template_digest

    return template_digest(SGEMM)


def test_a_broken_table_is_one_line(tmp_path):
    path = tmp_path / TABLE
    path.write_bytes(b"no gzip")
    with pytest.raises(RecordError, match=r"measured\.csv\.gz"):
        list(read_table(path, {}))


# --- learning ---


def test_learning_finds_what_the_estimate_is_blind_to(tmp_path):
    """Times that are the estimate, but three times as long where BM is small: trees must find it."""
    pytest.importorskip("lightgbm")
    random = np.random.default_rng(1)
    names = [name for name in SGEMM.parameters if name not in family_of(SGEMM).FOLLOWS]
    tiles = [{name: preset[name] for name in names} for preset in SGEMM.presets.values()]
    measured = []
    for problem in [shape.problem for shape in random_shapes(24, 3)]:
        try:
            legal = SGEMM.enumerate(problem, H200, tiles=tiles)
        except SpaceError:
            continue
        configs = tuple(legal.config(int(i)) for i in random.choice(len(legal), min(60, len(legal)), False))
        columns = SGEMM.columns(SGEMM.points(configs), problem, H200)
        times = estimate_columns(SGEMM, columns, problem, H200) * np.where(columns["BM"] < 64, 3.0, 1.0)
        fits = np.isfinite(times)
        chosen = tuple(config for config, fit in zip(configs, fits, strict=True) if fit)
        measured.append(Measured(problem, chosen, times[fits]))
    write_table(tmp_path / "NVIDIA_A100" / TABLE, {"sgemm": measured}, [SGEMM])
    device = dataclasses.replace(H200, name="NVIDIA A100")
    store = Store(tmp_path)
    found = trials(device, [SGEMM], store)
    learned = learn(device, [SGEMM], found, store.depot).families["sgemm"]
    assert learned.fitted_on.problems == len(measured) >= 12
    assert learned.fitted_on.corrected.mean < 1.1 < learned.fitted_on.estimate.mean
    assert learned.tiles
    assert all("split_k" not in tile for tile in learned.tiles)


def test_trials_of_values_that_are_no_longer_searched_are_left_out(tmp_path):
    """Else they would become tiles that every choice looks at, and probes of another space."""
    config = SGEMM.fitted(SGEMM.presets["tiny_block"], PROBLEM, H200)
    gone = Config({**config, "BM": 40})
    other = Problem(64, 64, 64)
    measured = [
        Measured(PROBLEM, (gone, config), np.array([1.0, 2.0])),
        Measured(other, (gone,), np.array([1.0])),
    ]
    write_table(tmp_path / "NVIDIA_A10" / TABLE, {"sgemm": measured}, [SGEMM])
    (kept,) = trials(named_device("a10"), [SGEMM], Store(tmp_path))["sgemm"]
    assert (kept.problem, kept.configs, list(kept.times)) == (PROBLEM, (config,), [2.0])


def test_too_few_trials_teach_nothing(tmp_path):
    device, store = named_device("a10"), Store(tmp_path)
    with pytest.raises(RecordError, match="there are trials of 0 problems on NVIDIA A10, and 12"):
        learn(device, [SGEMM], trials(device, [SGEMM], store), store.depot)


# --- random shapes ---


def test_random_shapes_are_drawn_alike_and_within_their_limits():
    shapes = random_shapes(200, 5)
    assert [shape.problem for shape in random_shapes(50, 5)] == [shape.problem for shape in shapes[:50]]
    assert random_shapes(5, 6) != shapes[:5]
    batched = [shape.problem for shape in random_shapes(100, 5, batches=True)]
    assert all(2 <= problem.batch <= 2048 and 2**20 < problem.flops < 2**37 for problem in batched)
    assert len({problem.batch for problem in batched}) > 50
    assert len({shape.problem for shape in shapes}) == 200
    assert {shape.problem.layout for shape in shapes} == {"nn", "nt", "tn", "tt"}
    assert 0.05 < np.mean([shape.problem.beta for shape in shapes]) < 0.3
    for shape in shapes:
        p = shape.problem
        assert 2**19 < p.m * p.n * p.k < 2**36
        assert min(p.m, p.n, p.k) >= 11
        assert max(p.m, p.n, p.k) < 2**13
    with pytest.raises(UsageError, match="0 random shapes: give 1 to"):
        random_shapes(0)
