"""A document as Markdown: for a README, an issue or a pull request."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from urllib.parse import quote

from ddpbench.present.document import Chart, Document, Section
from ddpbench.present.writers.text import format_finding, lay_out
from ddpbench.records.schema import Finding
from ddpbench.records.table import Table
from ddpbench.records.terminal_text import escape
from ddpbench.records.wording import counted

MOST_ROWS = 12  # of a table that is not folded away
NO_PICTURES: Mapping[str, Path] = MappingProxyType({})


def write(document: Document, pictures: Mapping[str, Path] = NO_PICTURES) -> str:
    """Return the document in GitHub's Markdown.

    pictures: name of a chart → its picture, relative to the Markdown.
    """
    blocks = [f"# {_text(document.title)}" if document.title else ""]
    for section in document.sections:
        blocks += _blocks(section, pictures)
    return "\n\n".join(filter(None, blocks)) + "\n"


def _blocks(section: Section, pictures: Mapping[str, Path]) -> Iterator[str]:
    yield f"## {_text(section.title)}" if section.title else ""
    yield _text(section.intro)
    yield from map(_text, section.lines)
    yield "\n".join(map(_item, section.findings))
    for chart in section.charts:
        yield from _chart(chart, pictures)
    yield "\n".join(f"- {_text(line)}" for line in section.legend)


def _item(finding: Finding) -> str:
    severity, rest = _text(format_finding(finding)).split(" ", 1)
    return f"- **{severity}** {rest}"


def _chart(chart: Chart, pictures: Mapping[str, Path]) -> Iterator[str]:
    """Yield the chart's title, its picture or its caption, and its table.

    A picture has the caption in it.
    """
    yield f"### {_text(chart.title)}" if chart.title else ""
    if drawn := pictures.get(chart.name):
        yield f"![{_text(chart.title)}]({quote(drawn.as_posix())})"
    else:
        yield _text(chart.caption)
    rows = len(chart.table.rows)
    most = rows if rows <= MOST_ROWS else 0
    if drawn:
        most = 0
    elif chart.remarkable is not None:
        most = chart.remarkable
    yield _lay_out(chart.table, slice(most))
    if (more := rows - most) > 0:
        summary = counted(more, "more row") if most else f"The table of {counted(more, 'row')}"
        folded = _lay_out(chart.table, slice(most, None))
        yield f"<details><summary>{summary}</summary>\n\n{folded}\n\n</details>"


def _lay_out(table: Table, part: slice) -> str:
    """Return these rows of a table and, below the first, the legend."""
    table = replace(table, rows=table.rows[part])
    if not table.rows:
        return ""
    if not any(column.heading for column in table.columns):
        return f"```\n{lay_out(table)}\n```"
    body = lay_out(table, "github", lambda cell: _text(cell).replace("|", "\\|"))
    legend = "\n".join(f"- {_text(line)}" for line in table.legend if not part.start)
    return f"{body}\n\n{legend}" if legend else body


def _text(text: str) -> str:
    """Return text in one line in which GitHub finds no HTML."""
    return html.escape(escape(text), quote=False)
