"""The check of a kernel on the GPU: its result against float64 references, and memory it must not write."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autotune.errors import Rejected
from autotune.measure.cuda import Gpu
from autotune.measure.inputs import Call, Inputs, InputSet
from autotune.measure.sampling import Sample
from autotune.measure.slab import Slab
from autotune.measure.verify import Deviation, Projection, judge
from autotune.measure.verify_kernels import COMPARED_WORDS, Place, VerifyKernels, Worst
from autotune.values.measurement import Verdict
from autotune.values.problem import FLOAT_BYTES, Problem

Multiply = Callable[[float, int, int, float, int], None]
"""Enqueues C = alpha op(A) op(B) + beta C for (alpha, A, B, beta, C), the matrices as addresses."""

REFERENCE_SHARE = 0.8  # of the memory that is free, for complete references
MAX_REFERENCE_ELEMENTS = 1 << 31
MAX_REPEATS = 100  # launches of a finalist: room for a race that shows once in a hundred of them
REPEAT_SECONDS = 0.2
_FOUND_WORDS = 2 * COMPARED_WORDS + 1


class Checker:
    """Checks results on one GPU against float64.

    Args:
        gpu: Where to run.
        kernels: verify.cu on it.
        problem: What is computed.
        seed: Of inputs and samples.
        scalars: alpha and beta to check with; drawn when None.

    Raises:
        DeviceError: The GPU lacks memory.
    """

    def __init__(
        self,
        gpu: Gpu,
        kernels: VerifyKernels,
        problem: Problem,
        seed: int,
        scalars: tuple[float, float] | None = None,
    ) -> None:
        self._gpu = gpu
        self._problem = problem
        self._seed = seed
        self._kernels = kernels
        self._inputs = Inputs(gpu, kernels, problem, seed, scalars)
        self._memory = gpu.allocate(8 * _FOUND_WORDS)
        self._found: int = self._memory.ptr
        self._turn = 0
        self._stale = False

    @property
    def set_count(self) -> int:
        """Sets of inputs that candidates are checked on in turn."""
        return len(self._inputs.sets)

    @property
    def operands(self) -> tuple[int, int, int]:
        """Addresses of one A, B and C, to time with."""
        inputs = self._inputs.sets[0]
        return inputs.a.address, inputs.b.address, self._inputs.c.address

    def check(self, multiply: Multiply) -> Verdict | Rejected:
        """Run once; compare sampled rows and columns and a projection of all of C.

        Raises:
            CUDA_ERRORS: The kernel cannot be launched, or failed.
        """
        if self._stale:
            self._inputs.refill()
            self._stale = False
        inputs = self._inputs.sets[self._turn]
        self._turn = (self._turn + 1) % len(self._inputs.sets)

        self._clear()
        self._run(multiply, inputs, inputs.drawn)
        for index, place in enumerate(inputs.places):
            c = self._inputs.c.at(0, inputs.samples[index].product * self._problem.m)
            self._kernels.compare(c, place, self._found + 8 * COMPARED_WORDS * index)
        self._project(inputs, inputs.drawn)
        if damage := self.damage():
            return damage
        words = self._gpu.download(self._found, _FOUND_WORDS, np.uint64)
        deviations = [
            self._deviation(sample.product * self._problem.m, sample, words[COMPARED_WORDS * index :])
            for index, sample in enumerate(inputs.samples)
        ]
        rows, cols = len(inputs.samples[0].rows), len(inputs.samples[1].cols)
        return judge(
            self._problem.k,
            deviations,
            self._projection(words),
            f"N(0,1), seed {self._seed}, set {inputs.number} of {len(self._inputs.sets)}: "
            f"{rows} rows, {cols} columns{' of a product each' * (self._problem.batch > 1)}, "
            "projection of all rows",
            self._problem.math,
        )

    def check_timed(self, multiply: Multiply) -> Rejected | None:
        """Return what is wrong after timed launches on `operands`, in C or outside it; None if nothing is.

        Where they read C it has grown with every launch; then one more runs with beta = 0 over NaN.

        Raises:
            CUDA_ERRORS: The kernel cannot be launched, or failed.
        """
        inputs = self._inputs.sets[0]
        self._clear()
        when = "after timing"
        if self._problem.beta:
            self._run(multiply, inputs, inputs.plain)
            when = "over NaN"
        self._project(inputs, inputs.plain)
        return self.damage() or self._fault(when)

    def restore(self) -> None:
        """Enqueue making the C of `operands` finite again where the problem reads it."""
        if self._problem.beta:
            inputs = self._inputs.sets[0]
            self._inputs.poison(inputs, inputs.drawn)

    def damage(self) -> Rejected | None:
        """Wait for the GPU; where a kernel wrote outside C, restore that and return what it was."""
        damage = self._inputs.damage()
        if not damage:
            return None
        self._inputs.refill()
        return _wrote(damage)

    def check_in_full(
        self, multiplies: Sequence[Multiply], announce: Callable[[int | None], None]
    ) -> list[Verdict | Rejected]:
        """Compare every element of every result, on inputs drawn for this call; then repeat each right one.

        The repeats run with alpha = 1 and beta = 0 over NaN, and each is checked by projection.

        Args:
            multiplies: What to check.
            announce: Told the index of the one about to run; None before references are computed.

        Raises:
            CUDA_ERRORS: The last announced kernel cannot be launched, or failed.
        """
        outcomes: dict[int, Verdict | Rejected] = {}
        while len(outcomes) < len(multiplies):
            waiting = {index: multiplies[index] for index in range(len(multiplies)) if index not in outcomes}
            outcomes.update(self._full_pass(waiting, announce))
        return [outcomes[index] for index in range(len(multiplies))]

    def _full_pass(
        self, multiplies: Mapping[int, Multiply], announce: Callable[[int | None], None]
    ) -> dict[int, Verdict | Rejected]:
        """Return every verdict, or one rejection: after stray writes the inputs must be drawn again.

        The complete reference is held in memory where it fits, else it is computed in chunks of rows, and
        every kernel runs again for each.
        """
        announce(None)
        problem, c = self._problem, self._inputs.c
        inputs = self._inputs.redraw()
        self._stale = True
        elements = min(int(REFERENCE_SHARE * self._gpu.memory_free) // 16, MAX_REFERENCE_ELEMENTS)
        m, rows = problem.m, problem.batch * problem.m
        chunk = max(1, min(rows, elements // problem.n))
        chunk -= chunk % m if m < chunk < rows else 0  # whole products
        sizes = {"rows": 4 * chunk, "cols": 4 * problem.n}
        sizes["expected"] = sizes["limit"] = 8 * chunk * problem.n
        plan = Slab.of(sizes, guard_bytes=0)
        memory = self._gpu.allocate(plan.total)
        address = {section.name: memory.ptr + section.begin for section in plan.sections}
        lines = Sample(np.arange(chunk, dtype=np.int32), np.arange(problem.n, dtype=np.int32))
        self._gpu.upload(address["rows"], lines.rows)
        self._gpu.upload(address["cols"], lines.cols)

        def place(first: int, count: int) -> Place:
            lists = (address["rows"], count, address["cols"], problem.n)
            offset = 8 * first * problem.n
            return Place(*lists, address["expected"] + offset, address["limit"] + offset)

        parts: dict[int, list[Deviation]] = {index: [] for index in multiplies}
        projections: dict[int, list[Projection]] = {index: [] for index in multiplies}
        for begin in range(0, rows, chunk):
            announce(None)
            end = min(begin + chunk, rows)
            self._gpu.fill(address["expected"], 0, 8 * (end - begin) * problem.n)
            self._gpu.fill(address["limit"], 0, 8 * (end - begin) * problem.n)
            drawn = inputs.drawn
            for product in range(begin // m, -(-end // m)):
                first, last = max(begin, product * m), min(end, (product + 1) * m)
                there = place(first - begin, last - first)
                self._inputs.reference(inputs, product, first - product * m, there, drawn)
            self._gpu.synchronize()
            for index, multiply in multiplies.items():
                announce(index)
                self._clear()
                self._run(multiply, inputs, drawn)
                self._kernels.compare(c.at(0, begin), place(0, end - begin), self._found)
                self._project(inputs, drawn)
                if damage := self._inputs.damage():
                    return {index: _wrote(damage)}
                words = self._gpu.download(self._found, _FOUND_WORDS, np.uint64)
                parts[index].append(self._deviation(begin, lines, words))
                projections[index].append(self._projection(words))

        described = f"N(0,1), seed {self._seed}, drawn for the finalists: all elements"
        outcomes: dict[int, Verdict | Rejected] = {}
        for index, multiply in multiplies.items():
            worst = max(projections[index], key=lambda projection: projection.worst)
            verdict = judge(problem.k, parts[index], worst, described, problem.math)
            outcomes[index] = verdict
            if verdict.ok:
                announce(index)
                repeats = self._repeat(multiply, inputs)
                if damage := self._inputs.damage():
                    return {index: _wrote(damage)}
                outcomes[index] = self._fault(f"in {repeats} repeats over NaN") or verdict
        return outcomes

    def _repeat(self, multiply: Multiply, inputs: InputSet) -> int:
        """Run up to `MAX_REPEATS` times within `REPEAT_SECONDS`, at least once; return how often."""
        self._clear()
        repeats, end = 0, time.monotonic() + REPEAT_SECONDS
        while repeats == 0 or (repeats < MAX_REPEATS and time.monotonic() < end):
            self._run(multiply, inputs, inputs.plain)
            self._project(inputs, inputs.plain)
            self._gpu.synchronize()
            repeats += 1
        return repeats

    def _clear(self) -> None:
        """Enqueue resetting what was found before."""
        self._gpu.fill(self._found, 0, 8 * _FOUND_WORDS)

    def _run(self, multiply: Multiply, inputs: InputSet, call: Call) -> None:
        """Enqueue one call over a poisoned C."""
        self._inputs.poison(inputs, call)
        multiply(call.alpha, inputs.a.address, inputs.b.address, call.beta, self._inputs.c.address)

    def _project(self, inputs: InputSet, call: Call) -> None:
        """Enqueue comparing C x with what a call must give; the worst row since `_clear` counts."""
        rows, sums = self._inputs.c.rows, self._inputs.sums
        self._gpu.fill(sums, 0, 8 * rows)
        self._kernels.project(self._inputs.c, inputs.x, sums)
        found = self._found + 8 * (_FOUND_WORDS - 1)
        self._kernels.compare_projection(sums, call.projected, call.limit, rows, found)

    def _fault(self, when: str) -> Rejected | None:
        """Return which row of C was wrong in plain calls, by projection alone; None if none was."""
        worst = self._projection(self._gpu.download(self._found, _FOUND_WORDS, np.uint64))
        if worst.worst <= 1:
            return None
        return Rejected(
            "correctness",
            f"{worst.place} is wrong {when}, with alpha = 1 and beta = 0: "
            f"its projection is off by {worst.worst:.3g} limits",
        )

    def _deviation(self, first: int, sample: Sample, words: NDArray[np.uint64]) -> Deviation:
        """Read the `COMPARED_WORDS` of a sample, its rows counted from one of C, and the worst element."""
        worst = Worst.unpack(int(words[0]))
        errors, references, limits = words[1:COMPARED_WORDS].view(np.float64).tolist()
        line, place = divmod(worst.index, len(sample.cols))
        row, col = first + int(sample.rows[line]), int(sample.cols[place])
        address = self._inputs.c.address + FLOAT_BYTES * (row * self._problem.n + col)
        value = float(self._gpu.download(address, 1, np.float32)[0])
        product, row = divmod(row, self._problem.m)
        return Deviation(errors, references, limits, worst.ratio, row, col, value, self._several(product))

    def _projection(self, words: NDArray[np.uint64]) -> Projection:
        worst = Worst.unpack(int(words[-1]))
        product, row = divmod(worst.index, self._problem.m)
        return Projection(worst.ratio, row, self._several(product))

    def _several(self, product: int) -> int | None:
        """Return the number of a product where there are several."""
        return product if self._problem.batch > 1 else None


def _wrote(damage: str) -> Rejected:
    return Rejected("correctness", f"wrote outside C: changed {damage}")
