from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins with it ignored

WORKERS = 3  # for two cores: many tests wait, for a child or for a time
LONGEST = {f"test_{name}" for name in ("docs", "interrupt", "kernels", "ladder", "resume", "tf32")}
SHARE = 0.9  # of one core that a probe must get, else the machine is too busy for a time to mean anything


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--browser", action="store_true", help="run tests marked browser: they need Chromium")
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/ as rendered now")
    parser.addoption(
        "--require-gpu", action="store_true", help="run tests marked gpu even if no GPU is found: they fail"
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Iterator[None]:
    """Run the whole suite in some processes, file by file, and after it what asserts a time, alone.

    That is `pytest` without a path, -m or -n; whatever is asked for by name runs here, in order.
    """
    option = config.option
    if hasattr(
        config, "workerinput"
    ):  # one of the processes: options that were set here do not reach it by themselves
        option.markexpr = config.workerinput["markexpr"]
        os.environ.pop("COLUMNS", None)  # which pytest-xdist sets, and tables obey
        return (yield)
    whole = (
        config.args_source is pytest.Config.ArgsSource.TESTPATHS
        and config.pluginmanager.hasplugin("xdist")
        and (option.numprocesses, option.markexpr, option.collectonly, option.usepdb)
        == (None, "", False, False)
    )
    if not whole:
        return (yield)
    option.numprocesses, option.dist, option.markexpr = WORKERS, "loadfile", "not timing"
    option.loadscopereorder = False  # by their number of tests, which says nothing of their time
    status = yield
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return status
    words = [word for word in config.invocation_params.args if not word.startswith("--junit")]
    print("\nassertions on time, one after the other", flush=True)
    files = [
        str(path)
        for path in sorted((config.rootpath / "tests").rglob("test_*.py"))
        if "mark.timing" in path.read_text()
    ]
    alone = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "timing", *words, *files], cwd=config.rootpath
    )
    return status if alone.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else 1


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process of pytest-xdist which tests to leave out."""
    node.workerinput["markexpr"] = node.config.option.markexpr


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none; the longest files are first, assertions on time last."""
    items.sort(
        key=lambda item: (item.get_closest_marker("timing") is not None, item.path.stem not in LONGEST)
    )
    if not config.getoption("--browser"):
        items[:] = [item for item in items if item.get_closest_marker("browser") is None]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or config.getoption("--require-gpu"):
        return
    if why := _no_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=why))


def _no_gpu() -> str:
    from autotune.errors import DeviceError
    from autotune.values.device import current_device

    try:
        current_device(0)
    except DeviceError as error:
        return str(error)
    return ""


# -- assertions on time --------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip a test marked timing while other processes want the cores, also if that shows only afterwards."""
    if item.get_closest_marker("timing") is None:
        return (yield)
    if load := load_of_others(0.2):
        pytest.skip(load)
    try:
        return (yield)
    except AssertionError:
        if load := load_of_others(1.0):
            pytest.skip(load)
        raise


def load_of_others(seconds: float) -> str:
    """Spin for so long; return what the machine was busy with, or "" if this process had a core to itself."""
    wall, own, wanting = time.perf_counter(), time.thread_time(), []
    while (passed := time.perf_counter() - wall) < seconds:
        wanting.append(int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1)
    share, others, cores = (
        (time.thread_time() - own) / passed,
        sum(wanting) / len(wanting),
        os.cpu_count() or 1,
    )
    if share >= SHARE and others < cores:
        return ""
    return (
        f"the machine is busy: a probe of {seconds:.1f} s got {share:.0%} of a core while {others:.1f} other "
        f"threads wanted the {cores} (load average {os.getloadavg()[0]:.1f})"
    )
