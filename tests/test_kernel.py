"""The whole way of a call, in the simulator: choice, compile, arguments, variants, launch, result."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import statistics
import subprocess
import sys
import threading
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from made_records import H200, SGEMM, fitted, made, made_estimate

import autotune
from autotune.code import cubins
from autotune.code.compiler import compile_text
from autotune.code.depot import Depot
from autotune.errors import (
    DeviceError,
    RecordMissing,
    Rejected,
    SpaceError,
    ToolchainError,
    UsageError,
)
from autotune.kernel import best, best_kernel, kernel, matmul
from autotune.kernel.choices import Choices
from autotune.kernel.kernel import Kernel
from autotune.records import Store
from autotune.space.space import Space
from autotune.values.problem import MATHS, Problem, Strided

pytestmark = pytest.mark.filterwarnings("ignore:records were measured under other circumstances")

SIZE = (40, 24, 20)
PROBLEM = Problem(*SIZE)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Records of small problems; what is compiled is shared by the tests of this module."""
    root = tmp_path_factory.mktemp("records")
    for problem in (PROBLEM, Problem(*SIZE, beta=1)):
        Store(root).write(made(problem, config=small(problem)))
    return root


@pytest.fixture(autouse=True)
def nothing_told_yet(monkeypatch):
    monkeypatch.setattr(best, "_told", {})


def small(problem, preset="tiny_block"):
    return fitted(problem, preset)


@pytest.fixture(scope="module")
def plain(root):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return best_kernel(*SIZE, device="simulator", root=root)


@pytest.fixture(scope="module")
def reading(root):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return best_kernel(*SIZE, beta=1, device="simulator", root=root)


RANDOM = np.random.default_rng(7)
X = RANDOM.standard_normal((40, 20), np.float32)
Y = RANDOM.standard_normal((20, 24), np.float32)
Z = RANDOM.standard_normal((40, 24), np.float32)


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def placed(array, offset=0, extra=0):
    """The same matrix at an offset of floats, with rows that are longer by some."""
    rows, columns = array.shape
    lead = columns + extra
    room = np.full(rows * lead + offset + 64, np.nan, np.float32)
    start = -room.ctypes.data // 4 % 64 + offset
    view = np.lib.stride_tricks.as_strided(room[start:], array.shape, (4 * lead, 4))
    view[...] = array
    return view


# --- results ---


def test_the_product(plain):
    assert plain.served == "exact"
    made_c = plain(X, Y)
    close(made_c, X @ Y)
    out = np.full((40, 24), np.nan, np.float32)
    assert plain(X, Y, out=out) is out
    close(out, X @ Y)
    close(plain(X, Y, alpha=-2), -2 * X @ Y)


def test_beta(reading):
    out = Z.copy()
    reading(X, Y, out=out, alpha=0.5, beta=2.0)
    close(out, 0.5 * X @ Y + 2 * Z)
    close(reading(X, Y), X @ Y)  # beta = 0 does not read what was never written


def test_addresses(plain):
    out = placed(np.zeros((40, 24), np.float32))
    a, b = placed(X), placed(Y)
    plain.launch(a.ctypes.data, b.ctypes.data, out.ctypes.data, 2.0)
    close(out, 2 * X @ Y)


@pytest.mark.parametrize(
    ("offsets", "extras"),
    [((1, 0, 0), (0, 0, 0)), ((2, 1, 3), (0, 0, 0)), ((0, 0, 0), (4, 0, 8)), ((3, 2, 1), (1, 2, 3))],
)
def test_operands_that_lie_otherwise_get_a_variant(plain, offsets, extras):
    a, b, out = (
        placed(array, offset, extra)
        for array, offset, extra in zip((X, Y, np.zeros_like(Z)), offsets, extras, strict=True)
    )
    around = np.lib.stride_tricks.as_strided(out, (40, 24 + extras[2]), out.strides)
    assert plain(a, b, out=out) is out
    close(out, X @ Y)
    assert np.isnan(around[:-1, 24:]).all()  # nothing is written between the rows
    count = len(plain._variants.made)
    plain(a, b, out=out)
    assert len(plain._variants.made) == count


def test_a_variant_is_compiled_only_when_the_code_differs(root):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = best_kernel(*SIZE, device="simulator", root=root)
    narrow = all(one.config[name] == 1 for name in ("vec_a",))
    assert narrow
    one(placed(X, 1), Y)  # scalar loads of A take any address
    assert [enqueue is one._enqueue for enqueue in one._variants.made.values()] == [True]
    one(X, placed(Y, 1))  # vector loads of B do not
    assert [enqueue is one._enqueue for enqueue in one._variants.made.values()] == [True, False]
    assert next(iter(one._variants.made)) == Strided(*SIZE, align_a=1)


# --- bad operands ---


def fault(call, *words, **named):
    with pytest.raises(UsageError) as caught:
        call(*words, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ({"a": X.astype(np.float64)}, "a is float64, not float32: pass a.astype('float32')"),
        ({"b": Y.astype(np.float16)}, "b is float16, not float32: pass b.astype"),
        ({"a": X[:, :8]}, "a has shape (40, 8): this kernel takes (40, 20) (40 x 24 x 20 nn)"),
        ({"b": Y[::-1]}, "b has negative strides"),
        ({"b": np.asfortranarray(Y)}, "b is stored by columns, not by rows"),
        ({"a": np.broadcast_to(X[0], X.shape)}, "a has rows of 20 elements only 0 apart"),
        ({"a": X.tolist()}, "a is a list: pass a numpy.ndarray, float32"),
        (
            {"a": np.ma.array(X, mask=X > 1)},
            "a is a masked array, and a kernel sees no mask: pass a.filled(0)",
        ),
        ({"b": np.ma.array(Y)}, "b is a masked array"),
        ({"out": np.ma.array(Z)}, "out is a masked array, and a kernel sees no mask: pass out.data"),
        ({"out": Z.astype(np.float64)}, "out is float64"),
        ({"out": np.broadcast_to(np.float32(0), Z.shape)}, "out has"),
        ({"alpha": "1"}, "alpha is a str: pass a real number"),
        (
            {"beta": 1.0, "out": Z},
            "beta = 1.0 needs a kernel that reads C: get it with best_kernel(..., beta=1)",
        ),
        ({"beta": float("nan"), "out": Z}, "beta = nan needs a kernel that reads C"),
    ],
)
def test_bad_operands_are_one_clear_error_and_nothing_is_written(plain, operands, message):
    out = operands.get("out", np.full((40, 24), 3, np.float32))
    before = np.array(out)
    words = {"a": X, "b": Y, "out": out, **operands}
    assert fault(plain, **words).startswith(message)
    np.testing.assert_array_equal(out, before)


def unaligned(array):
    """The same matrix at an address that is no multiple of 4."""
    room = np.zeros(array.nbytes + 8, np.uint8)
    view = room[1 : 1 + array.nbytes].view(np.float32).reshape(array.shape)
    view[...] = array
    return view


WRONG = {
    "float64": lambda array: array.astype(np.float64),
    "float16": lambda array: array.astype(np.float16),
    "big-endian": lambda array: array.astype(">f4"),
    "by columns": np.asfortranarray,
    "by columns in float64": lambda array: np.asfortranarray(array, np.float64),
    "every second": lambda array: np.repeat(array, 2, axis=1)[:, ::2],
    "flipped": lambda array: np.ascontiguousarray(array[::-1])[::-1],
    "mirrored": lambda array: np.ascontiguousarray(array[:, ::-1])[:, ::-1],
    "odd address": unaligned,
    "odd rows": lambda array: (
        np.pad(array, ((0, 0), (0, 1)))
        .view(np.uint8)
        .reshape(len(array), -1)[:, : 4 * array.shape[1]]
        .view(np.float32)
    ),
    "packed": lambda array: np.rec.fromarrays([array, array > 0], names="x,flag").x,
}


@pytest.mark.parametrize("name", ["a", "b", "out"])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_the_message_advises_puts_the_product_where_it_was_wanted(reading, name, wrong):
    operands = {"a": X.copy(), "b": Y.copy(), "out": Z.copy()}
    operands[name] = wanted = WRONG[wrong](operands[name])
    scalars = {"alpha": 0.5, "beta": 2.0}
    product = 0.5 * np.float32(operands["a"]) @ np.float32(operands["b"]) + 2 * np.float32(operands["out"])
    words = dict(operands)
    after = []
    for _ in range(3):  # an array may be wrong in two ways
        try:
            reading(**words, **scalars)
            break
        except UsageError as error:
            _, _, advice = str(error).rpartition("pass ")
        if name == "out":
            made, assign = re.fullmatch(r"c = (.*) as out, then (.*)", advice).groups()
            before = words["out"]
            words["out"] = c = eval(made, {"out": before})
            after.insert(0, (assign, {"out": before, "c": c}))
        else:
            words[name] = eval(advice, {name: words[name]})
    else:
        raise AssertionError("what is advised does not help")
    for assign, names in after:
        exec(assign, names)
    np.testing.assert_allclose(
        np.float64(operands["out"] if name != "out" else wanted), product, rtol=2e-3, atol=2e-2
    )


def test_a_product_stored_by_columns_is_the_transpose_of_another(plain, at_root):
    out = np.zeros((40, 24), np.float32, order="F")
    message = fault(plain, X, Y, out=out)
    assert message.startswith(
        "out is stored by columns, not by rows: call autotune.matmul(b.T, a.T, out=out.T)"
    )
    matmul(Y.T, X.T, out=out.T, device="simulator")
    close(out, X @ Y)


def test_overlap_is_refused(plain):
    room = np.zeros(3000, np.float32)
    a = room[:800].reshape(40, 20)
    assert "out overlaps a in memory" in fault(plain, a, Y, out=room[700:1660].reshape(40, 24))
    assert "out overlaps b in memory" in fault(
        plain, X, room[:480].reshape(20, 24), out=room[:960].reshape(40, 24)
    )


def test_read_only_out_is_refused(plain):
    out = np.zeros((40, 24), np.float32)
    out.flags.writeable = False
    assert "out is read-only" in fault(plain, X, Y, out=out)


def test_beta_without_out_is_refused(reading):
    assert fault(reading, X, Y, beta=1.0) == "beta = 1.0 scales C as it was: pass it as out="


# --- best_kernel ---


def quiet(*words, **named):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return best_kernel(*words, **named)


def test_what_is_served_and_why(root, tmp_path):
    assert quiet(41, 24, 20, device="simulator", root=root).served == "predicted"
    smaller = dataclasses.replace(H200, name="NVIDIA H199", sm_count=100)
    Store(tmp_path).write(made(Problem(1, 1, 20), device=smaller))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing was learned of a T4, once in a process
        t4 = best_kernel(*SIZE, device="simulator:t4", root=tmp_path)
    assert (t4.served, t4.record, t4.device.name) == ("predicted", None, "Tesla T4")
    close(t4(X, Y), X @ Y)


def test_a_kernel_tells_where_it_comes_from(plain):
    assert plain.record.problem == plain.problem == PROBLEM
    assert plain.config == plain.record.config
    assert 'extern "C" __global__' in plain.source
    assert repr(plain) == f"Kernel(40 x 24 x 20 nn, exact, {plain.config.id})"


def test_exact_refuses_anything_else(root):
    with pytest.raises(RecordMissing) as caught:
        best_kernel(41, 24, 20, policy="exact", device="simulator", root=root)
    assert str(caught.value) == (
        "no record of 41 x 24 x 20 nn on NVIDIA H200: run 'autotune tune --m 41 --n 24 --k 20', "
        "or pass tune=True or policy='any'"
    )


def test_exact_tells_of_an_estimate(tmp_path):
    Store(tmp_path).write(made_estimate(PROBLEM))
    with pytest.raises(RecordMissing, match="there is an estimated one, which is never served"):
        best_kernel(*SIZE, policy="exact", device="simulator", root=tmp_path)


def test_differences_are_said_once_in_words(monkeypatch, root):
    simulated = best.machine_of("simulator")
    monkeypatch.setattr(best, "_told", {})
    choice = next(Choices(Problem(*SIZE), simulated.device, Store(root)).all())
    binary = cubins.load_or_compile(choice.source.text, choice.source.entry, "sm_90", depot=Depot(root))
    assert list(best._differences(choice, binary, simulated)) == []  # nothing is timed there
    on_a_gpu = SimpleNamespace(ordinal=0)
    (said,) = best._differences(choice, dataclasses.replace(binary, nvrtc="99.9"), on_a_gpu)
    with pytest.warns(UserWarning, match="records were measured under other circumstances: NVRTC 13.0 then,"):
        best._tell(said)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        best._tell(said)


@pytest.fixture
def failing(monkeypatch):
    """Let texts that hold one of these words fail to compile."""
    words = []

    def compiling(text, *rest):
        if any(word in text for word in words):
            return Rejected("compile", "kernel.cu(1): error: out of luck")
        return compile_text(text, *rest)

    monkeypatch.setattr("autotune.code.cubins.compile_bounded", compiling)
    return words


def test_a_winner_that_does_not_compile_is_passed_over_with_one_warning(tmp_path, failing):
    winner, finalist = small(PROBLEM), small(PROBLEM, "small_block")
    Store(tmp_path).write(made(PROBLEM, config=winner, others=[finalist]))
    failing.append(winner.id)
    with pytest.warns(UserWarning, match="is passed over") as caught:
        found = best_kernel(*SIZE, device="simulator", root=tmp_path)
    passed = [str(each.message) for each in caught if "is passed over" in str(each.message)]
    assert passed == [
        f"the record of 40 x 24 x 20 nn on NVIDIA H200, {winner.id}, is passed over: "
        "it does not compile: kernel.cu(1): error: out of luck"
    ]
    assert (found.served, found.config) == ("exact", finalist)
    close(found(X, Y), X @ Y)
    assert quiet(*SIZE, device="simulator", root=tmp_path).config == finalist


@pytest.mark.filterwarnings("ignore:.*is passed over")
def test_at_last_an_error(tmp_path, failing):
    winner = small(PROBLEM)
    Store(tmp_path).write(made(PROBLEM, config=winner))
    failing.append(winner.id)
    with pytest.raises(
        ToolchainError, match=r"the record of 40 x 24 x 20 nn on NVIDIA H200 fails: kernel\.cu"
    ):
        best_kernel(*SIZE, device="simulator", policy="exact", root=tmp_path)
    failing.append("float")
    with pytest.raises(ToolchainError, match="no kernel for 40 x 24 x 20 nn: the record of"):
        best_kernel(*SIZE, device="simulator", root=tmp_path, space=SGEMM)
    failing.remove("float")
    assert quiet(*SIZE, device="simulator", root=tmp_path).served == "predicted"


def test_a_variant_that_does_not_compile_says_what_to_pass(root, failing, tmp_path):
    one = best_kernel(41, 24, 20, device="simulator", root=tmp_path)
    failing.append("float")
    with pytest.raises(ToolchainError, match=r"does not compile .*: pass arrays without gaps"):
        one(placed(np.zeros((41, 20), np.float32), 1, 3), Y)


@pytest.mark.parametrize("device", ["gpu", "0", 1.5, True, "simulated", b"simulator"])
def test_a_device_that_is_none(device):
    with pytest.raises(UsageError, match="give the CUDA ordinal of a GPU, or 'simulator'"):
        best_kernel(*SIZE, device=device)


def test_what_is_plainly_meant_is_taken(root, tmp_path, monkeypatch):
    where = {"device": "simulator", "root": str(root)}
    assert quiet(*SIZE, **where, space="sgemm").config == quiet(*SIZE, **where).config
    own = tmp_path / "own.toml"
    own.write_text('extends = "sgemm"\nsummary = "of mine"\n')
    for space in (own, str(own)):
        assert best_kernel(*SIZE, **where, space=space)._choice.space.path == own
    with pytest.raises(SpaceError, match="family 'sgem' is unknown"):
        best_kernel(*SIZE, **where, space="sgem")
    asked = []
    monkeypatch.setattr(
        best, "cuda_machine", lambda ordinal: asked.append(ordinal) or best.machine_of("simulator")
    )
    for device in (np.int64(1), np.uint8(1), 1):
        best_kernel(*SIZE, device=device, root=root)
    assert asked == [1, 1, 1]
    assert {type(each) for each in asked} == {int}


def test_words_that_are_none():
    with pytest.raises(UsageError, match=r"policy 'best' is unknown: give one of any, exact"):
        best_kernel(*SIZE, policy="best", device="simulator")
    with pytest.raises(UsageError, match="target 'h999' is not in the table"):
        best_kernel(*SIZE, device="simulator:h999")


def test_without_a_gpu_the_error_says_so():
    from autotune.values.device import has_gpu

    if has_gpu():
        pytest.skip("there is a GPU")
    for words in ({}, {"device": 0}, {"device": 7}, {"tune": True}):
        with pytest.raises(DeviceError, match="there is no NVIDIA driver"):
            best_kernel(*SIZE, **words)


def test_a_cache_that_cannot_be_written_serves(tmp_path):
    (tmp_path / "file").write_text("")
    one = best_kernel(41, 24, 20, device="simulator", root=tmp_path / "file")
    assert one.served == "predicted"


def test_threads_share_one_kernel(plain):
    a = placed(X, 2)
    outs = [None] * 8
    failures = []

    def call(number):
        try:
            outs[number] = plain(a, Y, alpha=float(number))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for number, out in enumerate(outs):
        close(out, number * (X @ Y))


# --- matmul ---


@pytest.fixture
def at_root(root, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(root))


@pytest.mark.parametrize("turned_a", [False, True])
@pytest.mark.parametrize("turned_b", [False, True])
def test_matmul_reads_transposed_views_as_they_lie(at_root, turned_a, turned_b):
    a = np.asfortranarray(X) if turned_a else X
    b = np.asfortranarray(Y) if turned_b else Y
    close(matmul(a, b, device="simulator"), X @ Y)
    close(matmul(a.T, b.T, transpose_a=True, transpose_b=True, device="simulator"), X @ Y)


def test_matmul_takes_scalars_and_out(at_root):
    out = Z.copy()
    assert matmul(X, Y, out, alpha=2.0, beta=-1.0, device="simulator") is out
    close(out, 2 * X @ Y - Z)


def test_matmul_takes_vectors_as_matrices(at_root):
    row, column = X[:1], np.ascontiguousarray(X[:, :1])
    close(matmul(row, Y, device="simulator"), row @ Y)
    close(matmul(column.T, X, device="simulator"), column.T @ X)
    close(matmul(X[:, ::20].T, X, device="simulator"), X[:, :1].T @ X)  # one column, 80 bytes apart


def test_matmul_says_what_does_not_fit(at_root):
    assert fault(matmul, X, X, device="simulator").startswith(
        "a gives 40 x 20 and b gives 40 x 20: the inner extents must agree (shapes (40, 20) and (40, 20)"
    )
    assert "a has 1 dimensions" in fault(matmul, X[0], Y, device="simulator")
    assert "out has shape" in fault(matmul, X, Y, X, device="simulator")
    assert "elements 2 apart" in fault(matmul, X[:, ::2], Y[:10], device="simulator")
    assert "matmul runs where its arrays are" in fault(matmul, X, Y, device=0)
    assert "alpha is an int beyond" in fault(matmul, X, Y, alpha=10**400, device="simulator")
    assert "beta is a numpy.ndarray" in fault(matmul, X, Y, beta=np.zeros(2), device="simulator")
    assert "policy [] is unknown" in fault(matmul, X, Y, policy=[], device="simulator")
    assert "math 'tf32' is unknown: give one of ffma, 3xtf32, 3xfp16, any" in fault(
        matmul, X, Y, math="tf32", device="simulator"
    )
    assert "in host memory: pass cupy.asarray(a)" in fault(matmul, X, Y)


def test_matmul_takes_any_math(at_root):
    """Sums on tensor cores are rounded otherwise, so that each math gives bits of its own."""
    rough = {math: matmul(X, Y, math=math, device="simulator") for math in ("ffma", "3xtf32", "any")}
    for product in rough.values():
        close(product, X @ Y)
    assert (rough["ffma"] != rough["3xtf32"]).any()
    assert any((rough["any"] == rough[math]).all() for math in ("ffma", "3xtf32"))


def test_matmul_loads_a_kernel_once(at_root, monkeypatch):
    loads = []
    monkeypatch.setattr(
        "autotune.kernel.multiply.load",
        lambda *words, **named: loads.append(words) or best.load(*words, **named),
    )
    a, b = X[:7], Y[:, :5]  # of no other test
    barrier = threading.Barrier(6)

    def call():
        barrier.wait()
        close(matmul(a, b, device="simulator"), a @ b)

    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1


# --- the launcher seam ---


class Recorder:
    """A machine of which every launch is noted: where a GPU would be."""

    def __init__(self):
        self.device, self.ordinal, self.options, self.ndarray = H200, 0, (), Fake
        self.launches = []

    def current_stream(self, ordinal):
        return dataclasses.make_dataclass("Stream", ["ptr"])(ptr=100 + ordinal)

    def take(self, a, b, out, stream):
        from autotune.kernel.libraries import take

        return take(a, b, out, stream)

    def load(self, source, binary):
        return lambda *words: self.launches.append((source.problem, words))


class Memory:
    def __init__(self, ptr, device_id):
        self.ptr, self.device_id = ptr, device_id


class Fake:
    """The attributes of ``cupy.ndarray`` that a call reads, on memory that nobody touches."""

    def __init__(self, shape, address, ordinal=0, dtype=np.float32, strides=None):
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.data = Memory(address, ordinal)
        tight = (4 * shape[1], 4)
        self.strides = tight if strides is None else strides
        self._c_contiguous = self.strides == tight

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.data.ptr, False),
            "strides": self.strides,
            "version": 3,
        }


@pytest.fixture
def recorder(root, monkeypatch):
    from autotune.kernel import libraries
    from autotune.kernel.choices import Choices

    machine = Recorder()
    monkeypatch.setattr(libraries, "ordinal_of", lambda name, address, empty: 1 if address >= 1 << 30 else 0)
    choice = next(Choices(PROBLEM, H200, Store(root)).exact())
    binary = compile_text(choice.source.text, choice.source.entry, "sm_90")
    return machine, Kernel(choice, binary, machine, Depot(root))


A, B, C = Fake((40, 20), 1 << 20), Fake((20, 24), 2 << 20), Fake((40, 24), 3 << 20)


def test_the_short_way_launches_on_the_current_stream(recorder, monkeypatch):
    machine, one = recorder
    monkeypatch.setattr(kernel.Kernel, "run", None)  # it is not needed
    assert one(A, B, C) is C
    assert one(A, B, C, 2.0, 0.0, 9) is C
    assert one(A, B, C, stream=dataclasses.make_dataclass("S", ["ptr"])(ptr=5)) is C
    addresses = (1 << 20, 2 << 20, 3 << 20)
    assert [words for _, words in machine.launches] == [
        (*addresses, 1.0, 0.0, 100),
        (*addresses, 2.0, 0.0, 9),
        (*addresses, 1.0, 0.0, 5),
    ]


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ({"a": Fake((40, 20), (1 << 30) + 64, 1)}, "a is on GPU 1: this kernel runs on GPU 0; pass an array"),
        ({"out": Fake((40, 24), (1 << 30) + 64, 1)}, "out is on GPU 1"),
        ({"a": Fake((20, 40), 1 << 20)}, "a has shape (20, 40)"),
        ({"b": Fake((20, 24), 2 << 20, dtype=np.float64, strides=(192, 8))}, "b is float64"),
        ({"out": Fake((40, 24), (1 << 20) + 3184)}, "out overlaps a"),
        ({"out": Fake((40, 24), (2 << 20) - 3824)}, "out overlaps b"),
        ({"a": Fake((40, 20), 1 << 20, strides=(4, 160))}, "a is stored by columns"),
        ({"beta": 1.0}, "beta = 1.0 needs a kernel that reads C"),
        ({"stream": "main"}, "stream is a str"),
    ],
)
def test_the_short_way_refuses_what_the_long_way_does(recorder, operands, message):
    machine, one = recorder
    assert fault(one, **{"a": A, "b": B, "out": C, **operands}).startswith(message)
    assert machine.launches == []


def test_the_short_way_leaves_strided_operands_to_the_long_way(recorder):
    machine, one = recorder
    one(Fake((40, 20), (1 << 20) + 4), B, C, stream=3)
    one(Fake((40, 20), 1 << 20, strides=(160, 4)), B, C, alpha=2, stream=3)
    assert [(problem.align_a, problem.lda) for problem, _ in machine.launches] == [(4, 20), (4, 40)]
    assert [words[3] for _, words in machine.launches] == [1.0, 2.0]


# --- cost ---


FRESH = """
import sys, time
import numpy as np, jinja2
from pathlib import Path
from autotune.code import cubins, nvrtc
from autotune.kernel.choices import Choices
from autotune.records import Store
from autotune.values.device import named_device
from autotune.values.problem import Problem
start = time.perf_counter()
choice = next(Choices(Problem(40, 24, 20), named_device("h200"), Store(sys.argv[1])).all())
source = choice.source
binary = cubins.load_or_compile(source.text, source.entry, "sm_90", nvrtc="13.0", options=("-lineinfo",),
    depot=Store(sys.argv[1]).depot)
print(choice.served, len(binary.cubin) > 0, nvrtc.nvrtc.cache_info().currsize, time.perf_counter() - start)
"""


def found_by_fresh_processes(root, count):
    words = [sys.executable, "-c", FRESH, str(root)]
    runs = [subprocess.run(words, capture_output=True, text=True, check=True) for _ in range(count)]
    return [run.stdout.split() for run in runs]


def test_a_fresh_process_finds_its_machine_code_without_a_compiler(root, plain):
    told = found_by_fresh_processes(root, 2)
    assert told[1][:3] == ["exact", "True", "0"]


@pytest.mark.timing
def test_a_fresh_process_finds_its_machine_code_soon(root, plain):
    told = found_by_fresh_processes(root, 6)
    assert statistics.median(float(each[3]) for each in told[1:]) < 0.1, told  # 0.02 s on an idle machine


def test_the_examples_of_the_docstrings_run(tmp_path, monkeypatch):
    import doctest
    from importlib import import_module

    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path))
    for name in ("autotune", "autotune.kernel.best", "autotune.kernel.multiply"):
        outcome = doctest.testmod(import_module(name))
        assert outcome.attempted > 0
        assert outcome.failed == 0


def test_the_public_names_are_typed():
    from importlib.resources import files

    assert (files(autotune) / "py.typed").is_file()


# --- any math ---

TENSOR = Space.load("sgemm_3xtf32")
BOTH = Problem(64, 64, 56)  # there is no record of it in cache/, and 3xfp16 does not compute it


def measured_in_both(root, fp32_ms, tensor_ms):
    tensor = dataclasses.replace(BOTH, math="3xtf32")
    config = TENSOR.fitted(TENSOR.presets["two_warps"], tensor, H200)
    Store(root).write(made(BOTH, config=small(BOTH), ms=fp32_ms))
    Store(root).write(made(tensor, config=config, space=TENSOR, ms=tensor_ms))


@pytest.mark.parametrize(("times", "math"), [((1.0, 2.0), "ffma"), ((2.0, 1.0), "3xtf32")])
@pytest.mark.parametrize("policy", ["any", "exact"])
def test_any_math_takes_the_faster_record(tmp_path, times, math, policy):
    measured_in_both(tmp_path, *times)
    found = best_kernel(64, 64, 56, math="any", device="simulator", policy=policy, root=tmp_path)
    assert (found.served, found.problem.math, found.record.timing.median_ms) == ("exact", math, 1.0)
    usual = best_kernel(64, 64, 56, device="simulator", root=tmp_path)
    assert usual.problem.math == "ffma"  # nobody gets the other unasked, however fast it is


def test_any_math_goes_by_the_estimate_where_nothing_was_measured(tmp_path):
    for device, math in (("h200", "3xfp16"), ("a10", "ffma"), ("t4", "ffma")):  # a T4 has no TF32
        found = best_kernel(3000, 3000, 3000, math="any", device=f"simulator:{device}", root=tmp_path)
        assert (found.served == "exact", found.problem.math) == (False, math)
    with pytest.raises(RecordMissing, match="no record of 2000 x 2048 x 2048 nn on NVIDIA A10"):
        best_kernel(2000, 2048, 2048, math="any", device="simulator:a10", policy="exact", root=tmp_path)


@pytest.mark.parametrize(("doubt", "math"), [(1e-3, "3xtf32"), (1e3, "ffma")])
def test_tensor_cores_must_be_predicted_to_be_faster_than_doubt_allows(tmp_path, monkeypatch, doubt, math):
    monkeypatch.setattr(best, "DOUBT", doubt)
    problems = [dataclasses.replace(BOTH, math=each) for each in MATHS]
    assert best.expected(problems, H200, None, Store(tmp_path)).math == math


def test_a_math_without_a_record_must_be_predicted_to_beat_the_fastest_that_has_one(tmp_path):
    """Of 3xfp16 there is none: a measured time and one that is predicted are not compared."""
    for extent, math in ((128, "3xtf32"), (4000, "3xfp16")):
        problem = Problem(extent, extent, extent)
        tensor = dataclasses.replace(problem, math="3xtf32")
        config = TENSOR.fitted(TENSOR.presets["two_warps"], tensor, H200)
        Store(tmp_path).write(made(problem, config=small(problem), ms=200.0))
        Store(tmp_path).write(made(tensor, config=config, space=TENSOR, ms=100.0))
        found = best_kernel(extent, extent, extent, math="any", device="simulator", root=tmp_path)
        assert (found.problem.math, found.served) == (math, "exact" if math == "3xtf32" else "predicted")


def test_any_math_looks_at_operands_where_it_chose_the_tensor_cores(tmp_path):
    measured_in_both(tmp_path, 2.0, 1.0)
    found = best_kernel(64, 64, 56, math="any", check_finite=True, device="simulator", root=tmp_path)
    assert (found.problem.math, found.strict.problem.math) == ("3xtf32", "ffma")


# --- copies ---


def test_a_copy_is_the_kernel_itself(plain):
    assert copy.copy(plain) is plain
    assert copy.deepcopy({"layer": plain})["layer"] is plain


def test_a_pickled_kernel_is_loaded_again_from_its_source(plain, monkeypatch):
    plain(placed(X, 1), Y)  # what it made meanwhile stays behind
    again = pickle.loads(pickle.dumps(plain))
    assert (again.problem, again.served, again.config) == (plain.problem, plain.served, plain.config)
    assert (again.source, again.record, again.device) == (plain.source, plain.record, plain.device)
    close(again(placed(X, 1), Y), X @ Y)
    monkeypatch.setattr(
        "autotune.code.cubins.compile_bounded", lambda *words: Rejected("compile", "out of luck")
    )
    monkeypatch.setattr("autotune.code.cubins.load", lambda *words, **named: None)
    with pytest.raises(
        ToolchainError, match="the kernel of 40 x 24 x 20 nn does not compile here: out of luck"
    ):
        pickle.loads(pickle.dumps(plain))


def test_a_pickled_kernel_works_in_another_process(plain, tmp_path):
    (tmp_path / "kernel").write_bytes(pickle.dumps(plain))
    program = (
        "import pickle, sys, numpy\n"
        "kernel = pickle.load(open(sys.argv[1], 'rb'))\n"
        "print(kernel(numpy.ones((40, 20), 'f'), numpy.ones((20, 24), 'f')).sum())"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "kernel")]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "19200.0\n"


def test_a_kernel_of_one_gpu_is_not_loaded_on_another(monkeypatch):
    from autotune.kernel import cuda
    from autotune.kernel.once import Once
    from autotune.values.device import named_device

    machine = object.__new__(cuda.CudaMachine)
    machine.ordinal, machine.device = 0, H200
    pickled = pickle.dumps(machine)
    monkeypatch.setattr(cuda, "_machines", Once())
    monkeypatch.setattr(cuda, "cuda_machine", lambda ordinal: SimpleNamespace(device=named_device("a100")))
    with pytest.raises(
        DeviceError,
        match=r"for NVIDIA H200 \(132 SMs\), and GPU 0 is .*A100.* \(108 SMs\) here: call best_kernel here",
    ):
        pickle.loads(pickled)
    same = SimpleNamespace(device=dataclasses.replace(H200, clock_mhz=1))
    monkeypatch.setattr(cuda, "cuda_machine", lambda ordinal: same)
    assert pickle.loads(pickled) is same


def test_a_product_that_no_memory_holds_is_one_line():
    a, b = np.ones((4_000_000, 1), np.float32), np.ones((1, 4_000_000), np.float32)
    with pytest.raises(DeviceError, match="C of 4000000 x 4000000 needs 64000000000000 bytes, which"):
        matmul(a, b, device="simulator")
