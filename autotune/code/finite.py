"""The kernel that finds out whether a problem's operands are finite."""

from __future__ import annotations

from pathlib import Path

from autotune.code.render import Source
from autotune.values.measurement import Launch
from autotune.values.problem import Problem

THREADS = 256
PIECE = 1024  # floats, as in finite.cu
MOST_BLOCKS = 1056  # eight for each of 132 SMs; each reads many pieces


def finite_check(problem: Problem) -> Source:
    """Return the kernel that writes 1 to its last argument where an operand holds an infinity or a NaN.

    It is launched like a multiplication, with one float in the place of C, which must be 0 before. It reads
    each operand once: at 4096 cubed 134 MB.

    Args:
        problem: Shapes, leading dimensions; an operand without gaps counts as one long row.
    """
    facts: dict[str, int] = {}
    blocks = 1
    for name, (rows, cols), ld, stride in (
        ("a", problem.a_shape, problem.lda, problem.stride_a),
        ("b", problem.b_shape, problem.ldb, problem.stride_b),
    ):
        batch = problem.batch if stride else 1
        if ld == cols:
            rows, cols = 1, rows * cols
            if stride == cols:
                batch, cols = 1, batch * cols
        facts |= {f"{name}_rows": batch * rows, f"{name}_cols": cols, f"ld{name}": ld}
        facts |= {f"{name}_matrix": rows, f"{name}_gap": stride - rows * ld if batch > 1 else 0}
        rows *= batch
        blocks = max(blocks, rows * -(-cols // PIECE))
    launch = Launch.of("find_not_finite", (min(blocks, MOST_BLOCKS), 1, 1), (THREADS, 1, 1))
    return Source.of_file(Path(__file__).with_name("finite.cu"), facts, problem, launch)
