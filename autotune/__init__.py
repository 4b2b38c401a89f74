"""Generate, verify and tune FP32 matrix-multiplication kernels for one GPU and one problem size.

>>> import autotune
>>> autotune.Problem(4096, 4096, 4096).flops
137438953472
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autotune.errors import (
    AutotuneError,
    ConfigError,
    DeviceError,
    ProblemError,
    RecordError,
    RecordMissing,
    SpaceError,
    ToolchainError,
    TuningError,
    UsageError,
)
from autotune.values.problem import Problem

if TYPE_CHECKING:
    from autotune.code.render import Source
    from autotune.kernel import Kernel, best_kernel, matmul
    from autotune.simulator import simulate
    from autotune.space.space import Config, Space
    from autotune.tuning.budget import Budget
    from autotune.tuning.tuner import tune
    from autotune.values.device import Device, current_device, named_device

__version__ = "0.1.0"

_HOMES = {
    "Budget": "tuning.budget",
    "Config": "space.space",
    "Device": "values.device",
    "Kernel": "kernel",
    "Source": "code.render",
    "Space": "space.space",
    "best_kernel": "kernel",
    "current_device": "values.device",
    "matmul": "kernel",
    "named_device": "values.device",
    "simulate": "simulator",
    "tune": "tuning.tuner",
}

__all__ = [
    "AutotuneError",
    "Budget",
    "Config",
    "ConfigError",
    "Device",
    "DeviceError",
    "Kernel",
    "Problem",
    "ProblemError",
    "RecordError",
    "RecordMissing",
    "Source",
    "Space",
    "SpaceError",
    "ToolchainError",
    "TuningError",
    "UsageError",
    "best_kernel",
    "current_device",
    "matmul",
    "named_device",
    "simulate",
    "tune",
]


def __getattr__(name: str) -> Any:
    """Import the home of a public name when it is first used: NumPy, Optuna and CuPy cost hundreds of ms."""
    if name == "torch":
        return import_module("autotune.torch")
    if name not in _HOMES:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    value = getattr(import_module(f"autotune.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return __all__
