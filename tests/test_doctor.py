"""``autotune doctor`` where something is broken: every part is one line, and none ends the report."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_cli import run_elsewhere

from autotune.cli import doctor

PARTS = ["NVRTC", "records", "driver", "CuPy", "GPU", "NVML"]


def findings(**environment):
    status, out, err = run_elsewhere("doctor", "--json", **environment)
    assert err == ""
    return status, {each["part"]: each for each in json.loads(out)}


def test_every_part_is_reported(tmp_path):
    status, found = findings(AUTOTUNE_CACHE_DIR=str(tmp_path))
    assert status == 0
    assert [part for part in PARTS if part in found] == PARTS
    assert found["NVRTC"]["works"]
    assert found["records"]["says"] == f"0 in {tmp_path}"


@pytest.fixture
def broken(tmp_path):
    """Put a module of a name before all others; return what makes a child see it."""

    def broken(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        return {
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
            "AUTOTUNE_CACHE_DIR": str(tmp_path),
        }

    return broken


def test_a_library_that_fails_in_a_way_of_its_own_is_one_line(broken):
    status, found = findings(**broken("cupy", "raise RuntimeError('built for\\nanother NumPy')"))
    assert status == 0
    assert found["GPU"]["says"] == "cannot be asked (RuntimeError: built for another NumPy)"
    assert "NVML" in found


def test_a_warning_of_a_library_is_a_line_of_the_report(monkeypatch):
    import warnings

    def probe():
        warnings.warn("several CuPy are\ninstalled", UserWarning, stacklevel=1)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        return doctor.Finding("GPU", True, "0: a GPU")

    said = [finding.says for finding in doctor._probed("GPU", probe)]
    assert said == ["0: a GPU", "warns: several CuPy are installed"]


def test_a_folder_of_records_that_cannot_be_read_is_said(tmp_path, monkeypatch):
    (tmp_path / "somebodys").mkdir()
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path))
    listed = Path.iterdir

    def denied(path):
        if path.name == "somebodys":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", denied)
    done = CliRunner().invoke(doctor.command, ["--json"])
    found = {each["part"]: each for each in json.loads(done.stdout)}
    assert done.exit_code == 1
    assert found["records"]["says"] == f"{tmp_path}/somebodys cannot be read (Permission denied)"
    assert "AUTOTUNE_CACHE_DIR" in found["records"]["remedy"]
