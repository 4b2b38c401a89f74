from __future__ import annotations

import signal

import pytest

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins with it ignored


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/ as rendered now")
    parser.addoption(
        "--require-gpu", action="store_true", help="run tests marked gpu even if no GPU is found: they fail"
    )


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
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
