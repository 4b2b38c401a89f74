from __future__ import annotations

from pathlib import Path

from autotune import paths

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


def test_the_environment_chooses_the_folder_of_records(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", "~/kept")
    assert paths.cache_dir() == tmp_path / "kept"
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", "~nobody-of-this-name/kept")
    assert paths.cache_dir() == Path("~nobody-of-this-name/kept")


def test_an_empty_variable_counts_as_none(monkeypatch):
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", "")
    assert paths.cache_dir() == ROOT / "cache"
