"""Turns a record into a `Kernel`: a function on GPU arrays that says where it comes from."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autotune import records
from autotune.compiler import compile_text
from autotune.device import Device, current_device
from autotune.errors import ConfigError, RecordMissing, Rejected, ToolchainError, UsageError
from autotune.nvrtc import nvrtc_version
from autotune.problem import Problem
from autotune.render import Source, render
from autotune.space import Config, Space

if TYPE_CHECKING:
    from autotune.records.schema import Record

Served = Literal["exact"]


class Kernel:
    """C = alpha op(A) op(B) + beta C by one launch of a tuned kernel, on the GPU current at creation.

    Attributes:
        problem: What it computes.
        served: How it was found: "exact" is the record of this very problem and device.
        record: The record it was made from.
        config: The choices.
        source: CUDA C++ text.
    """

    def __init__(self, record: Record, source: Source, cubin: bytes, served: Served) -> None:
        import cupy
        from cupy.cuda.function import Module

        self.problem = record.problem
        self.served = served
        self.record = record
        self.config: Config = source.config
        self.source = source.text
        self._cupy = cupy
        self._launch = source.launch
        self._ordinal = cupy.cuda.runtime.getDevice()
        self._module = Module()
        self._module.load(cubin)
        self._function = self._module.get_function(source.entry)
        if source.launch.shared_bytes > 0:
            self._function_attribute(source.launch.shared_bytes)
        self._alignments = tuple(4 * int(source.config.get(vec, 1)) for vec in ("vec_a", "vec_b", "vec_c"))

    def _function_attribute(self, shared_bytes: int) -> None:
        from cupy_backends.cuda.api import driver

        max_dynamic_shared_size_bytes = 8  # CUfunction_attribute: above 48 KiB a kernel must opt in
        driver.funcSetAttribute(self._function.ptr, max_dynamic_shared_size_bytes, shared_bytes)

    def __call__(
        self, a: Any, b: Any, out: Any = None, alpha: float = 1.0, beta: float = 0.0, stream: Any = None
    ) -> Any:
        """Enqueue one multiplication and return C; nothing is synchronised or copied.

        Args:
            a: A as stored, `Problem.a_shape`: `[m, k]`, or `[k, m]` for layout "t?". CuPy, float32,
                C-contiguous, like the others.
            b: B as stored, `Problem.b_shape`: `[k, n]`, or `[n, k]` for layout "?t".
            out: C, `[m, n]`; a new array when not given. Must not overlap a or b.
            alpha: Scalar of the product.
            beta: Scalar of C as it was; 0 never reads C. Only 0 unless the kernel was tuned for beta = 1.
            stream: `cupy.cuda.Stream`; CuPy's current stream when not given.

        Raises:
            UsageError: An operand has another type, shape, order, device or alignment, or beta needs another
                kernel.
        """
        problem = self.problem
        if beta != 0.0 and not problem.beta:
            raise UsageError(
                f"beta = {beta} needs a kernel that reads C: get it with best_kernel(..., beta=1)"
            )
        if out is None:
            if beta != 0.0:
                raise UsageError(f"beta = {beta} scales C as it was: pass it as out=")
            out = self._cupy.empty(problem.c_shape, self._cupy.float32)
        self._check("a", a, problem.a_shape, self._alignments[0])
        self._check("b", b, problem.b_shape, self._alignments[1])
        self._check("out", out, problem.c_shape, self._alignments[2])
        c_pointer = out.data.ptr
        for name, operand in (("a", a), ("b", b)):
            if operand.data.ptr < c_pointer + out.nbytes and c_pointer < operand.data.ptr + operand.nbytes:
                raise UsageError(f"out overlaps {name} in memory: pass an array of its own")
        float32 = self._cupy.float32
        self._function(
            self._launch.grid,
            self._launch.block,
            (float32(alpha), a, b, float32(beta), out),
            self._launch.shared_bytes,
            stream,
        )
        return out

    def _check(self, name: str, array: Any, shape: tuple[int, int], alignment: int) -> None:
        if not isinstance(array, self._cupy.ndarray):
            raise UsageError(
                f"{name} is a {type(array).__module__}.{type(array).__name__}: pass a cupy.ndarray"
            )
        if array.dtype != self._cupy.float32:
            raise UsageError(f"{name} is {array.dtype}: pass float32, such as {name}.astype(cupy.float32)")
        if array.shape != shape:
            raise UsageError(f"{name} has shape {array.shape}: this kernel takes {shape} ({self.problem})")
        if not array.flags.c_contiguous:
            raise UsageError(
                f"{name} is not C-contiguous: pass cupy.ascontiguousarray({name}), or use another layout"
            )
        if array.device.id != self._ordinal:
            raise UsageError(f"{name} is on GPU {array.device.id}: this kernel runs on GPU {self._ordinal}")
        if array.data.ptr % alignment:
            raise UsageError(
                f"{name} starts at an address that is not a multiple of {alignment} bytes "
                f"(a view at an odd offset): pass {name}.copy()"
            )

    def __repr__(self) -> str:
        return f"Kernel({self.problem}, {self.served}, {self.config.id})"


def best_kernel(
    m: int,
    n: int,
    k: int,
    layout: str = "nn",
    *,
    beta: int = 0,
    tune: bool = False,
    budget: str = "60s",
    space: Space | None = None,
    root: Path | None = None,
) -> Kernel:
    """Load the stored winner for a problem on CuPy's current device.

    Args:
        m: Rows of C.
        n: Columns of C.
        k: Length of each dot product.
        layout: "nn", "nt", "tn" or "tt": see `Problem`.
        beta: 1 for a kernel that reads C.
        tune: Search now when no record serves; otherwise that is an error.
        budget: Of that search.
        space: The space the record came from; the built-in ``sgemm`` when not given.
        root: Folder of records; `autotune.paths.cache_dir` when not given.

    Raises:
        ProblemError: The problem is out of range.
        DeviceError: No usable GPU.
        RecordMissing: No record serves, and ``tune`` is false; the message names the command that makes one.
    """
    problem = Problem(m, n, k, layout, beta)  # type: ignore[arg-type]  # Problem checks the layout
    space = space or Space.load("sgemm")
    ordinal = _current_ordinal()
    device = current_device(ordinal)
    record, source, why = _serving(problem, space, device, root)
    if record is None and tune:
        from autotune.tuner import tune as run

        run(problem, space=space, budget=budget, ordinal=ordinal, root=root)
        record, source, why = _serving(problem, space, device, root)
    if record is None or source is None:
        if records.find(device, space.family, problem, root=root, estimated=True) is not None:
            why += " (there is an estimated one, which is never served)"
        raise RecordMissing(f"{why}: run 'autotune tune {problem.cli_flags()}', or pass tune=True")
    changed = records.differences(
        record,
        nvrtc=nvrtc_version(),
        driver=None,
        template_digest=source.template_digest,
        space_digest=space.digest,
    )
    if changed:
        warnings.warn(f"the record of {problem} was made elsewhere: {'; '.join(changed)}", stacklevel=2)
    binary = compile_text(source.text, source.entry, device.arch)
    if isinstance(binary, Rejected):
        raise ToolchainError(f"the stored winner of {problem} does not compile any more: {binary.why}")
    return Kernel(record, source, binary.cubin, "exact")


def _serving(
    problem: Problem, space: Space, device: Device, root: Path | None
) -> tuple[Record | None, Source | None, str]:
    """Find the record that serves a problem, and its source rendered today; else say why there is none."""
    record = records.find(device, space.family, problem, root=root)
    if record is None:
        return None, None, f"no record of {problem} on {device.name}"
    try:
        source = render(space, space.config(record.config), problem, device)
    except ConfigError as error:
        return None, None, f"the record of {problem} on {device.name} is stale: {error}"
    why = records.serves(record, device, problem, source)
    return (record, source, "") if why is None else (None, None, f"{problem} on {device.name}: {why}")


def _current_ordinal() -> int:
    try:
        from cupy.cuda import runtime

        return int(runtime.getDevice())
    except Exception:  # without CuPy, driver or GPU: current_device says so in its own words
        return 0
