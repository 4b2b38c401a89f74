"""The rows of a bench, one shape and its outcome each, kept in a file until the run is whole.

A run that is stopped, however that may be, goes on from there if nothing has changed that its times depend
on. The file holds a `Circumstances`, then one line for each shape that was timed; a line that is cut is where
a writer died. What failed is tried again.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Any, Literal

from autotune.code.compiler import nvrtc_version
from autotune.code.render import template_digest
from autotune.errors import RecordError, Rejected, UsageError
from autotune.kernel.choices import Choice, Served
from autotune.measure.comparison import Baseline, BenchFacts, Library
from autotune.model.account import traffic_bytes
from autotune.outside import MIB, read_bytes
from autotune.records import RecordedDevice, Store, now
from autotune.records import schema as recorded
from autotune.records.schema import Digest, Text
from autotune.space.space import Config, built_in
from autotune.tuning.prediction import model_digest
from autotune.values import jsontext, typed
from autotune.values.digest import digest_of
from autotune.values.limits import Count, Name
from autotune.values.measurement import MeasuredTrial, Sustained, Timing, Verdict
from autotune.values.suite import Shape

FOLDER = "bench"  # of the user's folder of records
LIMIT = 256 * MIB


@dataclass(frozen=True)
class Failure:
    """Why a shape has no time: a rejection kind, "device" or "machine"; and one line."""

    kind: str
    why: str


@dataclass(frozen=True)
class Winner:
    """The kernel that was timed, as `Choice` has it."""

    family: Name
    config: recorded.Config
    served: Served

    @classmethod
    def of(cls, choice: Choice) -> Winner:
        """Return what is kept of a choice."""
        return cls(choice.space.family, dict(choice.config), choice.served)

    @property
    def id(self) -> str:
        """Name of its config."""
        return Config(self.config).id


@dataclass(frozen=True)
class Row:
    """One shape and its outcome.

    Attributes:
        shape: The shape.
        winner: What serves it, as `best_kernel` finds it; None where nothing does.
        measured: The winner's timing and verdict; None where it failed or is missing.
        failure: Why it failed; None where it did not.
        libraries: What the libraries did on the same operands; one that is not installed is left out.
        missing: Why no record serves; "" where one does.
        choosing_s: Host seconds to find what serves, without compiling it; to measure it, where it was tuned
            quickly.
        sustained: What held for seconds, of the kernel by `KERNEL` and of libraries; empty where not asked.
    """

    shape: Shape
    winner: Winner | None = None
    measured: MeasuredTrial | None = None
    failure: Failure | None = None
    libraries: Mapping[Library, Baseline | Rejected] = field(default_factory=dict)
    missing: str = ""
    choosing_s: float = 0.0
    sustained: Mapping[str, Sustained] = field(default_factory=dict)

    def baseline(self, name: Library) -> Baseline | None:
        """Return a library's timing; None where it is absent, failed, or was not asked."""
        found = self.libraries.get(name)
        return found if isinstance(found, Baseline) else None

    def versus(self, name: Library) -> float | None:
        """Return time of the library / time of the kernel; None unless both were timed."""
        found = self.baseline(name)
        if found is None or self.measured is None:
            return None
        return found.timing.median_ms / self.measured.timing.median_ms

    @property
    def gflops(self) -> float | None:
        """2mnk / time, 10^9 operations per second."""
        return (
            None if self.measured is None else self.shape.problem.flops / self.measured.timing.median_ms / 1e6
        )

    @property
    def gbs(self) -> float | None:
        """Bytes that must move / time, 10^9 per second: A, B and C once, C twice where it is read."""
        if self.measured is None:
            return None
        return traffic_bytes(self.shape.problem) / self.measured.timing.median_ms / 1e6


@dataclass(frozen=True)
class Circumstances:
    """What the times of a run depend on, beside its shapes.

    Attributes:
        created: When it began, UTC.
        seed: Of the operands.
        device: The GPU.
        driver: Its driver.
        cublas: Version of cuBLAS; "" where there is none.
        nvrtc: What compiled the kernels.
        model: Digest of the code that predicts, and of what was learned of the GPU.
        families: Digest of all spaces and templates.
        records: Digest of the names, sizes and times of change of all records.
    """

    schema: Literal[1]
    created: Text
    seed: Count
    device: RecordedDevice
    driver: Text
    cublas: str
    nvrtc: Text
    model: Digest
    families: Digest
    records: Digest

    @classmethod
    def of(cls, facts: BenchFacts, store: Store, seed: int) -> Circumstances:
        """Return those of now."""
        paths = [file.path for file in store.filed() if os.path.isfile(file.path)]
        return cls(
            1,
            now(),
            seed,
            RecordedDevice.of(facts.device),
            facts.driver,
            facts.cublas or "",
            nvrtc_version(),
            model_digest(store, facts.device),
            digest_of(*(f"{space.content_digest} {template_digest(space)}" for space in built_in())),
            digest_of(*(f"{path} {(found := path.stat()).st_mtime_ns} {found.st_size}" for path in paths)),
        )

    def differences(self, other: Circumstances) -> str:
        """Return in what those of another run differ from these; "" where its times may stand beside ours."""
        named = {
            "nvrtc": "NVRTC", "cublas": "cuBLAS", "families": "spaces or templates", "records": "records",
            "model": "the model", "device": "the GPU", "driver": "the driver",
        }  # fmt: skip
        return ", ".join(
            named[each.name]
            for each in fields(self)
            if each.name in named and getattr(self, each.name) != getattr(other, each.name)
        )


@dataclass(frozen=True)
class _Line:
    shape: Text
    winner: Winner | None
    timing: Timing
    verdict: Verdict
    baselines: Mapping[Name, Baseline]
    refused: Mapping[Name, Rejected]
    choosing_s: float
    sustained: Mapping[Name, Sustained] = field(default_factory=dict)


class Rows:
    """The file of one run: its rows so far, and those to come.

    Args:
        store: In whose folder it lies.
        shapes: That are asked for.
        asked: What else tells one run from another: how it is timed, and what serves.
        resume: Go on from the rows of a run that was stopped; False begins anew.

    Attributes:
        path: Of the file.
        done: Row of each shape that an earlier run has timed, by the shape's id.
        seed: Of the operands of that run; None where there is none.
        told: One line on how this run begins; "" where that goes without saying.
    """

    def __init__(self, store: Store, shapes: Sequence[Shape], *asked: object, resume: bool = True) -> None:
        self.path = store.root / FOLDER / f"{digest_of(*map(repr, (*shapes, *asked)))[:16]}.jsonl"
        self.done: dict[str, Row] = {}
        self.seed: int | None = None
        self.told = ""
        self._shapes = {shape.id: shape for shape in shapes}
        self._whole = 0  # bytes of lines that can be read
        self._before = self._read() if resume else None
        if self._before is not None:
            self.seed = self._before.seed
        self._file: int | None = None

    def open(self, now: Circumstances) -> None:
        """Begin to write, where the circumstances of the rows are those of now; else begin anew.

        Raises:
            UsageError: Another process does the same run.
        """
        changed = "" if self._before is None else now.differences(self._before)
        if changed:
            self.told = f"{len(self.done)} shapes that were timed before are timed anew: {changed} changed"
            self.done, self._before = {}, None
        elif self.done and self._before is not None:
            self.told = (
                f"going on: {len(self.done)} of {len(self._shapes)} shapes were timed in a run that began at "
                f"{self._before.created} (--no-resume begins anew)"
            )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._file, self._whole if self._before else 0)
            if self._before is None:
                os.write(self._file, _text(typed.plain(now)))
        except BlockingIOError:
            raise UsageError(f"another process times these shapes, and has locked {self.path}") from None
        except OSError as error:
            self._close()
            self.told = f"what is timed is not kept: {self.path} cannot be written ({error.strerror})"

    def add(self, row: Row) -> None:
        """Keep the row of a shape that was timed; it has left this process when this returns."""
        if self._file is not None and row.measured is not None:
            with suppress(OSError):  # such as of a full disk: this run goes on
                os.write(self._file, _text(_line(row)))

    def __enter__(self) -> Rows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file, and remove it if the run is whole."""
        if kind is None and self._file is not None:
            self.path.unlink(missing_ok=True)
            with suppress(OSError):
                self.path.parent.rmdir()
        self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _read(self) -> Circumstances | None:
        """Read what a stopped run has left, up to a line that is none."""
        before: Circumstances | None = None
        with suppress(OSError, RecordError, UnicodeDecodeError, KeyError):  # or a shape that is none of ours
            for text in read_bytes(self.path, LIMIT).splitlines(keepends=True):
                value = jsontext.load(text.decode(), self.path)
                if before is None:
                    before = typed.build(Circumstances, value, self.path)
                else:
                    line = typed.build(_Line, value, self.path, defaults=True)
                    self.done[line.shape] = _row(line, self._shapes[line.shape])
                self._whole += len(text)
        return before


def _text(line: Any) -> bytes:
    return f"{jsontext.compact(line)}\n".encode()


def _line(row: Row) -> Any:
    assert row.measured is not None, "only what was timed is kept"
    found = row.libraries.items()
    return typed.plain(
        _Line(
            row.shape.id,
            row.winner,
            row.measured.timing,
            row.measured.verdict,
            {name: each for name, each in found if isinstance(each, Baseline)},
            {name: each for name, each in found if isinstance(each, Rejected)},
            row.choosing_s,
            row.sustained,
        )
    )


def _row(line: _Line, shape: Shape) -> Row:
    libraries: Any = {**line.baselines, **line.refused}
    measured = MeasuredTrial(line.timing, line.verdict)
    return Row(
        *(shape, line.winner, measured),
        libraries=libraries,
        choosing_s=line.choosing_s,
        sustained=line.sustained,
    )
