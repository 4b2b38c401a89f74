"""Rendered kernels to read: one for each structural switch of each family, in tests/golden/<family>/.

A switch is an ``if`` statement of the family's template or of a part of it. Each of its two branches that
some legal config takes is shown by a kernel here. As few kernels as do this were chosen, and each is named
after what it shows.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import jinja2
import jinja2.nodes
import pytest
from test_render import assert_tidy

from autotune.code import sandbox, templates
from autotune.code.render import Source, render
from autotune.errors import SpaceError
from autotune.space.space import Config, Space
from autotune.values.device import named_device
from autotune.values.problem import LAYOUTS, Problem

GOLDEN = Path(__file__).with_name("golden")
UPDATE = "make golden"
H200 = named_device("h200")

# One output per thread and one buffer: no preset is like it.
PLAIN = {
    "BM": 16, "TM": 1, "BN": 16, "TN": 1, "VM": 1, "VN": 1, "loader": "reg", "stages": 1, "transpose_a": 0,
    "vec_b": 1, "vec_c": 1, "smem_pad": 0, "fragment_pipeline": 0, "unroll_stages": 0, "group_m": 1,
}  # fmt: skip
ODD = {"vec_a": 1, "vec_b": 1, "vec_c": 1, "edge": "guarded"}

Case = tuple[
    tuple[int | str, ...], str, dict[str, int | str]
]  # problem, preset, what differs from the preset

# family: name: case
CASES: dict[str, dict[str, Case]] = {
    "sgemm": {
        "batch": ((64, 64, 4096, "nn", 1, 16), "tiny_block", {"split_k": 2, "edge": "exact", "group_m": 1}),
        "more_products_than_layers": ((32, 32, 256, "nn", 0, 100_000), "tiny_block", {"group_m": 1}),
        "one_output_per_thread": ((256, 256, 256), "small_block", PLAIN),
        "guarded_registers": ((4095, 4097, 1023, "nn", 1), "register_staged", ODD),
        "shifted_single_buffer_kept_along_k": (
            (100, 70, 33, "tt", 1),
            "thin_mixed",
            {"LM": 4, "TN": 8, "BK": 64, "split_k": 1, "stages": 1, "vec_b": 1, "edge": "shifted",
             "fragment_pipeline": 0, "unroll_stages": 0},
        ),
        "turned_operands": (
            (132, 260, 100, "nt"),
            "square_block",
            {"turn_a": 1, "turn_b": 1, "split_k": 2, "stages": 2, "edge": "shifted"},
        ),
        "spread_columns": (
            (4095, 4097, 1023, "tt", 1),
            "odd_block",
            {"BM": 256, "LM": 4, "lane_order": "pairs", "BN": 64, "TN": 4, "stages": 2, "ffma_order": "row"},
        ),
        "uneven_parts_of_k": (
            (1000, 1000, 1000),
            "register_staged",
            {"BM": 192, "TM": 4, "LM": 8, "BN": 96, "TN": 12, "split_k": 4, "edge": "shifted",
             "ffma_order": "blocked", "group_m": 1, "min_blocks": 2},
        ),
        "warps_in_turn_and_clusters": ((64, 512, 2080), "cluster_small", {"fragment_pipeline": 1}),
        "shared_tiles": (
            (3552, 736, 6321, "nt"),
            "square_block",
            {"split_k": 0, "vec_b": 1, "edge": "shifted", "group_m": 1},
        ),
        "equal_parts_of_k_in_two_rounds": (
            (64, 64, 64000, "nt"),
            "deep_block",
            {"LM": 4, "TN": 2, "BK": 16, "split_k": 32, "vec_a": 1, "vec_b": 1, "fragment_pipeline": 0},
        ),
        "registers_without_fragment_pipeline": (
            (1760, 128, 1760, "nn", 1),
            "tiny_block",
            {"BM": 128, "TM": 16, "split_k": 12, "loader": "reg", "stages": 2, "vec_a": 4, "edge": "shifted",
             "fragment_pipeline": 0, "unroll_stages": 0},
        ),
    },
    "sgemm_skinny": {
        "batch": ((8, 1024, 2048, "nt", 0, 4), "rows_along", {}),
        "rows_along_k_guarded": (
            (4097, 3, 333),
            "row_along",
            {"vec_a": 1, "vec_b": 1, "LK": 16, "unroll_k": 1, "ahead": 2, "edge": "guarded", "min_blocks": 2},
        ),
        "columns_across_two_buffers": (
            (4096, 8, 4096, "tt", 1),
            "many_across",
            {"LK": 1, "warps_k": 4, "blocks_per_sm": 7, "unroll_k": 2, "BK": 64, "ahead": 2},
        ),
        "rows_across_undivided_k": (
            (16, 4095, 1023, "tn", 1),
            "rows_across",
            {"vec_a": 1, "vec_b": 1, "LK": 2, "blocks_per_sm": 0, "unroll_k": 2, "stages": 1,
             "edge": "guarded"},
        ),
    },
    "sgemm_3xtf32": {
        "batch": ((64, 64, 2048, "nt", 0, 16), "two_warps", {"split_k": 2, "group_m": 1}),
        "guarded": (
            (1000, 1000, 1000, "nn", 1),
            "narrow_warps",
            {"BM": 128, "BN": 32, "BK": 16, "edge": "guarded", "fragment_pipeline": 0, "group_m": 1},
        ),
        "parts_of_k_promoted_often": (
            (1760, 128, 1760, "nn", 1),
            "short_sums",
            {"BM": 32, "WM": 16, "WN": 32, "BK": 64, "split_k": 2, "stages": 4, "min_blocks": 1},
        ),
        "equal_parts_of_k_in_two_rounds": (
            (64, 64, 64000, "nt", 1),
            "four_warps",
            {"WM": 16, "BN": 64, "WN": 32, "split_k": 64, "group_m": 1, "min_blocks": 1},
        ),
    },
    "sgemm_3xtf32_wgmma": {
        "batch": ((64, 64, 2048, "nt", 0, 16), "small_block", {"group_m": 1}),
        "b_turned_while_split": (
            (256, 256, 256, "tn", 1),
            "one_warpgroup",
            {"BM": 64, "BN": 32, "vec_c": 2, "group_m": 1},
        ),
        "guarded_raster_with_a_rest": (
            (1000, 1000, 1000, "nn", 1),
            "small_block",
            {"BM": 96, "stages": 4, "edge": "guarded"},
        ),
        "many_blocks_per_sm": (
            (1760, 128, 1760, "nn", 1),
            "two_warpgroups",
            {"BM": 32, "stages": 4, "group_m": 1},
        ),
        "uneven_parts_of_k": (
            (1000, 1000, 1000),
            "narrow_block",
            {"split_k": 3, "stages": 3, "splits": 2, "edge": "guarded"},
        ),
        "equal_parts_of_k": (
            (64, 64, 64000, "nt", 1),
            "one_warpgroup",
            {"BM": 32, "split_k": 2, "stages": 5, "group_m": 1},
        ),
        "parts_of_k_in_two_rounds": (
            (64, 64, 64000, "nt", 1),
            "one_warpgroup",
            {"BM": 32, "split_k": 64, "group_m": 1},
        ),
    },
    "sgemm_3xfp16_wgmma": {
        "exact": ((1024, 1024, 1024), "two_warpgroups", {}),
        "batch": ((64, 64, 2048, "nt", 0, 16), "slim_block", {}),
        "guarded": ((1000, 1003, 1001, "tt", 1), "one_warpgroup", {"vec_c": 1, "edge": "guarded"}),
    },
    **{
        family: {
            "plain": ((4096, 4096, 4096), family, {}),
            "transposed": ((100, 70, 33, "tt", 1), family, {}),
        }
        for family in ("naive", "coalesced", "flattened", "shared_tile", "register_tile")
    },
}  # fmt: skip
NAMES = [(family, name) for family, cases in CASES.items() for name in cases]


def made(family: str, name: str) -> Source:
    space = Space.load(family)
    problem, preset, changes = CASES[family][name]
    return render(
        space, space.config({**space.presets[preset], **changes}), problem_of(space, *problem), H200
    )


def problem_of(
    space: Space, m: int, n: int, k: int, layout: str = "nn", beta: int = 0, batch: int = 1
) -> Problem:
    return Problem(m, n, k, layout, beta, space.math, batch)


@pytest.mark.parametrize(("family", "name"), NAMES)
def test_the_rendered_text_is_the_golden_one(family, name, update_golden):
    source = made(family, name)
    # Digests are left out: a word in any template would change every file.
    text = re.sub(r"(?m)^// template [0-9a-f]{16}$", "// template", source.text)
    assert_tidy(text)
    path = GOLDEN / family / f"{name}.cu"
    if update_golden:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.is_file(), f"no {path}: {UPDATE}"
    assert text == path.read_text(), f"if this is meant: {UPDATE}"


def test_every_golden_belongs_to_a_case(update_golden):
    files = {(path.parent.name, path.stem): path for path in GOLDEN.rglob("*.cu")}
    if update_golden:
        for key in files.keys() - set(NAMES):
            files.pop(key).unlink()
    assert set(files) == set(NAMES)


def test_every_family_is_shown():
    assert set(CASES) == {path.stem for path in (GOLDEN.parents[1] / "search_spaces").glob("*.toml")}


# -- every switch is shown -----------------------------------------------------------------------------------

SIZES = {
    "sgemm_skinny": [(1, 4096, 4096), (4096, 8, 4096), (32, 4096, 4096), (16, 4095, 1023), (4097, 3, 333)],
}
COMMON = [
    (1000, 1000, 1000),
    (64, 64, 64000),
    (256, 256, 256),
    (4095, 4097, 1023),
    (1760, 128, 1760),
    (100, 70, 33),
]
SAMPLES = 24  # of each problem

Ways = set[tuple[str, bool]]  # an `if` by template, line and position; whether its condition held


@pytest.fixture
def ways(monkeypatch) -> Ways:
    """The branches of the templates that were taken since this was cleared."""
    taken: Ways = set()

    def went(condition: object, place: str) -> object:
        taken.add((place, bool(condition)))
        return condition

    generate = jinja2.Environment._generate

    def generate_watched(self, source, name, *rest, **more):
        self.filters["went"] = went
        for index, node in enumerate(source.find_all(jinja2.nodes.If)):
            place = jinja2.nodes.Const(f"{name}, line {node.lineno}, if {index}")
            node.test = jinja2.nodes.Filter(node.test, "went", [place], [], None, None, lineno=node.lineno)
        return generate(self, source, name, *rest, **more)

    monkeypatch.setattr(jinja2.Environment, "_generate", generate_watched)
    monkeypatch.setattr(templates, "_known", {})  # compiled before
    monkeypatch.setattr(sandbox, "_kept_code", lambda: None)  # by another process
    return taken


def some_configs(space: Space) -> Iterator[tuple[Problem, Config]]:
    chance = random.Random(space.family)
    for index, size in enumerate(SIZES.get(space.family, COMMON)):
        problem = problem_of(space, *size, LAYOUTS[index % 4], index % 2)
        try:
            legal = space.enumerate(problem, H200)
        except SpaceError:  # none is legal
            continue
        yield from ((problem, legal.config(chance.randrange(len(legal)))) for _ in range(SAMPLES))


def own(ways: Ways, space: Space) -> Ways:
    """Those in the family's own templates: the goldens of its fallback show the others."""
    files = templates.template_of(space).files
    return {way for way in ways if way[0].partition(", ")[0] in files}


@pytest.mark.parametrize("family", CASES)
def test_every_switch_is_shown(family, ways):
    shown: Ways = set()
    for name in CASES[family]:
        ways.clear()
        source = made(family, name)
        assert ways, source.text  # the templates are watched
        shown |= ways
    space = Space.load(family)
    for problem, config in some_configs(space):
        ways.clear()
        render(space, config, problem, H200)
        assert not own(ways, space) - shown, f"no golden of {family} shows this: add {problem}, {config.id}"


@pytest.mark.parametrize("family", CASES)
def test_no_golden_could_be_left_out(family, ways):
    alone: list[Ways] = []
    for name in CASES[family]:
        ways.clear()
        made(family, name)
        alone.append(set(ways))
    for index, name in enumerate(CASES[family]):
        others = set().union(*(each for other, each in enumerate(alone) if other != index))
        assert alone[index] - others, f"{name} shows nothing that no other golden of {family} shows"
