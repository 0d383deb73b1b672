"""The one strict reader of values: tables, from TOML or from the command line, become frozen dataclasses.

A table may name only the fields there are, and a value must have its field's type. What does not fit raises UserError
with the full key, the value found and what is allowed. Words of the command line are `Text`: their field's type says
how they are read.
"""

import json
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from difflib import SequenceMatcher
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from titan_loom.errors import UserError

T = TypeVar("T")
Scopes = list[tuple[type, str]]
NAMES = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "a table"}


class Text(str):
    """A word of the command line: a name in which `-` may stand for `_`, or a value that its field's type reads."""


def decode(cls: type[T], table: dict[str, Any], prefix: str = "") -> T:
    """A `cls` with the fields that `table` sets and the defaults of the others.

    Supports bool, int, float, str, Literal, `X | None`, list and tuple of those, nested dataclasses, `list[dataclass]`
    (from TOML), `dict[str, dataclass]` and `dict[str, Any]`. An integer is a float too, a bool is no integer, and
    `"none"` is the None that TOML lacks (for a string only on the command line, where it cannot be quoted).

    Args:
        prefix: the key of `table` itself, for the messages.

    Raises:
        UserError: an unknown key, a value of another type, or a field without a default that is not set.
    """
    return _decode(cls, table, prefix, [])


def override(instance: T, table: dict[str, Any], prefix: str = "") -> T:
    """`instance` with the fields that `table` sets; nested tables override field by field. See `decode`."""
    return _override(instance, table, prefix, [])


def keys(cls: type, prefix: str = "") -> list[str]:
    """Every full key of `cls` and of the dataclasses in it; `<name>` stands for a name that the user chooses, 0 for any
    entry of a list."""
    found = []
    for name, kind in _kinds(cls).items():
        key = _join(prefix, name)
        inner = get_args(kind)[1] if get_origin(kind) is dict else None
        if is_dataclass(kind):
            found += keys(kind, key)
        elif is_dataclass(inner):
            found += keys(inner, f"{key}.<name>")
        elif is_dataclass(_entry_of(kind)):
            found += keys(_entry_of(kind), f"{key}.0")
        else:
            found.append(key)
    return found


def leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The full key of every value in a nested table, with the value."""
    for name, value in table.items():
        key = _join(prefix, name)
        if isinstance(value, dict):
            yield from leaves(value, key)
        else:
            yield key, value


def _decode(cls: type[T], table: dict[str, Any], prefix: str, scopes: Scopes) -> T:
    values = {field.name: _default(field) for field in fields(cls)}
    values |= _read_table(cls, values, table, prefix, scopes)
    for name, value in values.items():
        if value is MISSING:
            raise UserError(f"{_join(prefix, name)} is not set; it must be {_describe(_kinds(cls)[name])}")
    return cls(**values)


def _override(instance: T, table: dict[str, Any], prefix: str, scopes: Scopes) -> T:
    current = {field.name: getattr(instance, field.name) for field in fields(instance)}
    return replace(instance, **_read_table(type(instance), current, table, prefix, scopes))


def _read_table(cls: type, current: dict[str, Any], table: Any, prefix: str, scopes: Scopes) -> dict[str, Any]:
    """The fields that `table` sets. `scopes`: the tables around it, which hold what an unknown key may have meant."""
    kinds = _kinds(cls)
    scopes = [*scopes, (cls, prefix)]
    values = {}
    for word, value in _as_table(table, prefix).items():
        name = _find(word, kinds)
        if name is None:
            raise _unknown_key(_join(prefix, word), value, scopes)
        values[name] = _read(kinds[name], value, _join(prefix, name), current[name], scopes)
    return values


def _read(kind: Any, value: Any, key: str, current: Any, scopes: Scopes) -> Any:
    if is_dataclass(kind):
        read = _decode if current is MISSING else _override
        return read(kind if current is MISSING else current, value, key, scopes)
    if get_origin(kind) is dict:
        merged = dict(current)
        for word, item in _as_table(value, key).items():
            name = _find(word, merged) or (word.replace("-", "_") if isinstance(word, Text) else word)
            merged[name] = _read(get_args(kind)[1], item, f"{key}.{name}", merged.get(name, MISSING), scopes)
        return merged
    if is_dataclass(entry := _entry_of(kind)) and isinstance(value, list):
        return [_read(entry, item, f"{key}.{i}", MISSING, scopes) for i, item in enumerate(value)]
    try:
        return _convert(kind, value)
    except (ValueError, OverflowError):
        raise _wrong_type(key, value, _describe(kind)) from None


def _convert(kind: Any, value: Any) -> Any:
    """`value` as a `kind`; ValueError when it is none."""
    origin, options = get_origin(kind), get_args(kind)
    if kind is Any:
        return _guess(value) if isinstance(value, Text) else value
    if origin in (Union, UnionType):
        (inner,) = (option for option in options if option is not NoneType)
        is_none = isinstance(value, str) and value.lower() == "none" and (isinstance(value, Text) or inner is not str)
        return None if is_none else _convert(inner, value)
    if origin in (list, tuple):
        if isinstance(value, Text):
            value = [Text(word.strip()) for word in value.split(",") if word.strip()]
        if not isinstance(value, list | tuple):
            raise ValueError
        return origin(_convert(options[0], item) for item in value)
    if origin is Literal:
        return options[options.index(value)]
    if is_dataclass(kind):
        raise ValueError  # no word spells a table
    if isinstance(value, Text):
        return bool(("false", "true").index(value.lower())) if kind is bool else kind(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError
    return value


def _guess(word: Text) -> Any:
    """A word for a field of unknown type: the TOML value that it spells, `1,2` as a list, else a string."""
    for toml in [word, word.lower(), *([f"[{word}]"] if "," in word else [])]:
        try:
            parsed = tomllib.loads(f"value = {toml}")
        except tomllib.TOMLDecodeError:
            continue
        if parsed.keys() == {"value"}:
            return parsed["value"]
    return str(word)


def _as_table(value: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong_type(key, value, "a table of keys")
    return value


def _find(word: str, names: Iterable[str]) -> str | None:
    """The one of `names` that `word` spells."""
    if isinstance(word, Text):
        return next((name for name in names if name.replace("-", "_") == word.replace("-", "_")), None)
    return word if word in names else None


def _unknown_key(key: str, value: Any, scopes: Scopes) -> UserError:
    known = [key for cls, prefix in scopes for key in keys(cls, prefix)]
    while isinstance(value, dict) and value:
        word, value = next(iter(value.items()))
        key = _join(key, word)
    section, _, name = key.rpartition(".")

    def similarity(other: str) -> float:
        other_section, _, other_name = other.rpartition(".")
        return _ratio(name, other_name) + 0.25 * _ratio(section, other_section)

    return UserError(f"{key} is not a key; the nearest one is {max(known, key=similarity)}")


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, a.lower().replace("-", "_"), b, autojunk=False).ratio()


def _wrong_type(key: str, value: Any, wanted: str) -> UserError:
    if isinstance(value, dict):
        return UserError(f"{key} is a table; it must be {wanted}")
    kind = str if isinstance(value, Text) else type(value)
    found = json.dumps(value, ensure_ascii=False, default=str)
    return UserError(f"{key} is {found} ({NAMES.get(kind, kind.__name__)}); it must be {wanted}")


def _describe(kind: Any) -> str:
    origin, options = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(_describe(option) if option is not NoneType else "none" for option in options)
    if origin in (list, tuple):
        return f"a list, each entry {_describe(options[0])}"
    if is_dataclass(kind):
        return f"a table of {', '.join(keys(kind))}"
    if origin is Literal:
        return "one of " + ", ".join(json.dumps(option) for option in options)
    return NAMES[kind]


def _entry_of(kind: Any) -> Any:
    """The type of a list's entries; None for other types."""
    return get_args(kind)[0] if get_origin(kind) is list else None


def _default(field: Field) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _kinds(cls: type) -> dict[str, Any]:
    """Type of every field, by name."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
