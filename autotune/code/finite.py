"""The kernel that finds out whether a problem's operands are finite."""

from __future__ import annotations

import hashlib
from pathlib import Path

from autotune.code.render import Source
from autotune.space.space import Config
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
    for name, (rows, cols), ld in (
        ("a", problem.a_shape, problem.lda),
        ("b", problem.b_shape, problem.ldb),
    ):
        if ld == cols:
            rows, cols = 1, rows * cols
        facts |= {f"{name}_rows": rows, f"{name}_cols": cols, f"ld{name}": ld}
        blocks = max(blocks, rows * -(-cols // PIECE))
    text = Path(__file__).with_name("finite.cu").read_text(encoding="utf-8")
    text = "".join(f"constexpr long long {name} = {value};\n" for name, value in facts.items()) + text
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Source(
        family="finite",
        config=Config({}),
        problem=problem,
        text=text,
        entry="find_not_finite",
        launch=Launch.of("find_not_finite", (min(blocks, MOST_BLOCKS), 1, 1), (THREADS, 1, 1)),
        code_digest=digest,
        template_digest=digest,
        space_digest=digest,
    )
