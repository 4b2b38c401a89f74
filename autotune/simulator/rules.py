"""The PTX instructions that are one expression, or one call, of their operands: a table of rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from autotune.simulator.emitter import DTYPES, Emitter
from autotune.simulator.ptx import TYPE_BITS, Instruction, integer, natural

_SHORT = {  # in this order: one may hold those that follow
    "<ROUGH>": r"(\.rn|\.approx|\.full)?<FLOAT>",
    "<TOWARDS>": r"\.(?P<mode>rz|rm|rp)\.f32",
    "<WHOLE>": r"\.(?P<mode>r[nzmp]i)<FTZ>",
    "<FLOAT>": r"<FTZ><SAT><F>",
    "<FTZ>": r"(?P<ftz>\.ftz)?",
    "<SAT>": r"(?P<sat>\.sat)?",
    "<F>": r"\.f(16|32|64)",
    "<I>": r"\.[us](8|16|32|64)",
    "<INT>": r"\.[us](16|32|64)",
    "<BITS>": r"\.b(16|32|64)",
    "<MBARRIER>": r"(\.(release|acquire|relaxed|cta|cluster|shared(::cta)?))*\.b64",
}
# Opcode, type of the result, types of the operands, value: a call. Of types, "k" is the last of the opcode,
# "j" the one before it, "w" twice as wide as k; "n" is an amount to shift by, "#" a natural number, "@" the
# address of an mbarrier with what its calls take besides, "*" anything. In a value, types are NumPy's, SHARED
# and LOCAL begin windows of generic addresses. A call of the machine is made even if nobody wants its result.
_TABLE = r"""
add(<INT>|(\.rn)?<FLOAT>)            k  k k      add({0}, {1})
sub(<INT>|(\.rn)?<FLOAT>)            k  k k      subtract({0}, {1})
mul((\.lo)?<INT>|(\.rn)?<FLOAT>)     k  k k      multiply({0}, {1})
mul\.hi<INT>                         k  k k      multiply_high({0}, {1})
mul\.wide\.[us](16|32)               w  k k      multiply({0}, {1}, dtype={w})
mad\.lo<INT>                         k  k k k    add(multiply({0}, {1}), {2})
mad\.hi<INT>                         k  k k k    add(multiply_high({0}, {1}), {2})
mad\.wide\.[us](16|32)               w  k k w    add(multiply({0}, {1}, dtype={w}), {2})
mul24\.(?P<part>hi|lo)\.[us]32       k  k k      multiply24({0}, {1}, {part!r})
mad24\.(?P<part>hi|lo)\.[us]32       k  k k k    add(multiply24({0}, {1}, {part!r}), {2})
dp2a\.(?P<part>hi|lo)\.[us]32\.[us]32  k  j k k  dot_product({0}, {1}, {2}, 2, {part!r})
dp4a\.[us]32\.[us]32                 k  j k k    dot_product({0}, {1}, {2}, 4)
div<INT>                             k  k k      integer_divide({0}, {1})
rem<INT>                             k  k k      integer_remainder({0}, {1})
min<INT>                             k  k k      minimum({0}, {1})
max<INT>                             k  k k      maximum({0}, {1})

div<ROUGH>                           k  k k      divide({0}, {1})
(fma|mad)(\.rn)?<FTZ><SAT>\.f(32|64)  k  k k k  fma{bits}({0}, {1}, {2})
add<TOWARDS>                         k  k k      fma32_directed({0}, float32(1), {1}, {mode!r})
sub<TOWARDS>                         k  k k      fma32_directed({1}, float32(-1), {0}, {mode!r})
mul<TOWARDS>                         k  k k      fma32_directed({0}, {1}, float32(-0.0), {mode!r})
(fma|mad)<TOWARDS>                   k  k k k    fma32_directed({0}, {1}, {2}, {mode!r})
neg(\.s(16|32|64)|<FLOAT>)           k  k        negative({0})
abs(\.s(16|32|64)|<FLOAT>)           k  k        absolute({0})
min<FTZ><F>                          k  k k      fmin({0}, {1})
max<FTZ><F>                          k  k k      fmax({0}, {1})
min<FTZ><F>                          k  k k k    fmin(fmin({0}, {1}), {2})
max<FTZ><F>                          k  k k k    fmax(fmax({0}, {1}), {2})
min<FTZ>\.NaN<F>                     k  k k      minimum({0}, {1})
min<FTZ>\.NaN<F>                     k  k k k    minimum(minimum({0}, {1}), {2})
max<FTZ>\.NaN<F>                     k  k k      maximum({0}, {1})
max<FTZ>\.NaN<F>                     k  k k k    maximum(maximum({0}, {1}), {2})
sqrt<ROUGH>                          k  k        sqrt({0})
rcp<ROUGH>                           k  k        reciprocal({0})
rsqrt<ROUGH>                         k  k        inverse_sqrt({0})
ex2<ROUGH>                           k  k        approximate({0}, 'exp2')
lg2<ROUGH>                           k  k        approximate({0}, 'log2')
(?P<name>sin|cos|tanh)<ROUGH>        k  k        approximate({0}, {name!r})
copysign\.f(32|64)                   k  k k      copysign({1}, {0})
testp\.finite\.f(32|64)              pred  k  isfinite({0})
testp\.infinite\.f(32|64)            pred  k  isinf({0})
testp\.notanumber\.f(32|64)          pred  k  isnan({0})
testp\.number\.f(32|64)              pred  k  equal({0}, {0})

(?P<name>and|or|xor)(\.pred|<BITS>)  k  k k      bitwise_{name}({0}, {1})
not(\.pred|<BITS>)                   k  k        invert({0})
cnot<BITS>                           k  k        equal({0}, 0)
shl<BITS>                            k  k n      left_shift({0}, {1})
shr\.[bus](16|32|64)                 k  k n      right_shift({0}, {1})
shf\.(?P<side>[lr])\.(?P<mode>wrap|clamp)\.b32  k  k k k  funnel({0}, {1}, {2}, {side!r}, {mode!r})
bfe\.[us](32|64)                     k  k u32 u32  extract_bits({0}, {1}, {2})
bfi\.b(32|64)                        k  k k u32 u32  insert_bits({0}, {1}, {2}, {3})
bfind(?P<amount>\.shiftamt)?\.[us](32|64)  u32  k  find_bit({0}, {amount!r})
popc\.b(32|64)                       u32  k  count_bits({0})
clz\.b(32|64)                        u32  k  leading_zeros({0})
brev\.b(32|64)                       k  k        reverse_bits({0})
prmt\.b32                            k  k k k    permute_bytes({0}, {1}, {2})
lop3\.b32                            k  k k k #  logic3({0}, {1}, {2}, {3})

selp\.[busf](16|32|64)               k  k k pred  where({2}, {0}, {1})
slct(\.ftz)?\.[busf](16|32|64)\.(s32|f32)  j  j j k  where(greater_equal({2}, 0), {0}, {1})
isspacep\.(?P<space>global|shared|local|param|const)  pred  u64  in_space({0}, {space!r})
mapa(\.shared::cluster)?\.u(32|64)   k  k u32    of_block({0}, {1})
cvta\.shared\.u64                    k  k        add({0}, SHARED)
cvta\.local\.u64                     k  k        add({0}, LOCAL)
cvta\.to\.shared\.u64                k  k        subtract({0}, SHARED)
cvta\.to\.local\.u64                 k  k        subtract({0}, LOCAL)
cvta(\.to)?\.(global|const)\.u64     k  k        positive({0})
cvt\.rn\.f16x2\.f32                  b32  f32 f32  pack_halves({0}, {1})
cvt\.(?P<mode>rna?)\.tf32\.f32       b32  f32  round_tf32({0}, {mode!r})
cvt\.(?P<mode>rz|rm|rp)\.f32\.(f64|[su]32)  j  k  round_directed({0}.astype(float64), 0, {mode!r})
cvt(\.rn)?<FTZ><SAT><F>(<F>|<I>)     j  k        {0}.astype({j})
cvt<WHOLE><SAT><F><F>                j  k        round_whole({0}, {mode!r}).astype({j})
cvt<WHOLE>(\.sat)?<I><F>             j  k        float_to_integer({0}, {mode!r}, {j})
cvt\.sat<I><I>                       j  k        saturate_integer({0}, {j})
cvt<I><I>                            j  k        {0}.astype({j})
createpolicy\.fractional\.[\w.:]+\.b64  k  *  uint64(0)
(prefetch|nanosleep)[\w.:]*          -  *        pass
discard[\w.:]*                       -  * *      pass
griddepcontrol\.\w+                  -  -        pass

bar\.warp\.sync                      -  b32      M.sync_warp({active})
shfl\.sync\.(?P<mode>up|down|bfly|idx)\.b32  b32|pred  k k k k  M.shuffle({mode!r}, {all}, {active})
vote\.sync\.(?P<name>all|any|uni)\.pred  k  k b32  warp.vote_{name}(M.lanes, {all}, {active})
vote\.sync\.ballot\.b32              k  pred b32  warp.vote_ballot(M.lanes, {all}, {active})
activemask\.b32                      k  -  warp.vote_ballot(M.lanes, bool_(1), uint32(2**32 - 1), {active})
match\.any\.sync\.b(32|64)           b32  k b32  warp.match_any(M.lanes, {all}, {active})
redux\.sync\.(?P<how>add|min|max|and|x?or)\.[bus]32  k  k b32  warp.reduce({how!r}, M.lanes, {all}, {active})
elect\.sync                          b32|pred  b32  warp.elect(M.lanes, {all}, {active})
setmaxnreg\.(inc|dec)\.sync\.aligned\.u32  -  #  pass

wgmma\.fence\.sync\.aligned          -  -        M.wgmma_fence({active})
wgmma\.commit_group\.sync\.aligned   -  -        M.wgmma_commit({active})
wgmma\.wait_group\.sync\.aligned     -  #        M.wgmma_wait({0}, {active})
cp\.async\.commit_group              -  -        M.async_copies.commit({active})
cp\.async\.wait_group                -  #        M.async_copies.wait({0}, {active})
cp\.async\.wait_all                  -  -        M.async_copies.wait(None, {active})
cp\.async\.mbarrier\.arrive(?P<noinc>\.noinc)?<MBARRIER>  -  @  M.copies_arrive({0}, {noinc!r})
mbarrier\.init<MBARRIER>             -  @ u32    M.mbarrier_init({all})
mbarrier\.inval<MBARRIER>            -  @        pass
mbarrier\.expect_tx<MBARRIER>        -  @ u32    M.mbarrier_expect({all})
mbarrier\.arrive<MBARRIER>           b64  @  M.mbarrier_arrive({0}, uint32(1))
mbarrier\.arrive<MBARRIER>           b64  @ u32  M.mbarrier_arrive({all})
mbarrier\.arrive\.expect_tx<MBARRIER>  b64  @ u32  M.mbarrier_arrive({0}, uint32(1), {1})
mbarrier\.(try|test)_wait\.parity<MBARRIER>  pred  @ u32  M.mbarrier_wait({all})
mbarrier\.try_wait\.parity<MBARRIER>  pred  @ u32 u32  M.mbarrier_wait({0}, {1})
mbarrier\.(try|test)_wait<MBARRIER>  pred  @ b64  M.mbarrier_wait({all})
mbarrier\.try_wait<MBARRIER>         pred  @ b64 u32  M.mbarrier_wait({0}, {1})
"""


def _read_table() -> Iterator[tuple[re.Pattern[str], list[str], list[str], str]]:
    for line in filter(None, _TABLE.splitlines()):
        opcode, results, operands, value = re.split(r"\s{2,}", line)
        for word, meaning in _SHORT.items():
            opcode = opcode.replace(word, meaning)
        yield re.compile(opcode), results.strip("-").split("|"), operands.strip("-").split(), value


_RULES = tuple(_read_table())


@lru_cache(maxsize=4096)
def _find(opcode: str, operands: int) -> tuple[list[str], list[str], str, dict[str, str | None]] | None:
    for form, results, kinds, value in _RULES:
        found = form.fullmatch(opcode) if any(results) + len(kinds) == operands else None
        if found:
            return results, kinds, value, found.groupdict()
    return None


def rule_of(x: Instruction) -> tuple[list[str], list[str], str, dict[str, str | None]] | None:
    """Return (types of the results, types of the operands, value, named parts of the opcode), or None."""
    return _find(x.opcode, len(x.operands))


def emit_rule(e: Emitter, x: Instruction) -> None:
    """Write the statements for an instruction that has a rule."""
    rule = rule_of(x)
    assert rule is not None
    results, kinds, value, parts = rule
    own = x.parts[-1]
    spelled = {"k": own, "j": x.parts[-2], "w": f"{own[0]}{2 * TYPE_BITS.get(own, 0)}"}
    results, kinds = ([spelled.get(kind, kind) for kind in each] for each in (results, kinds))
    given = x.operands[any(results) :]
    operands = [_operand(e, x, operand, kind) for operand, kind in zip(given, kinds, strict=True)]
    if parts.get("ftz"):
        operands, value = [f"flush({operand})" for operand in operands], f"flush({value})"
    if parts.get("sat"):
        value = f"saturate({value})"
    names = {short: np.dtype(DTYPES[kind]).name for short, kind in spelled.items() if kind in DTYPES}
    words = {**parts, **names, "all": ", ".join(operands), "active": e.active, "bits": TYPE_BITS.get(own)}
    text = value.format(*operands, **words)
    if not any(results):
        e.statement(text)
    elif len(results) == 1 and text[:2] != "M.":
        e.call(x.operands[0], results[0], text)
    else:
        targets = [target.strip() for target in x.operands[0].split("|")]
        e.statement(f"{', '.join(['t', 't2'][: len(results)])} = {text}")
        for target, kind, name in zip(targets, results[: len(targets)], ("t", "t2"), strict=False):
            e.write(target, kind, name)


def _operand(e: Emitter, x: Instruction, operand: str, kind: str) -> str:
    """Return the text of an operand of one of the types of the table."""
    if kind == "#":
        return str(natural(operand))
    if kind == "@":
        address, offset = e.address(operand)
        return f"{e.access(x, 'mbarrier', 'mbarrier', 'b64', 1, offset)}, {address}, {e.active}"
    if kind != "n":
        return operand if kind == "*" else e.read(operand, kind)
    own, bits = x.parts[-1], TYPE_BITS[x.parts[-1]]
    if operand not in e.rows:
        return e.constant(min(integer(operand) & 0xFFFFFFFF, bits), own)
    amount = f"minimum({e.row(operand, 'u32')}, {e.constant(bits, 'u32')})"
    return f"{amount}.astype({np.dtype(DTYPES[own]).name})"
