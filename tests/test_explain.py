"""The account of a kernel: the field's figures for configs whose figures are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.cli.explain import source_text, text
from autotune.code import sass
from autotune.code.banks import BankReads
from autotune.errors import ConfigError, ToolchainError
from autotune.families import estimate
from autotune.measure.proof import small_problem
from autotune.records import Store
from autotune.report.explain import differing, explain
from autotune.report.limit import RELIEF, limit_of
from autotune.space.space import Space
from autotune.values.device import named_device
from autotune.values.problem import Problem

H200 = named_device("h200")
SGEMM = Space.load("sgemm")
LARGE = Problem(4096, 4096, 4096)
CACHE = Path(__file__).resolve().parents[1] / "cache"


@pytest.fixture(scope="module")
def long_block():
    return explain(SGEMM, SGEMM.presets["long_block"], LARGE, H200, title="long_block")


@pytest.fixture(scope="module")
def tiny_block():
    return explain(SGEMM, SGEMM.presets["tiny_block"], LARGE, H200, title="tiny_block")


def test_the_algorithm_is_counted(long_block):
    assert long_block.global_loads == 4096 / 64 + 4096 / 256
    assert long_block.shared_reads == 4096 * 16 / 64
    assert long_block.tile_intensity == pytest.approx(64 * 256 / (2 * (64 + 256)))
    assert long_block.problem_intensity == pytest.approx(4096 / 6)
    assert long_block.roofline_ms == pytest.approx(LARGE.flops / H200.peak_gflops * 1e-6)


def test_residency_follows_from_what_was_compiled(long_block):
    held, binary = long_block.occupancy, long_block.binary
    assert 120 <= binary.registers <= 128
    assert held.limits["registers"] == 2
    assert held.blocks == 2
    assert held.limited_by == ("registers",)
    assert long_block.waves == pytest.approx(1024 / (2 * 132))
    assert long_block.wave_efficiency == pytest.approx(1024 / (8 * 132))


def test_the_main_loop_is_read_from_machine_code(long_block):
    loop = long_block.loop
    assert loop is not None
    assert loop.opcodes["FFMA"] == 8 * 8 * 8 * 3  # TM TN BK, unrolled by three stages
    assert 0.88 < loop.share("FFMA") < 0.95
    assert loop.ratio("LDS") == pytest.approx(1 / 16, rel=0.15)  # 4 LDS.128 for 64 FFMAs
    assert loop.ratio("LDGSTS") > 0


def test_register_banks_are_counted_in_the_main_loop(long_block):
    banks = long_block.banks
    assert banks.ffmas == long_block.loop.opcodes["FFMA"]
    assert 2 < banks.per_ffma < 2.5  # the sum and one operand; the other is kept for most
    assert 0.75 < banks.ffmas_per_clock < long_block.loop.share("FFMA")
    assert f"at most {banks.ffmas_per_clock:.3f} FFMAs per clock" in text([long_block])
    assert long_block.plain()["main_loop"]["register_banks"]["ffmas_per_clock"] == banks.ffmas_per_clock


def test_operands_kept_along_k_are_limited_by_register_banks(long_block):
    deep = Problem(64, 64, 64000, "nt")
    found = explain(SGEMM, SGEMM.presets["deep_block"], deep, H200, title="deep_block")
    assert found.banks.ffmas_per_clock < 0.72
    assert found.bottleneck == "banks"
    assert f"wait for {found.banks.waited_share:.0%} of the issue time" in text([found])
    assert "read_k = 4" in found.relief
    both = text([long_block, found])
    shown = next(line for line in both.splitlines() if "register banks  " in line)
    assert shown.startswith("* ")
    assert shown.count("reads per FFMA") == 2


def test_banks_limit_where_they_take_more_than_a_little_and_than_other_instructions():
    config = SGEMM.presets["long_block"]
    modelled = estimate.estimate(SGEMM, SGEMM.values(config, LARGE, H200), LARGE, H200)

    def limit(waited: int, others: int) -> str:
        banks = BankReads(1000, others, 2500, waited, waited)
        return limit_of(SGEMM, LARGE, H200, 1024, 1, modelled, banks).name

    assert limit(200, 100) == "banks"
    assert limit(200, 300) == "issue"
    assert limit(100, 50) == "issue"
    assert limit_of(SGEMM, LARGE, H200, 1024, 1, modelled).name == "issue"


@pytest.mark.parametrize("device", ["a100", "b200"])
def test_register_banks_are_not_counted_where_they_limit_no_ffma_or_are_unknown(device):
    found = explain(SGEMM, SGEMM.presets["long_block"], LARGE, named_device(device))
    assert found.loop is not None
    assert found.banks is None
    assert found.plain()["main_loop"]["register_banks"] is None
    assert "register banks" not in text([found])


def test_without_a_disassembler_the_rest_is_told(monkeypatch):
    def missing() -> str:
        raise ToolchainError("nvdisasm is not installed")

    monkeypatch.setattr(sass, "nvdisasm", missing)
    found = explain(SGEMM, SGEMM.presets["deep_block"], Problem(64, 64, 64000, "nt"), H200)
    assert found.loop is None
    assert found.banks is None
    assert found.bottleneck == "issue"
    assert "register banks" not in text([found])


def test_memory_accesses_are_counted_in_the_simulator(long_block, tiny_block):
    traffic = long_block.traffic
    assert traffic["global st"].per_request == 16  # 32 lanes write 16 bytes each, whole sectors
    assert traffic["shared ld"].conflict_factor == 1
    assert "global ld" not in traffic  # everything is copied asynchronously
    copies = traffic["global copy"]
    tile = 4 * long_block.miniature.k * (64 + 256)  # bytes of A and B that the miniature's one block needs
    assert copies.units * 32 == tile
    assert tiny_block.traffic["shared copy"].conflict_factor > 1  # 4-byte copies across rows of 36 floats


def test_the_source_view_accounts_for_every_counter(long_block):
    shown = source_text(long_block)
    lines = dict(enumerate(long_block.miniature_source.text.splitlines(), 1))
    ffma = "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum"
    hot = max(long_block.lines, key=lambda line: long_block.lines[line].get(ffma, 0))
    assert "acc[i][j] += reg_m[half][i] * reg_n[half][j]" in lines[hot]
    small = long_block.miniature
    assert long_block.lines[hot][ffma] == small.m * small.n * small.k
    assert len(shown.splitlines()) == len(lines) + 2


def test_the_record_gives_the_measured_time():
    record = Store(CACHE).find(H200, "sgemm", LARGE)
    assert record is not None
    assert record.timing is not None
    found = explain(SGEMM, SGEMM.config(record.config), LARGE, H200, record=record)
    assert found.median_ms == record.timing.median_ms
    assert found.gflops == pytest.approx(record.gflops, rel=1e-3)
    assert "of the roofline" in text([found])


def test_without_a_record_no_time_is_claimed(long_block):
    assert long_block.median_ms is None
    assert long_block.gflops is None
    assert "measured" not in text([long_block]).replace("not a measurement", "")


def test_two_kernels_side_by_side_name_what_differs(long_block, tiny_block):
    assert "BM 64 | 32" in differing(long_block, tiny_block)
    shown = text([long_block, tiny_block])
    assert "they differ in BM 64 | 32" in shown
    assert differing(long_block, long_block) == []


def test_the_bottleneck_is_named_with_its_relief(long_block, tiny_block):
    assert long_block.bottleneck == "issue"
    assert tiny_block.bottleneck == "shared"
    for account in (long_block, tiny_block):
        assert RELIEF[account.bottleneck][0] in text([account])
    few = Problem(1536, 1536, 4096)
    quantised = SGEMM.config({**SGEMM.presets["square_block"], "group_m": 1})
    found = explain(SGEMM, quantised, few, H200)
    assert found.bottleneck == "waves"
    assert "the 144 blocks keep the 132 SMs busy for 55% of the time" in text([found])


def test_fewer_blocks_than_sms_are_no_wave_quantisation():
    config = SGEMM.config({**SGEMM.presets["square_block"], "group_m": 1})
    small = Problem(512, 1024, 4096)
    found = explain(SGEMM, config, small, H200)
    assert found.bottleneck == "fill"
    assert "too few blocks (32): 100 of the 132 SMs have no work" in text([found])
    naive = Space.load("naive")
    lonely = explain(naive, next(iter(naive.presets.values())), Problem(16, 16, 4096), H200)
    assert (lonely.bottleneck, lonely.because[:15]) == ("fill", "too few blocks ")


def test_the_account_is_plain_json(long_block):
    plain = json.loads(json.dumps(long_block.plain()))
    assert plain["blocks_per_sm"] == {"registers": 2, "shared": 7, "warps": 8, "blocks": 32, "resident": 2}
    assert plain["median_ms"] is None
    assert plain["relief"] == RELIEF["issue"][1]


@pytest.mark.parametrize(
    "problem", [Problem(4095, 4097, 1023), Problem(5, 3, 2), Problem(130, 4096, 17, "tt", 1)]
)
def test_a_miniature_keeps_edges_and_remainders(problem):
    legal = SGEMM.enumerate(problem, H200)
    for index in range(0, len(legal), max(1, len(legal) // 7)):
        config = legal.config(index)
        small = small_problem(SGEMM, config, problem, H200, tiles=1)
        assert SGEMM.violations(config, small, H200) == []
        assert small.m <= problem.m
        assert small.n <= problem.n
        for name, tile in (("m", "BM"), ("n", "BN"), ("k", "BK")):
            assert getattr(small, name) % config[tile] == getattr(problem, name) % config[tile]


def test_an_illegal_config_names_each_violated_constraint():
    config = SGEMM.config({**SGEMM.presets["long_block"], "loader": "reg", "LM": 16})
    with pytest.raises(ConfigError, match=r"reg_stages: needs .*stages = 3"):
        explain(SGEMM, config, LARGE, H200)


def test_kernels_on_tensor_cores_are_explained_in_their_own_terms():
    cube = Problem(4096, 4096, 4096, math="3xtf32")
    space = Space.load("sgemm_3xtf32_wgmma")
    fast = explain(space, space.presets["two_warpgroups"], cube, H200, title="two_warpgroups")
    assert fast.bottleneck == "tensor"
    assert "limited by the tensor cores: each FP32 product is three of theirs" in text([fast])
    assert fast.loop.multiply == "HGMMA"
    assert fast.banks is None
    assert fast.ridge == pytest.approx(H200.peak("3xtf32") / H200.bandwidth_gbs)
    warps = Space.load("sgemm_3xtf32")
    for family in (space, warps):
        own = {**RELIEF, **estimate.relief(family)}
        resources = ("tensor", "issue", "shared", "stall", "l2", "dram")
        assert "FFMA" not in "".join("".join(own[name]) for name in resources)
    assert "splits" in estimate.relief(space)["stall"][1]
    assert "splits =" not in str(estimate.relief(warps))
    assert estimate.relief(SGEMM) == {}
