"""The committed records: each still describes the code that its config renders to."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_records import H200, SGEMM, fitted, made

from autotune import records
from autotune.code.render import render
from autotune.kernel import best
from autotune.kernel.choices import Choices
from autotune.records import Store
from autotune.space.space import Space
from autotune.values.device import named_device
from autotune.values.problem import Problem

CACHE = Path(__file__).resolve().parents[1] / "cache"
FILES = sorted(CACHE.glob("*/*_f32_*.json"))


def test_there_are_records_of_the_h200():
    assert {path.parent.name for path in FILES} >= {"NVIDIA_H200"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_committed_record_serves(path):
    record = records.read(path)
    device = named_device(record.device.name)
    space = Space.load(record.family)
    source = render(space, space.config(record.config), record.problem, device)
    assert records.serves(record, device, record.problem, source) is None
    assert Store(CACHE).path(device, record.family, record.problem) == path


def test_every_committed_record_serves_without_a_warning(monkeypatch):
    """As on its GPU, with that driver and NVRTC: that templates or spaces were tidied does not count."""
    warnings.simplefilter("error")  # pytest restores the filters
    for path in FILES:
        record = records.read(path)
        monkeypatch.setattr(best, "driver_version", lambda record=record: record.toolchain.driver)
        device, spaces = named_device(record.device.name), [Space.load(record.family)]
        choice = next(Choices(record.problem, device, Store(CACHE), spaces=spaces).exact())
        assert choice.record == record
        binary = SimpleNamespace(nvrtc=record.toolchain.nvrtc, digest=record.machine_code_digest)
        assert list(best._differences(choice, binary, SimpleNamespace(ordinal=0))) == []
    assert len(FILES) >= 37


def test_other_machine_code_of_the_same_text_is_told(tmp_path, monkeypatch):
    problem = Problem(200, 136, 72)
    record = made(problem, machine_code_digest="a" * 64, others=[fitted(problem, "small_block")])
    store = Store(tmp_path)
    store.write(record)
    monkeypatch.setattr(best, "driver_version", lambda: record.toolchain.driver)
    winner, other = list(Choices(problem, H200, store, spaces=[SGEMM]).exact())
    on_a_gpu = SimpleNamespace(ordinal=0)
    for digest, count in (("a" * 64, 0), ("b" * 64, 1)):
        binary = SimpleNamespace(nvrtc=record.toolchain.nvrtc, digest=digest)
        told = list(best._differences(winner, binary, on_a_gpu))
        assert len(told) == count
        assert all("NVRTC made other machine code of the same text" in line for line in told)
        assert list(best._differences(other, binary, on_a_gpu)) == []  # the digest is the winner's


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_committed_record_is_a_verified_measurement(path):
    record = records.read(path)
    assert record.evidence == "measured"
    assert record.timing is not None
    assert record.gflops == pytest.approx(record.problem.flops / record.timing.median_ms / 1e6, rel=1e-3)
    assert record.cublas is not None
    assert record.vs_cublas == pytest.approx(record.cublas.median_ms / record.timing.median_ms, rel=1e-3)
    assert record.verification.error <= record.verification.bound
