from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from autotune.code import cubins
from autotune.code.compiler import Binary, compile_text
from autotune.code.depot import Depot
from autotune.code.single import compile_bounded
from autotune.errors import Rejected

TEXT = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }'
ARCH = "sm_90"


@pytest.fixture(scope="module")
def binary():
    made = compile_text(TEXT, "twice", ARCH)
    assert isinstance(made, Binary)
    return made


@pytest.fixture
def compiles(monkeypatch):
    """Count compiles, which still happen."""
    counted = []

    def counting(*words):
        counted.append(words)
        return compile_bounded(*words)

    monkeypatch.setattr(cubins, "compile_bounded", counting)
    return counted


def test_a_binary_comes_back_whole(binary, tmp_path):
    assert cubins.put(TEXT, binary, ARCH, depot=Depot(tmp_path))
    found = cubins.load(TEXT, "twice", ARCH, depot=Depot(tmp_path))
    assert found == binary
    assert found.seconds == binary.seconds
    assert (found.cubin, found.ptx, found.log) == (binary.cubin, binary.ptx, binary.log)


def test_what_differs_is_another_binary(binary, tmp_path):
    cubins.put(TEXT, binary, ARCH, depot=Depot(tmp_path))
    for words in (
        (TEXT.replace("2.0f", "3.0f"), "twice", ARCH),
        (TEXT, "thrice", ARCH),
        (TEXT, "twice", "sm_80"),
    ):
        assert cubins.load(*words, depot=Depot(tmp_path)) is None
    assert cubins.load(TEXT, "twice", ARCH, options=("-lineinfo",), depot=Depot(tmp_path)) is None
    assert cubins.load(TEXT, "twice", ARCH, nvrtc="1.0", depot=Depot(tmp_path)) is None
    assert cubins.load(TEXT, "twice", ARCH, nvrtc=binary.nvrtc, depot=Depot(tmp_path)) == binary


def test_a_comment_changes_no_machine_code_but_the_lines_that_faults_name(binary, tmp_path):
    cubins.put(TEXT, binary, ARCH, depot=Depot(tmp_path))
    cubins.put(TEXT, binary, ARCH, options=("-lineinfo",), depot=Depot(tmp_path))
    commented = f"// twice as much\n\n{TEXT}  // at once"
    assert cubins.load(commented, "twice", ARCH, depot=Depot(tmp_path)) == binary
    assert cubins.load(commented, "twice", ARCH, options=("-lineinfo",), depot=Depot(tmp_path)) is None


def test_it_is_compiled_once(compiles, tmp_path):
    first = cubins.load_or_compile(TEXT, "twice", ARCH, depot=Depot(tmp_path))
    again = cubins.load_or_compile(TEXT, "twice", ARCH, depot=Depot(tmp_path))
    assert isinstance(first, Binary)
    assert again == first
    assert len(compiles) == 1
    cubins.load_or_compile(TEXT, "twice", ARCH, options=("-lineinfo",), depot=Depot(tmp_path))
    assert len(compiles) == 2


def test_threads_compile_it_once(compiles, tmp_path):
    found = []
    threads = [
        threading.Thread(
            target=lambda: found.append(cubins.load_or_compile(TEXT, "twice", ARCH, depot=Depot(tmp_path)))
        )
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiles) == 1
    assert len({each.digest for each in found}) == 1


def test_a_broken_entry_is_replaced(compiles, tmp_path):
    first = cubins.load_or_compile(TEXT, "twice", ARCH, depot=Depot(tmp_path))
    (path,) = Depot(tmp_path).folder.glob("cubin.*")
    whole = path.read_bytes()
    for broken in (b"", whole[:1000], whole[:-1], whole[:50] + b"\0" + whole[51:], b"x" * len(whole)):
        path.write_bytes(broken)
        assert cubins.load(TEXT, "twice", ARCH, depot=Depot(tmp_path)) is None
    again = cubins.load_or_compile(TEXT, "twice", ARCH, depot=Depot(tmp_path))
    assert isinstance(again, Binary)
    assert again.registers == first.registers
    assert cubins.load(TEXT, "twice", ARCH, depot=Depot(tmp_path)) == again
    assert len(compiles) == 2


def test_the_machine_code_that_was_measured_goes_first(binary, compiles, tmp_path):
    measured = Binary(**{**vars(binary), "cubin": b"measured", "nvrtc": "12.9"})
    cubins.put(TEXT, measured, ARCH, depot=Depot(tmp_path))
    assert cubins.load_or_compile(TEXT, "twice", ARCH, nvrtc="12.9", depot=Depot(tmp_path)) == measured
    assert not compiles
    assert cubins.load_or_compile(TEXT, "twice", ARCH, nvrtc="12.8", depot=Depot(tmp_path)) != measured
    assert len(compiles) == 1


def test_what_does_not_compile_is_said_each_time(compiles, tmp_path):
    for _ in range(2):
        outcome = cubins.load_or_compile("nonsense", "twice", ARCH, depot=Depot(tmp_path))
        assert isinstance(outcome, Rejected)
    assert len(compiles) == 2
    assert not list(Depot(tmp_path).folder.glob("cubin.*"))


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path):
    (tmp_path / "file").write_text("")
    outcome = cubins.load_or_compile(TEXT, "twice", ARCH, depot=Depot(tmp_path / "file"))
    assert isinstance(outcome, Binary)


FRESH = """
import sys
from pathlib import Path
from autotune.code import cubins
from autotune.code.depot import Depot
from autotune.code.nvrtc import nvrtc
found = cubins.load_or_compile({text!r}, "twice", "sm_90", depot=Depot(Path({root!r})))
print(found.digest, nvrtc.cache_info().currsize)
"""


def test_a_fresh_process_loads_no_compiler(tmp_path):
    program = FRESH.format(text=TEXT, root=str(tmp_path))

    def run():
        return subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout

    first, second = run().split(), run().split()
    assert first[0] == second[0]
    assert (first[1], second[1]) == ("1", "0")


def test_another_nvrtc_is_noticed(tmp_path, monkeypatch):
    from autotune.code import nvrtc

    version = cubins.installed_version(Depot(tmp_path))
    assert version == nvrtc.nvrtc_version()
    monkeypatch.setattr(cubins.library, "nvrtc_identity", lambda: "another file")
    nvrtc.nvrtc.cache_clear()
    # asked anew: what was kept is of the other file
    assert cubins.installed_version(Depot(tmp_path)) == version
    assert nvrtc.nvrtc.cache_info().currsize == 1


def test_machine_code_of_another_build_is_not_taken_for_this_one(binary, compiles, tmp_path, monkeypatch):
    """Two builds of one minor version: what one compiled is not what the other would have."""
    depot = Depot(tmp_path)
    before = Binary(**{**vars(binary), "cubin": b"of 13.0.48", "nvrtc": "13.0.48"})
    cubins.put(TEXT, before, ARCH, depot=depot)
    monkeypatch.setattr(cubins, "installed_version", lambda depot: "13.0.88")
    assert cubins.load(TEXT, "twice", ARCH, depot=depot) is None
    assert cubins.load(TEXT, "twice", ARCH, nvrtc="13.0.88", depot=depot) is None
    assert cubins.load_or_compile(TEXT, "twice", ARCH, nvrtc="13.0.88", depot=depot) != before
    assert len(compiles) == 1
    assert cubins.load_or_compile(TEXT, "twice", ARCH, nvrtc="13.0.48", depot=depot) == before


def test_many_are_found_or_compiled_side_by_side(binary, tmp_path):
    depot = Depot(tmp_path)
    other, wrong = TEXT.replace("2.0f", "3.0f"), TEXT.replace("x[", "y[")
    cubins.put(TEXT, binary, ARCH, depot=depot)
    wanted = {"kept": (TEXT, "twice", None), "new": (other, "twice", None), "wrong": (wrong, "twice", None)}
    wanted["measured"] = (TEXT, "twice", binary.nvrtc)
    outcomes = dict(cubins.load_or_compile_all(wanted, ARCH, depot=depot, workers=2, timeout_s=60))
    assert outcomes["kept"] == outcomes["measured"] == binary
    assert outcomes["kept"].seconds == binary.seconds  # found, not compiled
    assert outcomes["new"] == cubins.load(other, "twice", ARCH, depot=depot)
    assert isinstance(outcomes["wrong"], Rejected)
