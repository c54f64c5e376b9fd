"""A document as text for a terminal. The most important facts come last."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from ddpbench.present.document import Document, Section, format_cell
from ddpbench.records.schema import Finding
from ddpbench.records.table import Table
from ddpbench.records.terminal_text import escape

WIDTH = 100  # characters of a remark


def write(document: Document) -> str:
    """Return the title and, of each section, its lines, tables, findings and result."""
    blocks = [escape(document.title)]
    for section in document.sections:
        shown = [*filter(None, _blocks(section))]
        if shown and section.title:
            shown[0] = f"{escape(section.title)}\n{shown[0]}"
        blocks += shown
    return "\n\n".join(filter(None, blocks)) + "\n"


def _blocks(section: Section) -> Iterator[str]:
    """Yield blocks, which blank lines separate; some may be empty."""
    yield "\n".join(map(_wrap, section.lines))
    for table in (chart.table for chart in section.charts):
        yield "\n".join(filter(None, (escape(table.title), lay_out(table))))
        yield "\n".join(map(_wrap, table.legend))
    yield "\n".join(map(_wrap, section.legend))
    yield "\n".join(escape(format_finding(finding)) for finding in section.findings)
    yield escape(section.intro)


def _wrap(line: str) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    look: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(escape(line), WIDTH, subsequent_indent=f"{indent}  ", **look)


def format_finding(finding: Finding) -> str:
    """Return severity, code, sentence and next step in one line."""
    next_step = f". Next: {finding.next_step}" if finding.next_step else ""
    return f"{finding.severity.upper()} ({finding.code}): {finding.sentence}{next_step}"


def lay_out(
    table: Table, tablefmt: str = "simple", escape_cell: Callable[[str], str] = escape
) -> str:
    """Return headings and rows, without title and legend. A list of facts has no headings.

    tablefmt: of tabulate.
    """
    from tabulate import tabulate

    headings = [escape_cell(column.heading) for column in table.columns]
    cells = [
        [escape_cell(format_cell(*cell)) for cell in zip(row, table.columns, strict=True)]
        for row in table.rows
    ]
    align = [column.align for column in table.columns]
    if not any(headings):
        return tabulate(cells, tablefmt="plain", colalign=align, disable_numparse=True)
    return tabulate(cells, headings, tablefmt=tablefmt, colalign=align, disable_numparse=True)
