"""Turns an emulating kernel and an FP32 one into a `CheckedKernel`, which looks at the operands first."""

from __future__ import annotations

from typing import Any

import numpy as np

from autotune.code import cubins
from autotune.code.finite import finite_check
from autotune.errors import Rejected, ToolchainError
from autotune.kernel.kernel import Enqueue, Kernel
from autotune.kernel.libraries import Taken
from autotune.kernel.operands import leading
from autotune.values.problem import Problem, Strided


class CheckedKernel(Kernel):
    """A kernel on tensor cores that leaves operands with an infinity or NaN to the FP32 kernel.

    Each call reads both operands once more and waits for the answer: the host is held up until the stream has
    come that far, and a stream that is being captured cannot be used. `launch` checks nothing.

    Attributes:
        strict: The kernel for operands that are not finite.

    Args:
        emulating: The kernel for finite operands; its attributes are those of this one.
        strict: For the same problem in FP32, on the same machine.
    """

    def __init__(self, emulating: Kernel, strict: Kernel) -> None:
        self.__dict__.update(emulating.__dict__)
        self._emulating = emulating
        self.strict = strict
        self._checks: dict[Problem, Enqueue] = {}

    def __call__(
        self, a: Any, b: Any, out: Any = None, alpha: float = 1.0, beta: float = 0.0, stream: Any = None
    ) -> Any:
        """Look at the operands, enqueue one multiplication and return C: see `Kernel.__call__`."""
        return self.run(self._machine.take(a, b, out, stream), out, alpha, beta)

    def run(self, taken: Taken, out: Any, alpha: Any, beta: Any) -> Any:
        """Do what `__call__` does, on operands."""
        kernel = self._emulating if self._finite(taken) else self.strict
        return kernel.run(taken, out, alpha, beta)

    def _finite(self, taken: Taken) -> bool:
        """Tell whether both operands are finite; those of another GPU, which no kernel takes, count as such.

        Raises:
            UsageError: An operand has another shape or order.
        """
        a, b, _, stream, *_ = taken
        problem = self.problem
        if a.ordinal != self._ordinal or b.ordinal != self._ordinal:
            return True
        lda, ldb = leading("a", a, problem.a_shape, problem), leading("b", b, problem.b_shape, problem)
        facts = (problem.m, problem.n, problem.k, problem.layout, problem.beta, problem.math)
        check = self._check(Strided(*facts, lda, ldb))
        if self._ordinal is None:
            found = np.zeros(1, np.float32)
            check(a.address, b.address, found.ctypes.data, 1.0, 0.0, 0)
            return not found[0]
        import cupy

        with cupy.cuda.Device(self._ordinal), cupy.cuda.ExternalStream(stream):
            answer = cupy.zeros(1, cupy.float32)
            check(a.address, b.address, answer.data.ptr, 1.0, 0.0, stream)
            return not float(answer.get()[0])

    def _check(self, problem: Problem) -> Enqueue:
        """Find the kernel that looks at operands that lie so."""
        with self._lock:
            found = self._checks.get(problem)
            if found is None:
                source = finite_check(problem)
                binary = cubins.load_or_compile(
                    source.text,
                    source.entry,
                    self.device.arch,
                    options=self._machine.options,
                    root=self._root,
                )
                if isinstance(binary, Rejected):
                    raise ToolchainError(f"the check for finite operands does not compile: {binary.why}")
                found = self._checks[problem] = self._machine.load(source, binary)
            return found
