from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jinja2
import jinja2.meta
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from preset_problems import PROBLEMS

from autotune.code.compiler import Binary
from autotune.code.pool import CompilePool
from autotune.code.render import Source, render, template_digest
from autotune.errors import ConfigError, SpaceError
from autotune.space.file import read_space_file
from autotune.space.space import Space
from autotune.space.statements import FACTS, LIMITS, TEMPLATE_NAMES
from autotune.values.device import named_device
from autotune.values.problem import LAYOUTS, Problem

ROOT = Path(__file__).resolve().parents[1]
H200 = named_device("h200")
SGEMM = Space.load("sgemm")

NAIVE = {
    **{name: values[0] for name, values in SGEMM.parameters.items()},
    "BM": 16, "TM": 1, "LM": 4, "BN": 16, "TN": 1, "VM": 1, "VN": 1, "BK": 16, "loader": "reg", "stages": 1,
    "transpose_a": 0, "vec_a": 1, "vec_b": 1, "vec_c": 1, "smem_pad": 0, "edge": "exact",
    "fragment_pipeline": 0, "unroll_stages": 0, "ffma_order": "row", "group_m": 1, "min_blocks": 1,
}  # fmt: skip
COLUMN = {**NAIVE, "BM": 64, "TM": 8, "LM": 1, "BN": 64, "VM": 4, "BK": 8}
ODD = {"edge": "guarded", "vec_a": 1, "vec_b": 1, "vec_c": 1}

# name: problem, preset or config, changes
CASES: dict[str, tuple[Problem, str | dict[str, int | str], dict[str, int | str]]] = {
    **{name: (problem, name, {}) for name, problem in PROBLEMS.items()},
    "naive": (Problem(256, 256, 256), NAIVE, {}),
    "column_per_thread": (Problem(256, 256, 256), COLUMN, {}),
    "guarded_cp_async": (Problem(4095, 4097, 1023), "square_block", ODD),
    "guarded_registers": (Problem(4095, 4097, 1023, beta=1), "register_staged", ODD),
    "beta": (Problem(4096, 4096, 4096, beta=1), "small_block", {"unroll_stages": 0, "ffma_order": "blocked"}),
    "nt": (Problem(4096, 4096, 4096, "nt"), "square_block", {"vec_b": 1}),
    "tn": (Problem(4096, 4096, 4096, "tn"), "middle_block", {"vec_a": 4, "smem_pad": 0}),
    "tt": (Problem(4096, 4096, 4096, "tt"), "register_staged", {"fragment_pipeline": 0}),
    "a_along_k": (Problem(4096, 4096, 4096), "small_block", {"transpose_a": 0, "vec_a": 4}),
    "shifted": (Problem(4095, 4097, 1023, beta=1), "long_block", {**ODD, "edge": "shifted"}),
    "split_ragged": (Problem(1000, 1000, 1000), "split_slim", {"edge": "shifted", "split_k": 12}),
}


def choice(name: str) -> dict[str, int | str]:
    _, start, changes = CASES[name]
    return {**(SGEMM.presets[start] if isinstance(start, str) else start), **changes}


@functools.cache
def source(name: str) -> Source:
    return render(SGEMM, SGEMM.config(choice(name)), CASES[name][0], H200)


# -- machine code --------------------------------------------------------------------------------------------

# Presets for the GPU that they were tuned on, the rest also for one of another generation; what needs no
# cp.async also for the oldest.
OTHERS = ("sm_80", "sm_120")
COMPILES = [
    (name, arch)
    for number, name in enumerate(CASES)
    for arch in (
        "sm_90",
        *[OTHERS[number % 2]] * (name not in PROBLEMS),
        *["sm_75"] * (choice(name)["loader"] == "reg"),
    )
]


@pytest.fixture(scope="module")
def compiled():
    """The outcome of every case, compiled two at a time."""
    with CompilePool(workers=2, timeout_s=60) as pool:
        for name, arch in COMPILES:
            pool.submit((name, arch), source(name).text, source(name).entry, arch)
        outcomes = {}
        while pool.pending:
            outcomes.update(pool.collect(timeout=60))
    return outcomes


@pytest.mark.parametrize(("name", "arch"), COMPILES)
def test_every_case_compiles(compiled, name, arch):
    binary = compiled[name, arch]
    assert isinstance(binary, Binary), binary
    warnings = re.findall(r"warning #(\S+):", binary.log)
    assert set(warnings) <= {"177-D"}, binary.log  # a constant that only the reader needs
    assert binary.shared_bytes == 0  # all of it is dynamic
    threads = source(name).launch.block[0]
    assert binary.registers * threads * int(source(name).config["min_blocks"]) <= 65536


# -- text ----------------------------------------------------------------------------------------------------


def assert_tidy(text):
    lines = text.split("\n")
    depth = 0
    assert lines.pop() == ""
    assert lines[-1] == "}"
    for number, line in enumerate(lines, 1):
        place = f"line {number}: {line!r}"
        assert line == line.rstrip(), place
        assert "\t" not in line, place
        closed = line.lstrip().startswith("}")
        assert not line or len(line) - len(line.lstrip()) >= 4 * (depth - closed), place
        code = re.sub(
            r"//.*|`.*?`|^namespace.*|^\}  // namespace.*", "", line
        )  # in a namespace nothing is indented
        depth += code.count("{") - code.count("}")
        assert len(line) <= 144 or line.startswith("// config "), place
        assert not re.search(r"\{\{|\}\}|\{%|%\}|\{#|//%", line.replace("{}}", "")), place
    assert "\n\n\n" not in text
    assert "\n\n}" not in text
    assert "{\n\n" not in text


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_tidy(name):
    assert_tidy(source(name).text)


@pytest.mark.parametrize("name", CASES)
def test_the_text_says_what_it_is(name):
    made = source(name)
    formula, config, template = made.text.splitlines()[:3]
    assert formula.startswith("// sgemm: C[m,n] = alpha op(A)[m,k] op(B)[k,n]")
    assert (" + beta C" in formula) == bool(made.problem.beta)
    assert formula.endswith(f"layout {made.problem.layout}")
    assert config == f"// config   {made.config.id}"
    assert template == f"// template {made.template_digest[:16]}"
    for name_, value in (("m", made.problem.m), ("n", made.problem.n), ("k", made.problem.k)):
        assert f"constexpr int {name_} = {value};" in made.text
    cluster = "__cluster_dims__(cluster_k) " if made.config["cluster_k"] > 1 else ""
    bounds = f"__launch_bounds__(num_threads, {made.config['min_blocks']})"
    assert f'extern "C" __global__ void {cluster}{bounds}' in made.text


@settings(max_examples=12, deadline=None)
@given(
    size=st.tuples(*[st.one_of(st.integers(1, 600), st.sampled_from([1024, 4096]))] * 3),
    layout=st.sampled_from(LAYOUTS),
    beta=st.sampled_from([0, 1]),
    draw=st.integers(0, 2**32),
)
def test_any_legal_point_renders_tidily(size, layout, beta, draw):
    problem = Problem(*size, layout, beta)
    legal = SGEMM.enumerate(problem, H200)
    made = render(SGEMM, legal.config(draw % len(legal)), problem, H200)
    assert_tidy(made.text)
    assert made.launch.grid[1:] == made.launch.block[1:] == (1, 1)


def test_rendering_is_pure():
    """The same in another process, whatever its hash seed."""
    program = (
        "import sys; sys.path.insert(0, 'tests'); from test_render import CASES, source\n"
        "for name in reversed(CASES): print(name, source(name).code_digest, source(name).template_digest, "
        "hash_of(source(name).text))"
    )
    program = "import hashlib\nhash_of = lambda text: hashlib.sha256(text.encode()).hexdigest()\n" + program
    told = {}
    for seed in ("0", "1"):
        command = [sys.executable, "-c", program]
        told[seed] = subprocess.run(
            command,
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    assert told["0"] == told["1"]
    for line in told["0"].splitlines():
        name, code_digest, digest, _ = line.split()
        assert (code_digest, digest) == (source(name).code_digest, source(name).template_digest)


def test_launch_geometry_follows_the_config():
    made = source("square_block")
    assert made.launch.grid == (32 * 32, 1, 1)
    assert made.launch.block == (256, 1, 1)
    assert made.launch.shared_bytes == 4 * 2 * (8 * 132 + 8 * 132 - 8 * 4)
    assert made.entry == made.family == "sgemm"


def test_an_illegal_config_is_not_rendered():
    config = SGEMM.config({**SGEMM.presets["square_block"], "stages": 1})
    with pytest.raises(ConfigError, match="async_stages: needs"):
        render(SGEMM, config, Problem(4096, 4096, 4096), H200)


# -- template and space --------------------------------------------------------------------------------------


def test_templates_and_spaces_have_the_same_stems():
    templates = {path.name.removesuffix(".cu.jinja") for path in (ROOT / "templates").glob("*.jinja")}
    assert templates == {path.stem for path in (ROOT / "search_spaces").glob("*.toml")}
    assert {Space.load(name).family for name in templates} == templates


FAMILIES = [path.stem for path in sorted((ROOT / "search_spaces").glob("*.toml"))]
ENVIRONMENT = jinja2.Environment(line_statement_prefix="//%", trim_blocks=True, lstrip_blocks=True)


def template_facts(family):
    """Names that a template and its parts take from outside, but those that may be missing; and the parts."""
    asked, made, files = set(), set(), [f"{family}.cu.jinja"]
    for name in files:
        tree = ENVIRONMENT.parse((ROOT / "templates" / name).read_text())
        optional = set()
        made |= {node.name for node in tree.find_all(jinja2.nodes.Macro)}
        for node in tree.find_all(jinja2.nodes.Assign):
            made |= {
                each.name
                for each in (node.target, *node.target.find_all(jinja2.nodes.Name))
                if each.fields[0] == "name"
            }
        for node in (*tree.find_all(jinja2.nodes.Test), *tree.find_all(jinja2.nodes.Filter)):
            if node.name in ("defined", "default") and isinstance(node.node, jinja2.nodes.Name):
                optional.add(node.node.name)
        asked |= jinja2.meta.find_undeclared_variables(tree) - optional
        for include in tree.find_all((jinja2.nodes.Include, jinja2.nodes.FromImport)):
            files += [include.template.value] * (include.template.value not in files)
    return asked - made, set(files[1:])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_asks_only_for_what_its_space_offers(family):
    asked, _ = template_facts(family)
    assert asked <= {*Space.load(family).names, *FACTS, *LIMITS, *TEMPLATE_NAMES}
    assert {"family", "config_id", "template_digest", "layout"} <= asked


def test_every_function_is_one_of_the_gpu():
    """Where NVRTC takes what says nothing for a function of the GPU, nvcc takes it for one of the host."""
    for path in (ROOT / "templates").rglob("*.jinja"):
        assert not re.search(
            r"^(?:constexpr |inline |static )*\w+ \w+\(.*\)$", path.read_text(), re.MULTILINE
        ), path


def test_every_part_is_included():
    parts = {
        path.relative_to(ROOT / "templates").as_posix() for path in (ROOT / "templates").rglob("parts/*/*")
    }
    assert set().union(*(template_facts(family)[1] for family in FAMILIES)) == parts


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_and_derived_quantity_is_used(family):
    """By the template, the launch, or a rule; a parameter by one of the first two."""
    asked, _ = template_facts(family)
    space = read_space_file(family)

    def reached(names):
        found = set()
        while names:
            name = names.pop()
            found.add(name)
            if name in space.derived:
                names |= space.derived[name].names - found
        return found

    parts = (*space.launch, space.grid_y, space.grid_z, space.block_y, space.workspace_bytes)
    parts += tuple(part for each in (*space.before, *space.prepare) for part in each.launch)
    launch = set().union(*(part.names for part in parts if part is not None))
    rules = set().union(*(rule.expression.names for rule in space.rules))
    assert set(space.parameters) <= reached(asked | launch)
    explained = {"BM", "BN", "TM", "TN"}  # by `autotune explain`
    assert set(space.derived) <= reached(asked | launch | rules) | explained


@pytest.fixture
def copy(tmp_path):
    """A copy of the family that may be changed; returns a function that replaces text and renders."""

    def render_changed(old="", new="", file="sgemm.cu.jinja"):
        for name in ("search_spaces", "templates"):
            shutil.copytree(ROOT / name, tmp_path / name, dirs_exist_ok=True)
        path = tmp_path / "templates" / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        space = Space.load(tmp_path / "search_spaces" / "sgemm.toml")
        return render(space, SGEMM.presets["square_block"], Problem(4096, 4096, 4096), H200)

    return render_changed


def test_a_copy_renders_the_same(copy):
    made = copy()
    assert (made.text, made.template_digest) == (
        source("square_block").text,
        source("square_block").template_digest,
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("// [stages]", "// another word about [stages]"),
        (
            "    const int thread = threadIdx.x;\n",
            "    // what else\n\n    const int thread = threadIdx.x;   \n",
        ),
        ("    const int thread = threadIdx.x;\n", "    const int thread = threadIdx.x; /* a\n * b */\n"),
        ("    const int thread = threadIdx.x;\n", "{# unseen #}    const int thread = threadIdx.x;\n"),
    ],
)
def test_a_comment_changes_the_template_but_not_the_code(copy, old, new):
    made = copy(old, new)
    assert made.code_digest == source("square_block").code_digest
    assert made.template_digest != source("square_block").template_digest


@pytest.mark.parametrize(
    ("old", "new", "file"),
    [
        ("threadIdx.x;", "threadIdx.x + 0;", "sgemm.cu.jinja"),
        ("a warp has 32 lanes", "a warp // has lanes", "parts/sgemm/constants.cu.jinja"),
        ("const int j = i % 2 ?", "const int j = i % 3 ?", "parts/sgemm/multiply.cu.jinja"),
    ],
)
def test_a_change_of_the_code_changes_both_digests(copy, old, new, file):
    made = copy(old, new, file)
    assert made.code_digest != source("square_block").code_digest
    assert made.template_digest != source("square_block").template_digest


def test_what_looks_like_a_comment_in_a_string_is_code(copy):
    one = copy("a warp has 32 lanes", "a warp // has 32 lanes", "parts/sgemm/constants.cu.jinja")
    other = copy("a warp has 32 lanes", "a warp // has 33 lanes", "parts/sgemm/constants.cu.jinja")
    assert one.code_digest != other.code_digest


@pytest.mark.parametrize(
    ("new", "says"),
    [
        (
            "{{ no_such_name }}\n",
            r"sgemm\.cu\.jinja: line 4: does not render \('no_such_name' is undefined\)$",
        ),
        ("{{ BM // 0 }}\n", r"sgemm\.cu\.jinja: line 4: does not render \(.*zero\)$"),
        ("{{ BM + 'x' }}\n", r"sgemm\.cu\.jinja: line 4: does not render \(unsupported operand"),
        ("//% if BM\n", r"sgemm\.cu\.jinja: line \d+: does not render \(Unexpected end of template"),
        ("//% nonsense\n", r"sgemm\.cu\.jinja: line 4: does not render \(Encountered unknown tag 'nonsense'"),
        (
            '//% include "parts/none.cu.jinja"\n',
            r"sgemm\.cu\.jinja: line 4: does not render \('parts/none\.cu",
        ),
    ],
)
def test_a_fault_in_a_template_is_one_line_with_its_place(copy, new, says):
    with pytest.raises(SpaceError, match=says) as raised:
        copy("\n{# A blank", f"{new}\n{{# A blank")
    assert "\n" not in str(raised.value)


def test_a_fault_in_a_part_names_the_part(copy):
    with pytest.raises(
        SpaceError, match=r"problem\.cu\.jinja: line \d+: does not render \('nothing' is undefined"
    ):
        copy("{{ m }};", "{{ nothing.m }};", "parts/common/problem.cu.jinja")


def test_a_family_of_ones_own_lies_in_one_folder_and_may_include_built_in_parts(tmp_path):
    (tmp_path / "mine.toml").write_text(
        'family = "mine"\n[parameters]\nBM = { values = [32] }\n'
        '[launch]\ngrid = "ceil_div(m, BM)"\nblock = "BM"\nshared_bytes = "0"\n'
    )
    template = tmp_path / "mine.cu.jinja"
    template.write_text('extern "C" __global__ void {{ family }}() { // {{ BM }}\n}\n')
    space = Space.load(tmp_path / "mine.toml")
    made = render(space, space.config({"BM": 32}), Problem(100, 1, 1), H200)
    assert made.text == 'extern "C" __global__ void mine() { // 32\n}\n'
    assert (made.entry, made.launch.grid, made.launch.shared_bytes) == ("mine", (4, 1, 1), 0)
    template.write_text('//% include "parts/common/cp_async.cu.jinja"\n')
    assert "cp.async.commit_group" in render(space, space.config({"BM": 32}), Problem(1, 1, 1), H200).text


FOLDER_OF_ONES_OWN = """
family = "mine"
[parameters]
BM = { values = [32] }
[launch]
grid = "1"
block = "BM"
shared_bytes = "0"
"""


@pytest.fixture
def mine(tmp_path):
    """A family of one's own in a folder; returns a function that writes its files and gives its digest."""

    def digest(template=None, **files):
        (tmp_path / "mine.toml").write_text(FOLDER_OF_ONES_OWN)
        if template is not None:
            files["mine.cu.jinja"] = template
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        space = Space.load(tmp_path / "mine.toml")
        made = render(space, space.config({"BM": 32}), Problem(1, 1, 1), H200)
        assert made.template_digest == template_digest(space)
        return made.template_digest

    return digest


@pytest.mark.parametrize(
    "statement",
    [
        '{% include "deep/er/what.txt" %}',
        "{%- include 'deep/er/what.txt' -%}",
        '{%+ include "./deep//er/what.txt" ignore missing with context %}',
        '//% include "deep/er/what.txt"',
        '  //%- include  "deep/er/what.txt"  ',
        '//% include ["none", "deep/er/what.txt"] ignore missing',
        '{% include ("none",\n "deep/er/what.txt",) %}',
        '{% import "deep/er/what.txt" as what %}',
        '{% from "deep/er/what.txt" import what without context %}',
        '{% extends "deep/er/what.txt" %}',
        '{% include "deep/" "er/what.txt" %}',
        '{% include "deep/" ~ "er" ~ "/what.txt" %}',
        '{% include "deep/er/what.txt" if m else "none" %}',
        '{% set what = "deep/er/what.txt" %}{% include what %}',
        '//% set what = "deep/er/what.txt"\n//% include what',
        '{% include ["none", "deep/er/" ~ "what.txt"] %}',
        '{% include "deep\\x2fer/what.txt" %}',
        '{% include "middle.jinja" %}',
    ],
)
def test_the_digest_follows_every_file_that_a_template_loads(mine, statement):
    rest = {"middle.jinja": '//% include "deep/er/what.txt"\n'}
    what = "{% macro what() %}{% endmacro %} // "
    first = mine(statement + "\n", **{"deep/er/what.txt": what + "a\n"}, **rest)
    assert mine(**{"deep/er/what.txt": what + "b\n"}) != first
    assert mine(**{"deep/er/what.txt": what + "a\n"}) == first


def test_the_digest_leaves_out_what_a_template_does_not_load(mine):
    first = mine('//% include "part.jinja"\n', **{"part.jinja": "// a\n", "other.jinja": "// a\n"})
    assert mine(**{"other.jinja": "// b\n", "parts/more.jinja": "// c\n"}) == first


def test_a_part_that_hides_a_built_in_one_changes_the_digest(mine):
    first = mine('//% include "parts/common/cp_async.cu.jinja"\n')
    assert mine(**{"parts/common/cp_async.cu.jinja": "// mine\n"}) != first
    computed = mine('//% include "parts/common/" ~ "cp_async.cu.jinja"\n')
    assert mine(**{"some/new": "file\n"}) != computed


def test_a_part_may_be_named_as_when_all_lay_in_one_folder(mine, tmp_path):
    def text(name):
        mine(f'//% include "{name}"\n')
        space = Space.load(tmp_path / "mine.toml")
        return render(space, space.config({"BM": 32}), Problem(1, 1, 1), H200).text

    assert "cp.async.commit_group" in text("parts/cp_async.cu.jinja")
    assert text("parts/tf32_split.cu.jinja") == text("parts/tf32/split.cu.jinja")
    for moved in tomllib.loads((ROOT / "templates/parts/moved.toml").read_text()).values():
        assert all((ROOT / f"templates/parts/{now}.cu.jinja").is_file() for now in moved.values())


def test_a_part_that_was_rewritten_is_told_by_its_name_of_before(mine):
    says = r"mine\.cu\.jinja: line 2: does not render \('parts/load_tiles\.cu\.jinja' is now "
    with pytest.raises(SpaceError, match=says + r"'parts/common/load_tiles\.cu\.jinja', which takes and"):
        mine('\n//% include "parts/load_tiles.cu.jinja"\n')
    assert mine(**{"parts/load_tiles.cu.jinja": "// one's own\n"})


def test_a_part_of_ones_own_hides_a_built_in_one_by_its_name_of_before_too(mine):
    first = mine('//% include "parts/common/cp_async.cu.jinja"\n')
    assert mine(**{"parts/cp_async.cu.jinja": "// mine\n"}) != first
    hidden = mine(**{"parts/cp_async.cu.jinja": "// mine too\n"})
    assert mine(**{"parts/common/cp_async.cu.jinja": "// mine, where it lies now\n"}) != hidden


def test_a_computed_name_may_stand_for_so_many_files_only(mine, monkeypatch):
    monkeypatch.setattr("autotune.code.templates.MOST_FILES", 50)
    with pytest.raises(
        SpaceError, match="computed name, which could be any of more than 50: give the templates a"
    ):
        mine('{% include "a" ~ 1 %}', **{f"files/{i}": "" for i in range(60)})


def test_what_cannot_be_a_template_is_said_where_it_is_named(mine, tmp_path):
    (tmp_path / "none").write_bytes(b"\xff")
    with pytest.raises(SpaceError, match=r"none: is not UTF-8 \(invalid start byte at byte 0\)$"):
        mine('{% include "none" %}')
    (tmp_path / "none").write_bytes(b" " * (1 << 20) + b" ")
    with pytest.raises(
        SpaceError, match=r"none: cannot be read \(it is longer than 1 MiB, the most that is read\)"
    ):
        mine('{% include "none" %}')
    assert mine('{% set name = "some" %}{% include name %}', some="")
    with pytest.raises(SpaceError, match="does not render"):
        mine('{% include "../mine.toml" %}')


def test_a_byte_order_mark_is_no_part_of_a_template(mine, tmp_path):
    first = mine('//% include "part.txt"\n{{ BM }}\n', **{"part.txt": "// part\n"})
    (tmp_path / "mine.cu.jinja").write_bytes(b'\xef\xbb\xbf//% include "part.txt"\n{{ BM }}\n')
    (tmp_path / "part.txt").write_bytes(b"\xef\xbb\xbf// part\n")
    assert mine() == first
    space = Space.load(tmp_path / "mine.toml")
    assert render(space, space.config({"BM": 32}), Problem(1, 1, 1), H200).text == "// part\n32\n"


def test_a_template_that_is_no_regular_file_is_not_waited_for(mine, tmp_path):
    mine("// a")
    (tmp_path / "mine.cu.jinja").write_text('{% include "pipe" %}')
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SpaceError, match="'pipe' is no template"):
        mine()


def test_a_missing_template_is_named_with_the_places_looked_at(tmp_path):
    path = tmp_path / "spaces" / "mine.toml"
    path.parent.mkdir()
    path.write_text(
        'family = "mine"\n[parameters]\nBM = { values = [32] }\n'
        '[launch]\ngrid = "1"\nblock = "BM"\nshared_bytes = "0"\n'
    )
    with pytest.raises(
        SpaceError, match=rf"mine\.toml: no template mine\.cu\.jinja in {path.parent}, .*templates"
    ):
        template_digest(Space.load(path))
