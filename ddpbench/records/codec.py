"""Frozen dataclasses to JSON and back, types checked: what cannot be read is said, not guessed."""

from __future__ import annotations

import json
import types
import typing
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")
hints_of = cache(typing.get_type_hints)  # it compiles every annotation: most of the time of a read


def encode(record: Any) -> bytes:
    """A dataclass, or its asdict, as indented JSON. Raises ValueError for a NaN or an infinity."""
    data = record if isinstance(record, dict) else asdict(record)
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False).encode()


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


def _record(kind: Any, data: dict[str, Any], where: str) -> Any:
    hints = hints_of(kind)
    absent = [f.name for f in fields(kind) if f.name not in data and f.default is MISSING
              and f.default_factory is MISSING]  # fmt: skip
    if absent:
        raise ValueError(f"{where} lacks {', '.join(absent)}")
    known = {f.name for f in fields(kind)} & set(data)
    return kind(**{name: _value(hints[name], data[name], f"{where}.{name}") for name in known})
