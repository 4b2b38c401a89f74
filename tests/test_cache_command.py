from __future__ import annotations

import dataclasses
import errno
import json
import os
import sys
import time
from pathlib import Path

import pytest
from made_records import H200, fitted, made, made_estimate
from test_trials import HEADER

from autotune import records
from autotune.cli import main
from autotune.code.depot import Depot
from autotune.paths import data_dir
from autotune.records import Store
from autotune.records.trials import TrialLog, trials_path
from autotune.values.device import named_device
from autotune.values.problem import Problem

ONE, TWO = Problem(64, 64, 64), Problem(64, 64, 128)


@pytest.fixture
def root(tmp_path, monkeypatch):
    root = tmp_path / "records"
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(root))
    monkeypatch.setenv("COLUMNS", "160")
    return root


SHIPPED = len(list(data_dir("cache").glob("*/*_f32_*.json")))


@pytest.fixture
def run(root, monkeypatch, capsys):
    """Run ``autotune cache``: (exit code, stdout, stderr)."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["autotune", "cache", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        told = capsys.readouterr()
        return end.value.code, told.out, told.err

    return run


def done(outcome):
    code, out, _ = outcome
    assert code == 0, outcome
    return out


@pytest.mark.parametrize("name", ["list", "show", "verify", "prune", "export", "import", "path"])
def test_each_command_has_help_and_json(run, name):
    out = done(run(name, "--help"))
    assert out.startswith(f"Usage: autotune cache {name}")
    assert "--json" in out
    assert "--cache" in out


def test_path(run, root):
    code, out, err = run("path")
    assert (code, out) == (0, f"{root}\n")
    assert "beneath it lie the records that came with the package" in err
    assert "0.0 MiB of at most 512 MiB" in err
    assert json.loads(done(run("path", "--json")))["compiled"] == str(root / "compiled")


def test_list_says_what_serves(run, root):
    Store(root).write(made(ONE))
    Store(root).write(made(TWO, code_digest="0" * 64))
    Store(root).write(made_estimate(ONE))
    rows = json.loads(done(run("list", "--json")))
    ours = {row["path"].removeprefix(f"{root}/NVIDIA_H200/"): row["state"] for row in rows}
    name = "sgemm_f32_nn_m64_n64_k{}_beta0_ffma.json"
    assert ours[name.format(64)] == "serves"
    assert ours[name.format(128)] == "stale"
    assert ours["estimated/" + name.format(64)] == "estimated"
    assert "shipped" in {row["state"] for row in rows}
    table = done(run("list"))
    assert "64 x 64 x 128 nn" in table
    assert "stale" in table


def test_list_names_what_is_broken_and_goes_on(run, root):
    path = Store(root).write(made(ONE))
    Store(root).write(made(TWO))
    text = path.read_text()
    path.write_text(text.replace('"median_ms": 1.0', '"median_ms": null'))
    code, out, err = run("list")
    assert code == 0
    assert err == f"autotune: {path}: $.timing.median_ms: expected a number, got null\n"
    assert "64 x 64 x 128 nn" in out


def test_show_is_show(run, root):
    Store(root).write(made(ONE))
    out = done(run("show", "--m", 64, "--n", 64, "--k", 64))
    assert out.startswith("64 x 64 x 64 nn on NVIDIA H200: 1 ms")


def test_verify_without_the_gpu_reads_and_renders(run, root):
    Store(root).write(made(ONE))
    stale = Store(root).write(made(TWO, code_digest="0" * 64))
    before = stale.read_text()
    code, out, err = run("verify", "--json")
    assert code == 0
    assert "nothing is timed: " in err
    assert [row["state"] for row in json.loads(out)] == ["stale", "read"]
    assert stale.read_text() == before
    stale.write_text("{")
    code, out, err = run("verify")
    assert code == 1
    assert err.endswith("$: " + err.rpartition("$: ")[2]) or "not JSON" in err
    assert run("verify", "--m", 1, "--n", 1, "--k", 1)[0] == 1


class Machine:
    """A GPU and its worker as `verify` asks for them, with made-up answers."""

    def __init__(self, monkeypatch, outcome):
        import stub_gpu

        from autotune.errors import Rejected
        from autotune.values.measurement import Finals

        self.started = started = []

        class Worker:
            def __init__(self, ordinal, problem, *, cold, service):
                self.turns = [problem]
                started.append(self)

            def turn_to(self, problem):
                self.turns.append(problem)

            def close(self):
                self.closed = True

            def ready(self):
                return stub_gpu.FACTS

            def finals(self, entries, timeout_s):
                return Finals({key: outcome for key, _, _ in entries}, None, None)

            def sustained(self, *about):
                return Rejected("crash", "the GPU worker died")

        monkeypatch.setattr("autotune.values.device.current_device", lambda ordinal: H200)
        monkeypatch.setattr("autotune.tuning.audit.GpuWorker", Worker)


def test_verify_writes_anew_what_changed(run, root, monkeypatch):
    from stub_gpu import measured

    machine = Machine(monkeypatch, measured(2.0))
    path = Store(root).write(made(ONE))
    Store(root).write(made(TWO, ms=2.0))
    other = Store(root).write(made(ONE, device=named_device("a100")))
    before = path.read_text()
    code, out, _ = run("verify", "--dry-run")
    assert (code, path.read_text()) == (0, before)
    assert "slower   NVIDIA_H200/sgemm_f32_nn_m64" in out
    assert "by more than 5 %: 1 ms then, 2 ms now" in out
    (worker,) = machine.started
    assert sorted(worker.turns, key=str) == sorted([ONE, TWO], key=str)
    assert worker.closed
    code, out, _ = run("verify")
    assert code == 0
    assert "written anew" in out
    assert "read     NVIDIA_A100" in out
    assert records.read(path).timing.median_ms == 2.0
    assert records.read(other).timing.median_ms == 1.0
    assert "holds    NVIDIA_H200" in run("verify")[1]


def test_verify_sets_aside_what_fails(run, root, monkeypatch):
    from autotune.errors import Rejected

    Machine(monkeypatch, Rejected("correctness", "C[0, 0] is nan"))
    path = Store(root).write(made(ONE))
    code, out, _ = run("verify")
    assert code == 1
    assert f"correctness: C[0, 0] is nan; renamed to {path.name}.bad" in out
    assert not path.exists()


def test_verify_of_what_came_with_the_package_stores_it_as_ones_own(run, root, monkeypatch):
    from stub_gpu import measured

    Machine(monkeypatch, measured(50.0))
    size = ("--m", 1024, "--n", 1024, "--k", 1024)
    assert run("verify", *size)[0] == 1  # none of one's own
    code, out, _ = run("verify", "--shipped", *size)
    assert code == 0
    assert "stored as your own" in out
    assert Store(root).find(H200, "sgemm", Problem(1024, 1024, 1024)).timing.median_ms == 50.0


def test_prune(run, root):
    path = Store(root).write(made(ONE))
    estimate = Store(root).write(made_estimate(ONE))
    Depot(root).put("cubin.x", b"1" * 1000)
    names = [
        "a.json.bad",
        "a.trials.jsonl",
        "a.old.trials.jsonl",
        "a.old2.trials.jsonl",
        ".a.1-2.tmp",
        ".b.1-2.tmp",
    ]
    for name in names:
        path.with_name(name).write_text("x")
    os.utime(path.with_name(".a.1-2.tmp"), (time.time() - 7200,) * 2)
    rows = {row["what"]: row["files"] for row in json.loads(done(run("prune", "--json")))}
    assert rows == {"bad": 1, "displaced": 0, "old": 2, "trials": 3, "tmp": 1, "estimated": 1, "compiled": 1}
    assert all(path.with_name(name).exists() for name in names)
    assert "would go" in done(run("prune", "--bad", "--dry-run"))
    assert path.with_name("a.json.bad").exists()
    done(run("prune", "--bad", "--old", "--tmp"))
    assert sorted(each.name for each in path.parent.iterdir()) == sorted(
        [".b.1-2.tmp", "a.trials.jsonl", path.name, "estimated"]
    )
    done(run("prune", "--trials", "--estimated", "--compiled"))
    assert not estimate.exists()
    assert Depot(root).entries() == []
    assert records.read(path) == made(ONE)


@pytest.mark.parametrize("name", ["x.tar.gz", "x.jsonl"])
def test_export_and_import(run, root, tmp_path, name):
    for record in (made(ONE), made(TWO), made_estimate(ONE)):
        Store(root).write(record)
    archive, other = tmp_path / name, tmp_path / "other"
    assert done(run("export", archive)) == f"{2 + SHIPPED} records in {archive}\n"
    told = done(run("import", archive, "--cache", other))
    assert (told.count("taken "), told.count("same ")) == (2, SHIPPED)
    found = Store(other).find(H200, "sgemm", ONE)
    assert found.imported
    assert dataclasses.replace(found, imported=None) == made(ONE)
    assert Store(other).find(H200, "sgemm", ONE, estimated=True) is None
    assert json.loads(done(run("export", archive, "--estimated", "--json")))["records"] == 3 + SHIPPED
    states = [row["state"] for row in json.loads(done(run("import", archive, "--cache", other, "--json")))]
    assert (states.count("same"), states.count("taken")) == (2 + SHIPPED, 1)


def test_import_keeps_the_better_record(run, root, tmp_path):
    archive = tmp_path / "x.jsonl"
    slow, fast = (
        made(ONE, ms=ms, config=fitted(ONE, preset))
        for ms, preset in ((2.0, "tiny_block"), (1.0, "small_block"))
    )
    Store(root).write(slow)
    done(run("export", archive))
    Store(root).write(fast)
    assert "kept ours" in done(run("import", archive))
    assert Store(root).find(H200, "sgemm", ONE) == fast
    stale = made(ONE, ms=0.5, code_digest="0" * 64)
    Store(root).write(stale)
    done(run("export", archive))
    Store(root).write(slow)
    assert "kept ours" in done(run("import", archive))  # it renders to other code today


def test_import_of_a_broken_archive(run, root, tmp_path):
    Store(root).write(made(ONE))
    archive = tmp_path / "x.jsonl"
    done(run("export", archive))
    records_ = archive.read_text().splitlines()
    archive.write_text("\n".join([*records_, '{"schema": 999}']))
    code, out, err = run("import", archive, "--cache", tmp_path / "other")
    assert code == 1
    assert "taken" in out
    assert err.startswith(f"autotune: {archive}, line {len(records_) + 1}: schema 999 is newer than")
    assert run("import", tmp_path / "x.zip")[0] == 2
    assert run("export", tmp_path / "x.zip")[0] == 2
    nothing = run("export", tmp_path / "y.jsonl", "--m", 7, "--n", 7, "--k", 7)
    assert nothing == (1, "", f"autotune: {root} holds no record of 7 x 7 x 7 nn to export\n")


def test_an_imported_config_must_be_one_of_its_family(run, root, tmp_path):
    shipped = data_dir("cache") / "NVIDIA_H200" / "sgemm_f32_nn_m4096_n4096_k4096_beta0_ffma.json"
    value = json.loads(shipped.read_text())
    value["config"]["BM"] = 7
    path = tmp_path / "all.jsonl"
    path.write_text(json.dumps(value) + "\n")
    code, out, err = run("import", path)
    assert code == 1
    assert "refused" in out
    assert "BM = 7: give one of 8, 16, " in err
    assert not list(root.glob("**/*.json"))


def test_prune_leaves_the_log_of_a_running_search_alone(run, root):
    path = trials_path(Store(root).path(H200, "sgemm", ONE))
    with TrialLog(path, HEADER) as log:
        log.event("begin")
        (row,) = json.loads(done(run("prune", "--trials", "--json")))
        assert (row["files"], row["removed"], path.exists()) == (0, True, True)
    assert "removed           1 files" in done(run("prune", "--trials"))
    assert not path.exists()


def test_prune_follows_no_link(run, root, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    path = Store(elsewhere).write(made_estimate(ONE))
    path.with_name("a.json.bad").write_text("x")
    Depot(elsewhere).put("key", b"content")
    root.mkdir()
    (root / "NVIDIA_H200").symlink_to(elsewhere / "NVIDIA_H200")
    (root / "compiled").symlink_to(elsewhere / "compiled")
    (root / "other").mkdir()
    (root / "other" / "estimated").symlink_to(path.parent)
    (root / "other" / "b.json.bad").symlink_to(path)
    done(run("prune", "--bad", "--estimated", "--compiled", "--tmp"))
    assert path.exists()
    assert path.with_name("a.json.bad").exists()
    assert Depot(elsewhere).get("key") == b"content"
    assert not (root / "other" / "b.json.bad").is_symlink()  # itself, not what it leads to


def test_prune_says_what_it_could_not_remove(run, root, monkeypatch):
    path = Store(root).write(made(ONE))
    for name in ("a.json.bad", "b.json.bad"):
        path.with_name(name).write_text("x")
    unlink = Path.unlink

    def refusing(self, missing_ok=False):
        if self.name == "a.json.bad":
            raise PermissionError(errno.EACCES, "Permission denied")
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", refusing)
    code, out, err = run("prune", "--bad")
    assert code == 1
    assert out.startswith("removed           1 files")
    assert err == f"autotune: {path.with_name('a.json.bad')} cannot be removed: Permission denied\n"


def test_reading_changes_nothing(run, root):
    path = Store(root).write(made(ONE))
    path.write_text(path.read_text()[:300])

    def kept():
        """All but sources and machine code, which can be made again."""
        return {each: each.read_bytes() for each in root.glob("[!c]*/**/*") if each.is_file()}

    before = kept()
    for words in (["list"], ["show"], ["show", "--m", 64, "--n", 64, "--k", 64], ["prune"], ["path"]):
        run(*words)
    assert kept() == before != {}


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ([], 3),
        (["--layout", "nt"], 1),
        (["--beta", 1], 1),
        (["--math", "ffma"], 3),
        (["--math", "3xtf32"], 0),
        (["--family", "sgemm"], 3),
        (["--family", "naive"], 0),
        (["--layout", "nn", "--beta", 0], 1),
    ],
)
def test_show_without_sizes_filters(run, root, monkeypatch, words, count):
    monkeypatch.setattr("autotune.records.store.data_dir", lambda name: root / "none")
    for problem in (ONE, dataclasses.replace(ONE, layout="nt"), dataclasses.replace(ONE, beta=1)):
        Store(root).write(made(problem))
    assert len(json.loads(done(run("show", "--json", *words)))) == count
    if not count:
        told = run("show", *words)[2]
        assert "holds no record of" in told
        assert told.endswith(f"--k 4096 {' '.join(map(str, words)).replace('family', 'space')}'\n")


def test_a_filter_that_is_none_is_a_usage_error(run):
    code, _, err = run("show", "--layout", "xx")
    assert code == 2
    assert "layout 'xx' is unknown" in err


def test_records_of_a_layout_are_exported_alone(run, root, tmp_path, monkeypatch):
    monkeypatch.setattr("autotune.records.store.data_dir", lambda name: root / "none")
    for problem in (ONE, dataclasses.replace(ONE, layout="nt")):
        Store(root).write(made(problem))
    assert done(run("export", tmp_path / "x.jsonl", "--layout", "nt")).startswith("1 records")
