"""Random operands on the GPU, with float64 references of their product, in one allocation with guard zones.

`Inputs.damage` names what a kernel changed although it must not, and `Inputs.refill` draws everything again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autotune.errors import DeviceError
from autotune.measure.cuda import CUDA_ERRORS, Gpu, out_of_memory
from autotune.measure.sampling import Sample, draw_samples
from autotune.measure.slab import Slab
from autotune.measure.verify import bound_factor, draw_scalars, projection_limit, projection_vector
from autotune.measure.verify_kernels import Matrix, Place, VerifyKernels
from autotune.values.problem import FLOAT_BYTES, Problem

MAX_SETS = 2
SEVERAL_SETS_SHARE = 0.6  # of free memory
ONE_SET_SHARE = 0.9
POISON_BYTE = 0xFF  # four of them are a NaN


@dataclass(frozen=True)
class Call:
    """The scalars of one call, and the C x that follows from them.

    Attributes:
        alpha: Scalar of the product.
        beta: Scalar of C0.
        projected: Expected C x, `[batch, m]` float64.
        limit: Largest error of it, `[batch, m]` float64.
    """

    alpha: float
    beta: float
    projected: int
    limit: int


@dataclass(frozen=True)
class InputSet:
    """Operands, and what is expected of a right C.

    Attributes:
        number: From 1.
        a: op(A), `[m, k]`, a batch of them.
        b: op(B), `[k, n]`, likewise.
        c0: The rows of all products, `[batch m, n]`; address 0 when the problem never reads C.
        samples: Elements of C to compare.
        places: Their index lists and references.
        x: Projection vector, `[n]` float64.
        drawn: The call with drawn scalars, whose references are at ``places``.
        plain: The call with alpha = 1 and beta = 0, which must not read C.
    """

    number: int
    a: Matrix
    b: Matrix
    c0: Matrix
    samples: tuple[Sample, Sample]
    places: tuple[Place, Place]
    x: int
    drawn: Call
    plain: Call


class Inputs:
    """Sets of inputs, one C for all of them, and working memory.

    Args:
        gpu: Where to run.
        kernels: verify.cu on it.
        problem: What is computed.
        seed: Of everything random.
        scalars: alpha and beta of the drawn calls; drawn too when None.

    Attributes:
        sets: The sets, one or two.
        c: The rows of C of all products, `[batch m, n]`.
        vector: Working memory, `[batch, k]` float64.
        sums: Working memory, `[batch, max(m, k)]` float64.

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
        self._kernels = kernels
        self._problem = problem
        self._given = scalars
        self._random = np.random.default_rng(seed)
        self._slab, working, set_count = self._plan(gpu.memory_free)
        try:
            self._memory = gpu.allocate(self._slab.total)
            self._working_memory = gpu.allocate(working.total)
        except CUDA_ERRORS as error:
            if out_of_memory(error):
                raise self._too_large(self._slab.total + working.total, gpu.memory_free) from None
            raise
        self._base: int = self._memory.ptr

        def working_address(name: str) -> int:
            address: int = self._working_memory.ptr + working[name].begin
            return address

        self.vector, self.sums = working_address("vector"), working_address("sums")
        self._found = working_address("found")
        self._guard_spans, self._input_spans = working_address("guard spans"), working_address("input spans")
        self._constant = [section for section in self._slab.sections if section.name != "C"]
        gpu.upload(self._guard_spans, np.array([span.words for span in self._slab.guards], np.int64))
        gpu.upload(self._input_spans, np.array([span.words for span in self._constant], np.int64))
        rows = problem.batch * problem.m
        self.c = Matrix(self._base + self._slab["C"].begin, rows, problem.n, problem.n, 1)
        self.sets = [self._place_set(number) for number in range(1, set_count + 1)]
        self.refill()

    def refill(self) -> None:
        """Draw all operands again, compute their references, restore the guards."""
        self._restore_guards()
        for inputs in self.sets:
            self._refill_set(inputs)
        self._sums = self._survey()[1]

    def redraw(self) -> InputSet:
        """Draw operands and scalars again in the place of the first set, with projections as sole references.

        `refill` before using that set again.
        """
        self._restore_guards()
        alpha, beta = self._scalars()
        inputs = replace(self.sets[0], drawn=replace(self.sets[0].drawn, alpha=alpha, beta=beta))
        self._draw(inputs)
        self._sums = self._survey()[1]
        return inputs

    def _restore_guards(self) -> None:
        self._kernels.fill_guards(self._base, self._guard_spans, len(self._slab.guards))

    def poison(self, inputs: InputSet, call: Call) -> None:
        """Enqueue filling C with what a kernel finds there: C0 where the call reads C, else NaN."""
        size = self._slab["C"].size
        if call.beta != 0:
            self._gpu.copy(self.c.address, inputs.c0.address, size)
        else:
            self._gpu.fill(self.c.address, POISON_BYTE, size)

    def damage(self) -> str:
        """Wait for the GPU and name what was overwritten, in guards the number of words; "" if nothing."""
        changed, sums = self._survey()
        parts = [
            f"{count} word{'s' if count > 1 else ''} {guard.name}"
            for guard, count in zip(self._slab.guards, changed, strict=True)
            if count
        ]
        parts += [
            f"the contents of {section.name}"
            for section, now, before in zip(self._constant, sums, self._sums, strict=True)
            if now != before
        ]
        return ", ".join(parts)

    def _survey(self) -> tuple[list[int], list[int]]:
        """Return changed words of each guard, and the checksum of each section but C."""
        guards, constants = len(self._slab.guards), len(self._constant)
        self._gpu.fill(self._found, 0, 8 * (guards + constants))
        self._kernels.count_changed(self._base, self._guard_spans, guards, self._found)
        self._kernels.checksum(self._base, self._input_spans, constants, self._found + 8 * guards)
        words = self._gpu.download(self._found, guards + constants, np.uint64).tolist()
        return words[:guards], words[guards:]

    # ------------------------------------------------------------------------------------------ filling

    def _draw(self, inputs: InputSet) -> None:
        """Draw operands and x, and fill in what follows for C x."""
        problem, gpu = self._problem, self._gpu
        for matrix in (inputs.a, inputs.b, inputs.c0):
            if matrix.address:
                seed = int(self._random.integers(2**63))
                self._kernels.fill_normal(matrix.address, matrix.batch * matrix.rows * matrix.cols, seed)
        gpu.upload(inputs.x, projection_vector(problem.n, int(self._random.integers(2**63))))

        self._zero(self.vector, problem.batch * problem.k)
        self._kernels.project(inputs.b, inputs.x, self.vector)
        product = self._row_sums("project", inputs.a, self.vector, problem.k)
        a_norms = np.sqrt(self._row_sums("row_squares", inputs.a, 0))
        b_squares = self._row_sums("row_squares", inputs.b, inputs.x).reshape(problem.batch, problem.k)
        b_norms = np.sqrt(b_squares.sum(axis=1)).repeat(problem.m)
        start, c0_norms = np.zeros(len(product)), np.zeros(len(product))
        if inputs.c0.address:
            start = self._row_sums("project", inputs.c0, inputs.x)
            c0_norms = np.sqrt(self._row_sums("row_squares", inputs.c0, inputs.x))
        factor = bound_factor(problem.k, problem.math)
        for call in (inputs.drawn, inputs.plain):
            gpu.upload(call.projected, call.alpha * product + call.beta * start)
            limit = projection_limit(call.alpha, a_norms, b_norms, call.beta, c0_norms, factor)
            gpu.upload(call.limit, limit)

    def _scalars(self) -> tuple[float, float]:
        return self._given or draw_scalars(self._problem, self._random)

    def _refill_set(self, inputs: InputSet) -> None:
        gpu, drawn = self._gpu, inputs.drawn
        self._draw(inputs)
        for sample, place in zip(inputs.samples, inputs.places, strict=True):
            gpu.upload(place.rows, sample.rows)
            gpu.upload(place.cols, sample.cols)
            self._zero(place.expected, sample.count)
            self._zero(place.limit, sample.count)
            self.reference(inputs, sample.product, 0, place, drawn)

    def reference(self, inputs: InputSet, product: int, row: int, place: Place, call: Call) -> None:
        """Enqueue adding the C of one product, from a row on, to the zeroed references of a place."""
        c0 = inputs.c0.at(0, product * self._problem.m + row).address if inputs.c0.address else 0
        factors = inputs.a.at(product, row), inputs.b.at(product)
        self._kernels.reference(*factors, c0, place, call.alpha, call.beta)

    def _row_sums(self, name: str, matrix: Matrix, weights: int, *weights_step: int) -> NDArray[np.float64]:
        count = matrix.batch * matrix.rows
        self._zero(self.sums, count)
        getattr(self._kernels, name)(matrix, weights, self.sums, *weights_step)
        return self._gpu.download(self.sums, count, np.float64)

    def _zero(self, address: int, count: int) -> None:
        self._gpu.fill(address, 0, 8 * count)

    # ------------------------------------------------------------------------------------------ placing

    def _plan(self, free: int) -> tuple[Slab, Slab, int]:
        """Choose the number of sets that fits; return the slab, the working memory and that number."""
        problem = self._problem
        facts = (problem.m, problem.n, self._random, problem.batch)
        self._samples = [draw_samples(*facts) for _ in range(MAX_SETS)]
        for count in range(MAX_SETS, 0, -1):
            slab = self._slab_of(count)
            working = Slab.of(
                {
                    "vector": 8 * problem.batch * problem.k,
                    "sums": 8 * problem.batch * max(problem.m, problem.k),
                    "found": 8 * (len(slab.guards) + len(slab.sections)),
                    "guard spans": 16 * len(slab.guards),
                    "input spans": 16 * len(slab.sections),
                },
                guard_bytes=0,
            )
            needed = slab.total + working.total
            if needed <= (SEVERAL_SETS_SHARE if count > 1 else ONE_SET_SHARE) * free:
                return slab, working, count
        raise self._too_large(needed, free)

    def _too_large(self, needed: int, free: int) -> DeviceError:
        return DeviceError(
            f"{self._problem} needs {needed} bytes of device memory with its references and {free} are free: "
            "tune a smaller problem, or free memory"
        )

    def _slab_of(self, sets: int) -> Slab:
        problem = self._problem
        sizes = {}
        for number in range(1, sets + 1):
            sizes[_name("A", number)] = FLOAT_BYTES * problem.batch * problem.m * problem.k
            sizes[_name("B", number)] = FLOAT_BYTES * problem.batch * problem.k * problem.n
            if problem.beta:
                sizes[_name("C0", number)] = problem.c_bytes
            sizes[_name("the references", number)] = self._references(number).total
        sizes["C"] = problem.c_bytes
        return Slab.of(sizes)

    def _references(self, number: int) -> Slab:
        problem = self._problem
        sizes = {"x": 8 * problem.n}
        for call in ("drawn", "plain"):
            sizes[f"{call} projected"] = sizes[f"{call} limit"] = 8 * problem.batch * problem.m
        for index, sample in enumerate(self._samples[number - 1]):
            sizes[f"rows {index}"] = sample.rows.nbytes
            sizes[f"cols {index}"] = sample.cols.nbytes
            sizes[f"expected {index}"] = 8 * sample.count
            sizes[f"limit {index}"] = 8 * sample.count
        return Slab.of(sizes, guard_bytes=0)

    def _place_set(self, number: int) -> InputSet:
        problem = self._problem
        references = self._references(number)
        base = self._base + self._slab[_name("the references", number)].begin

        def operand(name: str) -> int:
            return self._base + self._slab[_name(name, number)].begin

        def address(name: str) -> int:
            return base + references[name].begin

        def place(index: int, sample: Sample) -> Place:
            lists = (address(f"rows {index}"), len(sample.rows), address(f"cols {index}"), len(sample.cols))
            return Place(*lists, address(f"expected {index}"), address(f"limit {index}"))

        def call(name: str, alpha: float, beta: float) -> Call:
            return Call(alpha, beta, address(f"{name} projected"), address(f"{name} limit"))

        samples = self._samples[number - 1]
        a_strides = (problem.lda, 1) if problem.layout[0] == "n" else (1, problem.lda)
        b_strides = (problem.ldb, 1) if problem.layout[1] == "n" else (1, problem.ldb)
        return InputSet(
            number=number,
            a=Matrix(operand("A"), problem.m, problem.k, *a_strides, problem.batch, problem.stride_a),
            b=Matrix(operand("B"), problem.k, problem.n, *b_strides, problem.batch, problem.stride_b),
            c0=self.c._replace(address=operand("C0") if problem.beta else 0),
            samples=samples,
            places=(place(0, samples[0]), place(1, samples[1])),
            x=address("x"),
            drawn=call("drawn", *self._scalars()),
            plain=call("plain", 1.0, 0.0),
        )


def _name(operand: str, number: int) -> str:
    return f"{operand} of input set {number}"
