"""The JSON Schema of records is what the classes say, and every shipped record keeps it."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from jsonschema import Draft202012Validator
from made_records import made, made_estimate
from test_records import make_record

from autotune import records
from autotune.paths import data_dir
from autotune.records import Record, to_json
from autotune.values.limits import Limit
from autotune.values.problem import Problem

FILE = Path(records.__file__).with_name("record.schema.json")
SHIPPED = sorted(data_dir("cache").glob("*/*_f32_*.json"))
PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null"}
PRINTABLE = r"^[^\x00-\x1f\x7f]*$"
ABOUT = {
    "schema": "Version of this schema.",
    "problem": "What is computed: C[m,n] = alpha op(A)[m,k] op(B)[k,n] + beta C.",
    "device": "The GPU that it was measured on, or for.",
    "family": "Kernel family: its template and search space have this name.",
    "launch": "How the kernel is launched.",
    "toolchain": "What compiled and ran it.",
    "resources": "What the compiler reports.",
    "timing": "How long one launch takes.",
    "cublas": "The baseline, timed in turns with the winner.",
    "verification": "How far the result was from a float64 reference.",
    "search": "What the search did.",
}


def described(kind: type) -> dict[str, str]:
    """What the docstring of a class says of each attribute."""
    text = inspect.getdoc(kind) or ""
    section = text.partition("Attributes:\n")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    for line in section.splitlines():
        start = re.match(r"    (\w+): (.*)", line)
        if start:
            found[name := start[1]] = start[2]
        else:
            found[name] += " " + line.strip()
    return found


def schema_of(hint: Any) -> dict[str, Any]:
    if get_origin(hint) is Annotated:
        bare, limit = get_args(hint)
        return schema_of(bare) | limits(limit)
    if get_origin(hint) in (Union, UnionType):
        return {"anyOf": [schema_of(each) for each in get_args(hint)]}
    if get_origin(hint) is Literal:
        return {"enum": list(get_args(hint))}
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        if parts[-1] is Ellipsis:
            return {"type": "array", "items": schema_of(parts[0])}
        items = [schema_of(each) for each in parts]
        return {"type": "array", "prefixItems": items, "minItems": len(parts), "maxItems": len(parts)}
    if is_dataclass(hint):
        return object_of(hint)  # type: ignore[arg-type]
    if hint in PLAIN:
        return {"type": PLAIN[hint]} | ({"pattern": PRINTABLE} if hint is str else {})
    key, item = get_args(hint)
    return {"type": "object", "propertyNames": schema_of(key), "additionalProperties": schema_of(item)}


def limits(limit: Limit) -> dict[str, Any]:
    stated = {
        "minimum": limit.least,
        "exclusiveMinimum": limit.above,
        "pattern": limit.pattern and f"^(?:{limit.pattern})$",
    }
    return {key: value for key, value in stated.items() if value is not None}


def object_of(kind: type) -> dict[str, Any]:
    hints, about = get_type_hints(kind, include_extras=True), described(kind)
    parts = {}
    for field in fields(kind):  # type: ignore[arg-type]
        told = about.get(field.name) or (ABOUT.get(field.name) if kind is Record else None)
        parts[field.name] = ({"description": told} if told else {}) | schema_of(hints[field.name])
    required = [name for name in parts if not omitted(hints[name])]
    return {"type": "object", "properties": parts, "required": required, "additionalProperties": False}


def omitted(hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType):
        return any(omitted(each) for each in get_args(hint))
    return get_origin(hint) is Annotated and bool(get_args(hint)[1].omitted)


def whole() -> str:
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A record of autotune: the stored winner of one search",
        "description": "Names of milliseconds end in _ms, of seconds in _s, of bytes in _bytes. Besides: "
        "a measured record has timing and gflops, an estimated one no times; rates follow from times.",
    }
    return json.dumps(head | object_of(Record), indent=2) + "\n"


def test_the_file_is_what_the_classes_say(request):
    if request.config.getoption("--update-golden"):
        FILE.write_text(whole())
    assert FILE.read_text() == whole(), "run pytest --update-golden tests/test_record_schema.py"


def test_every_field_is_described():
    def places(part: Any, at: str = "$") -> Any:
        for name, each in part.get("properties", {}).items():
            yield f"{at}.{name}", each
            yield from places(each, f"{at}.{name}")
            yield from places(each.get("items", {}), f"{at}.{name}[]")
            for option in each.get("anyOf", ()):
                yield from places(option, f"{at}.{name}")

    found = dict(places(json.loads(whole())))
    bare = [at for at, part in found.items() if "description" not in part]
    assert bare == []
    assert "milliseconds per launch" in found["$.timing.quantiles_ms"]["description"]


@pytest.fixture(scope="module")
def validator():
    schema = json.loads(FILE.read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_record_keeps_the_schema(validator, path):
    validator.validate(json.loads(path.read_text()))
    assert to_json(records.read(path)) == path.read_text()


def test_what_is_written_keeps_the_schema(validator):
    small = Problem(64, 64, 64)
    for record in (make_record(), made(small), made_estimate(small)):
        validator.validate(json.loads(to_json(record)))


def test_what_is_not_read_breaks_the_schema(validator):
    wrongs = {"schema": 2, "gflops": -1, "timing": {}, "created": "today", "config": {"a": []}}
    for key, wrong in wrongs.items():
        assert list(validator.iter_errors(json.loads(to_json(make_record())) | {key: wrong})), key
    assert list(validator.iter_errors(json.loads(to_json(make_record())) | {"more": 1}))
