from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from made_records import made

from autotune.code import sources
from autotune.code.depot import Depot
from autotune.code.render import render
from autotune.errors import ConfigError
from autotune.records import Store
from autotune.space.space import Config, Space
from autotune.values.device import named_device
from autotune.values.problem import Problem, Strided

SPACE, H200 = Space.load("sgemm"), named_device("h200")
PROBLEM = Problem(128, 256, 64)
CONFIG = SPACE.fitted(SPACE.presets["tiny_block"], PROBLEM, H200)


def test_it_is_what_render_gives(tmp_path):
    for _ in range(2):
        assert sources.rendered(SPACE, CONFIG, PROBLEM, H200, depot=Depot(tmp_path)) == render(
            SPACE, CONFIG, PROBLEM, H200
        )


def test_it_is_rendered_once_for_each_input(tmp_path, monkeypatch):
    rendered = []

    def counting(*words):
        rendered.append(words)
        return render(*words)

    monkeypatch.setattr(sources, "render", counting)
    other = SPACE.fitted(SPACE.presets["small_block"], PROBLEM, H200)
    inputs = [
        (CONFIG, PROBLEM, H200),
        (other, PROBLEM, H200),
        (CONFIG, Problem(128, 256, 64, beta=1), H200),
        (CONFIG, Problem(128, 256, 128), H200),
        (CONFIG, Strided(128, 256, 64, lda=68), H200),
        (CONFIG, PROBLEM, dataclasses.replace(H200, sm_count=100)),
    ]
    for _ in range(2):
        texts = [sources.rendered(SPACE, *words, depot=Depot(tmp_path)).text for words in inputs]
    assert len(rendered) == len(inputs)
    assert len(set(texts)) == len(inputs) - 1  # the number of SMs decides nothing here


def test_a_change_of_the_templates_or_of_the_code_renders_anew(tmp_path, monkeypatch):
    first = sources.rendered(SPACE, CONFIG, PROBLEM, H200, depot=Depot(tmp_path))
    assert len(Depot(tmp_path).entries()) == 1
    monkeypatch.setattr(sources, "template_digest", lambda space: "f" * 64)
    assert sources.rendered(SPACE, CONFIG, PROBLEM, H200, depot=Depot(tmp_path)).text == first.text
    assert len(Depot(tmp_path).entries()) == 2
    monkeypatch.setattr(sources, "_code_digest", lambda: "other code")
    sources.rendered(SPACE, CONFIG, PROBLEM, H200, depot=Depot(tmp_path))
    assert len(Depot(tmp_path).entries()) == 3


def test_a_changed_space_file_renders_anew_even_where_the_statements_are_the_same(tmp_path):
    folder = tmp_path / "spaces"
    folder.mkdir()
    base, extending = folder / "mine.toml", folder / "more.toml"
    text = SPACE.path.read_text()
    base.write_text(text)
    extending.write_text('extends = "mine.toml"\n')
    for path in (base, extending):
        sources.rendered(Space.load(path), CONFIG, PROBLEM, H200, depot=Depot(tmp_path))
    assert len(Depot(tmp_path).entries()) == 2
    base.write_text(text + "# a comment\n")
    assert Space.load(base).digest == SPACE.digest
    for path in (base, extending):
        sources.rendered(Space.load(path), CONFIG, PROBLEM, H200, depot=Depot(tmp_path))
    assert len(Depot(tmp_path).entries()) == 4
    changed = text.replace('LN = { expr = "32 // LM"', 'LN = { expr = "LM * 0 + 4"')
    assert changed != text
    base.write_text(changed)
    config = {**CONFIG, "LM": 8}
    for path in (base, extending):
        assert Space.load(path).digest != SPACE.digest
        assert (
            sources.rendered(Space.load(path), config, PROBLEM, H200, depot=Depot(tmp_path)).launch.grid[0]
            > 0
        )
    assert len(Depot(tmp_path).entries()) == 6


def test_the_order_of_values_does_not_matter(tmp_path):
    first = sources.rendered(
        SPACE, dict(reversed(list(CONFIG.items()))), PROBLEM, H200, depot=Depot(tmp_path)
    )
    again = sources.rendered(SPACE, CONFIG, PROBLEM, H200, depot=Depot(tmp_path))
    assert len(Depot(tmp_path).entries()) == 1
    assert list(first.config.items()) == list(again.config.items()) == list(CONFIG.items())
    assert first == again == render(SPACE, CONFIG, PROBLEM, H200)
    with pytest.raises(ConfigError, match="the config misses BM"):
        sources.rendered(SPACE, {"TM": 4}, PROBLEM, H200, depot=Depot(tmp_path))


def test_what_is_not_legal_is_refused_each_time(tmp_path):
    wrong = Config({**CONFIG, "BM": 256, "edge": "exact"})
    for _ in range(2):
        with pytest.raises(ConfigError, match="is not legal"):
            sources.rendered(SPACE, wrong, PROBLEM, H200, depot=Depot(tmp_path))


FRESH = """
import sys
from pathlib import Path
from autotune.values.device import named_device
from autotune.kernel.choices import Choices
from autotune.records import Store
from autotune.values.problem import Problem
from autotune.space import file as spacefile
parsed = []
whole = spacefile.Heading.whole
spacefile.Heading.whole = lambda heading: parsed.append(heading.family) or whole(heading)
choice = next(Choices(Problem(200, 136, 72), named_device("h200"), Store({root!r})).all())
print(choice.served, choice.source.code_digest, choice.source.space_digest, "jinja2" in sys.modules, parsed)
"""


def test_a_fresh_process_needs_no_template_engine_and_no_parsed_space(tmp_path):
    record = made(Problem(200, 136, 72))
    Store(tmp_path).write(record)
    program = FRESH.format(root=str(tmp_path))
    for rest in ("True ['sgemm']", "False []"):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == f"exact {record.code_digest} {record.space_digest} {rest}"
