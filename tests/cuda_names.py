"""Finds the names that a piece of CUDA C++ declares and those that it mentions.

It knows as much of the grammar as the kernels here need, formatted as they are: the `<` of a template follows
a name without a blank, that of a comparison does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LEFT_OUT = re.compile(
    r'(?P<text>"(?:\\.|[^"\\\n])*")|//[^\n]*|^\s*#[^\n]*|\bextern "C"|'
    r"\b(?:__launch_bounds__|__align__|alignas)\([^()]*\)",
    re.MULTILINE,
)
_TOKEN = re.compile(
    r"[A-Za-z_]\w*|\.?\d[\w.]*|(?<=\w)<(?=\w)|(?<=^template )<|[-+*/%&|^<>=!]=|->|::|<<|&&|\|\||\+\+|--|\S",
    re.MULTILINE,
)
_CLOSE = {"(": ")", "[": "]", "{": "}", "<": ">"}
_TYPES = {"auto", "bool", "char", "double", "float", "int", "long", "short", "unsigned", "void", "const"}
_CONTROL = {
    "asm",
    "break",
    "continue",
    "do",
    "else",
    "for",
    "if",
    "namespace",
    "return",
    "static_assert",
    "while",
}


@dataclass(frozen=True)
class Group:
    """What stands between two brackets."""

    opening: str
    inside: tuple[Token, ...]


Token = str | Group


def names(text: str) -> tuple[set[str], set[str], set[str]]:
    """Return what a text declares in its own scope, what it declares at all, and the names it mentions."""
    bare = _LEFT_OUT.sub(lambda found: '""' if found["text"] else " ", text)
    tokens = tuple(_grouped(_TOKEN.finditer(bare.replace('""', " ")), ""))
    return set(_declared(tokens)), set(_declared_anywhere(tokens)), set(_mentioned(tokens))


def _grouped(found: Iterator[re.Match[str]], until: str) -> Iterator[Token]:
    for each in found:
        if each[0] == until:
            return
        angle = each[0] == "<" and each.string[each.end()] != " "
        if angle or each[0] in ("(", "[", "{"):
            yield Group(each[0], tuple(_grouped(found, _CLOSE[each[0]])))
        else:
            yield each[0]


def _split(tokens: tuple[Token, ...], between: str) -> Iterator[tuple[Token, ...]]:
    """Yield statements or, between commas, their pieces; the braces of a body end a statement too."""
    first = 0
    for index, token in enumerate(tokens):
        body = between == ";" and isinstance(token, Group) and token.opening == "{"
        if token == between:
            yield tokens[first:index]
            first = index + 1
        elif (
            body
            and tokens[index - 1 : index] != ("=",)
            and tokens[index + 1 : index + 2] not in ((";",), (".",))
        ):
            yield tokens[first : index + 1]
            first = index + 1
    yield tokens[first:]


def _declared(tokens: tuple[Token, ...]) -> Iterator[str]:
    """Yield what statements declare, but not what those inside them do."""
    for statement in _split(tokens, ";"):
        left = statement[2:] if statement[:1] == ("template",) else statement
        if not left or left[0] in _CONTROL:
            continue
        if left[0] in ("struct", "using"):
            yield from (token for token in (left[-1 if "::" in left else 1],) if isinstance(token, str))
            continue
        first, *others = _split(left, ",")
        name = _name(first)
        if name:
            yield name
            yield from (_name(other) or str(next(filter(_is_name, other))) for other in others)


def _is_name(token: Token) -> bool:
    return isinstance(token, str) and re.match(r"[A-Za-z_]", token) is not None


def _name(piece: tuple[Token, ...]) -> str:
    """Return what a type followed by a name declares; nothing if the piece is something else."""
    before: list[str] = []
    for token in piece:
        if isinstance(token, Group) and token.opening != "<":
            reference = token.opening == "(" and token.inside[:1] in (("&",), ("*",))
            before += [str(token.inside[1])] if reference and before and before[-1] in _TYPES else []
            break
        if token == "=":
            break
        if isinstance(token, str):
            before.append(token)
    if not all(_is_name(token) or token in ("*", "&", "::") for token in before):
        return ""
    typed = len(before) > 1 and _is_name(before[0]) and before[-2] != "::" and _is_name(before[-1])
    return before[-1] if typed and before[-1] not in _TYPES else ""


def _declared_anywhere(tokens: tuple[Token, ...]) -> Iterator[str]:
    yield from _declared(tokens)
    for token in tokens:
        if isinstance(token, Group):
            yield from _declared_anywhere(token.inside)
            if token.opening in ("(", "<"):
                yield from filter(None, map(_name, _split(token.inside, ",")))


def _mentioned(tokens: tuple[Token, ...]) -> Iterator[str]:
    before: Token = ""
    for token in tokens:
        if isinstance(token, Group):
            yield from _mentioned(token.inside)
        elif _is_name(token) and before not in (".", "->", "::"):
            yield token
        before = token
