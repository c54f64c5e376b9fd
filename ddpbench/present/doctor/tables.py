"""The text of a doctor's run: each examination with its tables, then findings and the verdict.

The tables are data, so this module prints an examination without knowing it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ddpbench.present.columns import Column, Style, choose_columns, digits, text_column
from ddpbench.records.schema import Examination, Finding, Run
from ddpbench.records.table import Table, TableColumn
from ddpbench.records.wording import counted

FACT_WIDTH = 10  # of the names in a list of facts

FINDING_COLUMNS: dict[str, Column[Finding]] = {
    "severity": text_column("severity", lambda f: f.severity, "error, warning or note"),
    "code": text_column("code", lambda f: f.code, "name of the finding"),
    "sentence": text_column("sentence", lambda f: f.sentence, "what was found"),
    "next_step": text_column("next_step", lambda f: f.next_step, "what to do"),
    "place": text_column(
        "place",
        lambda f: " ".join(f"{k}={v}" for k, v in f.place.items()),
        "rank, host, link, … as name=value",
    ),
}


def blocks(run: Run, columns: tuple[str, ...] | None, quiet: bool, style: Style) -> list[str]:
    """Return the blocks of text that a blank line separates.

    The verdict comes last, after the findings: a terminal stops there. columns: show the findings
    as a table of these columns instead of sentences. quiet: leave out the examinations.
    """
    from ddpbench.present import header  # loads numpy

    shown = []
    for examination in run.examinations if not quiet else ():
        shown += _examination(examination, style)
    notes = header.partial(run) + (header.finding_lines(run) if columns is None else [])
    if notes:
        shown.append(style.gap.join(notes))
    if columns is not None:
        names = choose_columns(columns, FINDING_COLUMNS)
        shown.append(style.rows(run.findings, [FINDING_COLUMNS[name] for name in names]))
    return [*shown, verdict(run)]


def _examination(examination: Examination, style: Style) -> list[str]:
    title = f"{examination.name}  {examination.backend}, {examination.seconds:.1f} s"
    lines = [*examination.told, *(f"not checked: {text}" for text in examination.unchecked)]
    shown = [style.block(title, style.gap.join(lines)).rstrip()]
    return shown + [block for table in examination.tables for block in table_blocks(table, style)]


def table_blocks(table: Table, style: Style) -> list[str]:
    """Return the table under its title and, if it has one, the legend."""
    block = style.block(table.title, _body(table, style), 1)
    return [block, style.gap.join(table.legend)] if table.legend else [block]


def _body(table: Table, style: Style) -> str:
    cells = [
        [format_cell(value, column) for value, column in zip(row, table.columns, strict=True)]
        for row in table.rows
    ]
    heads = [column.heading for column in table.columns]
    if any(heads):
        return style.table(cells, heads, {c.heading for c in table.columns if c.align == "left"})
    facts = ["  ".join([*(f"{name:<{FACT_WIDTH}}" for name in row[:-1]), row[-1]]) for row in cells]
    return "\n".join(["```", *facts, "```"])  # fenced, for pasting into an issue


def format_cell(value: Any, column: TableColumn) -> str:
    """Format a cell of a table."""
    if isinstance(value, float) and column.decimals is not None:
        return f"{value:.{column.decimals}f}"
    return digits(value)


def verdict(run: Run) -> str:
    """Return one line: what was found, or that nothing was found and what remains open."""
    counts = Counter(finding.severity for finding in run.findings)
    seconds = sum(examination.seconds for examination in run.examinations)
    where = f"{counted(len(run.examinations), 'examination')} in {seconds:.0f} s"
    bad = [counted(counts[name], name).upper() for name in ("error", "warning") if counts[name]]
    if bad:
        return f"{' AND '.join(bad)} in {where}"
    if run.state != "complete":
        return f"UNDECIDED: nothing found in {where}, but the run is not complete"
    open_questions = sum(len(examination.unchecked) for examination in run.examinations)
    if open_questions:
        questions = counted(open_questions, "question")
        return f'NOTHING FOUND in {where}; {questions} not answered (see "not checked")'
    return f"HEALTHY: nothing found in {where}"
