"""A self-test as text: one entry of FORMATS adds an output."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from ddpbench.analysis.selftest import Tried
from ddpbench.render.style import MARKDOWN, TERMINAL, Style

MOST = 96  # characters of what was said, in a table
HEADS = ("fault", "planted", "found", "named", "seconds", "said")


def table(rows: Sequence[Tried]) -> str:
    """A row each, then how many came out as they must, and all that was said of the others."""
    return _text(rows, TERMINAL)


def markdown(rows: Sequence[Tried]) -> str:
    """The same for a pull request."""
    return _text(rows, MARKDOWN)


def as_json(rows: Sequence[Tried]) -> str:
    """All that was said in full."""
    return json.dumps([asdict(row) for row in rows], indent=1) + "\n"


FORMATS: dict[str, Callable[[Sequence[Tried]], str]] = {
    "table": table,
    "markdown": markdown,
    "json": as_json,
}


def _text(rows: Sequence[Tried], style: Style) -> str:
    cells = [
        [
            row.fault,
            row.planted,
            _answer(row.found, row),
            _answer(row.named, row),
            "-" if row.seconds is None else f"{row.seconds:.1f}",
            _short(row.said).replace("|", "/"),  # which ends a cell in Markdown
        ]
        for row in rows
    ]
    wrong = [f"{row.fault}, {row.planted}: {row.said}" for row in rows if row.right is False]
    blocks = [style.table(cells, HEADS), verdict(rows), style.gap.join(wrong)]
    return "\n\n".join(filter(None, blocks)) + "\n"


def _answer(answer: bool | None, row: Tried) -> str:
    if answer is None:
        return "-"
    if row.fault == "healthy":
        return "FALSE ALARM" if answer else "nothing"
    return "yes" if answer else "NO"


def verdict(rows: Sequence[Tried]) -> str:
    """One line: how many were found and named, what was not tried, what healthy runs gave."""
    planted = [row for row in rows if row.fault != "healthy"]
    healthy = [row for row in rows if row.fault == "healthy"]
    tried = [row for row in planted if row.right is not None]
    right = sum(bool(row.right) for row in tried)
    parts = []
    if planted:
        parts.append(f"{right} of {len(tried)} planted faults found and named rightly")
    if len(tried) < len(planted):
        parts.append(f"{len(planted) - len(tried)} not tried here")
    if healthy:
        quiet = sum(bool(row.right) for row in healthy)
        parts.append(f"{quiet} of {len(healthy)} healthy runs without a finding above note")
    return "; ".join(parts)


def _short(text: str) -> str:
    return text if len(text) <= MOST else f"{text[: MOST - 1]}…"
