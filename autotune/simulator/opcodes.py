"""Writes the Python statements that execute one PTX instruction, by its rule or by a handler."""

from __future__ import annotations

from autotune.simulator import emit_memory, emit_moves, emit_warp
from autotune.simulator.emitter import Emitter, Handler, Layout, unsupported
from autotune.simulator.ptx import Instruction
from autotune.simulator.rules import emit_rule, rule_of

_HANDLERS: dict[str, Handler] = {**emit_moves.HANDLERS, **emit_memory.HANDLERS, **emit_warp.HANDLERS}
# Opcode to (how many operands it may have, first letters of the types that it ends with).
_FORMS = {"setp": ("34", "busf"), "set": ("3", "busf"), "mov": ("2", "busfp"), "ldmatrix": ("2", "b")}
_CONTROL = ("bra", "brx", "ret", "exit", "bar", "barrier", "trap")
_WARP_WIDE = ("shfl", "vote", "match", "redux", "mma", "ldmatrix", "elect", "wgmma", "setmaxnreg")
WHOLE_WARPGROUP = ("wgmma", "setmaxnreg")
WHOLE_WARP = ("mma", "ldmatrix", *WHOLE_WARPGROUP)  # those that name no lanes: all must come


def is_warp_wide(x: Instruction) -> bool:
    """Return whether the lanes of a warp must arrive together: shfl.sync, mma.sync and the like."""
    return x.parts[0] in _WARP_WIDE or x.parts[:2] == ("bar", "warp")


def is_control(x: Instruction) -> bool:
    """Return whether an instruction may send lanes elsewhere or make them wait for their block."""
    return x.parts[0] in _CONTROL and not is_warp_wide(x)


def emit(layout: Layout, x: Instruction, index: int, masked: bool) -> list[str]:
    """Return the statements for one instruction that is not a control transfer.

    Args:
        layout: Of its kernel.
        x: The instruction.
        index: Its position in the kernel.
        masked: Whether only the lanes of the mask ``m`` run.

    Raises:
        UnsupportedPTX: Its opcode, a modifier or an operand is unknown.
    """
    handler = _HANDLERS.get(x.parts[0]) if rule_of(x) is None else emit_rule
    if handler is None:
        raise unsupported(x)
    counts, kinds = _FORMS.get(x.parts[0], ("", ""))
    if (counts and str(len(x.operands)) not in counts) or (kinds and x.parts[-1][0:1] not in kinds):
        raise unsupported(x)
    guard = []
    try:
        if x.predicate is not None:
            condition = Emitter(layout, index, None).row(x.predicate, "pred")
            condition = f"invert({condition})" if x.negated else condition
            guard = [f"q = {condition}{' & m' if masked else ''}", f"M.predicated({index}, q)"]
        emitter = Emitter(layout, index, "q" if guard else "m" if masked else None)
        handler(emitter, x)
    except (KeyError, IndexError, ValueError, TypeError, StopIteration, OverflowError):
        raise unsupported(x) from None
    return guard + emitter.lines
