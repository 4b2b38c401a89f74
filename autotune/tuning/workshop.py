"""Turns GPUs and cores into workers and compilers that searches use one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from types import TracebackType

from autotune.code.compiler import CompilePool, default_workers
from autotune.errors import UsageError
from autotune.measure.worker import GpuWorker
from autotune.tuning.pipeline import COMPILE_TIMEOUT_S
from autotune.values.device import Device
from autotune.values.problem import Problem


class Workshop:
    """A worker for each GPU, and the compile processes that they share; all start at once.

    Args:
        ordinals: CUDA ordinals of the GPUs, one or more, each once.
        problem: What the workers are to measure first.
        workers: Compiling processes; one for each core when not given: they yield to all else.
        cold: Time with operands that are not in the L2 cache.

    Attributes:
        pool: Compiles.
        gpus: Workers in the order of the ordinals.
    """

    def __init__(
        self,
        ordinals: Sequence[int],
        problem: Problem,
        *,
        workers: int | None = None,
        cold: bool = False,
    ) -> None:
        self._ordinals = list(ordinals)
        compilers = workers or default_workers(spare=0)
        with ExitStack() as opening:  # what is open closes again if something fails here
            self.gpus = [
                opening.enter_context(GpuWorker(ordinal, problem, cold=cold)) for ordinal in self._ordinals
            ]
            self.pool = opening.enter_context(CompilePool(compilers, COMPILE_TIMEOUT_S))
            self.pool.warm()
            for name in ("optuna", "jinja2"):  # half a second, while they start
                import_module(name)
            self._open = opening.pop_all()

    def __enter__(self) -> Workshop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def identity(self) -> tuple[Device, str]:
        """Wait until the GPUs are known: the device that all of them are, and the driver's version.

        Raises:
            UsageError: They are not of one kind.
            DeviceError: One cannot be used.
            ToolchainError: Likewise.
        """
        (device, driver), *others = [gpu.identity() for gpu in self.gpus]
        for ordinal, (other, _) in zip(self._ordinals[1:], others, strict=True):
            if (other.slug, other.sm_count) != (device.slug, device.sm_count):
                raise UsageError(
                    f"GPU {self._ordinals[0]} is {_named(device)} and GPU {ordinal} is {_named(other)}: "
                    "one search needs GPUs of one kind"
                )
        return device, driver

    def turn_to(self, problem: Problem) -> None:
        """Have the workers measure another problem; what is pending is forgotten."""
        self.pool.drop()
        for gpu in self.gpus:
            gpu.turn_to(problem)


def _named(device: Device) -> str:
    return f"{device.name}{f' {device.mig}' if device.mig else ''} with {device.sm_count} SMs"
