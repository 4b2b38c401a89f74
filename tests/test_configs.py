"""What users name on the command line, and what they are told where it does not fit."""

from __future__ import annotations

import json
import re
import shlex
import subprocess

import pytest

from autotune.cli import main
from autotune.cli.options import tune_command
from autotune.errors import SpaceError
from autotune.kernel.choices import Choices
from autotune.records import Store
from autotune.search.candidates import Candidates
from autotune.space.space import Space, families, quoted
from autotune.values.device import named_device
from autotune.values.problem import MATHS, Problem

H200 = named_device("h200")
ODD = ["--m", "1000", "--n", "777", "--k", "333", "--layout", "tn", "--beta", "1", "--target", "a100"]
CUBE = ["--m", "256", "--n", "256", "--k", "128", "--target", "h200"]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path / "records"))

    def called(*words):
        monkeypatch.setattr("sys.argv", ["autotune", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return end.value.code, out, err

    return called


def flags_of(err):
    return re.findall(r"--set (\S+=\w+)", err)


@pytest.mark.parametrize("preset", Space.load("sgemm").presets)
def test_every_preset_fits_or_the_line_names_what_would(run, preset):
    status, out, err = run("emit", *ODD, "--preset", preset)
    if status == 0:
        return
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert len(err) < 500
    assert f"preset {preset} does not fit 1000 x 777 x 333 tn beta on NVIDIA A100" in err
    assert re.search(r"presets that fit: \w+, .* and \d+ more$", err.strip())
    changes = [word for flag in flags_of(err) for word in ("--set", flag)]
    assert changes
    status, out, err = run("emit", *ODD, "--preset", preset, *changes)
    assert (status, err) == (0, "")
    assert "__global__" in out


@pytest.mark.parametrize("preset", ["deep_block", "thin_kept", "thin_mixed"])
@pytest.mark.parametrize("command", ["emit", "explain"])
def test_a_preset_for_another_layout_is_told_with_what_fits(run, preset, command):
    words = ["emit", "--preset", preset] if command == "emit" else ["explain", preset]
    status, _, err = run(*words, *ODD)
    assert status == 2
    assert "the nearest that fits: --set " in err


def test_a_step_of_the_ladder_is_known_to_emit_and_to_explain(run):
    for words in (["emit", "--preset", "naive"], ["explain", "naive"], ["explain", "naive", "vectorised"]):
        status, out, err = run(*words, *CUBE)
        assert (status, err) == (0, ""), words
        assert "naive" in out


# -- arithmetic ----------------------------------------------------------------------------------------------


def test_a_family_states_its_arithmetic():
    assert {name: Space.load(name).math for name in ("naive", "sgemm", "sgemm_skinny", "sgemm_3xtf32")} == {
        "naive": "ffma",
        "sgemm": "ffma",
        "sgemm_skinny": "ffma",
        "sgemm_3xtf32": "3xtf32",
    }


@pytest.mark.parametrize(
    ("family", "math", "says"),
    [
        (
            "coalesced",
            "3xtf32",
            "coalesced computes ffma, not 3xtf32: leave out --math, or name",
        ),
        ("sgemm", "3xtf32", "sgemm computes ffma, not 3xtf32: leave out --math"),
        (
            "sgemm_3xtf32",
            "ffma",
            "sgemm_3xtf32 computes 3xtf32, not ffma: give --math 3xtf32, or name",
        ),
    ],
)
def test_no_command_takes_a_family_for_another_arithmetic(run, tmp_path, family, math, says):
    extending = tmp_path / "mine.toml"
    extending.write_text(f'extends = "{family}"\n')
    preset = next(iter(Space.load(family).presets))
    for space in (family, extending):
        for words in (
            ["space"],
            ["emit", "--preset", preset],
            ["explain", preset],
            ["tune", "--budget", "1"],
        ):
            status, out, err = run(*words, *CUBE, "--math", math, "--space", space)
            assert (status, out) == (2, ""), words
            assert f"autotune: {says}" in err
    problem = Problem(256, 256, 128, math=math)
    with pytest.raises(SpaceError, match=says):
        Candidates([Space.load(family)], problem, H200)
    with pytest.raises(SpaceError, match=says):
        Choices(problem, H200, Store(tmp_path), spaces=[Space.load(family)])


def test_a_step_of_the_ladder_is_not_emitted_for_another_arithmetic(run):
    status, _, err = run("emit", "--preset", "naive", *CUBE, "--math", "3xtf32")
    assert (status, "'naive' is unknown" in err) == (2, True)


@pytest.mark.parametrize("math", MATHS)
def test_what_serves_an_arithmetic_computes_it(math):
    found = families(Problem(256, 256, 128, math=math), H200)
    assert found
    assert {space.math for space in found} == {math}


# -- hints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["plain/my.toml", "a b/my.toml", 'a"$`\\b.toml', "it's.toml", "é!.toml"])
def test_a_quoted_word_is_one_word_for_a_shell(word):
    done = subprocess.run(["sh", "-c", f"printf %s {quoted(word)}"], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (word, "")
    assert "'" not in quoted(word) or "'" in word


def test_hints_name_the_command_with_the_space_that_was_given(run, tmp_path):
    path = tmp_path / "a folder" / "my space.toml"
    path.parent.mkdir()
    path.write_text('extends = "sgemm"\n')
    for command in ("emit", "explain"):
        status, _, err = run(command, *CUBE, "--space", path)
        assert status == 0
        found = re.search(r"run '(autotune tune .*?)'", err)[1]
        assert shlex.split(found)[2:] == ["--m", "256", "--n", "256", "--k", "128", "--space", str(path)]
        status, _, err = run(command, *CUBE, "--space", "naive")
        assert "(a preset of naive), nothing of it is measured" in err
        assert "run 'autotune tune --m 256 --n 256 --k 128 --space naive'" in err
    assert tune_command(Problem(1, 2, 3), "a b") == 'autotune tune --m 1 --n 2 --k 3 --space "a b"'
    assert Space.load(path).flag == f'--space "{path}"'
    assert Space.load("naive").flag == "--space naive"


def test_a_family_that_is_not_made_for_a_problem_says_so(run):
    status, _, err = run("space", *CUBE, "--space", "sgemm_skinny")
    assert status == 2
    assert "removed by narrow_extent, narrow <= 32 (" in err
    assert err.strip().endswith("name another family")


# -- configs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[" * 100_000, "is not JSON"),
        (b'{"BM": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b'{"BM": ' + b"9" * 4000 + b"}", "the config misses"),
        (b"\xff", "is not JSON"),
        (b'{"\\u001b[31m": 1}', r"'\x1b[31m' is not a parameter"),
        (b" " * 2_000_000, "is longer than 1048576 bytes"),
    ],
)
def test_a_hostile_config_is_one_line(run, tmp_path, content, says):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    status, out, err = run("emit", *CUBE, "--config", path)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert says in err
    assert err.strip().isprintable()


def test_a_config_file_may_begin_with_a_byte_order_mark(run, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"BM": 32, "BN": 32}).encode())
    status, out, err = run("emit", *CUBE, "--space", "naive", "--config", path)
    assert (status, err) == (0, "")
    assert "// naive:" in out
