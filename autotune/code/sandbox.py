"""The environment in which templates are rendered: it runs no Python of theirs, and ends.

Jinja2's immutable sandbox keeps a template from the attributes by which it could reach the interpreter. What
it computes is counted here: turns of loops, calls, loaded files, characters. So a template that would not end
is an error after a moment, and the same one each time.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2

MOST_STEPS = 300_000  # turns of loops, calls and loaded files of one rendering; ours take some hundreds
MOST_TEXT = (
    4_000_000  # characters that one rendering writes, or that one expression gives; NVRTC needs minutes
)
_LONG_FIELD = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\d{5}|\d*\.\d{5})|\{[^{}]*:[^{}]*\d{5}")  # in a format
OPTIONS: dict[str, Any] = {
    "line_statement_prefix": "//%",
    "trim_blocks": True,
    "lstrip_blocks": True,
    "keep_trailing_newline": True,
    "autoescape": False,
}


class _Left(threading.local):
    """What a rendering of this thread may still spend; infinite outside of one."""

    steps = float("inf")
    text = float("inf")


_left = _Left()


@contextmanager
def limited() -> Iterator[None]:
    """Let what is rendered in this block take so many steps and characters and no more."""
    before = _left.steps, _left.text
    _left.steps, _left.text = MOST_STEPS, MOST_TEXT
    try:
        yield
    finally:
        _left.steps, _left.text = before


def _step() -> None:
    _left.steps -= 1
    if _left.steps < 0:
        raise _refusal(f"it takes more than {MOST_STEPS:,} turns of loops, calls and loaded files")


def _fits(size: float) -> None:
    if size > MOST_TEXT:
        raise _refusal(f"a text or list would be longer than {MOST_TEXT:,}")


def _refusal(why: str) -> Exception:
    from jinja2.exceptions import SecurityError

    return SecurityError(why)


def _written(value: Any) -> Any:
    """Count what an expression writes."""
    if isinstance(value, str):
        _left.text -= len(value)
        if _left.text < 0:
            raise _refusal(f"it writes more than {MOST_TEXT:,} characters")
    return value


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _joined(values: list[Any]) -> str:
    """Do what ``~`` does."""
    texts = [str(value) for value in values]
    _fits(sum(map(len, texts)))
    return "".join(texts)


def _require_small(values: Any) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MOST_TEXT:
            _fits(abs(value))


def _require_short_fields(text: Any) -> Any:
    if isinstance(text, str) and _LONG_FIELD.search(text):
        raise _refusal(f"the format {text:.60} has a field too long")
    return text


def _filter(name: str, function: Any) -> Any:
    @functools.wraps(function)  # with the mark of what it is passed
    def called(*words: Any, **named: Any) -> Any:
        _step()
        _require_small((*words[1:], *named.values()))
        if name == "format":
            _require_short_fields(words[0])
        made = function(*words, **named)
        _fits(_size(made))
        return made

    return called


@functools.cache
def _environment_class() -> type[jinja2.Environment]:
    from jinja2 import nodes, pass_context
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    @pass_context  # so that it is not called while a template is compiled
    def counted(_: Any, values: Any) -> Iterator[Any]:
        for value in values:
            _step()
            yield value

    class Sandbox(ImmutableSandboxedEnvironment):
        """Counts what templates do, and looks at the size of what they ask for before it is made."""

        intercepted_binops = frozenset({"*", "**", "+", "%"})

        def __init__(self, **options: Any) -> None:
            super().__init__(**OPTIONS, **options, finalize=_written)
            self.filters = {name: _filter(name, each) for name, each in self.filters.items()}
            self.filters |= {"(counted)": counted, "(joined)": _joined}  # no template can name these

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**":
                _fits(abs(right) * max(1, int(left).bit_length()) if isinstance(right, int) else 0)
            elif operator == "%":
                _require_short_fields(left)
                _require_small(
                    right if isinstance(left, str) and isinstance(right, tuple) else ()
                )  # for "%*d"
            elif operator == "*":
                _fits(_size(left) * abs(right) if isinstance(right, int) else 0)
                _fits(_size(right) * abs(left) if isinstance(left, int) else 0)
            elif operator == "+":
                _fits(_size(left) + _size(right))
            return super().call_binop(context, operator, left, right)

        def call(__self, __context: Any, __function: Any, *words: Any, **named: Any) -> Any:  # noqa: N805
            _step()
            if __function is not __self.globals["range"]:  # which has a limit of its own
                _require_small((*words, *named.values()))
            return super().call(__context, __function, *words, **named)

        def wrap_str_format(self, value: Any) -> Any:
            if getattr(value, "__name__", "") in ("format", "format_map"):
                _require_short_fields(getattr(value, "__self__", None))
            return super().wrap_str_format(value)

        def _load_template(self, *words: Any) -> jinja2.Template:
            _step()
            return super()._load_template(*words)

        def _generate(self, source: nodes.Template, *words: Any, **named: Any) -> str:
            for loop in source.find_all(nodes.For):
                loop.iter = _through("(counted)", loop.iter)
            for parent in [source, *source.find_all(nodes.Node)]:
                for name, child in parent.iter_fields():
                    if isinstance(child, nodes.Concat):
                        setattr(parent, name, joined(child))
                    elif isinstance(child, list):
                        child[:] = [
                            joined(each) if isinstance(each, nodes.Concat) else each for each in child
                        ]
            source.set_environment(self)
            return super()._generate(source, *words, **named)

    def _through(name: str, node: nodes.Node) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def joined(node: nodes.Concat) -> nodes.Filter:
        return _through("(joined)", nodes.List(node.nodes, lineno=node.lineno))

    return Sandbox


def sandbox(loader: jinja2.BaseLoader) -> jinja2.Environment:
    """Return what renders templates from a loader, within `limited`."""
    import jinja2

    return _environment_class()(loader=loader, undefined=jinja2.StrictUndefined, auto_reload=False)
