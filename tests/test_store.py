from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
from made_records import H200, SGEMM, fitted, made

from autotune import paths
from autotune.cli import main
from autotune.code.render import render
from autotune.errors import RecordError, UsageError
from autotune.kernel.choices import Choices
from autotune.paths import data_dir
from autotune.records import RecordedDevice, Store, locks, read, serves
from autotune.records.trials import TrialHeader, TrialLog, trials_path
from autotune.space.space import Config
from autotune.values.device import named_device
from autotune.values.problem import Problem

CUBE = Problem(4096, 4096, 4096)  # there is a shipped record of it
SIZE = ["--m", "4096", "--n", "4096", "--k", "4096"]
SHIPPED = sorted(data_dir("cache").glob("*/*_f32_*.json"))


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
    code = "import sys; from autotune.records import Store; Store().filed();"
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


@pytest.mark.parametrize("named", ["", b"", 3, ["x"], True, "a\0b", 1.5, "x" * 5000, "a/" * 5000])
def test_what_names_no_folder_is_one_line(named):
    with pytest.raises(UsageError, match=r"^root .* is not the path of a folder: give one"):
        Store(named)


# --- whose a record is ---


def smaller(device=H200):
    return dataclasses.replace(device, sm_count=114)


def test_two_gpus_of_one_name_keep_records_and_logs_apart(tmp_path):
    store, problem = Store(tmp_path), Problem(200, 136, 72)
    ours, theirs = made(problem), made(problem, device=smaller(), ms=2.0)
    store.write(ours)
    store.write(theirs)
    assert store.offer(made(problem, device=smaller(), ms=3.0)) == theirs
    assert store.find(H200, "sgemm", problem) == ours
    assert store.find(smaller(), "sgemm", problem) == theirs
    assert store.path(H200, "sgemm", problem).parent.name == "NVIDIA_H200"
    assert store.path(smaller(), "sgemm", problem).parent.name == "NVIDIA_H200_114SM"
    found = (each.record for each in store.entries(pytest.fail) if each.record.problem == problem)
    assert list(found) == [ours, theirs]
    assert [choice.record for choice in Choices(problem, smaller(), store).exact()] == [theirs]


def test_a_folder_with_nothing_but_a_log_is_taken_too(tmp_path):
    store, problem = Store(tmp_path), Problem(200, 136, 72)
    header = TrialHeader(
        family="sgemm", problem=problem, device=RecordedDevice.of(H200), space_digest="1" * 64,
        template_digest="2" * 64, nvrtc="13.0",
    )  # fmt: skip
    with TrialLog(trials_path(store.path(H200, "sgemm", problem)), header) as log:
        log.event("begin")
    assert store.path(H200, "naive", problem).parent.name == "NVIDIA_H200"
    assert store.path(smaller(), "sgemm", problem).parent.name == "NVIDIA_H200_114SM"


def test_a_file_copied_into_the_folder_of_another_gpu_is_not_exact_there(tmp_path):
    """H100 and H200 agree in compute capability and number of SMs."""
    store, problem = Store(tmp_path), Problem(200, 136, 72)
    h100 = named_device("h100sxm")
    path, copy = store.write(made(problem)), store.path(h100, "sgemm", problem)
    copy.parent.mkdir()
    copy.write_bytes(path.read_bytes())
    with pytest.warns(UserWarning, match="its content belongs in NVIDIA_H200/"):
        assert store.find(h100, "sgemm", problem) is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        served = {choice.served for choice in Choices(problem, h100, store).all()}
    assert "exact" not in served
    renamed = made(problem, device=dataclasses.replace(H200, name="NVIDIA H200 NVL"))
    assert "not NVIDIA H200" in str(
        serves(renamed, H200, problem, render(SGEMM, SGEMM.config(renamed.config), problem, H200))
    )


def test_a_runner_up_serves_as_exact_only_with_the_code_that_was_measured(tmp_path):
    store, problem = Store(tmp_path), Problem(200, 136, 72)
    others = [fitted(problem, preset) for preset in ("small_block", "middle_block")]
    record = made(problem, others=others)
    one, other = record.runners_up
    edited = dataclasses.replace(one, config=dict(fitted(problem, "wide_block")))
    store.write(
        dataclasses.replace(record, runners_up=(edited, dataclasses.replace(other, code_digest=None)))
    )
    found = {choice.config: choice.served for choice in Choices(problem, H200, store, spaces=[SGEMM]).all()}
    assert found[fitted(problem)] == "exact"
    assert found.get(fitted(problem, "wide_block")) != "exact"
    assert found[others[1]] == "predicted"  # of a record that does not say what code was measured


# --- what comes from elsewhere ---


def test_an_import_is_marked_and_what_it_displaces_is_kept(tmp_path):
    store, problem = Store(tmp_path), Problem(200, 136, 72)
    ours, faster = made(problem, ms=2.0), made(problem, config=fitted(problem, "small_block"))
    path = store.write(ours)
    state, kept = store.take_in(faster)
    assert (state, kept) == ("taken", path.with_name(f"{path.name}.displaced"))
    assert read(kept) == ours
    stored = store.find(H200, "sgemm", problem)
    assert stored.imported is not None
    assert dataclasses.replace(stored, imported=None) == faster
    assert store.take_in(faster) == ("same", None)
    assert store.take_in(ours) == ("kept ours", None)
    fastest = made(problem, ms=0.5)
    assert store.take_in(fastest)[1] == path.with_name(f"{path.name}.displaced2")
    assert [each.record.problem for each in store.entries(pytest.fail)].count(problem) == 1


def test_what_was_measured_here_takes_the_place_of_what_was_imported(tmp_path):
    store, problem = Store(tmp_path), Problem(200, 136, 72)
    assert store.take_in(made(problem, ms=0.5))[0] == "taken"
    slower = made(problem, ms=2.0)
    assert store.offer(slower) == slower


# --- folders and files that cannot be read ---


def test_pipes_devices_and_long_files_are_one_line(tmp_path):
    store, problem = Store(tmp_path), Problem(200, 136, 72)
    path = store.path(H200, "sgemm", problem)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    told = []
    list(store.entries(told.append))
    with pytest.raises(RecordError, match="it is a pipe, socket or device"):
        store.find(H200, "sgemm", problem)
    assert next(Choices(problem, H200, store).all()).served == "predicted"
    path.unlink()
    path.symlink_to("/dev/zero")
    list(store.entries(told.append))
    path.unlink()
    with path.open("wb") as file:
        file.truncate(3 << 30)
    list(store.entries(told.append))
    assert [str(error).removeprefix(f"{path} cannot be read: ")[:30] for error in told] == [
        "it is a pipe, socket or device",
        "it is a pipe, socket or device",
        "it is longer than 4 MiB, the m",
    ]
    path.unlink()
    os.mkfifo(path)
    store.write(made(problem))  # nobody waits for a reader
    assert store.find(H200, "sgemm", problem) == made(problem)


def test_a_byte_order_mark_is_no_fault(tmp_path):
    path = Store(tmp_path).write(made(CUBE, ms=50.0))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read(path) == made(CUBE, ms=50.0)


NOBODY = 54321  # a user who is not in the table of users
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.fixture
def as_nobody():
    """Call a function in a fork, as a user without entry and home; return what it printed."""

    def call(function, folder, **environment):
        told, child = folder / "told", os.fork()
        if child == 0:
            with told.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            os.environ.pop("HOME", None)
            os.environ.pop("AUTOTUNE_CACHE_DIR", None)
            os.environ.update(environment)
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                function()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
        os.waitpid(child, 0)
        return told.read_text()

    return call


@pytest.fixture
def open_folder():
    """A folder that every user can enter."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@needs_root
def test_a_folder_that_cannot_be_read_is_not_called_empty(open_folder, as_nobody, monkeypatch):
    import autotune.cli.tune  # noqa: F401  # nobody may read Python's own files

    (open_folder / "NVIDIA_H200").mkdir(mode=0o700)
    monkeypatch.setattr("autotune.records.store.data_dir", lambda name: open_folder / "none")
    monkeypatch.setattr(sys, "argv", ["autotune", "show"])

    def show():
        with pytest.raises(SystemExit) as end:
            main()
        print(end.value.code)

    told = as_nobody(show, open_folder, AUTOTUNE_CACHE_DIR=str(open_folder))
    assert told == f"autotune: {open_folder}/NVIDIA_H200 cannot be read: Permission denied\n1\n"


@needs_root
@pytest.mark.parametrize("closed", [".", "NVIDIA_H200", "NVIDIA_H200/learned.json"])
def test_what_cannot_be_read_serves_nothing_and_stops_nothing(open_folder, as_nobody, closed, tmp_path):
    shutil.copytree(SHIPPED[0].parent, open_folder / "NVIDIA_H200")
    next(Choices(Problem(200, 136, 72), H200, Store(tmp_path)).all())  # whatever is imported late is imported
    (open_folder / closed).chmod(0)

    def serve():
        found = next(Choices(Problem(200, 136, 72), H200, Store(open_folder)).all())
        print(found.served, found.note)

    (told,) = as_nobody(serve, open_folder).splitlines()
    assert told.startswith("predicted ")
    if closed.endswith(".json"):
        assert told.endswith(
            f"{open_folder / closed}: cannot be read (Permission denied): kernels without a record are "
            "chosen by the static estimate alone; move that file away"
        )


def test_a_file_in_place_of_the_folder_stops_nothing_that_needs_no_record(tmp_path, run):
    path = tmp_path / "own"
    path.touch()
    size = ["--m", "20", "--n", "24", "--k", "28", "--target", "h200"]
    for command in (["emit", "--predicted"], ["explain", "predicted"]):
        status, _, err = run(*command, *size)
        assert (status, err.count("nothing of it is measured")) == (0, 1)
    status, out, err = run("show", *size)
    assert (status, err) == (1, f"autotune: {path} cannot be read: Not a directory\n")
    assert 'this would serve, as "predicted"' in out


@needs_root
@pytest.mark.parametrize("environment", [{}, {"AUTOTUNE_CACHE_DIR": "~/records"}])
def test_a_user_without_a_home_is_served_and_told_when_something_is_to_be_kept(
    open_folder, as_nobody, monkeypatch, environment
):
    monkeypatch.setattr(paths, "in_checkout", lambda: False)
    next(Choices(CUBE, H200, Store(open_folder)).all())  # whatever is imported late is imported

    def serve():
        print(next(Choices(CUBE, H200, Store()).all()).served)
        try:
            Store().check_writable()
        except RecordError as error:
            print(error)

    assert as_nobody(serve, open_folder, **environment).splitlines() == [
        "exact",
        "there is no home directory to keep anything in: set AUTOTUNE_CACHE_DIR to a folder, or HOME",
    ]


# --- locks ---


def test_a_held_lock_is_waited_for_with_a_word_and_not_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "TELL_S", 0.05)
    monkeypatch.setattr(locks, "WAIT_S", 0.3)
    store = Store(tmp_path)
    folder = store.write(made(CUBE, ms=50.0)).parent
    holder = os.open(folder, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with (
        pytest.warns(UserWarning, match=f"waiting for another process that has locked {folder}"),
        pytest.raises(RecordError, match="another process has locked it"),
    ):
        store.write(made(CUBE, ms=40.0))
    os.close(holder)
    store.write(made(CUBE, ms=40.0))


def test_a_warning_of_a_command_is_one_line_and_a_broken_file_stays(run, tmp_path):
    path = Store().path(H200, "sgemm", CUBE)
    path.parent.mkdir(parents=True)
    path.write_text('{"schema": 3, "\x1b[2J": ')
    code, out, err = run("emit", *SIZE, "--target", "h200")
    assert code == 0
    assert out.startswith("// sgemm")
    assert err.startswith(f"autotune: record ignored: {path}: not JSON")
    assert (err.count("\n"), "\x1b" in err) == (1, False)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
