"""A page as Markdown: sentences, findings and tables for a README, an issue or a pull request."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from ddpbench.present.columns import MARKDOWN
from ddpbench.present.doctor.tables import table_blocks
from ddpbench.present.document import Chart, Section
from ddpbench.records.schema import Finding
from ddpbench.records.table import Table
from ddpbench.records.terminal_text import escape, escape_lines
from ddpbench.records.wording import counted

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
    for chart in section.charts:
        yield from _chart(chart, pictures)


def _item(finding: Finding) -> str:
    next_step = f". Next: {_text(finding.next_step)}" if finding.next_step else ""
    return (
        f"- **{finding.severity.upper()}** ({finding.code}): {_text(finding.sentence)}{next_step}"
    )


def _chart(chart: Chart, pictures: Mapping[str, Path]) -> Iterator[str]:
    """Yield the chart's title, its picture or its caption, and its table.

    A picture has the caption in it. Of many choices only the first has a table.
    """
    yield f"### {_text(chart.title)}"
    if drawn := pictures.get(chart.name):
        yield f"![{_text(chart.title)}]({quote(drawn.as_posix())})"
    elif chart.caption:
        yield _text(chart.caption)
    table = _table(chart.table)
    if drawn or len(chart.table.rows) > MOST_ROWS:
        rows = counted(len(chart.table.rows), "row")
        yield f"<details><summary>The table of {rows}</summary>\n\n{table}\n\n</details>"
    else:
        yield table


def _table(table: Table) -> str:
    """Return the rows and the legend, without the title, which is that of the chart."""
    fenced = not any(column.heading for column in table.columns)  # shows entities as they are
    text = escape if fenced else _text
    rows = tuple(tuple(text(v) if isinstance(v, str) else v for v in row) for row in table.rows)
    body, *_ = table_blocks(Table("", table.columns, rows), MARKDOWN)
    legend = "\n".join(f"- {_text(line)}" for line in table.legend)
    return "\n\n".join(filter(None, (body.split("\n", 1)[1].strip("\n"), legend)))


def _text(text: str) -> str:
    """Return text in one line in which GitHub finds no HTML."""
    return html.escape(escape(text), quote=False)
