"""A page as Markdown: sentences, findings and tables for a README, an issue or a pull request."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from ddpbench.records.schema import Finding
from ddpbench.records.table import Table
from ddpbench.records.terminal_text import escape, escape_lines
from ddpbench.render.doctor import table_blocks
from ddpbench.render.style import MARKDOWN
from ddpbench.report.chart import Chart, Section

MOST_ROWS = 12  # of a table that is not folded away


def make_markdown(sections: Sequence[Section], title: str, pictures: Mapping[str, Path]) -> str:
    """Return the sections in GitHub's Markdown.

    title: the heading. pictures: name of a chart → its picture, relative to the Markdown.
    """
    blocks = [f"# {_text(title)}"]
    for section in sections:
        blocks += _blocks(section, pictures)
    return escape_lines("\n\n".join(blocks)) + "\n"


def _blocks(section: Section, pictures: Mapping[str, Path]) -> Iterator[str]:
    yield f"## {_text(section.title)}"
    if section.intro:
        yield _text(section.intro)
    yield from map(_text, section.lines)
    if section.findings:
        yield "\n".join(map(_item, section.findings))
    for row in section.rows:
        for chart in row:
            yield from _chart(chart, pictures)


def _item(finding: Finding) -> str:
    next_step = f". Next: {_text(finding.next_step)}" if finding.next_step else ""
    return (
        f"- **{finding.severity.upper()}** ({finding.code}): {_text(finding.sentence)}{next_step}"
    )


def _chart(chart: Chart, pictures: Mapping[str, Path]) -> Iterator[str]:
    yield f"### {_text(chart.title)}"
    if chart.name in pictures:
        yield f"![{_text(chart.title)}]({quote(pictures[chart.name].as_posix())})"
    if chart.caption:
        yield _text(chart.caption)
    for table in [chart.table, *(choice.table for choice in chart.choices[1:])]:
        yield _table(table, folded=chart.name in pictures or len(table.rows) > MOST_ROWS)


def _table(table: Table, folded: bool) -> str:
    """Return the table under its title; folded: behind a line that opens it."""
    shown = Table(
        _text(table.title),
        table.columns,
        tuple(tuple(_text(v) if isinstance(v, str) else v for v in row) for row in table.rows),
        tuple(map(_text, table.legend)),
    )
    title, *rest = "\n\n".join(table_blocks(shown, MARKDOWN)).split("\n", 1)
    body = "".join(rest).strip("\n")
    if folded:
        rows = f"{len(table.rows)} row{'s' if len(table.rows) != 1 else ''}"
        return f"<details><summary>{shown.title}: {rows}</summary>\n\n{body}\n\n</details>"
    return f"{title}\n\n{body}"


def _text(text: str) -> str:
    """Return text in one line in which GitHub finds no HTML."""
    return html.escape(escape(text), quote=False)
