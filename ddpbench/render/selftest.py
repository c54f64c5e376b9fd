"""Formats of a self-test: one entry of FORMATS adds an output."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from ddpbench.analysis.selftest import Tried
from ddpbench.records.table import Table, TableColumn
from ddpbench.render.column import Column, text_column
from ddpbench.render.style import MARKDOWN, TERMINAL, Style

MOST = 96  # characters of a message in a table


def table(rows: Sequence[Tried]) -> str:
    """Format a row per fault, the summary, and in full the messages of what went wrong."""
    return _text(rows, TERMINAL)


def markdown(rows: Sequence[Tried]) -> str:
    """Format the same for a pull request."""
    return _text(rows, MARKDOWN)


def as_json(rows: Sequence[Tried]) -> str:
    """Format all rows with their messages in full."""
    return json.dumps([asdict(row) for row in rows], indent=1) + "\n"


FORMATS: dict[str, Callable[[Sequence[Tried]], str]] = {
    "table": table,
    "markdown": markdown,
    "json": as_json,
}
COLUMNS: tuple[Column[Tried], ...] = (
    text_column("fault", lambda row: row.fault),
    text_column("planted", lambda row: row.planted),
    text_column("found", lambda row: _answer(row.found, row)),
    text_column("named", lambda row: _answer(row.named, row)),
    Column("seconds", lambda row: "-" if row.seconds is None else f"{row.seconds:.1f}"),
    text_column("message", lambda row: _short(row.said)),
)


def _text(rows: Sequence[Tried], style: Style) -> str:
    wrong = [f"{row.fault}, {row.planted}: {row.said}" for row in rows if row.right is False]
    blocks = [style.rows(rows, COLUMNS), verdict(rows), style.gap.join(wrong)]
    return "\n\n".join(filter(None, blocks)) + "\n"


def build_table(rows: Sequence[Tried]) -> Table:
    """Return the table of a stored self-test, with messages cut to a line."""
    words = ("fault", "planted", "found", "named")
    return Table(
        "planted faults",
        (
            *(TableColumn(word, "left") for word in words),
            TableColumn("seconds", decimals=1),
            TableColumn("message", "left"),
        ),
        tuple(
            (
                row.fault,
                row.planted,
                _answer(row.found, row),
                _answer(row.named, row),
                row.seconds,
                _short(row.said),
            )
            for row in rows
        ),
    )


def _answer(answer: bool | None, row: Tried) -> str:
    if answer is None:
        return "-"
    if row.fault == "healthy":
        return "FALSE ALARM" if answer else "nothing"
    return "yes" if answer else "NO"


def verdict(rows: Sequence[Tried]) -> str:
    """Summarize in one line: faults found and named, faults not tried, healthy runs."""
    planted = [row for row in rows if row.fault != "healthy"]
    healthy = [row for row in rows if row.fault == "healthy"]
    tried = [row for row in planted if row.right is not None]
    right = sum(bool(row.right) for row in tried)
    parts = []
    if planted:
        parts.append(f"{right} of {len(tried)} planted faults found and named correctly")
    if len(tried) < len(planted):
        parts.append(f"{len(planted) - len(tried)} not tried here")
    if healthy:
        quiet = sum(bool(row.right) for row in healthy)
        parts.append(f"{quiet} of {len(healthy)} healthy runs without a finding above note")
    return "; ".join(parts)


def _short(text: str) -> str:
    return text if len(text) <= MOST else f"{text[: MOST - 1]}…"
