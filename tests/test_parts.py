"""Each part of a template begins with the names that it reads, uses and defines, and says what it does."""

from __future__ import annotations

import functools
import re
import textwrap
from collections import defaultdict
from pathlib import Path

import jinja2
import jinja2.meta
import jinja2.nodes
import pytest
from cuda_names import names
from test_goldens import CASES, made

from autotune.code import sandbox, templates

TEMPLATES = Path(__file__).parents[1] / "templates"
PARTS = sorted(path.relative_to(TEMPLATES).as_posix() for path in TEMPLATES.glob("parts/*/*.jinja"))
STATEMENT = re.compile(r"\{# (?=Reads|Uses|Defines)[^#]*#\}\n")


@functools.cache
def rendered() -> dict[str, str]:
    """Return all that a file wrote in the golden kernels, but not what those did that it includes."""
    load = templates.Template._load

    def marked(self: templates.Template, name: str) -> tuple[str, str, None]:
        text, place, fresh = load(self, name)
        return f"\x02{name}\n{text}\x03\n", place, fresh

    written: dict[str, list[str]] = defaultdict(list)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(templates.Template, "_load", marked)
        patch.setattr(templates, "_known", {})  # compiled before
        patch.setattr(sandbox, "_kept_code", lambda: None)  # by another process
        for family, cases in CASES.items():
            for name in cases:
                within: list[str] = []
                for line in made(family, name).text.splitlines(keepends=True):
                    if line[0] == "\x02":
                        within.append(line[1:-1])
                    elif line[0] == "\x03":
                        within.pop()
                    elif within:
                        written[within[-1]].append(line)
    return {file: "".join(lines) for file, lines in written.items()}


@functools.cache
def cuda() -> dict[str, tuple[set[str], set[str], set[str]]]:
    return {file: names(text) for file, text in rendered().items()}


def statement(part: str) -> str:
    """Return what a part has to say."""
    tree = sandbox.sandbox(jinja2.DictLoader({})).parse(
        templates._ASSEMBLY.sub("", (TEMPLATES / part).read_text())
    )
    asked = (
        each
        for each in tree.find_all((jinja2.nodes.Test, jinja2.nodes.Filter))
        if each.name in templates._ASKING
    )
    optional = {each.node.name for each in asked if isinstance(each.node, jinja2.nodes.Name)}
    own = {each.name for each in tree.find_all(jinja2.nodes.Name) if each.ctx != "load"} - optional
    read = jinja2.meta.find_undeclared_variables(tree) - own
    optional &= read
    declared, anywhere, mentioned = cuda().get(part, (set(), set(), set()))
    # a file that includes others may do so in the middle of a kernel: all names of it are theirs
    given = {
        name
        for file, (outside, within, _) in cuda().items()
        if file != part
        for name in (within if templates.loads((TEMPLATES / file).read_text())[0] else outside)
    }
    macros = set() if declared else {each.name for each in tree.find_all(jinja2.nodes.Macro)}  # for others
    lines = [
        "; ".join(filter(None, (listed("Reads", read - optional), listed("may read", optional)))),
        listed("Uses", (mentioned - anywhere) & given),
        listed("Defines", declared | macros),
    ]
    wrapped = (textwrap.wrap(line, 115, subsequent_indent="  ") for line in lines if line)
    said = [line for each in wrapped for line in each]
    return "{# " + "\n   ".join(said) + " #}\n" if said else ""


def listed(word: str, found: set[str]) -> str:
    return f"{word} {', '.join(sorted(found, key=lambda name: (name.lower(), name)))}" if found else ""


@pytest.mark.parametrize("part", PARTS)
def test_a_part_says_what_it_reads_and_defines(part, update_golden):
    path = TEMPLATES / part
    text = path.read_text()
    if update_golden:
        path.write_text(statement(part) + STATEMENT.sub("", text, count=1))
    said = STATEMENT.match(path.read_text())
    assert (said[0] if said else "") == statement(part), "run `make golden`"


def test_names_are_found_as_a_compiler_finds_them():
    declared, anywhere, mentioned = names("""
        // Not of a comment.
        template <int width>
        struct alignas(4 * width) Pair { float lane[width]; };
        __device__ float sum(const float (&terms)[2], bool minus = false) { return terms[0] + base; }
        const int row = 2 * (i < k ? i : 0), *col = &row;
        auto* const to = reinterpret_cast<Pair<2>*>(C + row * ldc);
        auto add = [&](int first) { for (int j = first; j < k; ++j) to->lane[j] += scale; };
        add(3);
    """)
    assert declared == {"Pair", "sum", "row", "col", "to", "add"}
    assert anywhere - declared == {"width", "lane", "terms", "minus", "first", "j"}
    assert {"base", "C", "i", "k", "ldc", "scale"} <= mentioned - anywhere
    assert not {"Not", "comment"} & mentioned
