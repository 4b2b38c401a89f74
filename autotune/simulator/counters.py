"""Counts instructions and memory traffic as Nsight Compute names them, per kernel and per source line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autotune.simulator.emitter import Access
from autotune.simulator.program import Program

INSTRUCTIONS = "smsp__inst_executed.sum"
THREAD_INSTRUCTIONS = "smsp__thread_inst_executed.sum"
FFMA = "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum"
FADD = "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum"
FMUL = "smsp__sass_thread_inst_executed_op_fmul_pred_on.sum"
GLOBAL_REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_{}.sum"
GLOBAL_SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_{}.sum"
SHARED_REQUESTS = "smsp__inst_executed_op_shared_{}.sum"
SHARED_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{}.sum"
SHARED_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{}.sum"
_KINDS = ("ld", "st", "atom", "ldgsts")
_TRAFFIC = (GLOBAL_REQUESTS, GLOBAL_SECTORS, SHARED_REQUESTS, SHARED_WAVEFRONTS, SHARED_CONFLICTS)
_FLOAT_METRICS = {"fma": FFMA, "add": FADD, "sub": FADD, "mul": FMUL}
METRICS = (
    INSTRUCTIONS,
    THREAD_INSTRUCTIONS,
    FFMA,
    FADD,
    FMUL,
    *(metric.format(kind) for metric in _TRAFFIC for kind in _KINDS),
)


@dataclass(frozen=True)
class Counters:
    """Instructions and memory traffic of one launch.

    Instructions are PTX instructions (the hardware executes SASS, which has other address arithmetic and
    moves). Memory traffic and floating-point operations are the hardware's numbers, but for a few wavefronts
    in ten thousand that it adds to shared reads. What cp.async loads counts as "ld", as it does there, and
    again as "ldgsts"; the wavefronts of its shared side are this simulator's own, unlike the hardware's.
    Bulk copies do not pass the load-store unit and are not counted. Accesses to shared memory of another
    block of the cluster count as shared ones of the block that makes them, which was not compared.

    Attributes:
        metrics: Nsight Compute's name of each metric to its value over the whole launch.
        lines: CUDA source line to the metrics of that line which are not zero; line 0 gathers what has none.
        opcodes: PTX opcode to executed warp instructions.
        thread_opcodes: PTX opcode to executed thread instructions, predicated-off threads left out.
    """

    metrics: Mapping[str, int]
    lines: Mapping[int, Mapping[str, int]]
    opcodes: Mapping[str, int]
    thread_opcodes: Mapping[str, int]

    def __getitem__(self, metric: str) -> int:
        return self.metrics[metric]


class Tally:
    """Collects numbers while a kernel runs."""

    def __init__(self, program: Program) -> None:
        self.program = program
        blocks = len(program.blocks)
        self.block_warps = np.zeros(blocks, np.int64)
        self.block_threads = np.zeros(blocks, np.int64)
        self.predicated: Counter[int] = Counter()  # instruction -> threads whose predicate held
        self.traffic: Counter[tuple[Access, str]] = Counter()

    def add_block(self, number: int, warps: int, threads: int) -> None:
        """Count one execution of a basic block."""
        self.block_warps[number] += warps
        self.block_threads[number] += threads

    def add_global(self, access: Access, requests: int, sectors: int) -> None:
        """Count the traffic of one execution of a global access."""
        self.traffic[access, GLOBAL_REQUESTS] += requests
        self.traffic[access, GLOBAL_SECTORS] += sectors

    def add_shared(self, access: Access, traffic: tuple[int, int, int]) -> None:
        """Count requests, wavefronts and conflicts of one execution of a shared access."""
        requests, wavefronts, ideal = traffic
        self.traffic[access, SHARED_REQUESTS] += requests
        self.traffic[access, SHARED_WAVEFRONTS] += wavefronts
        self.traffic[access, SHARED_CONFLICTS] += wavefronts - ideal

    def counters(self) -> Counters:
        """Return the sums."""
        total: Counter[str] = Counter(dict.fromkeys(METRICS, 0))
        lines: dict[int, Counter[str]] = {}
        opcodes: Counter[str] = Counter()
        thread_opcodes: Counter[str] = Counter()

        def count(line: int, metric: str, amount: int) -> None:
            if amount:
                total[metric] += amount
                lines.setdefault(line, Counter())[metric] += amount

        instructions = self.program.kernel.instructions
        for number, block in enumerate(self.program.blocks):
            warps, threads = int(self.block_warps[number]), int(self.block_threads[number])
            if not warps:
                continue
            for index in range(block.start, block.stop + (block.control is not None)):
                x = instructions[index]
                on = self.predicated[index] if x.predicate is not None and index < block.stop else threads
                opcodes[x.opcode] += warps
                thread_opcodes[x.opcode] += on
                count(x.line, INSTRUCTIONS, warps)
                count(x.line, THREAD_INSTRUCTIONS, threads)
                if x.parts[-1] == "f32" and x.parts[0] in _FLOAT_METRICS:
                    count(x.line, _FLOAT_METRICS[x.parts[0]], on)
        for (access, metric), amount in self.traffic.items():
            count(access.line, metric.format(access.kind), amount)
            if access.kind == "ldgsts" and metric in (GLOBAL_REQUESTS, GLOBAL_SECTORS):
                count(access.line, metric.format("ld"), amount)  # the hardware counts them as loads too
        return Counters(
            dict(total),
            {line: dict(found) for line, found in sorted(lines.items())},
            dict(opcodes),
            dict(thread_opcodes),
        )
