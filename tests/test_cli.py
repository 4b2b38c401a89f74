from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
import types

import click
import pytest
from made_records import H200 as NAMED_H200
from made_records import made

from autotune import __version__
from autotune.cli import COMMANDS, main
from autotune.cli.tune import summary
from autotune.records import Store
from autotune.space.space import Space
from autotune.values.problem import Problem

CUBE = ["--m", "4096", "--n", "4096", "--k", "4096"]
H200 = ["--target", "h200"]
PRESET = dict(Space.load("sgemm").presets["square_block"])


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run the command line here, in an empty folder with no records: (exit code, stdout, stderr)."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path / "records"))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["autotune", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        told = capsys.readouterr()
        return end.value.code, told.out, told.err

    return run


@pytest.fixture
def refuse(run, tmp_path):
    """Run a command that must fail: one line on stderr, nothing on stdout, nothing written."""

    def refuse(*words, code=2):
        before = sorted(tmp_path.rglob("*"))
        status, out, err = run(*words)
        assert err.count("\n") == 1, err
        assert err.startswith("autotune: ")
        assert out == ""
        assert status == code, err
        assert sorted(tmp_path.rglob("*")) == before
        return err.removeprefix("autotune: ").rstrip()

    return refuse


def run_elsewhere(*words, **environment):
    """Run the command line in a process of its own, which sees no GPU."""
    done = subprocess.run(
        [sys.executable, "-m", "autotune", *words],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


# -- help ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--help"], ["-h"], []])
def test_help_lists_every_command(run, words):
    status, out, err = run(*words)
    assert (status, err) == (0, "")
    assert out.startswith("Usage: autotune [OPTIONS] [COMMAND]")
    for name, (_, text) in COMMANDS.items():
        assert name in out
        assert text in out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(run, command):
    status, out, err = run(command, "--help")
    assert (status, err) == (0, "")
    assert out.startswith(f"Usage: autotune {command} [OPTIONS]")
    first = COMMANDS[command][1].partition(" ")[0].rstrip(":,")
    assert first in out.splitlines()[2] or command in ("replay", "convert")  # which say what of
    listed = out.partition("\nOptions:\n")[2]
    options = [line.split()[0] for line in listed.splitlines() if line.startswith("  -")]
    if command not in ("doctor", "cache", "learn", "replay", "convert"):
        assert {"--m", "--n", "--k", "--layout", "--beta", "--math"} <= set(options)
    assert len(options) == len(set(options))


def test_version(run):
    assert run("--version") == (0, f"autotune, version {__version__}\n", "")


HEAVY = {"numpy", "optuna", "cupy", "jinja2", "rich", "sqlalchemy"}


@pytest.mark.parametrize(
    "program",
    [
        "import autotune",
        "from autotune.cli import cli; cli.main(['--help'], 'autotune', standalone_mode=False)",
    ],
)
def test_help_and_import_load_nothing_heavy(program):
    program += "; import sys; print('loaded', *sys.modules)"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert not HEAVY & set(told.splitlines()[-1].split())


@pytest.mark.timing
@pytest.mark.parametrize(
    ("words", "limit_s"), [(["-m", "autotune", "--help"], 0.2), (["-c", "import autotune"], 0.12)]
)
def test_a_start_is_quick(words, limit_s):
    """Of whole processes, whose byte code is there after the first."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        subprocess.run([sys.executable, *words], env=environment, stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - started)
    assert statistics.median(seconds[1:]) < limit_s, seconds


# -- whatever goes wrong is one line -------------------------------------------------------------------------


@pytest.fixture
def broken(monkeypatch):
    """Return a function that makes ``autotune doctor`` raise an error."""

    def breaks(error):
        @click.command()
        def command():
            raise error

        monkeypatch.setitem(sys.modules, "autotune.cli.doctor", types.SimpleNamespace(command=command))

    return breaks


@pytest.mark.parametrize(
    "error", [ValueError("a\nb\x1b[31m" + "c" * 5000), RecursionError("deep"), MemoryError(), KeyError("k")]
)
def test_a_foreign_error_is_one_line_with_its_type_and_place(broken, run, error):
    broken(error)
    status, out, err = run("doctor")
    assert (status, out) == (1, "")
    assert err.startswith(f"autotune: {type(error).__name__} at ")
    assert ", line " in err
    assert "--debug" in err
    assert err.count("\n") == 1
    assert len(err) < 600
    assert err[:-1].isprintable()


def test_a_foreign_error_of_the_package_names_its_module(monkeypatch, run):
    monkeypatch.setattr("autotune.records.Store.entries", lambda *_, **__: 1 // 0)
    assert "ZeroDivisionError at autotune/cli/show.py, line " in run("show")[2]


def test_debug_shows_the_traceback(broken, run, monkeypatch):
    broken(ValueError("why"))
    monkeypatch.setattr(sys, "argv", ["autotune", "--debug", "doctor"])
    with pytest.raises(ValueError, match="why"):
        main()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (PermissionError(13, "Permission denied", "some\nfile"), r"some\nfile: Permission denied"),
    ],
)
def test_an_error_of_the_system_is_its_words(broken, run, error, says):
    broken(error)
    assert run("doctor") == (1, "", f"autotune: {says}\n")


def test_a_group_alone_shows_its_help(run):
    status, out, err = run("cache")
    assert (status, err) == (0, "")
    assert out == run("cache", "--help")[1]
    assert "\n  verify" in out


HOSTILE = "a\x1b]0;b\x07\x9b31m\x00c\rd"


@pytest.mark.parametrize(
    "words",
    [
        ["show", *CUBE, "--family", HOSTILE.replace("\x00", "")],
        ["emit", *CUBE, *H200, "--preset", HOSTILE],
        ["tune", "--suite", HOSTILE.replace("\x00", "")],
        ["explain", HOSTILE, *CUBE, *H200],
        ["replay", HOSTILE.replace("\x00", "")],
        ["no" + HOSTILE],
        ["cache", HOSTILE],
        ["space", *CUBE, "--target", HOSTILE],
    ],
    ids=lambda words: words[0][:7],
)
def test_control_characters_in_words_are_escapes(run, words):
    _, out, err = run(*words)
    assert out == ""
    assert all(each in "\n\t" or each.isprintable() for each in err)
    assert err.count("\n") == 1


def test_control_characters_of_records_and_templates_are_escapes(run, tmp_path):
    path = Store(tmp_path / "records").write(made(Problem(4096, 4096, 4096), ms=3.0))
    path.write_text(path.read_text().replace('"NVIDIA H200"', '"NVIDIA\\u001b[31m H200"'))
    (tmp_path / "mine.toml").write_text(
        'family = "mine"\nsummary = "a\\u001b[31mb"\n[parameters]\n'
        'BM = { values = [32], meaning = "\\u001b" }\n'
        '[launch]\ngrid = "1"\nblock = "BM"\nshared_bytes = "0"\n'
    )
    (tmp_path / "mine.cu.jinja").write_text('// \x1b[31m\nextern "C" __global__ void mine() {}\n')
    mine = [*CUBE, *H200, "--space", tmp_path / "mine.toml"]
    for words in (
        ["show"],
        ["show", *CUBE],
        ["cache", "list"],
        ["space", *mine],
        ["emit", *mine, "--set", "BM=32"],
    ):
        _, out, err = run(*words)
        assert all(each in "\n\t" or each.isprintable() for each in out + err), words
        assert out + err


# -- bad problems --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["tune", "show", "space", "emit"])
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--m", "0"], "m = 0 is out of range: give 1 to 2147483647 (2^31 - 1)"),
        (["--m", "-5"], "m = -5 is out of range: give 1 to 2147483647 (2^31 - 1)"),
        (["--k", str(2**31)], "k = 2147483648 is out of range: give 1 to 2147483647 (2^31 - 1)"),
        (["--layout", "xx"], "layout 'xx' is unknown: give one of nn, nt, tn, tt"),
        (["--beta", "2"], "beta = 2 is unknown: give 0 (C is never read) or 1 (C is read and scaled)"),
        (["--math", "fp8"], "math 'fp8' is unknown: give one of ffma, 3xtf32, 3xfp16"),
        (["--m", "x"], "Invalid value for '--m': 'x' is not a valid integer (see autotune {} --help)"),
        (["--beta", "x"], "Invalid value for '--beta': 'x' is not a valid integer (see autotune {} --help)"),
        (["--zzzzz"], "No such option '--zzzzz' (see autotune {} --help)"),
    ],
)
def test_a_bad_problem(refuse, command, words, says):
    more = ", any" if words[0] == "--math" and command == "tune" else ""
    assert refuse(command, *CUBE, *words) == says.format(command) + more


@pytest.mark.parametrize("command", ["space", "emit"])
def test_a_size_is_missing(refuse, command):
    assert refuse(command, "--m", "1", "--n", "1") == f"Missing option '--k' (see autotune {command} --help)"


@pytest.mark.parametrize("command", ["show", "tune"])
def test_all_sizes_or_none(refuse, command):
    assert refuse(command, "--m", "1") == "a problem needs all of --m, --n and --k"


def test_an_unknown_command(refuse):
    assert refuse("tun").startswith("No such command 'tun'")


# -- bad budgets, spaces, configs ----------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["0", "abc", "-5", "0s", "-5s", "1.5", "", "5 parsecs", "nan", "inf"])
def test_a_bad_budget(refuse, budget):
    assert refuse("tune", *CUBE, "--budget", budget).startswith(f"budget {budget!r} ")


def test_a_bad_strategy(refuse):
    assert "strategy 'guess'" in refuse("tune", *CUBE, "--strategy", "guess")


@pytest.mark.parametrize("workers", ["0", "-1", "100000", "many"])
def test_a_bad_number_of_workers(refuse, workers):
    assert refuse("tune", *CUBE, "--workers", workers).startswith("Invalid value for '--workers': ")


SPACES = {
    "name": ('[constraints]\nx = { expr = "BX > 1", reason = "x" }', "x uses the unknown name 'BX'"),
    "call": ('[constraints]\nx = { expr = "open(1)", reason = "x" }', "'open(1)' is not allowed here"),
    "empty": ("[parameters]\nBM = []", "parameters.BM.values must be a non-empty list"),
    "toml": ("[parameters", "is not TOML"),
}


@pytest.mark.parametrize("command", ["tune", "space", "emit"])
@pytest.mark.parametrize("fault", SPACES)
def test_a_bad_space_file(refuse, tmp_path, command, fault):
    text, says = SPACES[fault]
    path = tmp_path / "my.toml"
    path.write_text(f'extends = "sgemm"\n{text}\n')
    told = refuse(command, *CUBE, "--space", path)
    assert says in told
    assert "my.toml" in told


@pytest.mark.parametrize("command", ["tune", "space", "emit"])
def test_an_unknown_space(refuse, command):
    assert refuse(command, *CUBE, "--space", "sgem").startswith("family 'sgem' is unknown: give one of ")
    assert "missing.toml: cannot be read" in refuse(command, *CUBE, "--space", "missing.toml")


@pytest.mark.parametrize("target", [[], H200])
def test_no_legal_config(run, refuse, tmp_path, target):
    path = tmp_path / "my.toml"
    path.write_text('extends = "sgemm"\n[parameters]\nstages = [4]\nloader = ["reg"]\n')
    told = refuse("space", *CUBE, *target, "--space", path)
    assert "my.toml: no config is legal for 4096 x 4096 x 4096 nn on " in told
    assert "reg_stages, loader != 'reg' or stages <= 2 (registers hold one tile" in told
    if target:
        _, _, err = run("emit", *CUBE, *target, "--space", path, "--predicted")
        assert err == f"autotune: {told}\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--preset", "nothing"], "preset 'nothing' is unknown: sgemm has "),
        (["--preset", "square_block", "--config", "{}"], "--preset and --config each name a kernel"),
        (["--preset", "square_block", "--set", "stages"], "--set 'stages': write NAME=VALUE"),
        (["--preset", "square_block", "--set", "stages=9"], "stages = 9: give one of 1, 2, 3, 4"),
        (["--preset", "square_block", "--set", "stages=--2"], "stages = '--2': give one of 1, 2, 3, 4"),
        (["--preset", "square_block", "--set", "stages=²"], "stages = '²': give one of 1, 2, 3, 4"),
        (["--preset", "square_block", "--set", f"stages={'9' * 5000}"], "stages = '999"),
        (["--preset", "square_block", "--set", "loader=tma"], "loader = 'tma': give one of reg, cp_async"),
        (["--preset", "square_block", "--set", "BX=1"], "'BX' is not a parameter of sgemm: give turn_a, "),
        (["--config", "{"], "--config: is not JSON ("),
        (["--config", '{"a": ' * 9999], "--config: is not JSON ("),
        (["--config", '{"BM": 128}'], "the config misses TM, LM, BN"),
        (["--config", json.dumps({**PRESET, "BM": 128.0})], "BM = 128.0: give one of 8, 16"),
        (["--config", json.dumps({**PRESET, "BM": None})], "BM = None: give one of 8, 16"),
        (["--config", "missing.json"], "--config missing.json: cannot be read (No such file"),
        (["--config", "."], "--config .: cannot be read (Is a directory"),
        (["--config", "x" * 5000], "--config xxx"),
        (["--preset", "square_block", "--target", "voodoo2"], "target 'voodoo2' is not in the table: "),
        (["--preset", "square_block", *H200, "--device", "0"], "--device is a GPU here and --target one"),
    ],
)  # fmt: skip
def test_a_bad_config(refuse, words, says):
    assert refuse("emit", *CUBE, *words).startswith(says)


@pytest.mark.parametrize("target", [[], H200])
def test_an_illegal_config_is_told_with_every_broken_constraint_and_its_numbers(refuse, target):
    words = ["--preset", "square_block", "--set", "stages=1", "--set", "vec_a=4"]
    told = refuse("emit", "--m", 4096, "--n", 4096, "--k", 4094, *target, *words)
    assert " is not legal on " in told
    assert (
        "async_stages: needs loader != 'cp_async' or stages >= 2 but loader = cp_async, stages = 1 (" in told
    )
    assert "vec_a_aligned: needs vec_a <= widest_a and a_row % vec_a == 0 but a_row = 8, vec_a = 4, " in told


def test_a_config_file_that_is_no_object(refuse, tmp_path):
    path = tmp_path / "list.json"
    path.write_text("[1]")
    assert refuse("emit", *CUBE, "--config", path) == "--config: expected a JSON object of parameters"


# -- records -------------------------------------------------------------------------------------------------


def test_no_record_names_the_command_that_makes_one(refuse):
    remedy = "run 'autotune tune --m 4096 --n 4096 --k 4096 --layout tn --beta 1'"
    flags = [*CUBE, "--layout", "tn", "--beta", "1"]
    told = refuse("explain", "record", *flags, *H200, code=1)
    missing = f"no record of 4096 x 4096 x 4096 tn beta on NVIDIA H200: {remedy}, or name 'predicted' or a "
    assert told.startswith(f"{missing}preset: long_block, ")


@pytest.mark.parametrize("family", ["**", "[", "../x", "*"])
def test_a_family_is_no_pattern(refuse, family):
    assert "give one of coalesced, " in refuse("show", *CUBE, "--family", family)


def test_no_records_at_all(run, tmp_path, monkeypatch):
    monkeypatch.setattr("autotune.records.store.data_dir", lambda name: tmp_path / "none")
    assert run("show") == (
        0,
        "",
        f"{tmp_path / 'records'} holds no records: run 'autotune tune {' '.join(CUBE)}'\n",
    )
    assert run("show", "--json") == (0, "[]\n", "")


@pytest.mark.parametrize("command", ["tune", "show", "emit"])
def test_the_folder_of_records_is_a_file(refuse, tmp_path, command):
    (tmp_path / "file").write_text("")
    told = refuse(command, *CUBE, "--cache", tmp_path / "file")
    assert told.startswith("Invalid value for '--cache': Directory ")


def test_the_folder_of_records_cannot_be_written(refuse, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "below", "/proc/autotune"):
        assert str(folder) in refuse("tune", *CUBE, "--cache", folder, code=1)
        monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(folder))
        assert str(folder) in refuse("tune", *CUBE, code=1)


def test_emit_below_a_file_is_an_error_and_not_a_miss(refuse, tmp_path):
    (tmp_path / "file").write_text("")
    told = refuse("emit", *CUBE, *H200, "--cache", tmp_path / "file" / "below", code=1)
    assert "Not a directory" in told


# -- machines that lack something ----------------------------------------------------------------------------


TINY = ["--m", "64", "--n", "96", "--k", "40"]
QUICK = ["--budget", "2"]


def test_tuning_without_a_gpu(tmp_path):
    """It is for the H200 of the table then, says so, and measures nothing."""
    status, out, err = run_elsewhere("tune", *TINY, *QUICK, "--cache", str(tmp_path))
    assert status == 0, err
    path = tmp_path / "NVIDIA_H200" / "estimated" / "sgemm_f32_nn_m64_n96_k40_beta0_ffma.json"
    assert out.startswith(
        "64 x 96 x 40 nn for NVIDIA H200: estimated, compiled and simulated\n  config    turn_a0-turn_b0-BM"
    )
    assert "2 of " in out
    assert "nothing was measured: run 'autotune tune --m 64 --n 96 --k 40' on a machine with this GPU" in out
    assert f"stored in {path} after " in out
    assert err.endswith("no GPU here: this is for an NVIDIA H200 (see --target)\n")
    record = json.loads(path.read_text())
    assert record["evidence"] == "estimated"
    assert record["timing"] is record["gflops"] is None


def test_a_summary_says_what_there_is_besides_the_kernel():
    turned = summary(made(Problem(4096, 4096, 4096, "nt"), preset="turned_across", ms=3.0)).splitlines()
    assert "  besides   turn_a before it, in 4096 blocks, 126 MiB of workspace" in turned
    assert "besides" not in summary(made(Problem(64, 64, 64)))


def test_tuning_for_a_gpu_of_the_table(run, tmp_path):
    status, out, err = run("tune", *TINY, *QUICK, "--target", "a10", "--json")
    assert status == 0, err
    record = json.loads(out)
    assert (record["evidence"], record["device"]["name"]) == ("estimated", "NVIDIA A10")
    assert "no GPU" not in err

    status, out, err = run("show", *TINY)
    assert status == 0, err
    assert out.startswith("64 x 96 x 40 nn for NVIDIA A10: estimated, compiled and simulated\n")
    assert "nothing was measured" in out
    assert "this would serve" in out, "an estimated record is never served"
    status, out, err = run("show")
    assert (status, err) == (0, "")
    (row,) = (line for line in out.splitlines() if "NVIDIA A10" in line)
    assert row.split("sgemm ")[1].split()[:6] == ["estimated", "-", "-", "-", "2", "of"]

    status, out, err = run("explain", *TINY, "--target", "a10")
    assert (status, err) == (0, "")
    assert out.startswith("64 x 96 x 40 nn on NVIDIA A10: estimated record\n")
    status, text, err = run("emit", *TINY, "--target", "a10", "--estimated")
    assert (status, err) == (0, "")
    assert text.startswith("// sgemm: ")
    status, same, err = run("emit", *TINY, "--target", "a10")
    assert (status, same) == (0, text)
    assert err == "no measured record: this is the estimated one, whose speed nobody measured\n"
    status, _, err = run("emit", *TINY, "--target", "a10", "--set", "group_m=4", "--set", "min_blocks=2")
    assert status == 0
    assert "this is the estimated one, whose speed nobody measured; --set has changed it\n" in err


def test_tuning_on_a_gpu_that_was_asked_for_without_one(tmp_path):
    status, out, err = run_elsewhere("tune", *TINY, "--device", "0", "--cache", str(tmp_path))
    assert (status, out, err.count("\n")) == (1, "", 1), err
    assert err.startswith("autotune: ")
    assert "GPU" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*H200, "--device", "0"], "--device is a GPU here and --target one"),
        (["--target", "voodoo2"], "target 'voodoo2' is not in the table: "),
        ([*H200, "--cold"], "--cold is for measuring, and nothing is measured with --target: leave it out"),
        ([*H200, "--strategy", "tpe"], "--strategy is for measuring, and nothing is measured with --target"),
    ],
)
def test_tuning_for_a_gpu_of_the_table_with_what_needs_one(refuse, words, says):
    assert refuse("tune", *CUBE, *words).startswith(says)


def test_no_estimated_record_names_the_command_that_makes_one(refuse):
    told = refuse("emit", *TINY, "--target", "a10", "--estimated", code=1)
    assert told.startswith(
        "no estimated record of 64 x 96 x 40 nn on NVIDIA A10: "
        "run 'autotune tune --m 64 --n 96 --k 40 --target a10'"
    )
    told = refuse("emit", *TINY, "--preset", "tiny_block", "--estimated")
    assert told == "--preset and --estimated each name a kernel: give one of them"


def test_tuning_without_nvrtc(tmp_path):
    status, out, err = run_elsewhere("tune", *CUBE, "--cache", str(tmp_path), AUTOTUNE_NVRTC="/nonexistent")
    assert (status, out, err.count("\n")) == (1, "", 1), err
    assert list(tmp_path.iterdir()) == []


def test_doctor_without_nvrtc(tmp_path):
    status, out, err = run_elsewhere(
        "doctor", AUTOTUNE_NVRTC="/nonexistent", AUTOTUNE_CACHE_DIR=str(tmp_path)
    )
    assert (status, err) == (1, "")
    line = next(line for line in out.splitlines() if "NVRTC" in line)
    assert line.startswith("missing")
    assert "pip install nvidia-cuda-nvrtc" in out


def test_a_gpu_that_was_asked_for_is_not_replaced():
    status, out, err = run_elsewhere("space", *CUBE, "--device", "99")
    assert (status, out, err.count("\n")) == (1, "", 1), err


def test_a_device_that_was_assumed_is_said_behind_the_answer():
    status, out, err = run_elsewhere("emit", *CUBE, "--preset", "square_block")
    assert status == 0
    assert out.startswith("// sgemm: ")
    assert err == "no GPU here: this is for an NVIDIA H200 (see --target)\n"


def test_a_traceback_on_request():
    status, _, err = run_elsewhere("--debug", "space", "--m", "0", "--n", "1", "--k", "1")
    assert status == 1
    assert "Traceback" in err
    assert "autotune.errors.ProblemError: m = 0" in err


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m autotune emit {' '.join([*CUBE, *H200])} --preset square_block | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.startswith("// sgemm")
    assert done.stderr == ""


# -- answers -------------------------------------------------------------------------------------------------


def test_space_counts(run):
    status, out, err = run("space", *CUBE, *H200, "--json")
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert told["raw"] - sum(rule["removed"] for rule in told["rules"]) == told["legal"] > 50_000
    assert told["device"] == "NVIDIA H200"
    assert told["problem"] == "f32_nn_m4096_n4096_k4096_beta0_ffma"
    assert told["parameters"]["loader"] == ["reg", "cp_async"]


def test_space_shows_every_reason_as_it_is_written(run):
    status, out, err = run("space", *CUBE, *H200)
    assert (status, err) == (0, "")
    words = " ".join(out.split())
    for rule in Space.load("sgemm").rules:
        assert rule.name in words
        for word in rule.reason.split():
            assert word in words
    assert "what is stored [k][m] already is [BK][BM]" in words


def test_emit_writes_the_kernel_of_a_preset_and_of_the_same_config(run, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"config": PRESET, "evidence": "measured"}))
    status, out, err = run("emit", *CUBE, *H200, "--preset", "square_block")
    assert (status, err) == (0, "")
    assert 'extern "C" __global__' in out
    assert run("emit", *CUBE, *H200, "--config", json.dumps(PRESET))[1] == out
    assert run("emit", *CUBE, *H200, "--config", path)[1] == out
    changed = run(
        "emit", *CUBE, *H200, "--preset", "square_block", "--set", "stages=3", "--set", "ffma_order=row"
    )[1]
    assert "stages3" in changed
    assert "acc += reg_m x reg_n, row by row." in changed


# -- explain --

SMALL = ("--m", "256", "--n", "256", "--k", "128", "--target", "h200")


def test_explain_a_preset(run):
    status, out, err = run("explain", "tiny_block", *SMALL)
    assert (status, err) == (0, "")
    assert "tiny_block is limited by" in out
    assert "blocks per SM" in out


def test_explain_two_as_json(run, tmp_path):
    svg = tmp_path / "roofline.svg"
    status, out, err = run("explain", "tiny_block", "small_block", *SMALL, "--json", "--svg", str(svg))
    assert (status, err) == (0, "")
    assert [found["title"] for found in json.loads(out)] == ["tiny_block", "small_block"]
    assert svg.read_text().startswith("<svg")


def test_a_step_of_the_ladder_is_explained(run):
    status, out, err = run("explain", "naive", "tiny_block", *SMALL)
    assert (status, err) == (0, "")
    assert out.startswith("256 x 256 x 128 nn on NVIDIA H200: naive | tiny_block\n")
    assert "naive is limited by too few blocks (64): 68 of the 132 SMs have no work" in out


def test_a_drawing_that_cannot_be_written_is_told_first(run, tmp_path):
    status, out, err = run("explain", "tiny_block", *SMALL, "--svg", str(tmp_path / "none" / "x.svg"))
    assert (status, out) == (2, "")
    assert f"there is no folder {tmp_path / 'none'}" in err


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (("nothing",), 2, "'nothing' is no preset, config file, 'record' or 'predicted': sgemm has"),
        (("nothing",), 2, "steps of the ladder are naive, "),
        (("a", "b", "c"), 2, "one or two kernels, not 3"),
        (("record",), 1, "no record of 256 x 256 x 128 nn on NVIDIA H200: run 'autotune tune"),
        (('{"BM": 64}',), 2, "the config misses TM"),
    ],
)
def test_explain_refuses_in_one_line(run, words, status, says):
    found, out, err = run("explain", *words, *SMALL)
    assert (found, out) == (status, "")
    assert says in err
    assert err.count("\n") == 1


# -- math --

TENSOR = (*CUBE, *H200, "--math", "3xtf32")


def test_the_family_follows_from_the_math(run):
    status, out, err = run("space", *TENSOR, "--json")
    assert (status, json.loads(out)["family"]) == (0, "sgemm_3xtf32")
    assert err == "searched too: sgemm_3xtf32_wgmma (see --space)\n"
    for preset, family in (("four_warps", "sgemm_3xtf32"), ("two_warpgroups", "sgemm_3xtf32_wgmma")):
        status, out, err = run("emit", *TENSOR, "--preset", preset)
        assert (status, err) == (0, "")
        assert out.startswith(f"// {family}: ")
    config = json.dumps(dict(Space.load("sgemm_3xtf32_wgmma").presets["two_warpgroups"]))
    assert run("emit", *TENSOR, "--config", config)[1] == out


def test_a_record_is_found_whatever_its_family(run, tmp_path):
    problem = Problem(128, 128, 128, math="3xtf32")
    space = Space.load("sgemm_3xtf32_wgmma")
    config = space.fitted(space.presets["small_block"], problem, NAMED_H200)
    record = made(problem, space=space, config=config)
    Store(tmp_path).write(record)
    words = ("--m", 128, "--n", 128, "--k", 128, "--math", "3xtf32", "--cache", tmp_path)
    for command in (("emit", *H200), ("explain", *H200), ("show",)):
        status, _, err = run(*command, *words)
        assert (status, err) == (0, "")
    assert "sgemm_3xtf32_wgmma" in run("emit", *H200, *words)[1]
    assert "128 x 128 x 128 nn 3xtf32" in run("show", *words)[1]


def test_a_math_that_no_family_has(refuse):
    told = refuse("space", *CUBE, "--target", "t4", "--math", "3xtf32")
    assert told == (
        "no kernel family computes 4096 x 4096 x 4096 nn 3xtf32 on Tesla T4: "
        "sgemm_3xtf32 needs capability >= 80; "
        "sgemm_3xtf32_wgmma needs capability == 90 and k > 64"
    )
    told = refuse("show", *H200, "--m", 2**31 - 1, "--n", 2**31 - 1, "--k", 1)
    assert told.endswith(" on NVIDIA H200: sgemm cannot: rows and columns are counted in 32 bits")


def test_learning_without_lightgbm_ends_before_anything_is_read_or_measured(refuse, monkeypatch):
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    monkeypatch.setattr("autotune.tuning.learn.trials", None)
    told = refuse("learn", "--fit-only", *H200, code=1)
    assert re.fullmatch(
        r"learning needs LightGBM, which cannot be imported \(.*lightgbm.*\): pip install .*", told
    )


def test_any_math_is_for_measuring(refuse):
    told = refuse("tune", *CUBE, *H200, "--math", "any")
    assert told == "--math any is for measuring, and nothing is measured with --target: name one math"
    assert refuse("export", *CUBE, *H200, "--math", "any") == (
        "a file holds kernels of one math: give --math ffma or 3xtf32 or 3xfp16"
    )


HUGE = ["--m", "1000000", "--n", "1000000", "--k", "1000000"]
TOO_LARGE = "A, B and C of 1000000 x 1000000 x 1000000 nn take 12,000.0 GB, and NVIDIA H200 has 141.0 GB of"


@pytest.mark.parametrize("command", ["tune", "ladder"])
def test_operands_that_do_not_fit_are_refused_before_anything_starts(refuse, command, tmp_path):
    told = refuse(command, *HUGE, *H200, "--cache", tmp_path / "work", code=1)
    assert told.startswith(TOO_LARGE)


def test_a_kernel_whose_operands_do_not_fit_is_printed_with_a_word(run):
    status, out, err = run("emit", *HUGE, *H200, "--preset", "square_block")
    assert status == 0
    assert out.startswith("// sgemm: ")
    assert err.splitlines()[-1].startswith(TOO_LARGE)


def test_progress_without_a_terminal_is_short_lines(run):
    """A config's name has some 250 letters: it is in the answer, once."""
    status, out, err = run("tune", *TINY, "--target", "h200", "--budget", "3")
    assert status == 0, err
    (config,) = (line.split()[1] for line in out.splitlines() if line.startswith("  config "))
    assert len(config) > 150
    assert config not in err
    assert max(map(len, err.splitlines())) <= 100
    assert any(
        re.search(r"^ +[0-9.]+ s  [123] estimated; best [a-z_]+@[0-9a-f]{8}, by estimate$", line)
        for line in err.splitlines()
    )


def test_a_config_from_a_pipe(refuse, tmp_path):
    """One that nobody writes to is not waited for."""
    os.mkfifo(tmp_path / "pipe")
    for command in (
        ["emit", *CUBE, "--config", str(tmp_path / "pipe")],
        ["explain", *CUBE, str(tmp_path / "pipe")],
    ):
        assert re.search("is not JSON|is no preset, config file", refuse(*command, *H200))
    ends = os.pipe()
    with open(ends[0], "rb"), open(ends[1], "wb") as end:
        end.write(json.dumps({**PRESET, "BM": 128.0}).encode())
        end.close()
        assert "BM = 128.0: give one of" in refuse(
            "emit", *CUBE, "--config", f"/dev/fd/{ends[0]}", "--target", "h200"
        )
