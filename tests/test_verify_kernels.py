"""verify.cu on the simulator against NumPy, through the calls that the GPU worker makes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from host_gpu import HostGpu, NumpyKernels

from autotune.measure.verify_kernels import (
    COMPARED_WORDS,
    Matrix,
    Place,
    VerifyKernels,
    Worst,
    compile_kernels,
    split,
)


@pytest.fixture(scope="module")
def binary():
    return compile_kernels("sm_90")


@pytest.fixture
def gpu():
    return HostGpu()


@pytest.fixture
def kernels(gpu, binary):
    return VerifyKernels(gpu.simulated(binary), gpu.sm_count)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_120"])
def test_compiles_without_spills(arch):
    assert compile_kernels(arch).spill_bytes == 0


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def stored(gpu, rows, cols, letter, seed):
    """op(X), `[rows, cols]`, stored plain ("n") or transposed ("t")."""
    address = gpu.array(normal(rows, cols, seed=seed))
    return Matrix(address, rows, cols, *((cols, 1) if letter == "n" else (1, rows)))


def place(gpu, rows, cols):
    lists = [gpu.array(np.array(lines, np.int32)) for lines in (rows, cols)]
    references = [gpu.array(np.zeros(len(rows) * len(cols))) for _ in range(2)]
    return Place(lists[0], len(rows), lists[1], len(cols), *references)


def test_normal_numbers_are_normal_and_depend_on_the_seed(gpu, kernels):
    count = 4001
    address = gpu.array(np.full(count + 1, np.nan, np.float32))
    kernels.fill_normal(address, count, 7)
    values = gpu.download(address, count + 1, np.float32)
    assert np.isnan(values[-1])
    values = values[:-1].astype(np.float64)
    assert abs(values.mean()) < 4 / math.sqrt(count)
    assert abs(values.std() - 1) < 4 / math.sqrt(2 * count)
    assert abs((values**4).mean() - 3) < 4 * math.sqrt(96 / count)
    assert abs((values[:-1] * values[1:]).mean()) < 4 / math.sqrt(count)
    assert abs(values).max() < 6
    other = gpu.array(np.zeros(count, np.float32))
    kernels.fill_normal(other, count, 8)
    assert abs((values * gpu.download(other, count, np.float32)).mean()) < 4 / math.sqrt(count)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize(("m", "n", "k", "beta"), [(5, 3, 1, 0.0), (70, 66, 37, -0.5), (2, 3, 700, 0.0)])
def test_reference(gpu, kernels, layout, m, n, k, beta):
    a, b = stored(gpu, m, k, layout[0], 1), stored(gpu, k, n, layout[1], 2)
    c0 = gpu.array(normal(m, n, seed=3)) if beta else 0
    rows, cols = sorted({0, m // 2, m - 1}), list(range(n))
    ours, wanted = place(gpu, rows, cols), place(gpu, rows, cols)
    kernels.reference(a, b, c0, ours, 0.75, beta)
    NumpyKernels(gpu).reference(a, b, c0, wanted, 0.75, beta)
    for mine, theirs in ((ours.expected, wanted.expected), (ours.limit, wanted.limit)):
        found = gpu.download(mine, len(rows) * n, np.float64)
        assert found == pytest.approx(gpu.download(theirs, len(rows) * n, np.float64), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("letter", "nt")
@pytest.mark.parametrize(("rows", "cols"), [(3, 1), (20, 70), (1, 1030)])
def test_row_sums(gpu, kernels, letter, rows, cols):
    matrix = stored(gpu, rows, cols, letter, 1)
    weights = gpu.array(np.random.default_rng(2).uniform(-1, 1, cols))
    for name, factor in (("project", weights), ("row_squares", weights), ("row_squares", 0)):
        sums, wanted = gpu.array(np.zeros(rows)), gpu.array(np.zeros(rows))
        getattr(kernels, name)(matrix, factor, sums)
        getattr(NumpyKernels(gpu), name)(matrix, factor, wanted)
        found = gpu.download(sums, rows, np.float64)
        assert found == pytest.approx(gpu.download(wanted, rows, np.float64), rel=1e-12, abs=1e-12)


def test_row_sums_of_a_batch(gpu, kernels, monkeypatch):
    monkeypatch.setattr("autotune.measure.verify_kernels._MOST_LAYERS", 2)
    matrix = Matrix(gpu.array(normal(5, 7, 9)), 7, 9, 9, 1, batch=5, step=63)
    weights = gpu.array(np.random.default_rng(2).uniform(-1, 1, 45))
    for name, words in (("project", (0,)), ("project", (9,)), ("row_squares", ())):
        sums, wanted = gpu.array(np.zeros(35)), gpu.array(np.zeros(35))
        getattr(kernels, name)(matrix, weights, sums, *words)
        getattr(NumpyKernels(gpu), name)(matrix, weights, wanted, *words)
        found = gpu.download(sums, 35, np.float64)
        assert found == pytest.approx(gpu.download(wanted, 35, np.float64), rel=1e-12, abs=1e-12)
    assert len(set(found)) == 35


def compared(gpu, kernels, c, wrong=lambda c: None):
    m, n = c.shape
    where = place(gpu, [0, m - 1], range(n))
    gpu.upload(where.expected, c[[0, m - 1]].astype(np.float64) + 1e-9)
    gpu.upload(where.limit, np.full(2 * n, 2.0))
    wrong(c)
    found = gpu.array(np.zeros(COMPARED_WORDS, np.uint64))
    kernels.compare(Matrix(gpu.array(c), m, n, n, 1), where, found)
    words = gpu.download(found, COMPARED_WORDS, np.uint64)
    return Worst.unpack(int(words[0])), *words[1:].view(np.float64)


def test_compare_sums_squares_and_finds_the_worst(gpu, kernels):
    c = normal(9, 300)
    clean = c.copy()

    def one_wrong(c):
        c[8, 123] += 1

    worst, errors, references, limits = compared(gpu, kernels, c, one_wrong)
    assert worst.index == 300 + 123
    assert worst.ratio == pytest.approx(0.5, rel=1e-6)
    assert errors == pytest.approx(1, rel=1e-6)
    assert references == pytest.approx(np.square(clean[[0, 8]].astype(np.float64)).sum(), rel=1e-6)
    assert limits == 2 * 300 * 2.0**2


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_compare_counts_nan_and_infinity_as_infinitely_wrong(gpu, kernels, value):
    def poison(c):
        c[0, 5] = value

    worst, errors, *_ = compared(gpu, kernels, normal(3, 40), poison)
    assert worst == Worst(math.inf, 5)
    assert not errors < 1e30


def test_compare_of_equal_values_finds_nothing(gpu, kernels):
    where = place(gpu, [1], [0, 1])
    found = gpu.array(np.zeros(COMPARED_WORDS, np.uint64))
    kernels.compare(Matrix(gpu.array(np.zeros((2, 2), np.float32)), 2, 2, 2, 1), where, found)
    words = gpu.download(found, COMPARED_WORDS, np.uint64)
    assert Worst.unpack(int(words[0])).ratio == 0
    assert words[1:].tolist() == [0, 0, 0]


def test_compare_projection(gpu, kernels):
    count = 1000
    expected = np.arange(count, dtype=np.float64)
    found = expected.copy()
    found[777] += 3.0
    addresses = [gpu.array(values) for values in (found, expected, np.full(count, 2.0))]
    word = gpu.array(np.zeros(1, np.uint64))
    kernels.compare_projection(*addresses, count, word)
    assert Worst.unpack(int(gpu.download(word, 1, np.uint64)[0])) == Worst(1.5, 777)
    gpu.view(addresses[0], np.float64)[3] = np.nan
    kernels.compare_projection(*addresses, count, word)
    assert Worst.unpack(int(gpu.download(word, 1, np.uint64)[0])) == Worst(math.inf, 3)


def test_checksum_sees_any_changed_word_and_only_in_its_span(gpu, kernels):
    words = np.random.default_rng(0).integers(0, 2**32, 3000, dtype=np.uint32)
    base, spans = gpu.array(words), gpu.array(np.array([[10, 1500], [1500, 2999]], np.int64))

    def sums(kernels):
        found = gpu.array(np.zeros(2, np.uint64))
        kernels.checksum(base, spans, 2, found)
        return gpu.download(found, 2, np.uint64).tolist()

    before = sums(kernels)
    assert before == sums(NumpyKernels(gpu))
    memory = gpu.view(base, np.uint32)
    memory[[9, 2999]] ^= 1
    assert sums(kernels) == before
    memory[1499] ^= 0x80000000
    changed = sums(kernels)
    assert changed[0] != before[0]
    assert changed[1] == before[1]


def test_changed_words_of_guards_are_counted(gpu, kernels):
    base = gpu.array(np.zeros(2000, np.uint32))
    spans = gpu.array(np.array([[1, 1000], [1000, 1999]], np.int64))
    kernels.fill_guards(base, spans, 2)
    words = gpu.view(base, np.uint32)
    assert np.isnan(words[1:1999].view(np.float32)).all()
    assert len(set(words[1:1999].tolist())) == 1998
    assert words[[0, 1999]].tolist() == [0, 0]
    words[[0, 3, 4, 999, 1000, 1999]] = 1
    for each in (kernels, NumpyKernels(gpu)):
        found = gpu.array(np.zeros(2, np.uint64))
        each.count_changed(base, spans, 2, found)
        assert gpu.download(found, 2, np.uint64).tolist() == [3, 1]


@pytest.mark.parametrize("extent", [1, 15, 16, 255, 257, 4096, 500_000, 2**31 - 1])
@pytest.mark.parametrize("parts", [1, 2, 9, 8448])
def test_slices_cover_the_sum(extent, parts):
    slices, terms = split(extent, parts)
    assert 1 <= slices <= parts
    assert (slices - 1) * terms < extent <= slices * terms
    assert terms % 16 == 0
