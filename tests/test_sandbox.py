"""Templates that would reach Python, never end, or take all memory: each is one line, and one candidate."""

from __future__ import annotations

import sys
import threading
import time
import tracemalloc

import pytest

from autotune.code import sandbox, templates
from autotune.code.render import render, template_digest
from autotune.errors import SpaceError
from autotune.space.space import Space
from autotune.tuning.budget import Budget
from autotune.tuning.request import Request
from autotune.tuning.tuner import run
from autotune.values.device import named_device
from autotune.values.problem import Problem

H200, SMALL = named_device("h200"), Problem(16, 16, 16)
SPACE = """
family = "mine"
[parameters]
BM = { values = [16, 32] }
[launch]
grid = "ceil_div(m, BM)"
block = "BM"
shared_bytes = "0"
[presets.first]
BM = 16
"""


@pytest.fixture
def rendered(tmp_path):
    """Write a template, and render it for a config."""

    def made(template, BM=32, **files):
        (tmp_path / "mine.toml").write_text(SPACE)
        for name, text in {"mine.cu.jinja": template, **files}.items():
            (tmp_path / name).write_text(text)
        space = Space.load(tmp_path / "mine.toml")
        return render(space, space.config({"BM": BM}), SMALL, H200).text

    return made


OUTSIDE = [
    '{{ lipsum.__globals__.os.system("touch ran") }}',
    '{{ cycler.__init__.__globals__.os.system("touch ran") }}',
    '{{ "".__class__.__mro__[1].__subclasses__() }}',
    '{{ ""["__class__"] }}',
    '{{ ""|attr("__class__") }}',
    '{{ "{0.__class__}".format(1) }}',
    '{{ self._TemplateReference__context.environment.from_string("x") }}',
    '{% for x in [1] %}{{ loop._before.__globals__ }}{% endfor %}',
    '{% macro f() %}{% endmacro %}{{ f.__call__.__globals__ }}',
    '{{ [1].append(2) }}',
    '{% set d = {} %}{{ d.update(a=1) }}',
    '{% include "../mine.toml" %}',
    '{% include "/etc/passwd" %}',
]  # fmt: skip


@pytest.mark.parametrize("template", OUTSIDE)
def test_a_template_reaches_nothing_but_its_names(rendered, tmp_path, monkeypatch, template):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpaceError, match=r"mine\.cu\.jinja: line 1: does not render \(") as raised:
        rendered(template)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "ran").exists()


LOOP = "{% for i in range(99999) %}"
DOUBLING = "{% for i in range(60) %}"
END = "{% endfor %}"
ENDLESS = {
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": LOOP + LOOP + END + END,
    "line statements": "//% for i in range(99999)\n//% for j in range(99999)\n//% endfor\n//% endfor\n",
    "loop variable": LOOP + LOOP + "{{ loop.index }}" + END + END,
    "filtered loop": LOOP + "{% for j in range(99999) if j < 0 %}" + END + END,
    "loop of itself": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching macro": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(90) }}",
    "includes itself": '{% include "mine.cu.jinja" %}',
    "includes itself twice": '{% include "mine.cu.jinja" %}' * 2,
    "imports itself": '{% import "mine.cu.jinja" as me %}',
    "extends itself": '{% extends "mine.cu.jinja" %}',
    "block": "{% block b %}{{ self.b() }}{% endblock %}",
    "product": '{{ "x" * 10**10 }}',
    "list": "{{ [0] * 10**10 }}",
    "power": "{{ 9 ** (10**9) }}",
    "doubling": "{% set n = namespace(s='xx') %}" + DOUBLING + "{% set n.s = n.s ~ n.s %}" + END,
    "doubling by +": "{% set n = namespace(s='xx') %}" + DOUBLING + "{% set n.s = n.s + n.s %}" + END,
    "doubling a list": "{% set n = namespace(s=[1]) %}" + DOUBLING + "{% set n.s = n.s + n.s %}" + END,
    "field": '{{ "%1000000000d" % 1 }}',
    "star": '{{ "%*d" % (1000000000, 1) }}',
    "format": '{{ "{:>1000000000}".format(1) }}',
    "format filter": '{{ "%1000000000d"|format(1) }}',
    "center": '{{ "x"|center(10**9) }}',
    "ljust": '{{ "x".ljust(10**9) }}',
    "indent": '{{ "x\ny"|indent(10**9) }}',
    "join": '{{ (["x" * 99999] * 99999)|join }}',
    "join by a text": '{{ ("x" * 9999)|join("y" * 99999) }}',
    "joined by a text": '{{ ("y" * 99999).join(["x"] * 9999) }}',
    "replace": '{{ ("x" * 9999)|replace("x", "y" * 99999) }}',
    "replaced": '{{ ("x" * 9999).replace("x", "y" * 99999) }}',
    "translated": '{{ ("x" * 9999).translate({120: "y" * 99999}) }}',
    "many fields": '{{ ("{0}" * 9999).format("y" * 99999) }}',
    "many named fields": '{{ ("%(a)s" * 9999) % {"a": "y" * 99999} }}',
    "many indents": '{{ ("x\n" * 9999)|indent(99999) }}',
    "mapped": '{{ range(99999)|map("center", 99999)|list }}',
    "a list of lists": '{% set a = ["x" * 9999] * 99 %}{% set b = [a] * 99 %}{{ [b] * 99 }}',
    "a list written": '{% set a = ["x" * 99999] %}{{ [a' + ", a" * 999 + "] }}",
    "lipsum": "{{ lipsum(10**9) }}",
    "long": "{% for i in range(9999) %}{{ 'x' * 99999 }}{% endfor %}",
    "long in a macro": "{% macro f() %}" + LOOP + "{{ 'x' * 99999 }}" + END + "{% endmacro %}{{ f() }}",
    "deep brackets": "{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}",
    "deep loops": "{% for i in [1] %}" * 60 + "{% endfor %}" * 60,
    "deep sum": "{{ 1" + " + BM" * 20000 + " }}",
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_would_not_end_is_one_line(rendered, name):
    began = time.monotonic()
    with pytest.raises(SpaceError, match=r"mine\.cu\.jinja(: line \d+)?: does not render \(") as raised:
        rendered(ENDLESS[name])
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 600
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("name", ["join", "replaced", "many fields", "many indents", "mapped"])
def test_a_text_that_would_be_too_long_is_refused_before_it_is_made(rendered, name):
    tracemalloc.start()
    try:
        with pytest.raises(SpaceError, match="would be longer than"):
            rendered(ENDLESS[name])
        assert tracemalloc.get_traced_memory()[1] < 250 << 20
    finally:
        tracemalloc.stop()


def test_the_limits_are_far_from_what_templates_need(monkeypatch):
    monkeypatch.setattr(sandbox, "MOST_STEPS", sandbox.MOST_STEPS // 100)
    monkeypatch.setattr(sandbox, "MOST_TEXT", sandbox.MOST_TEXT // 10)
    space = Space.load("sgemm")
    problem = Problem(4096, 4096, 4096)
    for preset in ("square_block", "two_warps", "split_block"):
        render(space, space.fitted(space.presets[preset], problem, H200), problem, H200)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ [1, 'a', BM]|join(', ') }}", "1, a, 32"),
        ("{{ range(3)|map('string')|join('+') }}", "0+1+2"),
        ("{{ ', '.join(['a', 'b']) }}", "a, b"),
        ("{{ 'a-b'|replace('-', '_') }}{{ 'a-b'.replace('-', '+') }}", "a_ba+b"),
        ("{{ 'x{}y{n:>3}'.format(1, n=2) }}{{ '%s %4d' % ('a', 3) }}", "x1y  2a    3"),
        ("{{ 'a\nb'|indent(2) }}", "a\n  b"),
    ],
)
def test_texts_are_put_together_as_ever(rendered, template, text):
    assert rendered(template) == text


def test_what_one_template_takes_is_not_missing_to_the_next(rendered):
    template = "{% for i in range(90000) %}{% endfor %}{{ BM }}"
    for _ in range(5):
        assert rendered(template) == "32"
    with pytest.raises(SpaceError):
        rendered(ENDLESS["nested loops"])
    assert rendered(template) == "32"


def test_threads_have_limits_of_their_own(rendered, tmp_path):
    template = "{% for i in range(90000) %}{% endfor %}{{ BM }}"
    assert rendered(template) == "32"
    space = Space.load(tmp_path / "mine.toml")
    made: list[str] = []
    threads = [
        threading.Thread(target=lambda: made.append(render(space, space.presets["first"], SMALL, H200).text))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == ["16"] * 8


def test_a_template_may_do_all_that_is_harmless(rendered):
    template = (
        "{% macro twice(x) %}{{ x ~ x }}{% endmacro %}"
        "{% set n = namespace(sum=0) %}"
        "{% for i in range(4) %}{% set n.sum = n.sum + i * BM ** 2 %}{% endfor %}"
        "{{ twice('a') }} {{ n.sum }} "
        "{{ 'row * %d + 100000 %% %05d' % (m, BM) }} {{ '{:>3}12345'.format(m) }} "
        "{{ [1, 2]|join(',') }} {{ 'x'.upper() }} "
        "{% for i in 'abc' %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{% else %}none{% endfor %}"
    )
    assert rendered(template) == "aa 6144 row * 16 + 100000 % 00032  1612345 1,2 X 1False32False33True3"


KERNEL = """
//% if BM == 16
//%   for i in range(99999)
//%     for j in range(99999)
//%     endfor
//%   endfor
//% endif
extern "C" __global__ void mine(float alpha, const float* A, const float* B, float beta, float* C)
{
    const int i = blockIdx.x * {{ BM }} + threadIdx.x;
    if (i >= {{ m }})
        return;
    for (int j = 0; j < {{ n }}; ++j) {
        float sum = 0;
        for (int p = 0; p < {{ k }}; ++p)
            sum += A[i * {{ lda }} + p] * B[p * {{ ldb }} + j];
        C[i * {{ ldc }} + j] = alpha * sum;
    }
}
"""


def test_a_template_that_fails_on_one_config_costs_one_candidate(tmp_path):
    (tmp_path / "mine.toml").write_text(SPACE)
    (tmp_path / "mine.cu.jinja").write_text(KERNEL)
    space = Space.load(tmp_path / "mine.toml")
    request = Request(space=space, budget=Budget.of("2"), target=H200, root=tmp_path / "records")
    record = run(SMALL, request)
    assert record.config == {"BM": 32}
    assert dict(record.search.outcomes)["compile"] == 1


def test_a_template_that_fails_on_the_problem_of_a_proof_alone_costs_one_candidate(tmp_path):
    (tmp_path / "mine.toml").write_text(SPACE)
    (tmp_path / "mine.cu.jinja").write_text(KERNEL.replace("BM == 16", "BM == 16 and m < 200"))
    large = Problem(512, 16, 16)
    request = Request(
        space=Space.load(tmp_path / "mine.toml"),
        budget=Budget.of("2"),
        target=H200,
        root=tmp_path / "records",
    )
    record = run(large, request)
    assert record.config == {"BM": 32}
    assert dict(record.search.outcomes)["compile"] == 1


# -- which template is taken ---------------------------------------------------------------------------------

EVIL = '{{ lipsum.__globals__.os.system("touch ran") }}'


@pytest.fixture
def folder(tmp_path):
    """A space that extends a built-in one, with templates planted where they might be looked for."""
    (tmp_path / "spaces" / "parts").mkdir(parents=True)
    (tmp_path / "templates" / "parts").mkdir(parents=True)
    for place in ("spaces", "templates"):
        (tmp_path / place / "sgemm.cu.jinja").write_text(EVIL)
        (tmp_path / place / "parts" / "raster.cu.jinja").write_text(EVIL)
    return tmp_path / "spaces"


def test_a_space_that_extends_a_built_in_one_takes_its_template(folder):
    sgemm = Space.load("sgemm")
    (folder / "mine.toml").write_text('extends = "sgemm"\n')
    (folder / "more.toml").write_text('extends = "mine.toml"\n')
    cube = Problem(4096, 4096, 4096)
    for name in ("mine.toml", "more.toml"):
        space = Space.load(folder / name)
        assert template_digest(space) == template_digest(sgemm)
        config = space.presets["square_block"]
        assert render(space, config, cube, H200).text == render(sgemm, config, cube, H200).text


def test_it_takes_another_where_it_says_so(folder):
    (folder / "own.jinja").write_text("// {{ family }} of my own\n")
    (folder / "mine.toml").write_text('extends = "sgemm"\ntemplate = "own.jinja"\n')
    (folder / "more.toml").write_text('extends = "mine.toml"\n')
    for name in ("mine.toml", "more.toml"):
        space = Space.load(folder / name)
        text = render(space, space.presets["square_block"], Problem(4096, 4096, 4096), H200).text
        assert text == "// sgemm of my own\n"
    (folder / "mine.toml").write_text('extends = "sgemm"\ntemplate = "none.jinja"\n')
    with pytest.raises(SpaceError, match=r"mine\.toml: template .*none\.jinja is not there"):
        template_digest(Space.load(folder / "mine.toml"))


def test_a_space_that_extends_one_of_ones_own_finds_the_template_of_that(tmp_path):
    for name in ("base", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "base" / "mine.toml").write_text(SPACE)
    (tmp_path / "base" / "mine.cu.jinja").write_text("// base")
    (tmp_path / "other" / "more.toml").write_text('extends = "../base/mine.toml"\n')
    space = Space.load(tmp_path / "other" / "more.toml")
    assert render(space, space.presets["first"], SMALL, H200).text == "// base"
    (tmp_path / "other" / "mine.cu.jinja").write_text("// other")
    assert render(space, space.presets["first"], SMALL, H200).text == "// other"


# --- what is kept of them ---


@pytest.fixture
def pycache(tmp_path, monkeypatch):
    """A folder of its own for what Python keeps, and so for the code of templates."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "pycache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    sandbox._kept_code.cache_clear()
    yield tmp_path / "pycache"
    sandbox._kept_code.cache_clear()


def kept(folder):
    return sorted(path for path in folder.rglob("template.*") if path.is_file())


def compiled_again(monkeypatch, space):
    """Return what a new process would: its template, and how many files it compiles."""
    calls = []
    real = sandbox._environment_class()._generate

    def counted(self, source, *words, **named):
        calls.append(source)
        return real(self, source, *words, **named)

    with monkeypatch.context() as patch:
        patch.setattr(sandbox._environment_class(), "_generate", counted)
        patch.setattr(templates, "_known", {})
        text = render(space, space.presets["square_block"], Problem(256, 256, 256), H200).text
    return text, len(calls)


def test_the_code_of_our_templates_is_kept_where_python_keeps_its_own(pycache, monkeypatch):
    space = Space.load("sgemm")
    text, count = compiled_again(monkeypatch, space)
    assert count == len(kept(pycache)) > 5
    sandbox._kept_code.cache_clear()
    assert compiled_again(monkeypatch, space) == (text, 0)
    for path in kept(pycache):
        path.write_bytes(path.read_bytes()[:-1])
    assert compiled_again(monkeypatch, space) == (text, count)


def test_nothing_is_kept_where_python_keeps_nothing(pycache, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert compiled_again(monkeypatch, Space.load("sgemm"))[1] > 5
    assert kept(pycache) == []


def test_the_code_of_other_templates_is_not_kept(pycache, rendered):
    assert rendered("{{ BM }}").startswith("32")
    assert kept(pycache) == []
