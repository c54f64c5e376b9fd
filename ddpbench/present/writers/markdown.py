"""A document as Markdown: for a README, an issue or a pull request."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from urllib.parse import quote

from ddpbench.present.document import Chart, Document, Section
from ddpbench.present.writers.text import format_finding, lay_out
from ddpbench.records.schema import Finding
from ddpbench.records.terminal_text import escape
from ddpbench.records.wording import counted

MOST_ROWS = 12  # of a titled table that is not folded away
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

    A picture contains the caption. The table below a picture and a long one are folded away.
    """
    yield f"### {_text(chart.title)}" if chart.title else ""
    picture, table = pictures.get(chart.name), chart.table
    if picture:
        yield f"![{_text(chart.title)}]({quote(picture.as_posix())})"
    else:
        yield _text(chart.caption)
    if not table.rows:
        return
    if not any(column.heading for column in table.columns):
        body = f"```\n{lay_out(table)}\n```"
    else:
        body = lay_out(table, "github", lambda cell: _text(cell).replace("|", "\\|"))
    if picture or (chart.name and len(table.rows) > MOST_ROWS):
        summary = f"The table of {counted(len(table.rows), 'row')}"
        body = f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"
    yield body
    yield "\n".join(f"- {_text(line)}" for line in table.legend)


def _text(text: str) -> str:
    """Return text in one line in which GitHub finds no HTML."""
    return html.escape(escape(text), quote=False)
