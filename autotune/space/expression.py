"""Expressions of a space file: arithmetic and logic as text, evaluated over columns of integers."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from autotune.errors import SpaceError
from autotune.outside import printable, shown

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "min": np.minimum,
    "max": np.maximum,
    "ceil_div": lambda a, b: -_divided(operator.floordiv, -a, b),
}
_ALLOWED = (
    "integers, names, + - * // %, comparisons, and, or, not, 'a if c else b', min(a, b), max(a, b), "
    "ceil_div(a, b), and a word of a parameter behind == or !="
)
_LARGEST = 2**63 - 1
_DEEPEST = 100


class Expression:
    """An expression over named integers; a name that stands for words may only be compared with == and !=.

    All operands may be NumPy arrays of one length, so that one evaluation serves a whole column.
    Logic does not short-circuit; a division by zero gives 0, so that ``BN // 4 % WN == 0`` may stand beside
    the constraint that makes WN positive.

    Args:
        text: The expression.
        where: The place to name in an error, such as "search_spaces/sgemm.toml: constraints.threads".
        codes: Word to the integer that stands for it in a column.
        words: Name to the words it may be, for every name that is not a number.

    Attributes:
        text: The expression, in one line.
        names: Names that occur in it.

    Raises:
        SpaceError: The text does not parse, or uses what is not allowed.
    """

    def __init__(
        self, text: str, where: str, codes: Mapping[str, int], words: Mapping[str, Collection[str]]
    ) -> None:
        self.text = " ".join(text.split())  # it may be written in several lines
        self._where = where
        self._codes = codes
        self._words = words
        try:
            self._tree = ast.parse(self.text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            why = (
                printable(error.msg if isinstance(error, SyntaxError) else str(error), 80)
                or "it is nested too deeply"
            )
            raise SpaceError(
                f"{where}: {shown(self.text, 200)} does not parse ({why}); allowed are {_ALLOWED}"
            ) from None
        self.names: frozenset[str] = frozenset(self._check(self._tree, 0))

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """Evaluate with these integers or integer columns.

        Raises:
            SpaceError: An intermediate value does not fit into 64 bits.
        """
        with np.errstate(divide="ignore"):
            return self._value(self._tree, values)

    # -- reading ---------------------------------------------------------------------------------------

    def _check(self, node: ast.expr, depth: int) -> set[str]:
        """Refuse whatever the evaluator does not know; return the names that occur."""
        if depth > _DEEPEST:
            raise SpaceError(f"{self._where}: the expression is nested more than {_DEEPEST} deep")

        def names_of(*nodes: ast.expr) -> set[str]:
            return set().union(*(self._check(each, depth + 1) for each in nodes))

        match node:
            case ast.Constant(value=bool() | int() as number) if number <= _LARGEST:
                return set()
            case ast.Name(id=name) if name not in self._words:
                return {name}
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return names_of(left, right)
            case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
                return names_of(operand)
            case ast.BoolOp(values=parts):
                return names_of(*parts)
            case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq()], comparators=[right]) if self._is_word(
                left
            ) or self._is_word(right):
                return self._check_words(left, right)
            case ast.Compare(left=left, ops=ops, comparators=rest) if all(type(op) in _COMPARE for op in ops):
                return names_of(left, *rest)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return names_of(test, body, orelse)
            case ast.Call(func=ast.Name(id=name), args=[first, second], keywords=[]) if (
                name in FUNCTIONS
                and not isinstance(first, ast.Starred)
                and not isinstance(second, ast.Starred)
            ):
                return names_of(first, second)
        raise SpaceError(
            f"{self._where}: {shown(self._source(node), 200)} is not allowed here; allowed are {_ALLOWED}"
        )

    def _is_word(self, node: ast.expr) -> bool:
        return (isinstance(node, ast.Constant) and isinstance(node.value, str)) or (
            isinstance(node, ast.Name) and node.id in self._words
        )

    def _check_words(self, *sides: ast.expr) -> set[str]:
        """Check that both sides are words, and that they could be equal."""
        names: set[str] = set()
        choices: list[Collection[str]] = []
        for side in sides:
            match side:
                case ast.Constant(value=str() as word):
                    choices.append((word,))
                case ast.Name(id=name) if name in self._words:
                    names.add(name)
                    choices.append(self._words[name])
                case _:
                    number = self._source(side)
                    raise SpaceError(f"{self._where}: {shown(number)} is a number, so it is never a word")
        if not names or not set(choices[0]) & set(choices[1]):
            left, right = map(self._source, sides)
            options = "".join(f"; {name} is one of {', '.join(self._words[name])}" for name in sorted(names))
            raise SpaceError(f"{self._where}: {left} and {right} are never equal{options}")
        return names

    def _source(self, node: ast.expr) -> str:
        return ast.get_source_segment(self.text, node) or ""

    # -- evaluating ------------------------------------------------------------------------------------

    def _value(self, node: ast.expr, values: Mapping[str, Any]) -> Any:
        match node:
            case ast.Constant(value=str() as word):
                return self._codes[word]
            case ast.Constant(value=constant):
                return constant
            case ast.Name(id=name):
                return values[name]
            case ast.BinOp(left=left, op=op, right=right):
                return self._combined(type(op), self._number(left, values), self._number(right, values))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return np.logical_not(self._value(operand, values))
            case ast.UnaryOp(operand=operand):
                return -self._number(operand, values)
            case ast.BoolOp(op=op, values=parts):
                join = np.logical_and if isinstance(op, ast.And) else np.logical_or
                total = self._value(parts[0], values)
                for part in parts[1:]:
                    total = join(total, self._value(part, values))
                return total
            case ast.Compare(left=left, ops=ops, comparators=rest):
                terms = [self._value(term, values) for term in [left, *rest]]
                total = _COMPARE[type(ops[0])](terms[0], terms[1])
                for order, a, b in zip(ops[1:], terms[1:], terms[2:], strict=False):
                    total = np.logical_and(total, _COMPARE[type(order)](a, b))
                return total
            case ast.IfExp(test=test, body=body, orelse=orelse):
                chosen = np.where(
                    self._value(test, values), self._number(body, values), self._number(orelse, values)
                )
                return chosen if chosen.ndim else int(chosen)
            case ast.Call(func=ast.Name(id=name), args=[first, second]):
                return FUNCTIONS[name](self._number(first, values), self._number(second, values))
        raise AssertionError(ast.dump(node))

    def _number(self, node: ast.expr, values: Mapping[str, Any]) -> Any:
        """Evaluate to Python integers or int64 columns: NumPy's truth values do not add up."""
        value = self._value(node, values)
        if isinstance(value, np.ndarray):
            return value.astype(np.int64, copy=False)
        return self._fitting(int(value))

    def _combined(self, kind: type[ast.operator], a: Any, b: Any) -> Any:
        if kind in (ast.FloorDiv, ast.Mod):
            return _divided(_BINARY[kind], a, b)
        if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
            self._fitting(_BINARY[ast.Mult if kind is ast.Mult else ast.Add](_largest(a), _largest(b)))
        return self._fitting(_BINARY[kind](a, b))

    def _fitting(self, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise SpaceError(
                f"{self._where}: {printable(self.text, 200)} has a value beyond 64 bits: {value}"
            )
        return value


def _divided(divide: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """Divide; by zero gives 0."""
    if not isinstance(b, np.ndarray) and b == 0:
        return a * 0
    return divide(a, b)


def _largest(value: Any) -> int:
    """Return the largest magnitude, 0 for an empty column."""
    if isinstance(value, np.ndarray):
        return max(abs(int(value.max())), abs(int(value.min()))) if value.size else 0
    return abs(int(value))
