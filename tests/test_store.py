from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_records import H200, made

from autotune.cli import main
from autotune.errors import UsageError
from autotune.paths import data_dir
from autotune.records import RecordedDevice, Store, read
from autotune.space.space import Config
from autotune.values.problem import Problem

CUBE = Problem(4096, 4096, 4096)  # there is a shipped record of it
SIZE = ["--m", "4096", "--n", "4096", "--k", "4096"]
SHIPPED = sorted(data_dir("cache").glob("*/*.json"))


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run a command where the user has no record: (exit code, stdout, stderr)."""
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path / "own"))

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["autotune", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        told = capsys.readouterr()
        return end.value.code, told.out, told.err

    return run


def test_every_command_sees_what_the_package_ships(run, tmp_path):
    record = Store(tmp_path).find(H200, "sgemm", CUBE)
    assert record is not None
    code, out, _ = run("show", *SIZE, "--json")
    assert (code, json.loads(out)["code_digest"]) == (0, record.code_digest)
    assert run("show", "--json")[1].count('"schema"') == len(SHIPPED)
    code, out, _ = run("emit", *SIZE, "--target", "h200")
    assert code == 0
    assert f"// config   {Config(record.config).id}\n" in out
    code, out, _ = run("explain", *SIZE, "--target", "h200", "--json")
    assert (code, json.loads(out)["config"]) == (0, dict(record.config))
    code, out, _ = run("cache", "export", tmp_path / "x.jsonl", *SIZE)
    assert (code, out) == (0, f"1 records in {tmp_path / 'x.jsonl'}\n")
    assert not (tmp_path / "own" / "NVIDIA_H200").exists()  # nothing was written


def test_the_users_record_shadows_the_shipped_one(tmp_path):
    own = made(CUBE, ms=50.0)
    store = Store(tmp_path)
    store.write(own)
    assert store.find(H200, "sgemm", CUBE) == own
    entries = [each for each in store.entries(pytest.fail) if each.record.problem == CUBE]
    assert [each.record for each in entries] == [own]
    every = [each for each in store.entries(pytest.fail, shadowed=True) if each.record.problem == CUBE]
    assert [(each.shipped, each.shadowed) for each in every] == [(False, False), (True, True)]


def test_a_broken_record_of_the_users_shadows_nothing(tmp_path):
    store = Store(tmp_path)
    path = store.write(made(CUBE, ms=50.0))
    path.write_text("{")
    with pytest.warns(UserWarning, match="record ignored"):
        found = store.find(H200, "sgemm", CUBE)
    assert found == read(data_dir("cache") / path.relative_to(tmp_path))
    assert path.read_text() == "{"


def test_what_ships_is_never_written(tmp_path):
    store = Store(tmp_path)
    shipped = store.find(H200, "sgemm", CUBE)
    worse = made(CUBE, ms=50.0, template_digest=shipped.template_digest)
    assert store.offer(worse) == shipped  # nobody measured the two together
    assert not store.path(H200, "sgemm", CUBE).exists()
    assert store.offer(worse, over=shipped) == worse
    assert store.path(H200, "sgemm", CUBE).is_relative_to(tmp_path)


def test_the_folder_that_ships_is_not_its_own_shadow():
    store = Store(data_dir("cache"))
    assert store.shipped is None
    assert store.folders == (data_dir("cache"),)
    assert Store(str(data_dir("cache"))).root == data_dir("cache")


def test_a_store_needs_neither_numpy_nor_a_template_engine():
    code = "import sys; from autotune.records import Store; Store().filed('NVIDIA_H200');"
    code += "print({'numpy', 'jinja2', 'cupy', 'optuna'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_the_fastest_of_some_families_or_the_newest_estimate(tmp_path):
    store, problem = Store(tmp_path), Problem(200, 136, 72)
    assert store.best(H200, ["sgemm"], problem) is None
    record = made(problem)
    store.write(record)
    assert store.best(RecordedDevice.of(H200), ["naive", "sgemm"], problem) == record
    assert store.best(H200, ["naive"], problem) is None


def test_a_folder_may_be_named_in_every_plain_way(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for named in (str(tmp_path / "x"), tmp_path / "x", os.fsencode(tmp_path / "x"), "~/x", Path("~/x")):
        assert Store(named).root == tmp_path / "x"
    assert Store("x").root == Path("x")


@pytest.mark.parametrize("named", ["", b"", 3, ["x"], True, "a\0b", 1.5])
def test_what_names_no_folder_is_one_line(named):
    with pytest.raises(UsageError, match=r"^root .* is not the path of a folder: give one"):
        Store(named)
