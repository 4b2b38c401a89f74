"""The command with standard streams closed, and in a folder that is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.records.trials import read_log

ROOT = Path(__file__).parents[1]
SIZES = "--m 64 --n 64 --k 64 --target h200"
LOST = "autotune: standard output is closed: what was written there is lost\n"


def shell(words, folder, *, gone=False):
    """Run ``autotune``, with redirections, in a folder or in one that was removed: (exit code, out, err)."""
    return python(f"-m autotune {words}", folder, gone=gone)


def python(words, folder, *, gone=False, shell="/bin/sh"):
    if gone:
        (folder / "gone").mkdir()
    entering = "cd gone && rmdir ../gone && " if gone else ""
    done = subprocess.run(
        [shell, "-c", f"{entering}exec {sys.executable} {words}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        f"emit --preset square_block {SIZES}",
        f"space {SIZES} --json",
        "cache list",
        "show",
        "--help",
        "--version",
    ],
)
def test_an_answer_without_a_standard_output_is_lost_and_that_is_said(tmp_path, words):
    status, out, err = shell(f"{words} >&-", tmp_path)
    assert (status, out) == (1, "")
    assert err.endswith(LOST)
    assert "Traceback" not in err


def test_a_failure_without_a_standard_output_is_told_as_ever(tmp_path):
    status, _, err = shell("emit --m 0 --n 1 --k 1 >&-", tmp_path)
    assert (status, err) == (2, "autotune: m = 0 is out of range: give 1 to 2147483647 (2^31 - 1)\n")


def test_a_search_without_standard_streams_does_its_work(tmp_path):
    """A file that is opened meanwhile must not become the standard error of a compiler."""
    words = f"tune {SIZES} --budget 2 --cache records"
    status, out, _ = shell(f"{words} 2>&- <&-", tmp_path)
    assert status == 0
    assert "stored in records/" in out
    status, _, _ = shell(f"{words} --seed 1 >&- 2>&- <&-", tmp_path)
    assert status == 1  # what it found is stored, and its answer was lost
    (log,) = tmp_path.glob("records/*/estimated/*.trials.jsonl")
    assert all(isinstance(line, dict) for line in read_log(log)[1])
    assert log.read_text().count("\n") == len(log.read_text().splitlines())
    assert log.read_text().count('"event": "begin"') == 2


@pytest.mark.parametrize("words", [f"emit --preset square_block {SIZES}", "cache list", "show"])
def test_an_answer_in_a_folder_that_is_gone(tmp_path, words):
    assert shell(words, tmp_path, gone=True) == shell(words, tmp_path)


def test_a_search_in_a_folder_that_is_gone(tmp_path):
    status, out, err = shell(f"tune {SIZES} --budget 2 --cache {tmp_path}/records", tmp_path, gone=True)
    assert status == 0, err
    assert "stored in " in out
    status, out, err = shell(f"tune {SIZES} --budget 2 --cache relative", tmp_path, gone=True)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("autotune: relative cannot be written (No such file or directory): ")


def test_compilers_start_in_a_folder_that_is_gone(tmp_path):
    """Where the program came by -c, the first entry of `sys.path` is the folder itself."""
    program = """
from autotune.code.pool import CompilePool
with CompilePool(1) as pool:
    pool.submit(0, "extern \\"C\\" __global__ void f() {}", "f", "sm_90")
    print(pool.collect(60)[0][1].entry)
"""
    (tmp_path / "program.txt").write_text(program)
    command = f'-c "$(cat {tmp_path}/program.txt)"'
    assert python(command, tmp_path, gone=True) == (0, "f\n", "")


# -- streams that take no more -------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["show", f"emit --preset square_block {SIZES}", f"space {SIZES}", "--help"])
def test_a_full_disk_is_one_line(tmp_path, words):
    status, out, err = shell(f"{words} >/dev/full", tmp_path)
    assert (status, out) == (1, "")
    assert err == "autotune: standard output: cannot be written (No space left on device)\n"


@pytest.mark.parametrize("words", ["show", f"emit --preset square_block {SIZES}", f"space {SIZES}", "--help"])
@pytest.mark.parametrize("reader", ["true", "head -1"])
def test_a_reader_that_wants_no_more_ends_it_silently(tmp_path, words, reader):
    (tmp_path / "run").write_text(f"{sys.executable} -m autotune {words} 2>err | {reader}\n")
    done = subprocess.run(["/bin/sh", "run"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0
    assert (tmp_path / "err").read_text() in ("", "adapted to the problem: edge = guarded\n")


def test_what_an_encoding_lacks_is_written_as_an_escape(tmp_path):
    (tmp_path / "mine.toml").write_text(
        'family = "mine"\nsummary = "a → b"\n[parameters]\nBM = { values = [32] }\n'
        '[launch]\ngrid = "1"\nblock = "BM"\nshared_bytes = "0"\n',
        encoding="utf-8",
    )
    words = f"-X utf8=0 -m autotune space {SIZES} --space mine.toml"
    os.environ["PYTHONIOENCODING"] = "latin-1"
    try:
        status, out, err = python(words, tmp_path)
    finally:
        del os.environ["PYTHONIOENCODING"]
    assert (status, err) == (0, "")
    assert r"mine: a \u2192 b" in out


@pytest.mark.parametrize("words", ["", "cache", "cache list"])
def test_an_answer_that_cannot_be_written_is_one_line(tmp_path, words):
    status, _, err = shell(f"{words} >/dev/full", tmp_path)
    assert (status, err) == (
        1,
        "autotune: standard output: cannot be written (No space left on device)\n",
    )


def test_an_answer_that_nobody_reads_ends_without_a_word(tmp_path):
    status, _, err = python("-m autotune cache > >(exec true)", tmp_path, shell="/bin/bash")
    assert (status in (0, 1), err) == (True, "")


@pytest.mark.parametrize("where", ["/dev/full", ">(exec true)"])
def test_what_is_said_beside_an_answer_may_be_lost(tmp_path, where):
    words = f"-m autotune cache path --cache records 2> {where}"
    status, out, _ = python(words, tmp_path, shell="/bin/bash")
    assert (status, out) == (0, "records\n")
