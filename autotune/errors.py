"""The error tree, and the values that stand for what may happen to a candidate.

::

    AutotuneError
    ├── UsageError          the request cannot be carried out as asked (exit code 2)
    │   ├── ProblemError    m, n, k, layout, beta or math out of range
    │   ├── SpaceError      a search-space file is wrong, or leaves no legal config
    │   ├── ConfigError     a config is unknown, incomplete or not legal here
    │   └── LibraryMissing  a module of ours is for a library that is not installed
    ├── DeviceError         no GPU, an unknown one, too little memory, a driver too old (exit code 1)
    ├── ToolchainError      NVRTC or CuPy is missing or cannot serve this architecture (exit code 1)
    ├── MachineError        processes were killed, or memory taken, again and again (exit code 1)
    ├── RecordError         a record cannot be read or written (exit code 1)
    │   └── RecordMissing   no record serves this problem on this device
    └── TuningError         the search ended without one usable candidate (exit code 1)

A message says what failed, the numbers against the limit, and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from autotune.outside import printable


class AutotuneError(Exception):
    """Base of every error this package raises on purpose; names from files are safe to print in its text."""

    exit_code = 1

    def __str__(self) -> str:
        return printable(super().__str__())


class UsageError(AutotuneError):
    """The request itself is wrong; nothing was started."""

    exit_code = 2


class ProblemError(UsageError, ValueError):
    """A problem's sizes, layout, beta class or math are out of range."""


class SpaceError(UsageError, ValueError):
    """A search-space file is wrong, or no config of it is legal."""


class ConfigError(UsageError, ValueError):
    """A config names unknown parameters, misses some, or breaks a constraint."""


class LibraryMissing(UsageError, ImportError):
    """A module was imported that is for a library that cannot be imported."""


class DeviceError(AutotuneError):
    """There is no usable GPU, or its limits do not allow what was asked."""


class ToolchainError(AutotuneError):
    """NVRTC, CuPy or cuBLAS is missing, or does not know the architecture."""


class MachineError(AutotuneError):
    """The machine failed again and again: no candidate is to blame, and nothing can be measured."""


class RecordError(AutotuneError):
    """A record file cannot be read or written."""


class RecordMissing(RecordError, LookupError):
    """No record serves this problem on this device."""


class TuningError(AutotuneError):
    """The search ended and not one candidate was usable."""


RejectionKind = Literal["constraint", "compile", "compile_timeout", "crash", "timeout", "correctness"]
REJECTION_KINDS: tuple[RejectionKind, ...] = get_args(RejectionKind)


@dataclass(frozen=True)
class Rejected:
    """Why a candidate cannot win: an expected outcome of a search, so a value and not an exception.

    Attributes:
        kind: constraint (its real registers or shared memory exceed the device), compile,
            compile_timeout, crash (a CUDA error or a dead worker), timeout (the kernel did not end),
            correctness (a wrong result, or a write outside C).
        why: One line with the numbers.
    """

    kind: RejectionKind
    why: str


@dataclass(frozen=True)
class MachineFault:
    """Why a candidate has no outcome although it was tried: the machine failed, and another try may not.

    Never final: no log or record holds it as a property of the candidate.

    Attributes:
        why: One line, such as that its compiler was killed, or that others hold the GPU's memory.
    """

    why: str
