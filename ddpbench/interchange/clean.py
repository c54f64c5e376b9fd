"""Turn a log as it was saved or pasted into the lines that the tool printed.

Terminals add colours. Launchers, schedulers and web pages put text before each line: a rank
(`srun --label`), a tag (`mpirun --tag-output`), a time and a stream (Kubernetes), a pod, an
indentation, the `>` of a quotation. None of these is listed here. The text before the lines that a
tool is known to print is the prefix, and every line that starts alike loses it.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter

ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[()].|[@-Z\\^_])")
# Control characters, and those that have no width.
UNSEEN = re.compile("[\x01-\x08\x0e-\x1f\x7f\u200b\u2060\ufeff]")
WORD = re.compile(r"\w+")
PREFIX_LINES = 2  # text before a single line is an accident, such as two lines written as one


def decode(data: bytes) -> str:
    """Decode a file in UTF-8 or, as PowerShell saves it, in UTF-16."""
    utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    # UTF-16 without a byte order mark is ASCII with zeros between.
    return data.decode("utf-16" if utf16 else "utf-8", errors="replace").replace("\0", "")


def clean(text: str, marks: re.Pattern[str]) -> list[str]:
    """Return the lines as the tool printed them, without indentation; their numbers stay.

    marks: an expression that finds the tool's text in a line.
    """
    lines = [UNSEEN.sub("", ESCAPE.sub("", line)).strip() for line in text.split("\n")]
    matches = [marks.search(line) for line in lines]
    starts = [match.start() if match else 0 for match in matches]
    prefixes = Counter(
        _pattern(line[:start]) for line, start in zip(lines, starts, strict=True) if start
    )
    # The longest first: `0: [1,0]<stdout>:` before `0:`.
    often = [p for p, count in prefixes.items() if count >= PREFIX_LINES]
    prefix = re.compile("|".join(sorted(often, key=len, reverse=True)))
    return [
        (line[match.start() :] if match else prefix.sub("", line, count=1)).strip()
        for line, match in zip(lines, matches, strict=True)
    ]


def _pattern(prefix: str) -> str:
    """Return an expression for this prefix with other words: another time, another rank.

    A prefix of words alone matches only itself: any words would match a row of numbers too.
    """
    parts = re.findall(r"\w+|\s+|[^\w\s]", prefix.strip())
    alike = r"\w+" if any(not part.isspace() and not WORD.match(part) for part in parts) else ""
    return "^" + "".join(
        r"\s+" if part.isspace() else alike if alike and WORD.match(part) else re.escape(part)
        for part in parts
    )
