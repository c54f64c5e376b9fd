"""Convert frozen dataclasses to JSON and back. Reading checks every type and never guesses."""

from __future__ import annotations

import json
import re
import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
LOCK = threading.RLock()  # msgspec crashes if two threads first build records of one kind at once
SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, from a file name that is not UTF-8


def encode(record: Any, indent: int | None = 1) -> bytes:
    """Convert a dataclass or plain data to JSON: indented, or in one line if indent is None.

    Raises ValueError for a NaN or an infinity.
    """
    plain = record if isinstance(record, dict) else to_plain(record)
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False)
    data = SURROGATE.sub(lambda half: f"\\\\u{ord(half[0]):04x}", text).encode()
    return data if indent is None else msgspec.json.format(data, indent=indent)


def to_plain(record: Any) -> Any:
    """Convert a dataclass to dicts and lists; ten times as fast as `dataclasses.asdict`."""
    return msgspec.to_builtins(record)


def parse(data: bytes) -> Any:
    """Parse JSON. Raises ValueError for anything that `encode` does not write."""
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        raise ValueError("values are nested too deeply") from None


def decode(kind: type[T], data: Any, strict: bool = True) -> T:
    """Build a record of `kind` from parsed JSON. Skips unknown fields.

    strict: whether a number that is a string is an error. Raises ValueError with the path of the
    value, its type and the expected type.
    """
    with LOCK:
        return msgspec.convert(data, kind, strict=strict)
