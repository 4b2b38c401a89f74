from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed: pip install hatchling"
)


def run(*command, **environment):
    done = subprocess.run(
        [str(word) for word in command],
        cwd=environment.pop("cwd", ROOT),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel):
    """A folder with nothing but the wheel's content, installed."""
    folder = wheel.parent / "site"
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        folder,
        wheel,
    )
    return folder


def files(folder, inside=""):
    return {
        f"autotune/{inside}{path.relative_to(folder).as_posix()}"
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }


def test_every_file_of_the_package_is_in_the_wheel_and_nothing_else(wheel):
    expected = files(ROOT / "autotune")
    expected |= files(ROOT / "templates", "templates/") | files(ROOT / "search_spaces", "search_spaces/")
    shipped = [*(ROOT / "cache").glob("*/*.json"), *(ROOT / "cache").glob("*/*.csv.gz")]
    expected |= {f"autotune/cache/{path.parent.name}/{path.name}" for path in shipped}
    assert {"autotune/values/devices.toml", "autotune/measure/verify.cu", "autotune/py.typed"} <= expected
    assert {"autotune/templates/sgemm.cu.jinja", "autotune/search_spaces/sgemm.toml"} <= expected
    content = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert content == expected


def test_the_data_folders_hold_data_only():
    """A module there would be installed as one, and breaks editable installs."""
    for folder in ("templates", "search_spaces"):
        assert {path.suffix for path in (ROOT / folder).rglob("*") if path.is_file()} <= {".jinja", ".toml"}
    assert not list((ROOT / "cache").rglob("*.py"))


def test_the_wheel_names_its_license_and_its_command(wheel):
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    (entry,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "autotune = autotune.cli:main" in archive.read(entry).decode()
    (metadata,) = (name for name in names if name.endswith("METADATA"))
    assert "Name: autotune-cuda\n" in archive.read(metadata).decode()


PROGRAM = """
import autotune
from autotune import paths
from autotune.code.render import render
from autotune.measure.verify_kernels import __file__ as beside
print(autotune.__file__)
assert not paths.in_checkout()
space = autotune.Space.load("sgemm")
assert space.path.parent.parent.samefile(autotune.__path__[0]), space.path
problem, device = autotune.Problem(4096, 4096, 4096), autotune.named_device("h200")
source = render(space, space.presets["square_block"], problem, device)
print(source.code_digest)
"""


def test_the_installed_wheel_renders_from_its_own_files(installed, tmp_path):
    isolated = {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1", "cwd": tmp_path}
    place, digest = run(sys.executable, "-c", PROGRAM, **isolated).split()
    assert Path(place) == installed / "autotune" / "__init__.py"

    from autotune import Problem, Space, named_device
    from autotune.code.render import render

    here = Space.load("sgemm")
    source = render(here, here.presets["square_block"], Problem(4096, 4096, 4096), named_device("h200"))
    assert digest == source.code_digest


def test_the_installed_command_writes_the_same_kernel(installed, tmp_path):
    isolated = {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1", "cwd": tmp_path}
    words = ["emit", "--m", "256", "--n", "256", "--k", "256", "--target", "h200", "--preset", "tiny_block"]
    there = run(sys.executable, "-m", "autotune", *words, **isolated)
    assert there == run(sys.executable, "-m", "autotune", *words)
    assert list(tmp_path.iterdir()) == []


SERVING = """
from autotune import Problem, named_device
from autotune.kernel.choices import Choices
from autotune.records import Store
choice = next(Choices(Problem(1024, 1024, 1024), named_device("h200"), Store()).exact())
print(choice.served, choice.record.device.name)
"""


def test_the_installed_wheel_serves_the_records_it_came_with(installed, tmp_path):
    isolated = {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1", "cwd": tmp_path}
    told = run(sys.executable, "-c", SERVING, AUTOTUNE_CACHE_DIR=str(tmp_path / "own"), **isolated)
    assert told.strip() == "exact NVIDIA H200"
