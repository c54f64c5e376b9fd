"""Text that every terminal can show.

Control characters are escaped, because a host name or a file may contain any. ASCII stands in for
characters that the terminal's encoding lacks.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, ParamSpec, TypeVar

from ddpbench.records import redact

T = TypeVar("T")
P = ParamSpec("P")
FALLBACK = "ddpbench-ascii"  # the name of the error handler
ASCII = {
    "µ": "u", "μ": "u", "±": "+/-", "×": "x", "…": "...", "–": "-", "→": "->", "·": "*",
    "√": "sqrt ", "Δ": "delta", "°": "deg", "²": "^2", "³": "^3", "⁹": "^9", "█": "#",
    **dict.fromkeys("▏▎▍▌▋▊▉", "-"),
}  # fmt: skip


def escape(text: str) -> str:
    """The text in one line: what is not printable becomes an escape such as \\x1b or \\u202e."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def escape_lines(text: str) -> str:
    """The text with its lines kept, and all else that is not printable escaped."""
    return "\n".join(map(escape, text.split("\n")))


def escape_record(record: T) -> T:
    """The same record with every string in it escaped; `text` fields keep their lines."""
    return _escaped(record, escape, {})  # type: ignore[no-any-return]


def _escaped(value: Any, escape_text: Callable[[str], str], done: dict[int, Any]) -> Any:
    """done: what became of the records seen so far, by identity; a series holds one run often."""
    if isinstance(value, str):
        return escape_text(value)
    if isinstance(value, (tuple, list)):
        if id(value) not in done:
            done[id(value)] = type(value)(_escaped(item, escape_text, done) for item in value)
        return done[id(value)]
    if isinstance(value, dict):
        return {
            _escaped(key, escape, done): _escaped(item, escape_text, done)
            for key, item in value.items()
        }
    if is_dataclass(value) and not isinstance(value, type):
        if id(value) not in done:
            ways = {f.name: escape_lines if f.name == "text" else escape for f in fields(value)}
            done[id(value)] = replace(
                value, **{n: _escaped(getattr(value, n), way, done) for n, way in ways.items()}
            )
        return done[id(value)]
    return value


def escaped(render: Callable[P, str]) -> Callable[P, str]:
    """A function that renders records, given them escaped."""

    def rendered(*args: P.args, **settings: P.kwargs) -> str:
        return render(*map(escape_record, args), **settings)  # type: ignore[arg-type]

    return rendered


def tell(sentence: str) -> None:
    """Write one line to stderr, without what is secret, unless stderr takes none."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"ddpbench: {escape(redact.message(sentence))}\n")
        sys.stderr.flush()


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """The error handler: what stands in for characters that an encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_similar, error.object[error.start : error.end])), error.end


def _similar(character: str) -> str:
    plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return ASCII.get(character) or plain or character.encode("unicode_escape").decode()


codecs.register_error(FALLBACK, _in_ascii)


def prepare_streams() -> None:
    """Make stdout and stderr take any text; closed ones take it to nowhere."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)  # else the next file opened would be stdout
    os.close(descriptor)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=FALLBACK)


def silence_stdout() -> None:
    """Where stdout takes no more, because of its reader or its disk, let the rest go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    with contextlib.suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
