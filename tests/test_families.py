from __future__ import annotations

import pytest

from autotune.errors import SpaceError
from autotune.families import family_of
from autotune.families.estimate import estimate, knows, reading_tile
from autotune.space.space import Space
from autotune.values.device import named_device
from autotune.values.problem import Problem

H200, CUBE = named_device("h200"), Problem(4096, 4096, 4096)
SGEMM = Space.load("sgemm")
OWN = """
family = "{family}"
[parameters]
BM = {{ values = [8] }}
[launch]
grid = "1"
block = "32"
shared_bytes = "0"
"""


@pytest.fixture
def load(tmp_path):
    def loaded(text):
        (tmp_path / "mine.toml").write_text(text)
        return Space.load(tmp_path / "mine.toml")

    return loaded


def test_a_family_has_the_model_of_its_name():
    assert {
        name: family_of(Space.load(name)).__name__ for name in ("sgemm", "sgemm_skinny", "sgemm_3xtf32")
    } == {name: f"autotune.families.{name}" for name in ("sgemm", "sgemm_skinny", "sgemm_3xtf32")}
    assert not knows(Space.load("naive"))


def test_a_space_that_extends_another_has_its_model(load):
    assert family_of(load('extends = "sgemm_skinny"')) is family_of(Space.load("sgemm_skinny"))


def test_a_space_of_ones_own_says_which_model_it_wants(load):
    text = SGEMM.path.read_text().replace('family = "sgemm"', 'family = "mine"')
    assert not knows(load(text))  # its names are the same, but nothing is guessed from them
    space = load(text.replace('family = "mine"', 'family = "mine"\nmodel = "sgemm"'))
    values = SGEMM.values(SGEMM.presets["square_block"], CUBE, H200)
    assert estimate(space, values, CUBE, H200) == estimate(SGEMM, values, CUBE, H200)


def test_a_family_called_like_another_but_with_other_names_has_no_model(load):
    assert not knows(load(OWN.format(family="sgemm")))
    assert not knows(load(OWN.format(family="estimate")))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            "sgem",
            r"^mine\.toml: model = 'sgem': give one of sgemm, sgemm_3xfp16_wgmma, .*, sgemm_skinny$",
        ),
        ("naive", "give one of"),
        ("estimate", "give one of"),
        ("sgemm", r"the model of sgemm reads BK, BN, .* add them, or leave out model$"),
    ],
)
def test_a_model_that_does_not_fit_is_said(load, model, says):
    space = load(f'model = "{model}"\n' + OWN.format(family="mine"))
    with pytest.raises(SpaceError, match=says):
        family_of(space)


def test_what_reads_shared_memory_for_itself():
    for name, tile in (
        ("sgemm", (8, 8)),
        ("sgemm_skinny", (16, 4)),
        ("naive", (1, 1)),
        ("sgemm_3xtf32", (32, 64)),
    ):
        space = Space.load(name)
        problem = Problem(16, 4096, 4096) if name == "sgemm_skinny" else CUBE
        config = next(iter(space.presets.values()))
        assert reading_tile(space, space.values(config, problem, H200)) == tile
    space = Space.load("sgemm_3xtf32_wgmma")
    values = space.values(space.presets["one_warpgroup"], Problem(4096, 4096, 4096, math="3xtf32"), H200)
    assert reading_tile(space, values) == (64, 128)


def test_a_space_says_what_adapts(load):
    assert set(load('extends = "sgemm"\nadapts = ["edge", "vec_a"]').adapts) == {"edge", "vec_a"}
    assert load('extends = "sgemm"').adapts == SGEMM.adapts
    with pytest.raises(SpaceError, match="adapts names 'BX'"):
        load('extends = "sgemm"\nadapts = ["BX"]')
    with pytest.raises(SpaceError, match="adapts must be a list"):
        load('extends = "sgemm"\nadapts = "edge"')
