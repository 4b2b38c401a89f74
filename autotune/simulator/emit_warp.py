"""Turns PTX instructions of whole warps into Python statements."""

from __future__ import annotations

from autotune.simulator.emitter import Emitter, Handler
from autotune.simulator.ptx import Instruction, split_operands


def _bar(e: Emitter, x: Instruction) -> None:
    if x.parts[:3] != ("bar", "warp", "sync"):
        raise e.unsupported(x)
    e.statement(f"M.sync_warp({e.active})")


def _shfl(e: Emitter, x: Instruction) -> None:
    if x.parts[1] != "sync" or x.parts[2] not in ("up", "down", "bfly", "idx"):
        raise e.unsupported(x)
    targets = [target.strip() for target in x.operands[0].split("|")]
    value, lane, clamp = (e.read(operand, "b32") for operand in x.operands[1:4])
    e.statement(f"t, t2 = warp.shuffle({x.parts[2]!r}, M.lanes, {value}, {lane}, {clamp})")
    for target, name, kind in zip(targets, ("t", "t2"), ("b32", "pred"), strict=False):
        e.write(target, kind, name)


def _vote(e: Emitter, x: Instruction) -> None:
    if x.parts[1] != "sync":
        raise e.unsupported(x)
    condition = e.read(x.operands[1], "pred")
    members = e.read(x.operands[2], "b32")
    name = f"warp.vote_{x.parts[2]}(M.lanes, {condition}, {members}, {e.active})"
    e.write(x.operands[0], "b32" if x.parts[2] == "ballot" else "pred", name)


def _activemask(e: Emitter, x: Instruction) -> None:
    e.write(
        x.operands[0],
        "b32",
        f"warp.vote_ballot(M.lanes, bool_(True), uint32(0xFFFFFFFF), {e.active})",
    )


def _elect(e: Emitter, x: Instruction) -> None:
    leader, elected = (target.strip() for target in x.operands[0].split("|"))
    e.statement(f"t, t2 = warp.elect(M.lanes, {e.read(x.operands[1], 'b32')}, {e.active})")
    e.write(leader, "b32", "t")
    e.write(elected, "pred", "t2")


def _match(e: Emitter, x: Instruction) -> None:
    if x.parts[1:3] != ("any", "sync"):
        raise e.unsupported(x)
    value, members = e.read(x.operands[1], x.parts[-1]), e.read(x.operands[2], "b32")
    e.write(x.operands[0], "b32", f"warp.match_any(M.lanes, {value}, {members}, {e.active})")


def _redux(e: Emitter, x: Instruction) -> None:
    kind = x.parts[-1]
    if x.parts[1] != "sync" or kind[0] == "f":
        raise e.unsupported(x)
    value, members = e.read(x.operands[1], kind), e.read(x.operands[2], "b32")
    call = f"warp.reduce({x.parts[2]!r}, M.lanes, {value}, {members}, {e.active})"
    e.write(x.operands[0], kind, call)


def _mma(e: Emitter, x: Instruction) -> None:
    if x.opcode != "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32":
        raise e.unsupported(x)
    target, a, b, c = (split_operands(operand.strip("{} ")) for operand in x.operands)
    lists = [
        "[" + ", ".join(e.read(name, kind) for name in names) + "]"
        for names, kind in ((a, "b32"), (b, "b32"), (c, "f32"))
    ]
    e.statement(f"t = mma_m16n8k8_tf32(M.lanes.count, {', '.join(lists)})")
    for number, name in enumerate(target):
        e.write(name, "f32", f"t[{number}]")


HANDLERS: dict[str, Handler] = {
    "bar": _bar,
    "shfl": _shfl,
    "vote": _vote,
    "activemask": _activemask,
    "elect": _elect,
    "match": _match,
    "redux": _redux,
    "mma": _mma,
}
