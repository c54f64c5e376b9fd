"""Convert frozen dataclasses to JSON and back. Reading checks every type and never guesses."""

from __future__ import annotations

import json
import re
import types
import typing
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
hints_of = cache(typing.get_type_hints)  # it compiles every annotation: most of the time of a read
MOST_INT, MOST_FLOAT = 2**64, 1e100  # larger numbers are damage, and arithmetic would overflow
DEEPEST = 50  # levels of nested values
SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, from a file name that is not UTF-8


def encode(record: Any, indent: int | None = 1) -> bytes:
    """Convert a dataclass, or its asdict, to JSON: indented, or in one line if indent is None.

    Raises ValueError for a NaN or an infinity.
    """
    data = record if isinstance(record, dict) else asdict(record)
    text = json.dumps(data, indent=indent, ensure_ascii=False, allow_nan=False)
    return SURROGATE.sub(lambda half: f"\\\\u{ord(half[0]):04x}", text).encode()


def parse(data: bytes) -> Any:
    """Parse JSON. Raises ValueError for anything that `encode` does not write."""
    try:
        whole = json.loads(data, parse_int=_int, parse_float=_float, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    _require_sound(whole, "$", 0)
    return whole


def _int(digits: str) -> int:
    if len(digits) > 20 or abs(int(digits)) > MOST_INT:
        _refuse(digits)
    return int(digits)


def _float(digits: str) -> float:
    if abs(float(digits)) > MOST_FLOAT:
        _refuse(digits)
    return float(digits)


def _refuse(digits: str) -> NoReturn:
    shown = digits if len(digits) <= 20 else f"a number of {len(digits)} characters"
    raise ValueError(f"{shown} is no number that can have been measured")


def decode(kind: type[T], data: Any, where: str = "$") -> T:
    """A dataclass of `kind` from decoded JSON; fields it does not know are left out.

    Raises ValueError naming the place, what is there and what should be.
    """
    value: T = _value(kind, data, where)
    return value


def _value(kind: Any, data: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return data
    if origin in (typing.Union, types.UnionType):
        chosen = next(a for a in arguments if a is not types.NoneType)
        return None if data is None else _value(chosen, data, where)
    if origin is tuple and isinstance(data, list):
        return tuple(_value(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin is dict and isinstance(data, dict):
        return {key: _value(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    if is_dataclass(kind) and isinstance(data, dict):
        return _record(kind, data, where)
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if isinstance(kind, type) and isinstance(data, kind) and (kind is bool) == (type(data) is bool):
        return data
    raise ValueError(f"{where} is {type(data).__name__}, not {getattr(kind, '__name__', kind)}")


def _require_sound(data: Any, where: str, depth: int) -> None:
    """Raise ValueError for a string with half a character, and for values nested too deeply."""
    if depth > DEEPEST:
        raise ValueError("its values are nested too deeply")
    if isinstance(data, str) and not data.isascii() and SURROGATE.search(data):
        raise ValueError(f"{where} holds half a character (a lone surrogate)")
    if isinstance(data, dict):
        for key, item in data.items():
            _require_sound(key, where, depth)
            _require_sound(item, f"{where}.{key}", depth + 1)
    if isinstance(data, list):
        for i, item in enumerate(data):
            _require_sound(item, f"{where}[{i}]", depth + 1)


def _record(kind: Any, data: dict[str, Any], where: str) -> Any:
    hints = hints_of(kind)
    absent = [f.name for f in fields(kind) if f.name not in data and f.default is MISSING
              and f.default_factory is MISSING]  # fmt: skip
    if absent:
        raise ValueError(f"{where} lacks {', '.join(absent)}")
    known = [f.name for f in fields(kind) if f.name in data]
    return kind(**{name: _value(hints[name], data[name], f"{where}.{name}") for name in known})
