"""Register banks: counts of short listings done by hand, and of a compiled loop."""

from __future__ import annotations

import pytest

from autotune.code.banks import BankReads, bank_reads
from autotune.code.compiler import Binary, compile_text
from autotune.code.sass import main_loop

ALONG_K = """
extern "C" __global__ void product(float* out, const float4* in, int n)
{
    float sums[8][8] = {};
    #pragma unroll 1
    for (int step = 0; step < n; ++step, in += 16) {
        float a[8][4], b[8][4];
        for (int i = 0; i < 8; ++i) {
            *(float4*)a[i] = in[i];
            *(float4*)b[i] = in[8 + i];
        }
        #pragma unroll
        for (int k = 0; k < 4; ++k)
            #pragma unroll
            for (int i = 0; i < 8; ++i)
                #pragma unroll
                for (int j = 0; j < 8; ++j)
                    if (ACROSS)
                        sums[i][j] += a[2 * k + i / 4][i % 4] * b[2 * k + j / 4][j % 4];
                    else
                        sums[i][j] += a[i][k] * b[j][k];
    }
    for (int i = 0; i < 64; ++i)
        out[i] = sums[i / 8][i % 8];
}
"""


def counted(listing: str) -> BankReads:
    found = bank_reads(line.strip().split(" ", 1) for line in listing.strip().splitlines())
    assert found is not None
    return found


def test_two_operands_in_one_bank_are_covered_once_then_wait():
    found = counted("""
        FFMA R1,R2,R4,R1
        FFMA R3,R6,R8,R3
        FFMA R5,R10,R12,R5
    """)
    assert found == BankReads(ffmas=3, others=0, reads=9, waiting=2, waited=2)
    assert found.per_ffma == 3
    assert found.waiting_share == pytest.approx(2 / 3)
    assert found.ffmas_per_clock == pytest.approx(3 / 5)
    assert found.waited_share == pytest.approx(2 / 5)


def test_an_operand_of_each_bank_never_waits():
    found = counted("FFMA R1,R2,2,R1\n" * 8)
    assert (found.reads, found.waited, found.ffmas_per_clock) == (16, 0, 1)


def test_a_late_read_is_made_up_for_by_an_ffma_that_spares_its_bank():
    late, spared = "FFMA R1,R2,R4,R1\n", "FFMA R1,R3,RZ,RZ\n"
    assert counted(late + late).waited == 1
    assert counted(late + spared + late).waited == 0


def test_three_operands_in_one_bank_wait_at_once():
    assert counted("FFMA R0,R2,R4,R6").waited == 1


def test_a_kept_operand_is_not_read_again():
    found = counted("""
        FFMA R1,R2.reuse,R4,R1
        FFMA R3,R2,R6,R3
    """)
    assert (found.reads, found.waited) == (5, 0)


def test_an_operand_is_kept_for_one_instruction_unless_it_says_so_again():
    once = "FFMA R1,R2.reuse,R4,R1\nFFMA R3,R2,R6,R3\nFFMA R5,R2,R8,R5"
    assert counted(once).reads == 3 + 2 + 3
    assert counted(once.replace("R2,R6", "R2.reuse,R6")).reads == 3 + 2 + 2


def test_another_instruction_between_loses_what_was_kept():
    found = counted("""
        FFMA R1,R2.reuse,R4,R1
        LDS.128 R12,[R9+0x790]
        FFMA R3,R2,R6,R3
    """)
    assert found == BankReads(ffmas=2, others=1, reads=6, waiting=1, waited=1)
    assert found.ffmas_per_clock == pytest.approx(2 / 4)


def test_an_operand_is_kept_for_its_own_slot():
    assert counted("FFMA R1,R2.reuse,R4,R1\nFFMA R3,R6,R2,R3").reads == 6
    assert counted("FFMA R1,R2.reuse,R4,R1\nFFMA R3,R2,R6,R3").reads == 5


def test_only_registers_are_read():
    assert counted("FFMA R1,-R2,c[0x0][0x160],RZ").reads == 1
    assert counted("FFMA.FTZ R1,|R2|,UR4,-R7.reuse").reads == 2
    assert counted("FFMA R1,R2,R2,R1").reads == 2  # once for both slots


def test_without_ffmas_there_is_nothing_to_count():
    assert bank_reads([("LDS", "R0,[R1]"), ("HMMA.1688.F32.TF32", "R4,R8,R12,R4"), ("NOP", "")]) is None


def test_operands_read_along_k_wait_more_often_than_those_read_across():
    loops = {}
    for across in (0, 1):
        text = ALONG_K.replace("ACROSS", str(across))
        made = compile_text(text, "product", "sm_90")
        assert isinstance(made, Binary), made
        loop = main_loop(made.cubin, "product")
        assert loop.banks is not None
        assert loop.banks.ffmas == loop.opcodes["FFMA"] == 256
        assert loop.banks.ffmas + loop.banks.others == loop.instructions
        assert 1 < loop.banks.per_ffma < 3
        loops[across] = loop.banks
    along, across = loops[0], loops[1]
    assert along.per_ffma < 2.9  # operands are marked as kept in the listing
    assert along.waiting_share > 2 * across.waiting_share
