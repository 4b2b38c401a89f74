"""A GPU made of host memory: the interface of `gpu.cuda.Gpu`, with verify.cu in NumPy or simulated."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.code.compiler import Binary
from autotune.measure.verify_kernels import Matrix, Place
from autotune.simulator import run_ptx


class HostMemory:
    def __init__(self, size: int) -> None:
        self._bytes = np.full(size + 256, 0xA5, np.uint8)
        start = -self._bytes.ctypes.data % 256
        self.bytes = self._bytes[start : start + size]
        self.ptr = self.bytes.ctypes.data


class HostGpu:
    sm_count = 2

    def __init__(self, memory_free: int = 1 << 30) -> None:
        self.memory_free = memory_free
        self._allocated: list[HostMemory] = []

    def allocate(self, size: int) -> HostMemory:
        self._allocated.append(HostMemory(size))
        return self._allocated[-1]

    def array(self, values: NDArray[Any]) -> int:
        memory = self.allocate(values.nbytes)
        self.upload(memory.ptr, values)
        return memory.ptr

    def view(self, address: int, dtype: Any, count: int | None = None) -> Any:
        """Memory from an address to the end of its allocation, or ``count`` elements of it."""
        for memory in self._allocated:
            offset = address - memory.ptr
            if 0 <= offset < len(memory.bytes):
                size = (len(memory.bytes) - offset) // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize
                return memory.bytes[offset : offset + size].view(dtype)[:count]
        raise AssertionError(f"{address:#x} is not allocated")

    def matrix(self, matrix: Matrix) -> NDArray[np.float32]:
        strides = (4 * matrix.row_stride, 4 * matrix.col_stride)
        return np.lib.stride_tricks.as_strided(
            self.view(matrix.address, np.float32), (matrix.rows, matrix.cols), strides
        )

    def upload(self, address: int, values: NDArray[Any]) -> None:
        values = np.ascontiguousarray(values)
        self.view(address, np.uint8, values.nbytes)[:] = values.view(np.uint8).reshape(-1)

    def download(self, address: int, count: int, dtype: Any) -> Any:
        return self.view(address, dtype, count).copy()

    def copy(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    def fill(self, address: int, byte: int, size: int) -> None:
        ctypes.memset(address, byte, size)

    def synchronize(self) -> None:
        pass

    def simulated(self, binary: Binary) -> Callable[[str], Callable[..., None]]:
        """The kernels of a binary as `LoadedModule.kernel` gives them, run by the simulator."""

        def kernel(name: str) -> Callable[..., None]:
            def launch(grid: Any, block: Any, *arguments: np.generic) -> None:
                args = [self.view(int(v), np.uint8) if self._pointer(v) else v for v in arguments]
                blocks, threads = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
                run_ptx(binary.ptx, name, blocks, threads, args).raise_if_faulty()

            return launch

        return kernel

    def _pointer(self, value: np.generic) -> bool:
        """Tell an address from a seed or a null pointer, which are uint64 as well."""
        return isinstance(value, np.uint64) and any(
            memory.ptr <= int(value) < memory.ptr + len(memory.bytes) for memory in self._allocated
        )


class NumpyKernels:
    """What verify.cu computes, in NumPy: the interface of `VerifyKernels`."""

    def __init__(self, gpu: HostGpu) -> None:
        self._gpu = gpu

    def fill_normal(self, address: int, count: int, seed: int) -> None:
        self._gpu.view(address, np.float32, count)[:] = np.random.default_rng(seed).standard_normal(count)

    def reference(self, a: Matrix, b: Matrix, c0: int, place: Place, alpha: float, beta: float) -> None:
        rows = self._gpu.view(place.rows, np.int32, place.row_count)
        cols = self._gpu.view(place.cols, np.int32, place.col_count)
        left = self._gpu.matrix(a)[rows].astype(np.float64)
        right = self._gpu.matrix(b)[:, cols].astype(np.float64)
        value, limit = alpha * (left @ right), abs(alpha) * (abs(left) @ abs(right))
        if beta:
            start = self._gpu.matrix(Matrix(c0, a.rows, b.cols, b.cols, 1))[np.ix_(rows, cols)].astype(
                np.float64
            )
            value, limit = value + beta * start, limit + abs(beta * start)
        self._doubles(place.expected, value.size)[:] += value.ravel()
        self._doubles(place.limit, limit.size)[:] += limit.ravel()

    def project(self, matrix: Matrix, weights: int, sums: int, weights_step: int = 0) -> None:
        for number in range(matrix.batch):
            factors = self._doubles(weights + 8 * number * weights_step, matrix.cols)
            found = self._doubles(sums + 8 * number * matrix.rows, matrix.rows)
            found[:] += self._gpu.matrix(matrix.at(number)).astype(np.float64) @ factors

    def row_squares(self, matrix: Matrix, weights: int, sums: int) -> None:
        factors = self._doubles(weights, matrix.cols) if weights else 1.0
        for number in range(matrix.batch):
            squares = np.square(self._gpu.matrix(matrix.at(number)).astype(np.float64) * factors)
            self._doubles(sums + 8 * number * matrix.rows, matrix.rows)[:] += squares.sum(axis=1)

    def compare(self, c: Matrix, place: Place, found: int) -> None:
        rows = self._gpu.view(place.rows, np.int32, place.row_count)
        cols = self._gpu.view(place.cols, np.int32, place.col_count)
        wanted = self._doubles(place.expected, place.row_count * place.col_count)
        limit = self._doubles(place.limit, len(wanted))
        error = self._gpu.matrix(c)[np.ix_(rows, cols)].astype(np.float64).ravel() - wanted
        self._worst(error, limit, found)
        self._doubles(found + 8, 3)[:] += [np.square(values).sum() for values in (error, wanted, limit)]

    def compare_projection(self, sums: int, expected: int, limit: int, count: int, found: int) -> None:
        error = self._doubles(sums, count) - self._doubles(expected, count)
        self._worst(error, self._doubles(limit, count), found)

    def checksum(self, base: int, spans: int, count: int, found: int) -> None:
        for index, words in enumerate(self._spans(base, spans, count)):
            weights = (2 * words[1].astype(np.uint64) + 1) & 0xFFFFFFFF
            self._gpu.view(found, np.uint64, count)[index] += (words[0].astype(np.uint64) * weights).sum()

    def fill_guards(self, base: int, spans: int, count: int) -> None:
        for words, indices in self._spans(base, spans, count):
            words[:] = self._guard_words(indices)

    def count_changed(self, base: int, spans: int, count: int, found: int) -> None:
        for index, (words, indices) in enumerate(self._spans(base, spans, count)):
            changed = np.count_nonzero(words != self._guard_words(indices))
            self._gpu.view(found, np.uint64, count)[index] += changed

    def _guard_words(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return 0xFFC00000 | (indices & 0x1FFFFF)

    def _spans(self, base: int, spans: int, count: int) -> list[tuple[NDArray[np.uint32], NDArray[np.int64]]]:
        words = self._gpu.view(base, np.uint32)
        pairs = self._gpu.view(spans, np.int64, 2 * count).reshape(count, 2)
        return [(words[begin:end], np.arange(begin, end)) for begin, end in pairs]

    def _worst(self, error: NDArray[np.float64], limit: NDArray[np.float64], found: int) -> None:
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.where(abs(error) <= 0, 0.0, abs(error) / limit)
        ratio[~(ratio <= 3e38)] = np.inf
        packed = (ratio.astype(np.float32).view(np.uint32).astype(np.uint64) << np.uint64(32)) | np.arange(
            len(ratio), dtype=np.uint64
        )
        worst = self._gpu.view(found, np.uint64, 1)
        worst[0] = max(int(worst[0]), int(packed.max()))

    def _doubles(self, address: int, count: int) -> Any:
        return self._gpu.view(address, np.float64, count)
