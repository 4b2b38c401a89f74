from __future__ import annotations

import itertools
import os
import random
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from preset_problems import PROBLEMS

from autotune.errors import ConfigError, SpaceError
from autotune.paths import data_dir
from autotune.space.file import Heading, read_heading, read_space_file
from autotune.space.space import Config, Space, families
from autotune.space.statements import SpaceFile
from autotune.values.device import known_devices, named_device
from autotune.values.measurement import Launch
from autotune.values.problem import LAYOUTS, MATHS, Math, Problem

H200 = named_device("h200")
SGEMM = Space.load("sgemm")
CUBE = Problem(4096, 4096, 4096)
SMALL = """
family = "small"
summary = "a space that can be enumerated by hand"

[parameters]
BM = { values = [8, 16, 32, 48], meaning = "rows" }
loader = { values = ["reg", "cp_async"] }
BN = { values = [8, 16, 0, -1] }
stages = { values = [1, 2, 3] }

[derived]
tile = { expr = "BM * BN", meaning = "elements" }
bytes = { expr = "4 * tile * stages" }

[constraints]
positive = { expr = "BN > 0", reason = "a tile has columns" }
divides = { expr = "m % BM == 0 or loader == 'reg'", reason = "copies are not guarded" }
buffers = { expr = "loader != 'cp_async' or stages >= 2", reason = "a copy needs a free buffer" }
always = { expr = "capability >= 75", reason = "this decides nothing" }

[search]
fits = { expr = "bytes <= 4096", reason = "small is enough" }

[launch]
grid = "ceil_div(m, BM) * ceil_div(n, BN)"
block = "32 * stages"
shared_bytes = "bytes"

[presets]
first = { BM = 8, loader = "reg", BN = 8, stages = 1 }
"""


@pytest.fixture
def write(tmp_path):
    def write(text, name="small.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture(scope="module")
def sgemm():
    return SGEMM


def refusal(path):
    with pytest.raises(SpaceError) as raised:
        Space.load(path)
    message = str(raised.value)
    assert "\n" not in message
    assert path.name in message
    return message


# -- enumeration ---------------------------------------------------------------------------------------------


def brute_force(space, problem, device):
    """Every config of the cross product that all rules allow, found one by one."""
    for values in itertools.product(*space.parameters.values()):
        config = Config(dict(zip(space.parameters, values, strict=True)))
        if space.violations(config, problem, device):
            continue
        numbers = space.values(config, problem, device)
        if numbers["bytes"] <= 4096:
            yield config


@pytest.mark.parametrize("m", [8, 24, 96])
def test_enumeration_agrees_with_brute_force(write, m):
    space = Space.load(write(SMALL))
    problem = Problem(m, 16, 16)
    legal = space.enumerate(problem, H200)
    expected = list(brute_force(space, problem, H200))
    assert expected
    assert [legal.config(index) for index in range(len(legal))] == expected
    assert legal.raw == 4 * 2 * 4 * 3
    assert legal.raw - sum(points for _, points in legal.removals) == len(legal)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("target", ["t4", "h200", "rtx5090"])
@pytest.mark.parametrize(
    "size", [(4096, 4096, 4096), (4095, 4097, 1023), (1, 1, 1), (1, 4096, 77), (200, 3, 8)]
)
def test_every_problem_has_legal_points_and_every_raw_point_is_accounted_for(sgemm, size, target, layout):
    legal = sgemm.enumerate(Problem(*size, layout, beta=1), named_device(target))
    assert len(legal) > 0
    assert legal.raw - sum(points for _, points in legal.removals) == len(legal)
    assert [rule.name for rule, _ in legal.removals] == [rule.name for rule in sgemm.rules]


EXTENTS = st.one_of(st.integers(1, 300), st.sampled_from([512, 1000, 1023, 4096, 10**6, 2**31 - 1]))


@settings(max_examples=15, deadline=None)
@given(
    m=EXTENTS,
    n=EXTENTS,
    k=EXTENTS,
    layout=st.sampled_from(LAYOUTS),
    device=st.sampled_from(list(known_devices().values())),
    data=st.data(),
)
def test_no_listed_point_breaks_a_constraint(m, n, k, layout, device, data):
    space, problem = SGEMM, Problem(m, n, k, layout)
    countable = m * n <= 2**38 and max(m, n) <= 2**31 - 256  # blocks and rows, in 32 bits
    try:
        legal = space.enumerate(problem, device)
    except SpaceError:
        assert not countable
        return
    for index in data.draw(st.lists(st.integers(0, len(legal) - 1), min_size=1, max_size=8)):
        config = legal.config(index)
        assert space.violations(config, problem, device) == []
        launch = space.launch(config, problem, device)
        grid, block, shared_bytes = launch.grid[0], launch.block[0], launch.shared_bytes
        assert 1 <= grid <= 2**31 - 1
        assert 32 <= block <= device.max_threads_per_block
        assert block % 32 == 0
        assert 0 < shared_bytes <= device.shared_per_block
        assert config["split_k"] == 0 or grid * config["BM"] * config["BN"] >= m * n
        assert legal.index(config) == index
        assert legal.nearest(config) == index
        assert space.config(dict(config)) == config


@pytest.mark.timing
def test_a_million_raw_points_take_well_under_a_second(write):
    parameters = "\n".join(f"p{i} = {{ values = {list(range(1, 11))} }}" for i in range(6))
    rules = "\n".join(
        f'r{i} = {{ expr = "p{i} * p{i + 1} % 3 != 0 or p{i} < p{i + 1}", reason = "some" }}'
        for i in range(5)
    )
    space = Space.load(
        write(
            f'family = "small"\n[parameters]\n{parameters}\n[derived]\nsum = {{ expr = "p0 + p1 + p5" }}\n'
            f'[constraints]\n{rules}\nall = {{ expr = "sum % 2 == 0", reason = "some" }}\n'
            '[launch]\ngrid = "1"\nblock = "32"\nshared_bytes = "0"\n'
        )
    )
    started = time.perf_counter()
    legal = space.enumerate(CUBE, H200)
    assert time.perf_counter() - started < 1.0
    assert legal.raw == 10**6
    assert 0 < len(legal) < 10**6


@pytest.mark.timing
def test_the_whole_built_in_space_takes_under_a_second(sgemm):
    started = time.perf_counter()
    sgemm.enumerate(CUBE, H200)
    assert time.perf_counter() - started < 1.0


def test_a_space_too_large_to_list_is_refused(write):
    parameters = "\n".join(f"p{i} = {{ values = {list(range(1000))} }}" for i in range(3))
    launch = '[launch]\ngrid = "1"\nblock = "1"\nshared_bytes = "0"\n'
    space = Space.load(write(f'family = "small"\n[parameters]\n{parameters}\n{launch}'))
    with pytest.raises(SpaceError, match="1000000000 points are left when p2 is chosen; 20000000 can"):
        space.enumerate(CUBE, H200)


def test_no_legal_config_names_the_rule_that_left_none(write):
    space = Space.load(write(SMALL.replace("capability >= 75", "capability >= 999")))
    with pytest.raises(SpaceError) as raised:
        space.enumerate(CUBE, H200)
    assert str(raised.value) == (
        "small.toml: no config is legal for 4096 x 4096 x 4096 nn on NVIDIA H200; the last were removed "
        "by always, capability >= 999 (this decides nothing): no parameter decides it, name another family"
    )


def test_a_rule_that_overflows_is_an_error(write):
    space = Space.load(write(SMALL.replace("BN > 0", "BN * m * n * k * m * n > 0")))
    with pytest.raises(SpaceError, match=r"constraints\.positive: .* beyond 64 bits"):
        space.enumerate(CUBE, H200)


# -- points --------------------------------------------------------------------------------------------------


def test_index_of_what_is_not_listed(write):
    legal = Space.load(write(SMALL)).enumerate(CUBE, H200)
    point = dict(legal.config(0))
    assert legal.index(point) == 0
    assert legal.index({**point, "BN": 0}) is None
    assert legal.index({**point, "BN": 7}) is None
    assert legal.index({}) is None


def test_nearest_changes_few_parameters_by_few_steps(write):
    legal = Space.load(write(SMALL)).enumerate(Problem(48, 16, 16), H200)
    wanted = {"BM": 32, "loader": "cp_async", "BN": 8, "stages": 2}
    assert legal.index(wanted) is None  # 48 % 32
    found = legal.config(legal.nearest(wanted))
    assert sum(found[name] != wanted[name] for name in wanted) == 1
    unknown = legal.config(legal.nearest({**wanted, "BM": 7}))
    assert (unknown["loader"], unknown["BN"], unknown["stages"]) == ("cp_async", 8, 2)
    steps = legal.steps(wanted)
    assert steps.shape == (len(legal),)
    assert 1 < steps.min() <= 1.5  # one parameter, by some of its steps
    assert legal.steps(legal.config(3))[3] == 0


def test_a_config_is_an_immutable_value(write):
    space = Space.load(write(SMALL))
    config = space.config({"stages": 2, "BN": 8, "loader": "reg", "BM": 16})
    assert list(config) == ["BM", "loader", "BN", "stages"]
    assert config.id == "BM16-reg-BN8-stages2"
    assert repr(config) == "Config(BM16-reg-BN8-stages2)"
    assert config == {"BM": 16, "loader": "reg", "BN": 8, "stages": 2}
    assert len({config, space.config(dict(config))}) == 1
    with pytest.raises(KeyError):
        config["BK"]
    with pytest.raises(TypeError):
        config["BM"] = 8


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"BM": 7}, "BM = 7: give one of 8, 16, 32, 48"),
        ({"BM": "8"}, "BM = '8': give one of"),
        ({"BM": True}, "BM = True: give one of"),
        ({"BM": 8.0}, r"BM = 8\.0: give one of"),
        ({"BM": [8]}, r"BM = \[8\]: give one of"),
        ({"loader": 1}, "loader = 1: give one of reg, cp_async"),
        ({"loader": "tma"}, "loader = 'tma': give one of reg, cp_async"),
        ({"BK": 8}, "'BK' is not a parameter of small: give BM, loader, BN, stages"),
    ],
)
def test_a_config_that_is_not_of_the_space(write, change, says):
    with pytest.raises(ConfigError, match=says):
        Space.load(write(SMALL)).config({"BM": 8, "loader": "reg", "BN": 8, "stages": 1, **change})


def test_a_config_that_misses_parameters(write):
    with pytest.raises(ConfigError, match="the config misses loader, stages"):
        Space.load(write(SMALL)).config({"BM": 8, "BN": 8})


def test_an_illegal_config_names_each_broken_constraint_with_its_numbers(write):
    space = Space.load(write(SMALL))
    config = space.config({"BM": 48, "loader": "cp_async", "BN": 0, "stages": 1})
    with pytest.raises(ConfigError) as raised:
        space.require_legal(config, CUBE, H200)
    message = str(raised.value)
    assert message.startswith("config BM48-cp_async-BN0-stages1 is not legal on NVIDIA H200: ")
    for part in (
        "positive: needs BN > 0 but BN = 0 (a tile has columns)",
        "divides: needs m % BM == 0 or loader == 'reg' but BM = 48, loader = cp_async, m = 4096 (",
        "buffers: needs loader != 'cp_async' or stages >= 2 but loader = cp_async, stages = 1 (",
    ):
        assert part in message
    assert "always" not in message


def test_a_search_rule_narrows_but_does_not_forbid(write):
    space = Space.load(write(SMALL))
    config = space.config({"BM": 48, "loader": "reg", "BN": 16, "stages": 3})
    space.require_legal(config, CUBE, H200)
    assert space.enumerate(CUBE, H200).index(config) is None


def test_values_are_numbers_and_words(write):
    space = Space.load(write(SMALL))
    config = space.config({"BM": 16, "loader": "cp_async", "BN": -1, "stages": 2})
    values = space.values(config, Problem(3, 5, 7, "tn"), H200)
    assert values["loader"] == "cp_async"
    assert (values["layout_a"], values["layout_b"], values["math"]) == ("t", "n", "ffma")
    assert (values["BN"], values["tile"], values["bytes"]) == (-1, -16, -128)
    assert (values["m"], values["lda"], values["capability"]) == (3, 3, 90)
    assert {type(value) for value in values.values()} == {int, str}


def test_launch(write):
    space = Space.load(write(SMALL))
    config = space.config({"BM": 16, "loader": "reg", "BN": 8, "stages": 2})
    assert space.launch(config, Problem(17, 9, 4), H200) == Launch.of(
        "small", (2 * 2, 1, 1), (64, 1, 1), 4 * 16 * 8 * 2
    )


# -- files ---------------------------------------------------------------------------------------------------


def test_the_digest_follows_what_is_said_and_not_how(write):
    plain = Space.load(write(SMALL)).digest
    assert Space.load(write("# a comment\n" + SMALL, "other.toml")).digest == plain
    assert Space.load(write(SMALL.replace("[1, 2, 3]", "[1, 2]"))).digest != plain
    assert Space.load(write(SMALL.replace("4096", "4095"))).digest != plain
    told_otherwise = SMALL.replace('expr = "bytes <= 4096"', 'expr = """\n  bytes\n  <= 4096"""')
    told_otherwise = told_otherwise.replace("elements", "floats").replace("small is enough", "that is enough")
    assert Space.load(write(told_otherwise)).digest == plain


def test_what_is_absent_has_the_value_of_before(write):
    later = SMALL.replace("stages = { values = [1, 2, 3]", "stages = { values = [1, 2, 3], absent = 2")
    assert later != SMALL
    space, short = Space.load(write(later)), {"BM": 16, "loader": "reg", "BN": 8}
    assert dict(space.config(short)) == {**short, "stages": 2}
    assert space.points([short]).config(0) == space.config(short)
    assert space.config({**short, "stages": 3})["stages"] == 3
    legal = space.enumerate(CUBE, H200)
    assert legal.index(short) == legal.index({**short, "stages": 2}) is not None
    assert legal.nearest(short) == legal.index(short)
    with pytest.raises(ConfigError, match="misses BM"):
        space.config({"loader": "reg", "BN": 8})
    assert Space.load(write(SMALL, "other.toml")).digest == space.digest
    assert "parameters.stages.absent: stages = 7" in refusal(write(later.replace("absent = 2", "absent = 7")))


PRESETS = """
second = { from = "first", stages = 2 }
third = { from = "second", loader = "cp_async" }
"""


def test_a_preset_states_what_differs_from_another(write):
    space, first = Space.load(write(SMALL + PRESETS)), Space.load(write(SMALL)).presets["first"]
    assert list(space.presets) == ["first", "second", "third"]
    assert dict(space.presets["second"]) == {**first, "stages": 2}
    assert dict(space.presets["third"]) == {**first, "stages": 2, "loader": "cp_async"}
    in_full = "".join(
        f"{name} = {{ BM = 8, loader = '{preset['loader']}', BN = 8, stages = 2 }}\n"
        for name, preset in list(space.presets.items())[1:]
    )
    assert Space.load(write(SMALL + in_full, "full.toml")).digest == space.digest


@pytest.mark.parametrize(
    "dropped", ["second = false", "second = { BM = 16, loader = 'reg', BN = 8, stages = 3 }"]
)
def test_a_preset_stays_what_it_is_when_the_one_it_differs_from_is_dropped_or_replaced(write, dropped):
    base = Space.load(write(SMALL + PRESETS))
    extending = f'extends = "small.toml"\n[presets]\n{dropped}\nfourth = {{ from = "third", BN = 16 }}\n'
    space = Space.load(write(extending, "mine.toml"))
    assert space.presets["third"] == base.presets["third"]
    assert dict(space.presets["fourth"]) == {**base.presets["third"], "BN": 16}


@pytest.mark.parametrize("origin", ['"third"', '"none"', "3", '["first"]'])
def test_a_preset_differs_from_one_above_it(write, origin):
    says = refusal(
        write(SMALL + f"second = {{ from = {origin}, stages = 2 }}\nthird = {{ from = 'first' }}\n")
    )
    assert "presets.second.from" in says
    assert says.endswith("give a preset above it, of which are first")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('expr = "BN > 0"', 'expr = "BX > 0"', r"positive uses the unknown name 'BX'; known are BM"),
        ('expr = "BM * BN"', 'expr = "BM * bytes"', r"derived\.tile uses the unknown name 'bytes'"),
        ('expr = "BN > 0"', 'expr = "BN.real > 0"', r"constraints\.positive: 'BN\.real' is not allowed here"),
        ('expr = "BN > 0"', "expr = \"exit('x')\"", r"constraints\.positive: .* is not allowed here"),
        ('expr = "BN > 0"', 'expr = "(lambda: BN)()"', "is not allowed here"),
        ('expr = "BN > 0"', "expr = \"f'{BN}'\"", "is not allowed here"),
        ('expr = "BN > 0"', 'expr = "[x for x in BN]"', "is not allowed here"),
        ('expr = "BN > 0"', 'expr = "BN >"', "does not parse"),
        ('expr = "BN > 0"', 'expr = ""', r"constraints\.positive\.expr must be a non-empty string"),
        ('expr = "BN > 0"', "expr = 1", r"constraints\.positive\.expr must be a non-empty string"),
        ('expr = "BN > 0", ', "", r"constraints\.positive\.expr must be a non-empty string"),
        (', reason = "a tile has columns"', "", r"constraints\.positive\.reason must be a non-empty string"),
        ('reason = "small is enough"', 'reason = " "', r"search\.fits\.reason must be a non-empty string"),
        ('reason = "small is enough"', 'reson = "x"', r"search\.fits\.reson is unknown; known are expr"),
        ("loader == 'reg'", "loader == 'rge'", "never equal; loader is one of reg, cp_async"),
        ("[8, 16, 32, 48]", "[]", r"parameters\.BM\.values must be a non-empty list"),
        ("[8, 16, 32, 48]", "8", r"parameters\.BM\.values must be a non-empty list"),
        ("values = [8, 16, 32, 48]", "value = [8]", r"parameters\.BM\.value is unknown"),
        ("[8, 16, 32, 48]", '[8, "x"]', r"parameters\.BM\.values must be distinct integers or distinct"),
        ("[8, 16, 32, 48]", "[8, true]", "must be distinct integers or distinct words"),
        ("[8, 16, 32, 48]", "[true, false]", "must be distinct integers or distinct words"),
        ("[8, 16, 32, 48]", "[8, 8]", "must be distinct integers or distinct words"),
        ("[8, 16, 32, 48]", "[8.5]", "must be distinct integers or distinct words"),
        ("[8, 16, 32, 48]", "[[8]]", "must be distinct integers or distinct words"),
        ("[8, 16, 32, 48]", "[8, 3000000000]", "3000000000 is beyond 2147483647"),
        ('["reg", "cp_async"]', '["reg", "cp async"]', "'cp async' is not a name"),
        ('["reg", "cp_async"]', '["reg", "a\\nb"]', "is not a name"),
        ('loader = { values = ["reg", "cp_async"] }', "loader = 3", r"loader must be a table, not 3"),
        ("stages = { values", "m = { values", r"parameters\.m hides a name"),
        ("stages = { values", "layout = { values", r"parameters\.layout hides a name"),
        ("stages = { values", "min = { values", r"parameters\.min hides a name"),
        ("stages = { values", "if = { values", "'if' is not a name"),
        ("stages = { values", '"a b" = { values', "'a b' is not a name"),
        ("tile = {", "BM = {", r"derived\.BM hides a name"),
        ('family = "small"', "", "family must be a non-empty string"),
        ('family = "small"', 'family = "../x"', r"family: '\.\./x' is not a name"),
        ("[search]", "[serach]", "unknown section 'serach'; known are family, summary"),
        ("[launch]", "[[launch]]", r"\[launch\] must be a table"),
        ('block = "32 * stages"\n', "", r"launch\.block must be a non-empty string"),
        ("block =", "blocks =", r"launch\.blocks is unknown; known are grid, block, shared_bytes"),
        ("BM = 8, loader", "BM = 7, loader", r"presets\.first: BM = 7: give one of"),
        ("BM = 8, loader", "loader", r"presets\.first: the config misses BM"),
        ("first = {", "first = 3 #", r"presets\.first must be a table, not 3"),
        ("[parameters]", "[parameters", r"is not TOML \("),
    ],
)  # fmt: skip
def test_a_fault_in_a_file_is_one_line_with_its_place(write, old, new, says):
    assert SMALL.count(old) == 1
    path = write(SMALL.replace(old, new))
    with pytest.raises(SpaceError, match=says):
        Space.load(path)
    refusal(path)


def test_a_file_without_parameters(write):
    assert "[parameters] is empty" in refusal(write('family = "small"\n'))


def test_a_file_that_cannot_be_read(tmp_path, write):
    assert "cannot be read (No such file or directory)" in refusal(tmp_path / "missing.toml")
    (tmp_path / "folder.toml").mkdir()
    assert "cannot be read (Is a directory)" in refusal(tmp_path / "folder.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\0")
    assert "is not TOML" in refusal(binary)
    assert "is not TOML" in refusal(write("a = " + "[" * 5000, "deep.toml"))


@pytest.mark.parametrize("name", ["sgem", "", "../sgemm", "small.json"])
def test_an_unknown_family_lists_the_known_ones(name):
    with pytest.raises(SpaceError, match=r"is unknown: give one of .*sgemm.*, or a \.toml file"):
        Space.load(name)


# -- files that extend others --------------------------------------------------------------------------------


def test_an_extending_file_narrows_and_widens(write):
    write(SMALL)
    space = Space.load(
        write(
            """
            extends = "small.toml"
            [parameters]
            BM = [16, 64]
            stages = { values = [2] }
            [constraints]
            divides = false
            even = { expr = "BN % 16 == 0", reason = "for the test" }
            [search]
            fits = { expr = "bytes <= 100000", reason = "wider" }
            [presets]
            first = false
            second = { BM = 64, loader = "reg", BN = 16, stages = 2 }
            """,
            "narrow.toml",
        )
    )
    assert (space.family, space.summary) == ("small", "a space that can be enumerated by hand")
    assert space.parameters["BM"] == (16, 64)
    assert list(space.presets) == ["second"]
    assert [rule.name for rule in space.rules] == [
        *("positive", "buffers", "always", "even", "one_product"),
        "fits",
    ]
    legal = space.enumerate(Problem(63, 63, 63), H200)
    assert [legal.config(i).id for i in range(len(legal))] == [
        f"BM{BM}-{loader}-BN16-stages2" for BM in (16, 64) for loader in ("reg", "cp_async")
    ]
    assert space.meanings["BM"] == "rows"


def test_narrowing_words_keeps_rules_and_presets_that_name_the_others(write, sgemm):
    space = Space.load(write('extends = "sgemm"\n[parameters]\nloader = ["reg"]\nBM = [64]\n'))
    assert list(space.presets) == list(sgemm.presets)
    legal = space.enumerate(CUBE, H200)
    assert {legal.config(i)["loader"] for i in range(0, len(legal), 100)} == {"reg"}
    start = space.presets["square_block"]
    assert start["loader"] == "cp_async"
    assert legal.index(start) is None
    near = legal.config(legal.nearest(start))
    assert (near["BM"], near["BN"], near["loader"]) == (64, 128, "reg")
    assert space.config(dict(start)) == start


def test_what_does_not_change_is_the_same_space(write, sgemm):
    space = Space.load(write('extends = "sgemm"\nsummary = "mine"\n'))
    assert space.summary == "mine"
    assert space.parameters == sgemm.parameters
    assert len(space.enumerate(CUBE, H200)) == len(sgemm.enumerate(CUBE, H200))


def test_files_extend_in_a_chain_each_beside_the_next(write, tmp_path, monkeypatch):
    write(SMALL)
    write('extends = "small.toml"\n[parameters]\nBM = [8, 16]\n', "middle.toml")
    top = write('extends = "middle.toml"\n[parameters]\nBM = [32]\n', "top.toml")
    monkeypatch.chdir("/")
    space = Space.load(top)
    assert space.parameters["BM"] == (32,)
    assert space.config({**space.presets["first"], "BM": 48})["BM"] == 48


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('extends = "nothing"', "family 'nothing' is unknown: give one of "),
        ('extends = "nothing.toml"', r"nothing\.toml: cannot be read"),
        ("extends = 3", "extends must be a family or a .toml file, not 3"),
        ('extends = "other.toml"', r"other\.toml: extends itself"),
        ('extends = "small.toml"\nfamily = "x"', "'family' has no place in a file that extends another"),
        ('extends = "small.toml"\n[parameters]\nstages = { absent = 1 }', r"absent has no place in a file"),
        ('extends = "small.toml"\n[derived]\na = { expr = "1" }', "'derived' has no place"),
        ('extends = "small.toml"\nparameters = 3', "'parameters' has no place"),
        ('extends = "small.toml"\n[parameters]\nBX = [1]', r"parameters\.BX is not a parameter of small"),
        ('extends = "small.toml"\n[parameters]\nBM = []', r"parameters\.BM\.values must be a non-empty list"),
        ('extends = "small.toml"\n[parameters]\nBM = 3', r"parameters\.BM\.values must be a non-empty list"),
        ('extends = "small.toml"\n[parameters]\nBM = false', r"BM\.values must be a non-empty list"),
        ('extends = "small.toml"\n[parameters]\nBM = ["x"]', "distinct integers or distinct words"),
        ('extends = "small.toml"\n[parameters]\nBM = [[1]]', "distinct integers or distinct words"),
        ('extends = "small.toml"\n[constraints]\nnone = false', r"constraints\.none does not exist"),
        ('extends = "small.toml"\n[search]\nfits = true', r"search\.fits must be a table, not True"),
        ('extends = "small.toml"\n[presets]\nnone = false', r"presets\.none does not exist"),
        ('extends = "broken.toml"\n[parameters]\nBM = [8]', r"^broken\.toml: \[parameters\] is empty"),
        ('extends = "broken.toml"\n[presets]\nx = false', r"^broken\.toml: "),
    ],
)  # fmt: skip
def test_a_fault_in_an_extending_file(write, text, says):
    write(SMALL)
    write('family = "broken"', "broken.toml")
    with pytest.raises(SpaceError, match=says) as raised:
        Space.load(write(text, "other.toml"))
    assert "\n" not in str(raised.value)


# -- the built-in spaces -------------------------------------------------------------------------------------


def test_every_name_of_the_built_in_space_says_what_it_means(sgemm):
    assert all(sgemm.meanings.values())
    assert {*sgemm.parameters} < {*sgemm.meanings}


def test_every_preset_is_searched_where_it_has_its_history(sgemm):
    for name, preset in sgemm.presets.items():
        listed = sgemm.enumerate(PROBLEMS[name], H200, tiles=[preset])  # of all points, those alone
        assert [listed.config(index) for index in range(len(listed))] == [preset], name


def test_steps_are_counted_parameter_by_parameter(sgemm):
    legal = sgemm.enumerate(Problem(64, 48, 4096, "nt"), H200)
    assert len(legal) > 1000
    choose = random.Random(3)
    for _ in range(5):
        config = {name: choose.choice(values) for name, values in sgemm.parameters.items()}
        config[choose.choice(list(config))] = 12345  # no value of the space
        wanted = np.zeros(len(legal))
        for column, (name, values) in enumerate(sgemm.parameters.items()):
            if config[name] in values:
                away = abs(legal.ordinals[:, column] - values.index(config[name]))
                wanted += (away > 0) + 0.5 * away / max(1, len(values) - 1)
        assert legal.steps(config) == pytest.approx(wanted, abs=1e-12)
        assert legal.nearest(config) == np.flatnonzero(wanted < wanted.min() + 1e-9)[0]


def test_a_preset_has_a_near_point_for_every_problem(sgemm):
    for problem in (Problem(1, 1, 1), Problem(4095, 4097, 1023, "tt")):
        legal = sgemm.enumerate(problem, H200)
        for preset in sgemm.presets.values():
            index = legal.nearest(preset)
            assert sgemm.violations(legal.config(index), problem, H200) == []


def test_every_constraint_is_broken_by_some_point(sgemm):
    """A rule that nothing can break is dead text."""
    choose = random.Random(0)
    small = replace(H200, shared_per_block=16384, max_threads_per_sm=1024)
    broken = set()
    for _ in range(400):
        config = Config({name: choose.choice(values) for name, values in sgemm.parameters.items()})
        layout = choose.choice(LAYOUTS)
        extent = choose.choice([9, 4095, 4096, 2**31 - 1])
        device = choose.choice([small, named_device("t4")])
        problem = Problem(extent, extent, choose.choice([9, 4095]), layout, batch=choose.choice([1, 2]))
        violations = sgemm.violations(config, problem, device)
        broken |= {violation.partition(":")[0] for violation in violations}
    guards = {"fragment_widths", "shared_rows_aligned", "pipeline_parity"}  # see the next test
    assert broken | guards == {rule.name for rule in sgemm.rules if not rule.narrows}


@pytest.mark.parametrize(
    ("added", "changes", "rule"),
    [
        ("VN = { values = [4, 6] }\nTN = { values = [8, 12] }", {"VN": 6, "TN": 12}, "fragment_widths"),
        ("VM = { values = [3, 4] }\nTM = { values = [8, 12] }", {"VM": 3, "TM": 12}, "fragment_widths"),
        ("smem_pad = { values = [1, 4] }", {"smem_pad": 1}, "shared_rows_aligned"),
        ("BK = { values = [8, 9] }", {"BK": 9}, "pipeline_parity"),
    ],
)
def test_values_that_a_file_adds_meet_their_constraints(tmp_path, sgemm, added, changes, rule):
    file = tmp_path / "wide.toml"
    file.write_text(f'extends = "sgemm"\n[parameters]\n{added}\n')
    space = Space.load(file)
    config = space.config({**sgemm.presets["long_block"], **changes})
    found = space.violations(config, CUBE, H200)
    assert rule in {violation.partition(":")[0] for violation in found}


@pytest.mark.parametrize("problem", [Problem(1000, 1024, 72, "nt", 1), Problem(4096, 4096, 4096)])
def test_columns_are_the_values_of_every_point(problem):
    space = Space.load("sgemm")
    legal = space.enumerate(problem, H200)
    columns = space.columns(legal, problem, H200)
    assert {*space.parameters, "num_threads", "smem_bytes", "tiles_k", "b_along_k"} <= set(columns)
    assert {column.shape for column in columns.values()} == {(len(legal),)}
    for index in np.linspace(0, len(legal) - 1, 20, dtype=int):
        values = space.values(legal.config(index), problem, H200)
        assert {name: column[index] for name, column in columns.items()} == {
            name: values[name] for name in columns
        }


def test_a_search_starts_from_the_legal_points_nearest_to_the_presets():
    space = Space.load("sgemm")
    legal = space.enumerate(Problem(4096, 4096, 4096), H200)
    starts = space.starts(legal)
    assert len(starts) == len(set(starts))
    assert set(starts) == {legal.nearest(preset) for preset in space.presets.values()}
    assert legal.config(starts[0]) == next(iter(space.presets.values()))


def test_families_are_those_that_serve_the_problem() -> None:
    assert "sgemm" in [space.family for space in families(Problem(64, 64, 64), H200)]
    assert not {"naive", "coalesced"} & {space.family for space in families(Problem(1, 1, 1), H200)}


def test_serves_knows_the_problem_and_the_device_alone(tmp_path: Path) -> None:
    text = data_dir("search_spaces").joinpath("naive.toml").read_text()
    path = tmp_path / "naive.toml"
    path.write_text(text + '\n[serves]\nmath = "ffma"\nwhen = "m <= 4 and capability >= 80"\n')
    space = Space.load(path)
    assert space.serves(Problem(4, 9, 9), H200)
    assert not space.serves(Problem(5, 9, 9), H200)
    path.write_text(text + '\n[serves]\nmath = "ffma"\nwhen = "num_threads > 4"\n')
    with pytest.raises(SpaceError, match=r"naive.toml: serves.*num_threads"):
        Space.load(path)
    path.write_text(text + '\n[serves]\nmath = "fp8"\n')
    with pytest.raises(SpaceError, match=r"serves.math = 'fp8': give one of ffma"):
        Space.load(path)


@pytest.mark.parametrize("math", MATHS)
def test_families_are_found_without_parsing_those_of_another_arithmetic(math: Math) -> None:
    everything = [Space.load(path) for path in sorted(data_dir("search_spaces").glob("*.toml"))]
    for m, target in ((4096, "h200"), (8, "h200"), (4096, "t4")):
        problem, device = Problem(m, 4096, 4096, math=math), named_device(target)
        expected = [space.family for space in everything if space.serves(problem, device)]
        assert [space.family for space in families(problem, device)] == expected


@pytest.mark.parametrize("path", sorted(data_dir("search_spaces").glob("*.toml")), ids=lambda path: path.stem)
def test_a_heading_says_what_the_whole_file_says(path: Path) -> None:
    heading, whole = read_heading(path), read_space_file(path)
    assert isinstance(heading, Heading)
    conditions = [each.serves_when and each.serves_when.text for each in (heading, whole)]
    assert conditions[0] == conditions[1]
    for name in ("path", "family", "serves", "content_digest"):
        assert getattr(heading, name) == getattr(whole, name)
    assert heading.whole().digest == whole.digest
    lazy = Space(heading)
    assert (lazy.digest, lazy.presets) == (Space(whole).digest, Space(whole).presets)


def test_a_heading_is_of_the_text_that_was_read(write) -> None:
    path = write(SMALL)
    space = Space(read_heading(path))
    path.write_text("not TOML")
    assert list(space.parameters) == ["BM", "loader", "BN", "stages"]


@pytest.mark.parametrize(
    ("text", "serves"),
    [
        (SMALL + '[serves]\nmath = "ffma"\n', "ffma"),
        (SMALL + '[ serves ]\nmath = "ffma"\n', "ffma"),
        ('serves.math = "ffma"\n' + SMALL, "ffma"),
        ('serves = { math = "ffma" }\n' + SMALL, "ffma"),
        (SMALL.replace("[parameters]", '[serves]\nmath = "ffma"\n[parameters]'), "ffma"),
        (SMALL.replace("[parameters]", "# [serves]\n[parameters]"), None),
        (SMALL.replace('"a space', '"""\n[serves] is not here\na space').replace('hand"', 'hand"""'), None),
        ('extends = "naive"\n', None),
    ],
)
def test_wherever_a_file_says_what_it_serves_it_is_read(write, text: str, serves: str | None) -> None:
    found = read_heading(write(text))
    assert found.serves == serves
    whole = found if isinstance(found, SpaceFile) else found.whole()
    assert whole.serves == serves
    assert Space(found).serves(CUBE, H200) == (serves == "ffma")


def test_a_faulty_heading_is_one_clear_error(write) -> None:
    for text, why in (
        ('serves = { math = "fp8" }\n' + SMALL, "serves.math = 'fp8'"),
        ('serves = { math = "ffma", when = "BM > 8" }\n' + SMALL, "uses the unknown name 'BM'"),
        (SMALL.replace('family = "small"', ""), "family must be a non-empty string"),
    ):
        with pytest.raises(SpaceError, match=why):
            read_heading(write(text))


def test_a_space_is_accepted_as_what_it_plainly_is(write):
    path = write(SMALL)
    assert Space.of(SGEMM) is SGEMM
    assert Space.of("sgemm").digest == SGEMM.digest
    assert Space.of(path).digest == Space.of(str(path)).digest == Space.load(path).digest
    for wrong in (None, 3, ["sgemm"], "x" * 5000):
        with pytest.raises(SpaceError, match="give") as raised:
            Space.of(wrong)
        with pytest.raises(SpaceError, match="give"):
            Space.load(wrong)
        assert len(str(raised.value)) < 300


# -- parts ---------------------------------------------------------------------------------------------------

USING = SMALL.replace("summary =", 'uses = ["common", "tiles"]\nsummary =')
COMMON = """
[derived]
num_threads = { expr = "32 * stages" }
twice = { expr = "2 * BM" }

[constraints]
few = { expr = "twice <= 64", reason = "of the part" }
"""


def test_a_file_uses_statements_of_parts_beside_it_and_built_in(write, tmp_path):
    (tmp_path / "parts").mkdir()
    write(COMMON, "parts/common.toml")
    space, plain = Space.load(write(USING)), Space.load(write(SMALL, "plain.toml"))
    assert space.names - plain.names == {"num_threads", "twice", "tiles_m", "tiles_n"}
    rules = {rule.name: rule.reason for rule in space.rules}
    assert {"few", "threads", "row_index"} <= rules.keys()
    problem = Problem(96, 16, 16)
    assert {config["BM"] for config in map(space.enumerate(problem, H200).config, range(3))} <= {8, 16, 32}
    before = space.content_digest, space.digest
    write(COMMON.replace("of the part", "of a part"), "parts/common.toml")
    space = Space.load(tmp_path / "small.toml")
    assert (space.content_digest != before[0], space.digest == before[1]) == (True, True)
    write(COMMON.replace("64", "32"), "parts/common.toml")
    assert Space.load(tmp_path / "small.toml").digest != before[1]


def test_a_file_restates_or_drops_what_a_part_says(write, tmp_path):
    (tmp_path / "parts").mkdir()
    write(COMMON, "parts/common.toml")
    text = USING.replace("[derived]", '[derived]\ntwice = { expr = "3 * BM" }').replace(
        "[constraints]",
        "[constraints]\nfew = false\nthreads = { expr = 'num_threads <= 64', reason = 'mine' }",
    )
    space = Space.load(write(text))
    assert "few" not in {rule.name for rule in space.rules}
    assert next(rule for rule in space.rules if rule.name == "threads").reason == "mine"
    config = space.config(space.presets["first"])
    assert space.values(config, Problem(8, 8, 8), H200)["twice"] == 24


@pytest.mark.parametrize(
    ("part", "using", "says"),
    [
        (
            COMMON,
            'uses = ["none"]',
            r"uses 'none', but there is no .*parts/none\.toml or .*parts/none\.toml$",
        ),
        (COMMON, 'uses = ["../x"]', r"uses: '\.\./x' is not a name"),
        (COMMON, 'uses = "common"', "uses must be a list of names of parts"),
        ("[presets]\n", 'uses = ["common"]', r"common\.toml: 'presets' has no place in a part"),
        ("derived = 3\n", 'uses = ["common"]', r"common\.toml: 'derived' has no place in a part"),
        ("[derived\n", 'uses = ["common"]', r"common\.toml: is not TOML"),
        (COMMON, 'uses = ["common"]\nconstraints.none = false', "constraints.none does not exist"),
    ],
)
def test_a_part_that_cannot_be_used_is_said(write, tmp_path, part, using, says):
    (tmp_path / "parts").mkdir()
    write(part, "parts/common.toml")
    text = SMALL
    if "constraints.none" in using:
        using, text = using.splitlines()[0], SMALL.replace("[constraints]", "[constraints]\nnone = false")
    with pytest.raises(SpaceError, match=says) as raised:
        Space.load(write(f"{using}\n{text}"))
    assert "\n" not in str(raised.value)


def test_the_built_in_files_are_read_and_not_scrolled():
    files = sorted(data_dir("search_spaces").rglob("*.toml"))
    lines = [(file.name, line) for file in files for line in file.read_text().splitlines()]
    assert [place for place, line in lines if len(line) > 150] == []
    used = {name for file in files for name in tomllib.loads(file.read_text()).get("uses", ())}
    assert used == {file.stem for file in files if file.parent.name == "parts"}


# -- files that nobody would write ---------------------------------------------------------------------------

HEX = "0x" + "f" * 9000
HOSTILE = {
    "a dotted key": SMALL + ".".join("a" * 50_000) + " = 1\n",
    "a dotted header": SMALL + "[" + ".".join("a" * 50_000) + "]\n",
    "a dotted key of strings": SMALL + ".".join([r'"\""'] * 20_000) + " = 1\n",
    "a long key": SMALL + "a" * 100_000 + " = 1\n",
    "lists": SMALL + "x = " + "[" * 100_000,
    "tables": SMALL + "x = " + "{a=" * 20_000,
    "digits": SMALL.replace("[1, 2, 3]", f"[{'9' * 5000}]"),
    "hexadecimal digits": SMALL.replace("[1, 2, 3]", f"[{HEX}]"),
    "digits of a preset": SMALL.replace("BM = 8, loader", f"BM = {HEX}, loader"),
    "digits of a list": SMALL.replace("BM = 8, loader", f"BM = [{HEX}], loader"),
    "digits in place of a preset": SMALL + f"second = {HEX}\n",
    "digits in place of a name": SMALL + f"second = {{ from = {HEX} }}\n",
    "digits in place of a summary": SMALL.replace('"a space', f"{HEX} #"),
    "digits in place of a meaning": SMALL.replace('meaning = "rows"', f"meaning = {HEX}"),
    "digits in place of a family": SMALL.replace('"small"', HEX),
    "digits in place of a file": f"extends = {HEX}\n",
    "digits in an expression": SMALL.replace('"bytes"', f'"{"9" * 5000}"'),
    "hexadecimal digits in an expression": SMALL.replace('"bytes"', f'"{HEX}"'),
    "a long expression": SMALL.replace('"bytes"', f'"{"1+" * 100_000}1"'),
    "a deep expression": SMALL.replace('"bytes"', f'"{"(" * 100_000}1"'),
    "a control character": SMALL.replace('"small"', r'"\u001b[31m"'),
    "a control character in a key": SMALL + r'"\u001b[31m" = 1',
    "a zero": SMALL.replace('"small"', r'"sm\u0000all"'),
    "a long family": SMALL.replace("small", "s" * 5000),
    "a long part": f'uses = ["{"a" * 5000}"]\n' + SMALL,
    "a long base": f'extends = "{"a" * 5000}.toml"\n',
    "a base with a zero": r'extends = "a\u0000b.toml"' + "\n",
    "two megabytes": SMALL + "#" * 2_000_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_line_at_once(write, name):
    path = write(HOSTILE[name])
    began = time.process_time()
    with pytest.raises(SpaceError) as raised:
        Space.load(path)
    assert time.process_time() - began < 10
    message = str(raised.value)
    assert message.isprintable()
    assert len(message) < 1000
    assert "toml" in message


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    (tmp_path / "folder.toml").mkdir()
    for name in ("pipe", "zero", "folder"):
        with pytest.raises(SpaceError, match=rf"{name}\.toml: cannot be read \("):
            Space.load(tmp_path / f"{name}.toml")


def test_a_byte_order_mark_is_no_statement(write, tmp_path):
    plain = Space.load(write(SMALL))
    path = tmp_path / "marked.toml"
    path.write_bytes(b"\xef\xbb\xbf" + SMALL.encode())
    marked = Space.load(path)
    assert (marked.digest, marked.content_digest) == (plain.digest, plain.content_digest)
    assert Space(read_heading(path)).digest == plain.digest
    (tmp_path / "more.toml").write_bytes(b'\xef\xbb\xbfextends = "marked.toml"\n')
    assert Space.load(tmp_path / "more.toml").digest == plain.digest
