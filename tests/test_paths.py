from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import numpy as np
import pytest

from autotune import paths
from autotune.errors import RecordError
from autotune.records import Store

ROOT = Path(__file__).resolve().parents[1]


def test_data_lies_in_the_checkout():
    assert paths.in_checkout()
    assert paths.data_dir("templates") == ROOT / "templates"
    assert paths.data_dir("search_spaces") == ROOT / "search_spaces"


def test_data_inside_the_package_goes_first(tmp_path, monkeypatch):
    package = tmp_path / "site" / "autotune"
    (package / "templates").mkdir(parents=True)
    monkeypatch.setattr(paths, "_PACKAGE", package)
    assert paths.data_dir("templates") == package / "templates"
    assert paths.data_dir("search_spaces") == ROOT / "search_spaces"


def test_records_of_a_checkout_are_kept_in_it(monkeypatch):
    monkeypatch.delenv("AUTOTUNE_CACHE_DIR", raising=False)
    assert paths.cache_dir() == ROOT / "cache"


def test_records_of_an_installed_package_are_kept_for_the_user(tmp_path, monkeypatch):
    monkeypatch.delenv("AUTOTUNE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(paths, "_CHECKOUT", tmp_path / "site-packages")
    assert paths.cache_dir() == tmp_path / "autotune"


@pytest.fixture
def homeless(tmp_path, monkeypatch):
    """An installed package and a user that the system does not know."""
    for name in ("HOME", "XDG_CACHE_HOME", "AUTOTUNE_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: (_ for _ in ()).throw(KeyError(number)))
    monkeypatch.setattr(paths, "_CHECKOUT", tmp_path / "site-packages")
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "package")
    (tmp_path / "package").mkdir()
    for name in ("cache", "templates", "search_spaces"):
        (tmp_path / "package" / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)


def test_who_has_no_home_is_served_what_is_shipped_and_told_that_nothing_is_kept(
    homeless, tmp_path, monkeypatch
):
    from autotune.kernel import best, multiply
    from autotune.kernel.once import Once

    assert paths.cache_dir() == paths.NOWHERE
    monkeypatch.setattr(best, "_told", {})
    monkeypatch.setattr(multiply, "_kernels", Once())
    a, b = np.ones((8, 4), np.float32), np.ones((4, 6), np.float32)
    with pytest.warns(UserWarning, match="compiled kernels are not kept: there is no home directory"):
        assert (multiply.matmul(a, b, device="simulator") == 4).all()
    assert best.best_kernel(1024, 1024, 1024, device="simulator").served == "exact"
    with pytest.raises(RecordError, match="there is no home directory to keep anything in: set AUTOTUNE"):
        Store().check_writable()
    assert [path.name for path in tmp_path.iterdir()] == ["package"]


def test_the_environment_chooses_the_folder_of_records(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", "~/kept")
    assert paths.cache_dir() == tmp_path / "kept"
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", "~nobody-of-this-name/kept")
    assert paths.cache_dir() == Path("~nobody-of-this-name/kept")


def test_an_empty_variable_counts_as_none(monkeypatch):
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", "")
    assert paths.cache_dir() == ROOT / "cache"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x.txt"
    paths.write_file(path, "first")
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    path.chmod(0o640)

    def fail():
        with paths.replacing(path) as file:
            file.write(b"half")
            file.flush()
            assert path.read_text() == "first"
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "first"
    paths.write_file(path, b"second", durable=False)
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("second", 0o640)
    assert os.listdir(tmp_path) == ["x.txt"]


def test_a_link_and_a_long_name_are_written_and_kept(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    paths.write_file(link, "through")
    assert link.is_symlink()
    assert target.read_text() == "through"
    paths.write_file(tmp_path / ("n" * 250), "long")
    assert (tmp_path / ("n" * 250)).read_text() == "long"


def test_a_file_that_cannot_be_written_is_named():
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        paths.write_file(Path("/dev/full"), "text")


def test_a_pipe_is_written_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    paths.write_file(pipe, "through the pipe")
    reader.join()
    assert read == ["through the pipe"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_one_function_writes_files():
    """Whatever replaces a file goes through `paths.replacing`."""
    for source in (ROOT / "autotune").rglob("*.py"):
        if source.name in ("paths.py", "store.py"):  # the store renames a broken record
            continue
        text = source.read_text()
        assert "os.replace(" not in text, source
        assert ".write_bytes(" not in text, source
        assert ".write_text(" not in text or source.name == "pool.py", source  # a setting under /proc
