"""Formats of a run, for people and machines: one entry of FORMATS adds an output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ddpbench.present.collectives.columns import COLUMNS
from ddpbench.present.columns import MARKDOWN, TERMINAL, Column, Style, choose_columns
from ddpbench.present.doctor.document import FINDING_COLUMNS, build_document
from ddpbench.present.document import Document, make_table
from ddpbench.present.steps.columns import STEP_COLUMNS
from ddpbench.present.writers import WRITERS
from ddpbench.records.schema import Finding, Run
from ddpbench.records.table import Table
from ddpbench.records.terminal_text import escape_record

if TYPE_CHECKING:
    from ddpbench.analysis.lines import Line
    from ddpbench.analysis.step_lines import StepLine

Columns = tuple[str, ...] | None
STYLES = {"table": TERMINAL, "markdown": MARKDOWN}


def table(run: Run, columns: Columns = None, quiet: bool = False) -> str:
    """Format header, findings, tables and legends, as rank 0 prints them."""
    return _show(run, columns, quiet, "table")


def markdown(run: Run, columns: Columns = None, quiet: bool = False) -> str:
    """Format the same as Markdown, for a pull request or a README."""
    return _show(run, columns, quiet, "markdown")


def csv(run: Run, columns: Columns = None, quiet: bool = False) -> str:
    """Format one row per case, every column by default."""
    return WRITERS["csv"](Document("", (), list_values(run, columns)))


def json(run: Run, columns: Columns = None, quiet: bool = False) -> str:
    """Format the whole run as stored, or only the chosen columns of its rows."""
    if columns is None:
        return WRITERS["json"](Document("", (), data=asdict(run)))
    values = list_values(run, columns)
    names = [column.heading for column in values.columns]
    rows = [dict(zip(names, row, strict=True)) for row in values.rows]
    return WRITERS["json"](Document("", (), data=rows))


FORMATS: dict[str, Callable[[Run, Columns, bool], str]] = {
    "table": table,
    "csv": csv,
    "json": json,
    "markdown": markdown,
}


def list_values(run: Run, columns: Columns = None) -> Table:
    """Return the chosen columns, by default all, for each case or finding: unrounded.

    A case that was not measured has a row only if the column `reason` explains it.
    """
    from ddpbench.analysis import lines, step_lines
    from ddpbench.present import header

    known: Mapping[str, Column[Any]] = COLUMNS
    shown: Sequence[Line | StepLine | Finding]
    if header.of_doctor(run):
        known, shown = FINDING_COLUMNS, run.findings
    elif header.of_steps(run):
        known, shown = STEP_COLUMNS, step_lines.lines(run)
    else:
        shown = lines.lines(run)
    names = choose_columns(columns, known, every=True)
    if "reason" not in names:
        shown = [line for line in shown if isinstance(line, Finding) or line.results]
    return make_table("", names, [[known[name].value(line) for name in names] for line in shown])


def _show(run: Run, columns: Columns, quiet: bool, form: str) -> str:
    from ddpbench.present import header

    if header.of_doctor(run):
        return WRITERS[form](build_document(run, columns, quiet))
    return _show_blocks(escape_record(run), columns, quiet, STYLES[form])


def _show_blocks(run: Run, columns: Columns, quiet: bool, style: Style) -> str:
    from ddpbench.present import header
    from ddpbench.present.collectives import tables as collective_tables
    from ddpbench.present.steps import tables as step_tables
    from ddpbench.present.watch import tables as watch_tables

    facts = (f"{name:<9} {fact}" for name, fact in header.list_facts(run))
    blocks = [] if quiet else [style.gap.join((header.title(run), *facts))]
    notes = header.partial(run) + ([] if quiet else header.finding_lines(run))
    if notes:
        blocks.append(style.gap.join(notes))
    if header.of_watch(run):
        shown = watch_tables.blocks(run, columns, quiet, style)
    elif header.of_steps(run):
        shown = step_tables.blocks(run, columns, quiet, style)
    else:
        shown = collective_tables.blocks(run, columns, quiet, style)
    return "\n\n".join([*blocks, *shown]) + "\n"
