"""The environment in which templates are rendered: it runs no Python of theirs, and ends.

Jinja2's immutable sandbox keeps a template from the attributes by which it could reach the interpreter. What
it computes is counted here: turns of loops, calls, loaded files, characters. So a template that would not end
is an error after a moment, and the same one each time.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.code.depot import Depot

if TYPE_CHECKING:
    import jinja2

MOST_STEPS = 300_000  # turns of loops, calls and loaded files of one rendering; ours take some hundreds
MOST_TEXT = 4_000_000  # characters that one rendering writes, or one expression gives; NVRTC needs minutes
MOST_MADE = 25 * MOST_TEXT  # characters and items of all that one rendering computes
_SPREADING = {"join", "replace", "translate", "format", "format_map", "indent", "expandtabs", "wordwrap"}
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
    made = float("inf")


_left = _Left()


@contextmanager
def limited() -> Iterator[None]:
    """Let what is rendered in this block take so many steps and characters and no more."""
    before = _left.steps, _left.text, _left.made
    _left.steps, _left.text, _left.made = MOST_STEPS, MOST_TEXT, MOST_MADE
    try:
        yield
    finally:
        _left.steps, _left.text, _left.made = before


def _step() -> None:
    _left.steps -= 1
    if _left.steps < 0:
        raise _refusal(f"it takes more than {MOST_STEPS:,} turns of loops, calls and loaded files")


def _fits(size: float) -> None:
    if size > MOST_TEXT:
        raise _refusal(f"a text or list would be longer than {MOST_TEXT:,}")
    _left.made -= size
    if _left.made < 0:
        raise _refusal(f"its texts and lists would be longer than {MOST_MADE:,} together")


def _refusal(why: str) -> Exception:
    from jinja2.exceptions import SecurityError

    return SecurityError(why)


def _written(value: Any) -> Any:
    """Count what an expression writes."""
    if isinstance(value, str):
        _left.text -= len(value)
        if _left.text < 0:
            raise _refusal(f"it writes more than {MOST_TEXT:,} characters")
    else:
        _fits(_size(value))
    return value


def _size(value: Any) -> int:
    """Count the characters and items of a value and all that is in it; some more than `MOST_TEXT` at most."""
    size, waiting = 0, [value]
    while waiting and size <= MOST_TEXT:
        each = waiting.pop()
        if isinstance(each, str | bytes):
            size += len(each)
        elif isinstance(each, list | tuple | dict):
            size += len(each)
            waiting += [*each, *each.values()] if isinstance(each, dict) else each
    return size


def _require_small_spread(name: str, subject: Any, words: Any) -> None:
    """Refuse what may put a text in many places of another one before it is made."""
    longest = max((_size(word) for word in words), default=0)
    if name in ("indent", "expandtabs"):
        longest = max([longest, 4, *(abs(word) for word in words if isinstance(word, int))])
    if name in _SPREADING:
        _fits(_size(subject) * max(1, longest))


def _joined(values: list[Any]) -> str:
    """Do what ``~`` does."""
    _fits(_size(values))
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
        at = 1 if hasattr(function, "jinja_pass_arg") else 0
        if name == "join":  # so that items which are computed one by one are counted
            words = (*words[:at], list(words[at]), *words[at + 1 :])
        _require_small_spread(name, words[at], (*words[at + 1 :], *named.values()))
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
                # Of "%*d" the width is among the words.
                _require_small(right if isinstance(left, str) and isinstance(right, tuple) else ())
                _require_small_spread("format", left, [right] if isinstance(left, str) else ())
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
            subject = getattr(__function, "__self__", None)
            if isinstance(subject, str):
                name = __function.__name__
                if name == "join":
                    words = tuple(map(list, words))
                _require_small_spread(name, subject or " ", [*words, *named.values()])
            made = super().call(__context, __function, *words, **named)
            _fits(_size(made))
            return made

        def wrap_str_format(self, value: Any) -> Any:
            safe = super().wrap_str_format(value)
            if safe is None:
                return None
            text = _require_short_fields(getattr(value, "__self__", None))

            def limited_format(*words: Any, **named: Any) -> str:
                _require_small_spread("format", text, [*words, *named.values()])
                return safe(*words, **named)

            return limited_format

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


@functools.cache
def _kept_code() -> jinja2.BytecodeCache | None:
    """Return what keeps the code of templates where Python keeps its own, and trusts it as much.

    Compiling the templates of a family takes 60 ms of a new process. Where Python keeps no code, neither do
    we: a folder of records may be shared, and nothing in it is executed here.
    """
    try:
        own = Path(importlib.util.cache_from_source(__file__))
    except NotImplementedError:
        return None
    from jinja2 import BytecodeCache, __version__

    depot = Depot(own.parent)
    made_by = hashlib.sha256(__version__.encode() + Path(__file__).read_bytes()).hexdigest()

    class Kept(BytecodeCache):
        def load_bytecode(self, bucket: Any) -> None:
            content = depot.get(self._name(bucket))
            if content is not None:
                bucket.bytecode_from_string(content)

        def dump_bytecode(self, bucket: Any) -> None:
            if not sys.dont_write_bytecode:
                depot.put(self._name(bucket), bucket.bytecode_to_string())

        def _name(self, bucket: Any) -> str:
            parts = (made_by, sys.version, bucket.key, bucket.checksum)
            return "template." + hashlib.sha256(" ".join(parts).encode()).hexdigest()

    return Kept()


def sandbox(loader: jinja2.BaseLoader, *, keep: bool = False) -> jinja2.Environment:
    """Return what renders templates from a loader, within `limited`.

    Args:
        loader: Of the templates.
        keep: Their code is kept for other processes; for templates of this package.
    """
    import jinja2

    return _environment_class()(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        auto_reload=False,
        bytecode_cache=_kept_code() if keep else None,
    )
