"""`Kernel`, a multiplication that is called on arrays; `CheckedKernel` looks for infinities and NaN first."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from autotune.code import cubins
from autotune.code.compiler import Binary
from autotune.code.depot import Depot
from autotune.code.finite import finite_check
from autotune.code.render import Source
from autotune.code.sources import rendered
from autotune.errors import (
    AutotuneError,
    ConfigError,
    DeviceError,
    Rejected,
    SpaceError,
    ToolchainError,
    UsageError,
)
from autotune.kernel.choices import Choice, Served
from autotune.kernel.corners import loaded, scale
from autotune.kernel.dynamo import left_out
from autotune.kernel.libraries import Taken
from autotune.kernel.machine import Enqueue, Machine, NoArray
from autotune.kernel.once import Once
from autotune.kernel.operands import Operand, lying, row_major, scalar, stream_pointer, strided
from autotune.kernel.prepared import Prepared, form_of, on_prepared
from autotune.kernel.short import OF_LIBRARIES, Short, Way, remember
from autotune.space.space import Config
from autotune.values.device import Device
from autotune.values.faults import cuda_fault
from autotune.values.problem import FLOAT_BYTES, Problem, Strided

if TYPE_CHECKING:
    from autotune.records.schema import Record

_FLOAT32 = np.dtype(np.float32)
_UNALIGNED = 15  # bits of an address that is no multiple of 16


class Kernel:
    """C = alpha op(A) op(B) + beta C by one launch of a tuned kernel; made by `best_kernel`.

    Any number of threads may call it at once. Keep it as long as a CUDA graph that captured it is in use.
    A copy of a kernel is the kernel itself; one that was pickled is loaded from its source again, on a GPU of
    the same kind.

    Attributes:
        problem: The problem it computes.
        served: Where it comes from: "exact" is a record of this very problem and device; "predicted" is
            what the model expects to be fastest, and nobody timed it here.
        record: The record it was made from, or whose config was predicted; None where there is none.
        config: The value of each tuning parameter.
        source: CUDA C++ text.
        device: The GPU it runs on.
        ndarray: The array type with the short way through a call: ``cupy.ndarray`` on a GPU.
    """

    _remembers = True  # that operands were multiplied, and how

    def __init__(self, choice: Choice, binary: Binary, machine: Machine, depot: Depot) -> None:
        self.problem: Problem = choice.source.problem
        self.served: Served = choice.served
        self.record: Record | None = choice.record
        self.config: Config = choice.config
        self.source: str = choice.source.text
        self.device: Device = machine.device
        self._choice = choice
        self._machine = machine
        self._depot = depot
        self._enqueue = machine.load(choice.source, binary)
        self._variants: Once[Problem, Enqueue] = Once()
        self._preparations: Once[Problem, tuple[Enqueue, int]] = Once()
        # for the short way
        self.ndarray: Any = machine.ndarray
        self._ordinal = machine.ordinal
        self._current_stream = machine.current_stream
        problem = self.problem
        self._shapes = problem.arrays
        self._strides = tuple(row_major(shape) for shape in self._shapes)
        self._bytes = tuple(FLOAT_BYTES * math.prod(shape) for shape in self._shapes)
        self._reads_c = bool(problem.beta)
        self._form = form_of(choice.space.family, problem, choice.config.get("BN"), machine.ordinal)
        self._short: dict[type, Short] = {}

    @left_out
    def __call__(
        self, a: Any, b: Any, out: Any = None, alpha: float = 1.0, beta: float = 0.0, stream: Any = None
    ) -> Any:
        """Enqueue one multiplication and return C; nothing is synchronised or copied.

        Arrays are CuPy's, PyTorch's, Numba's, JAX's, or any with ``__cuda_array_interface__`` or DLPack;
        NumPy's for a kernel in the simulator. Rows must be contiguous. Where they lie further apart than they
        are long, or start at an address that is no multiple of 16 bytes, a variant of the kernel is compiled
        at the first call.

        Args:
            a: A as stored, `Problem.a_shape` float32: `[m, k]`, or `[k, m]` for layout "t?".
            b: B as stored, `Problem.b_shape` float32: `[k, n]`, or `[n, k]` for layout "?t"; or what
                `prepare` returned for it.
            out: C, `[m, n]` float32, apart from a and b; a new array of the library of ``a`` when not given.
                In a batch the extent of that comes first; an A or B without it is that of all products.
            alpha: Scalar of the product; at 0 neither A nor B is read, and what is not finite there stays.
            beta: Scalar of C as it was; 0 never reads C. Only 0 unless the kernel was made for beta = 1.
            stream: A stream, or its handle; the current one of the arrays' library when not given. Whoever
                passes one orders the work that makes and uses the arrays.

        Raises:
            UsageError: An operand has another type, shape, order or device, or beta needs another kernel;
                nothing was written.
            DeviceError: The driver refuses the launch.
        """
        try:
            kind = self.ndarray
            if type(a) is kind and type(b) is kind and type(out) is kind:
                a_memory, b_memory, c_memory = a.data, b.data, out.data
                a_address, b_address, c_address = a_memory.ptr, b_memory.ptr, c_memory.ptr
                a_bytes, b_bytes, c_bytes = self._bytes
                ordinal = self._ordinal
                if (
                    (a.shape, b.shape, out.shape) == self._shapes
                    and a.dtype is _FLOAT32
                    and b.dtype is _FLOAT32
                    and out.dtype is _FLOAT32
                    and a._c_contiguous
                    and b._c_contiguous
                    and out._c_contiguous
                    and not (a_address | b_address | c_address) & _UNALIGNED
                    and (a_address + a_bytes <= c_address or c_address + c_bytes <= a_address)
                    and (b_address + b_bytes <= c_address or c_address + c_bytes <= b_address)
                    and a_memory.device_id == ordinal
                    and b_memory.device_id == ordinal
                    and c_memory.device_id == ordinal
                    and type(alpha) is float
                    and type(beta) is float
                    and alpha != 0.0
                    and (beta == 0.0 or self._reads_c)
                ):
                    if stream is None:
                        stream = self._current_stream(ordinal).ptr  # type: ignore[arg-type]  # a GPU has one
                    elif type(stream) is not int:
                        stream = stream_pointer(stream)
                    self._enqueue(a_address, b_address, c_address, alpha, beta, stream)
                    return out
            if type(b) is Prepared:
                b.require(self._form)
                taken = self._machine.take(a, b.b, out, stream)
                return self.run(taken, out, alpha, beta, prepared=b)
            words = (beta == 0.0,)
            short = self._short.get(type(a))
            if short is not None:
                product = short(a, b, out, words, alpha, beta, stream)
                if product is not None:
                    return product
            taken = self._machine.take(a, b, out, stream)
            product = self.run(taken, out, alpha, beta)
            if self._remembers and alpha != 0.0 and type(taken.library) in OF_LIBRARIES:
                c = taken.out or taken.library.view_result(product, taken.stream)
                way = Way.of(self.launcher(taken.a, taken.b, c), taken.a, taken.b, c, c.shape)
                remember(self._short, taken.library, (a, b, product), words, out is not None, way)
            return product
        except Exception as error:
            raise_fault(error)
            raise

    def prepare(self, b: Any, stream: Any = None) -> Prepared:
        """Scale and split a B once, for any number of calls that take what is returned in its place.

        Only kernels of math "3xfp16" do; such calls then scale and split A alone. It takes as much memory as
        B, which must stay, unchanged, as long as what was made of it is used.

        Args:
            b: B as stored, as for a call.
            stream: As for a call; calls on other streams must wait for this one.

        Raises:
            UsageError: This kernel prepares nothing, or the operand has another type, shape or order.
            ToolchainError: The kernels that do it do not compile.
        """
        try:
            if self.problem.batch > 1:
                raise UsageError(
                    "a prepared B is that of one product: get a kernel without batch to prepare it"
                )
            taken = self._machine.take(b, b, None, stream, "b")
            lead, _, operand = lying("b", taken.b, 1, self.problem)
            if operand.ordinal != self._ordinal:
                self._refuse_ordinals(b=operand)
            stored = Strided(**vars(self.problem), ldb=lead, align_b=operand.alignment())
            enqueue, size = self._preparations(stored, lambda: self._preparation(on_prepared(stored)))
            ordinal, stream = self._ordinal or 0, taken.stream
            made = taken.library.empty("b", (size // FLOAT_BYTES,), b, ordinal, stream)
            address = taken.library.view_result(made, stream).address
            enqueue(0, operand.address, 0, 1.0, 0.0, stream, address)
            for owner, kept in taken.kept:
                owner.hold((kept,), ordinal, stream)
            return Prepared(b, taken.library.result(made, stream), address, self._form)
        except Exception as error:
            raise_fault(error)
            raise

    def launch(self, a: int, b: int, c: int, alpha: float = 1.0, beta: float = 0.0, stream: int = 0) -> None:
        """Enqueue one multiplication on addresses; nothing is checked.

        Args:
            a: Address of A, `Problem.arrays[0]` float32, row-major and tight, a multiple of 16 bytes.
            b: Address of B, likewise.
            c: Address of C, likewise.
            alpha: Scalar of the product; at 0 neither A nor B is read.
            beta: Scalar of C as it was; ignored by a kernel for beta = 0.
            stream: Handle of a stream; 0 is the default stream.

        Raises:
            DeviceError: The driver refuses the launch.
        """
        try:
            if alpha == 0.0:
                self._scale(self.problem, c, beta, stream)
            else:
                self._enqueue(a, b, c, alpha, beta, stream)
        except Exception as error:
            raise_fault(error)
            raise

    def run(
        self,
        taken: Taken,
        out: Any,
        alpha: Any,
        beta: Any,
        shape: tuple[int, ...] | None = None,
        prepared: Prepared | None = None,
    ) -> Any:
        """Check operands, find the variant that can take them, and enqueue it, as `__call__` does.

        Args:
            taken: The operands.
            out: As it was passed; None to make one.
            alpha: Scalar of the product.
            beta: Scalar of C as it was.
            shape: Of a C that is made, with as many elements as the problem's; None for the problem's.
            prepared: What was made of B, to be used in its place.

        Raises:
            UsageError: As for `__call__`.
        """
        alpha, beta = scalar("alpha", alpha), scalar("beta", beta)
        if beta != 0.0 and not self._reads_c:
            raise UsageError(
                f"beta = {beta} needs a kernel that reads C: get it with best_kernel(..., beta=1)"
            )
        if out is None and beta != 0.0:
            raise UsageError(f"beta = {beta} scales C as it was: pass it as out=")
        a, b, c, stream, library, like, held = taken
        ordinal = self._ordinal
        if a.ordinal != ordinal or b.ordinal != ordinal or (c is not None and c.ordinal != ordinal):
            self._refuse_ordinals(a=taken.a, b=taken.b, out=taken.out)
        made = None
        if c is None:
            lying("a", a, 0, self.problem)  # nothing is allocated for bad factors
            lying("b", b, 1, self.problem)
            made = library.empty("a", shape or self._shapes[2], like, ordinal or 0, stream)
            c = library.view_result(made, stream)._replace(shape=self._shapes[2], strides=self._strides[2])
        if alpha == 0.0:
            problem = self.problem if self._takes(a, b, c) else strided(self.problem, a, b, c)
            self._scale(problem, c.address, beta, stream)
        elif prepared is None:
            self.launcher(a, b, c)(a.address, b.address, c.address, alpha, beta, stream)
        else:
            variant = self._variant(on_prepared(strided(self.problem, a, b, c)))
            variant(a.address, b.address, c.address, alpha, beta, stream, prepared.address)
        for owner, kept in held:
            owner.hold((kept,), ordinal or 0, stream)
        return out if made is None else library.result(made, stream)

    def launcher(self, a: Operand, b: Operand, c: Operand) -> Enqueue:
        """Return the launch for operands that lie like these, compiled when they are first seen.

        Raises:
            UsageError: As for `__call__`.
        """
        return self._enqueue if self._takes(a, b, c) else self._variant(strided(self.problem, a, b, c))

    def _takes(self, a: Operand, b: Operand, c: Operand) -> bool:
        """Return whether the kernel itself takes these operands: tight, aligned and apart."""
        a_address, b_address, c_address = a.address, b.address, c.address
        a_bytes, b_bytes, c_bytes = self._bytes
        return (
            (a.shape, b.shape, c.shape) == self._shapes
            and (a.strides, b.strides, c.strides) == self._strides
            and not (a_address | b_address | c_address) & _UNALIGNED
            and (a_address + a_bytes <= c_address or c_address + c_bytes <= a_address)
            and (b_address + b_bytes <= c_address or c_address + c_bytes <= b_address)
            and 0 not in (a_address, b_address, c_address)
            and c.writable
        )

    def _refuse_ordinals(self, **operands: Operand | None) -> None:
        for name, operand in operands.items():
            if operand is not None and operand.ordinal != self._ordinal:
                raise UsageError(
                    f"{name} is on GPU {operand.ordinal}: this kernel runs on GPU {self._ordinal}; pass an "
                    f"array on that GPU, or use best_kernel(..., device={operand.ordinal})"
                )

    def _scale(self, problem: Problem, c: int, beta: float, stream: int) -> None:
        scale(problem, c, beta if self._reads_c else 0.0, stream, self._machine, self._depot)

    def _variant(self, problem: Problem) -> Enqueue:
        """Return the launch for the problem on operands that lie in some way."""
        if problem is self.problem:
            return self._enqueue
        return self._variants(problem, lambda: self._made(problem))

    def _made(self, problem: Problem) -> Enqueue:
        """Fit the config to the operands, and compile it if that gives another kernel.

        Raises:
            UsageError: No variant of the config can take them.
            ToolchainError: The variant does not compile.
        """
        source = self._rendered(problem)
        if source.text == self.source:
            return self._enqueue
        remedy = ": pass arrays without gaps between rows"
        return loaded(source, self._machine, self._depot, f"the variant for {problem}", remedy)

    def _rendered(self, problem: Problem) -> Source:
        """Fit the config to a problem and render it.

        Raises:
            UsageError: No variant of the config can take its operands.
        """
        device, space = self.device, self._choice.space
        try:
            config = space.fitted(self.config, problem, device)
            return rendered(space, config, problem, device, depot=self._depot)
        except (ConfigError, SpaceError) as error:
            raise UsageError(
                f"no variant of this kernel takes {problem}: pass arrays without gaps between rows, "
                f"at multiples of 16 bytes ({error})"
            ) from None

    def _preparation(self, problem: Problem) -> tuple[Enqueue, int]:
        """Return the launch that prepares a B, and the bytes that it takes.

        Raises:
            UsageError: The family prepares none.
            ToolchainError: It does not compile.
        """
        source = self._rendered(problem)
        launch = self._choice.space.preparation(source.config, problem, self.device)
        if launch is None:
            raise UsageError(
                f"a kernel of {source.family} prepares nothing: pass b itself, or get a kernel by "
                "best_kernel(..., math='3xfp16')"
            )
        what = f"what prepares B for {problem}"
        return loaded(replace(source, launch=launch), self._machine, self._depot, what), launch.prepared_bytes

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded_again, (type(self), self._choice, self._machine, self._depot)

    def __repr__(self) -> str:
        return f"Kernel({self.problem}, {self.served}, {self.config.id})"


class CheckedKernel(Kernel):
    """A kernel on tensor cores that leaves operands with an infinity or NaN to the FP32 kernel.

    Each call reads both operands once more and waits for the answer: the host is held up until the stream has
    come that far, and a stream that is being captured cannot be used. `launch` checks nothing.

    Attributes:
        strict: The FP32 kernel for operands that are not finite; same problem, same machine.
    """

    _remembers = False

    def __init__(
        self, choice: Choice, binary: Binary, machine: Machine, depot: Depot, *, strict: Kernel
    ) -> None:
        super().__init__(choice, binary, machine, depot)
        self.strict = strict
        self.ndarray = NoArray
        self._checks: Once[Problem, Enqueue] = Once()

    def run(
        self,
        taken: Taken,
        out: Any,
        alpha: Any,
        beta: Any,
        shape: tuple[int, ...] | None = None,
        prepared: Prepared | None = None,
    ) -> Any:
        """Look at the operands, then do what `Kernel.run` does, with the kernel that they need."""
        run = super().run if scalar("alpha", alpha) == 0.0 or self._finite(taken) else self.strict.run
        return run(taken, out, alpha, beta, shape, prepared)

    def _finite(self, taken: Taken) -> bool:
        """Return whether both operands are finite; those of another GPU, which `run` refuses, count as such.

        Raises:
            UsageError: An operand has another shape or order.
        """
        a, b, stream, problem = taken.a, taken.b, taken.stream, self.problem
        if a.ordinal != self._ordinal or b.ordinal != self._ordinal:
            return True
        (lda, stride_a, _), (ldb, stride_b, _) = lying("a", a, 0, problem), lying("b", b, 1, problem)
        strides: dict[str, Any] = {"stride_a": stride_a, "stride_b": stride_b} if problem.batch > 1 else {}
        stored = Strided(**vars(problem), lda=lda, ldb=ldb, **strides)
        return not self._machine.answer(
            lambda found: self._check(stored)(a.address, b.address, found, 1.0, 0.0, stream), stream
        )

    def _check(self, problem: Problem) -> Enqueue:
        """Return the kernel that looks at operands of these leading dimensions."""
        return self._checks(
            problem,
            lambda: loaded(
                finite_check(problem), self._machine, self._depot, "the check for finite operands"
            ),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        again, words = super().__reduce__()
        return again, (*words, self.strict)


def compiled(choice: Choice, machine: Machine, depot: Depot) -> Binary | Rejected:
    """Return the machine code of a choice: what was measured where that is on disk, else compiled now.

    Raises:
        ToolchainError: NVRTC is needed and missing.
    """
    measured_with = choice.record.toolchain.nvrtc if choice.record and choice.served == "exact" else None
    source = choice.source
    return cubins.load_or_compile(
        source.text,
        source.entry,
        machine.device.arch,
        nvrtc=measured_with,
        options=machine.options,
        depot=depot,
    )


def _loaded_again(
    kind: type[Kernel], choice: Choice, machine: Machine, depot: Depot, *strict: Kernel
) -> Kernel:
    """Load a kernel that was pickled."""
    binary = compiled(choice, machine, depot)
    if isinstance(binary, Rejected):
        raise ToolchainError(f"the kernel of {choice.source.problem} does not compile here: {binary.why}")
    try:
        if strict:
            return CheckedKernel(choice, binary, machine, depot, strict=strict[0])
        return kind(choice, binary, machine, depot)
    except Exception as error:
        raise_fault(error)
        raise


def raise_fault(error: Exception) -> None:
    """Raise `DeviceError` for an error of CUDA that is not yet one of our own."""
    fault = None if isinstance(error, AutotuneError) else cuda_fault(error)
    if fault is not None:
        raise DeviceError(fault) from None
