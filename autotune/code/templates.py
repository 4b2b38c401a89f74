"""Finds a family's template and reads every file that rendering it could load.

What is hashed is what can be loaded: Jinja2 gets its files from what was read here, never from the disk.
Included, imported and extended files are followed by name; a name that is computed could be that of any file
beside the template or among the built-in ones, so then all of these count. No Jinja2 is needed to find out.
"""

from __future__ import annotations

import os
import re
import stat
import time
import tomllib
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.code.sandbox import OPTIONS, sandbox
from autotune.errors import SpaceError
from autotune.outside import printable, read_bytes
from autotune.paths import data_dir
from autotune.space.space import Space
from autotune.values.digest import digest_of
from autotune.values.lazy import cached_property

if TYPE_CHECKING:
    import jinja2

MOST_BYTES = 1 << 20  # of one file
MOST_FILES = 2000  # that a computed name may stand for
_SETTLED_NS = 2_000_000_000  # a file as young as this may change again without another time of change

_STRING = r"""(?:"[^"\\\n]*"|'[^'\\\n]*')"""
_LOADS = re.compile(
    r"(?:(?P<block>\{%)|^[ \t\v]*//%)[-+]?(?(block)\s*|[^\S\n]*)(?:include|import|from|extends)\b"
    # a name, or a list of them, up to the statement's end; without it the name is computed
    rf"(?:\s*(?P<names>{_STRING}|[\[(]\s*(?:{_STRING}\s*,\s*)*(?:{_STRING}\s*)?[\])])"
    r"(?(block)\s*[-+]?%\}|[^\S\n]*$)|"
    rf"\s*(?P<named>{_STRING})\s+(?:ignore|with|without|as|import)\b)?",
    re.MULTILINE,
)

_ASSEMBLY = re.compile(r"\{%(?=[%\d])")  # inline assembly such as {%0, %1}: no statement of Jinja begins so

_ASKING = ("defined", "undefined", "default", "d")  # tests and filters of names that need not exist

_Stamp = tuple[int, int, int] | None  # when a file was changed, its size, its number; None: there is none


@dataclass(frozen=True, eq=False)
class Template:
    """A template and all it could load, as they were on disk.

    Attributes:
        name: Of the template itself, among the files.
        files: Name to (place, text), as templates name each other.
        digest: SHA-256 of names and texts.
    """

    name: str
    files: Mapping[str, tuple[Path, str]]
    digest: str

    @cached_property
    def jinja(self) -> jinja2.Template:
        """The template, ready to render.

        Raises:
            jinja2.TemplateSyntaxError: It does not parse.
        """
        import jinja2

        own = data_dir("templates")
        keep = all(place.is_relative_to(own) for place, _ in self.files.values())
        return sandbox(jinja2.FunctionLoader(self._load), keep=keep).get_template(self.name)

    def unknown_name(self, known: Set[str]) -> tuple[Path, int, str] | None:
        """Return place, line and name of the first name that nothing gives, in files that are loaded by name.

        Raises:
            jinja2.TemplateError: One of them does not parse or is missing.
        """
        from jinja2 import meta, nodes

        trees: dict[str, nodes.Template] = {}
        waiting = [self.name]
        for name in waiting:
            text, place, _ = self._load(name)
            trees[name] = self.jinja.environment.parse(text, name, place)
            optional = re.search(r"\bignore\s+missing\b", text) is not None
            named = (each for each in loads(text)[0] if each in self.files or not optional)
            waiting += [each for each in dict.fromkeys(named) if each not in waiting]
        given = {*known, *self.jinja.environment.globals}
        for tree in trees.values():
            given |= {each.name for each in tree.find_all(nodes.Name) if each.ctx != "load"}
            given |= {each.name for each in tree.find_all(nodes.Macro)}
            asked = (each.node for each in tree.find_all((nodes.Test, nodes.Filter)) if each.name in _ASKING)
            given |= {each.name for each in asked if isinstance(each, nodes.Name)}
        for name, tree in trees.items():
            for each in tree.find_all(nodes.Name):
                if each.name not in given and each.name in meta.find_undeclared_variables(tree):
                    return self.files[name][0], each.lineno, each.name
        return None

    def _load(self, name: str) -> tuple[str, str, None]:
        import jinja2

        found = self.files.get(_plain(name) or "")
        if found is None:
            successor = _successors("rewritten").get(_plain(name) or "")
            is_what = (
                f"no template beside {self.name} or among the built-in templates"
                if successor is None
                else f"now {successor!r}, which takes and gives other names: they are stated at its top"
            )
            raise jinja2.TemplateNotFound(name, f"{name!r} is {is_what}")
        return _ASSEMBLY.sub('{{ "{%" }}', found[1]), str(found[0]), None


def template_of(space: Space) -> Template:
    """Read a space's template, or return what was read before if no file of it has changed.

    Raises:
        SpaceError: There is none, or a file of it is no text or too large.
    """
    folder, name = _place(space)
    known = _known.get((folder, name))
    if known is not None and known.holds():
        return known.template
    read = _read(tuple(dict.fromkeys((folder, data_dir("templates")))), name)
    if known is not None and known.template.files == read.template.files:
        read = replace(read, template=known.template)  # which is compiled already
    _known[folder, name] = read
    return read.template


@cache
def environment(*folders: Path) -> jinja2.Environment:
    """Return what renders this package's own templates of these folders, the first before the next."""
    import jinja2

    loader = jinja2.FileSystemLoader(folders)
    return jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, **OPTIONS)


def _place(space: Space) -> tuple[Path, str]:
    """Find a space's template: where its file says; built in if it extends a built-in space; else near it.

    Near is beside the file or in a ``templates`` folder next to its own, then the same for the last of the
    files that it extends; after these the built-in template of its name.
    """
    if space.template is not None:
        if _stamp(str(space.template)) is None:
            place = printable(str(space.template), 300)
            raise SpaceError(f"{space.path.name}: template {place} is not there, or no regular file")
        return space.template.parent, space.template.name
    built_in = data_dir("templates")
    own, base = (path.resolve().parent for path in (space.path, space.origin))
    near = (own, own.parent / "templates", base, base.parent / "templates")
    extends_built_in = base == data_dir("search_spaces").resolve()
    folders = tuple(dict.fromkeys((*(() if extends_built_in else near), built_in)))
    name = f"{space.family}.cu.jinja"
    for folder in folders:
        if (folder / name).is_file():
            return folder, name
    raise SpaceError(f"{space.path.name}: no template {name} in {', '.join(map(str, folders))}")


@dataclass(frozen=True)
class _Known:
    """A template that was read, and what tells whether it would be read the same again.

    Attributes:
        template: The template.
        stamps: Every place that was looked at.
        folders: Those of which every file counts, because a name is computed.
        names: Of the files in them.
        settled: Whether any later change of these files gives another stamp.
    """

    template: Template
    stamps: Mapping[str, _Stamp]
    folders: tuple[Path, ...]
    names: tuple[str, ...]
    settled: bool

    def holds(self) -> bool:
        return (
            self.settled
            and all(_stamp(place) == stamp for place, stamp in self.stamps.items())
            and _listing(self.folders) == self.names
        )


_known: dict[tuple[Path, str], _Known] = {}


def _read(folders: tuple[Path, ...], first: str) -> _Known:
    now = time.time_ns()
    files: dict[str, tuple[Path, str]] = {}
    stamps: dict[str, _Stamp] = {}
    names: tuple[str, ...] = ()
    waiting, sure = [first], {first}
    while waiting:
        name = waiting.pop()
        places = (os.path.join(folder, each) for folder in folders for each in _spellings(name))
        place = next((place for place in places if stamps.setdefault(place, _stamp(place)) is not None), None)
        text = None if name in files or place is None else _text(place, name in sure)
        if text is None or place is None:
            continue
        files[name] = (Path(place), text)
        loaded, computed = loads(text)
        sure |= set(loaded)
        if computed and not names:
            names = _listing(folders)
        waiting += [*loaded, *(names if computed else ())]
    newest = max(stamp[0] for stamp in stamps.values() if stamp is not None)
    parts = (part for name in sorted(files) for part in (name, str(len(files[name][1])), files[name][1]))
    return _Known(
        Template(first, files, digest_of(*parts)),
        stamps,
        folders if names else (),
        names,
        newest < now - _SETTLED_NS,
    )


def loads(text: str) -> tuple[list[str], bool]:
    """Find the files that a template's text loads by name, and whether it loads any by a computed name."""
    names: list[str] = []
    computed = False
    for found in _LOADS.finditer(text.replace("\r\n", "\n").replace("\r", "\n")):
        stated = found["names"] or found["named"]
        computed |= stated is None
        names += [plain for name in re.findall(_STRING, stated or "") if (plain := _plain(name[1:-1]))]
    return names, computed


def _plain(name: str) -> str | None:
    """Return a name as it stands among the files, or None if it leads out of the folders."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return None if ".." in parts else "/".join(parts)


def _spellings(name: str) -> tuple[str, ...]:
    """Return a name, and the other one of a part that has moved: where it lies now, or lay before."""
    now = _successors("moved")
    other = now.get(name) or next((before for before, place in now.items() if place == name), None)
    return (name,) if other is None else (name, other)


@cache
def _successors(table: str) -> Mapping[str, str]:
    """Return where parts that have moved, or were rewritten, lie now, by their names of before."""
    tables = tomllib.loads((data_dir("templates") / "parts" / "moved.toml").read_text(encoding="utf-8"))
    return {f"parts/{before}.cu.jinja": f"parts/{stem}.cu.jinja" for before, stem in tables[table].items()}


def _listing(folders: tuple[Path, ...]) -> tuple[str, ...]:
    """List every file in the folders and in those inside them that a computed name could stand for."""
    found: set[str] = set()
    for folder in folders:
        inside = [""]
        seen: set[tuple[int, int]] = set()  # links may lead back
        for each in inside:
            try:
                with os.scandir(os.path.join(folder, each)) as entries:
                    here = [entry for entry in entries if not entry.name.startswith(".")]
            except OSError:
                continue
            for entry in here:
                facts = os.stat(entry.path) if os.path.exists(entry.path) else None
                if facts is not None and stat.S_ISREG(facts.st_mode):
                    found.add(each + entry.name)
                elif facts is not None and (facts.st_dev, facts.st_ino) not in seen:
                    seen.add((facts.st_dev, facts.st_ino))
                    inside.append(f"{each}{entry.name}/")
            if len(found) > MOST_FILES or len(inside) > MOST_FILES:
                raise SpaceError(
                    f"{folder}: a template here loads a file by a computed name, which could be any of more "
                    f"than {MOST_FILES}: give the templates a folder of their own, or write names as they are"
                )
    return tuple(sorted(found))


def _stamp(place: str) -> _Stamp:
    try:
        facts = os.stat(place)
    except (OSError, ValueError):
        return None
    return (facts.st_mtime_ns, facts.st_size, facts.st_ino) if stat.S_ISREG(facts.st_mode) else None


def _text(place: str, sure: bool) -> str | None:
    """Read a file; None if it is no template at all, which is an error where its name was stated."""
    try:
        return read_bytes(Path(place), MOST_BYTES).decode("utf-8-sig")
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    except UnicodeDecodeError as error:
        why = f"is not UTF-8 ({error.reason} at byte {error.start})"
    if sure:
        raise SpaceError(f"{place}: {why}")
    return None
