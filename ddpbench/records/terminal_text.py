"""Make text that every terminal can show.

Control characters are escaped, because a host name or a file may contain any. ASCII replaces
characters that the terminal's encoding lacks.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
import unicodedata

from ddpbench.records import redact

FALLBACK = "ddpbench-ascii"  # the name of the error handler
ASCII = {
    "µ": "u",
    "μ": "u",
    "±": "+/-",
    "×": "x",
    "…": "...",
    "–": "-",
    "→": "->",
    "·": "*",
    "√": "sqrt ",
    "Δ": "delta",
    "°": "deg",
    "²": "^2",
    "³": "^3",
    "⁹": "^9",
    "α": "alpha",
    "β": "beta",
    "½": "1/2",
    "█": "#",
    "│": "|",
    "─": "-",
    **dict.fromkeys("┌┐└┘├┤┬┴┼", "+"),
}


def escape(text: str) -> str:
    """Return the text in one line; unprintable characters become \\x1b, \\u202e and so on."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def escape_lines(text: str) -> str:
    """Escape unprintable characters except line breaks."""
    return "\n".join(map(escape, text.split("\n")))


def tell(sentence: str) -> None:
    """Write one line without secrets to stderr. Ignores a missing, closed or full stderr."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"ddpbench: {escape(redact.message(sentence))}\n")
        sys.stderr.flush()


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Handle an encoding error: replace the characters that the encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = ""
    for character in error.object[error.start : error.end]:
        plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
        text += ASCII.get(character) or plain or character.encode("unicode_escape").decode()
    return text, error.end


codecs.register_error(FALLBACK, _in_ascii)


def prepare_streams() -> None:
    """Make stdout and stderr accept any text. Closed ones discard it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)  # otherwise the next open file would be stdout
    os.close(descriptor)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=FALLBACK)


def divert_libraries() -> None:
    """Send to stderr what libraries print to stdout, as NCCL_DEBUG does. stdout is for results.

    NCCL_DEBUG_FILE=/dev/stderr is not enough: NCCL empties a stderr that is a file when it opens
    it, and writes its version to stdout all the same.
    """
    if sys.__stdout__ is not None and sys.stdout is sys.__stdout__:
        sys.stdout.flush()
        sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=FALLBACK)
        os.dup2(2, 1)


def silence_stdout() -> None:
    """Discard further output if stdout accepts no more: its reader ended or its disk is full."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    with contextlib.suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
