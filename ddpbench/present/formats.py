"""Formats of a run, for people and machines: one entry of FORMATS adds an output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ddpbench.present.collectives.columns import COLUMNS
from ddpbench.present.columns import MARKDOWN, TERMINAL, Column, Style, choose_columns
from ddpbench.present.doctor.tables import FINDING_COLUMNS
from ddpbench.present.steps.columns import STEP_COLUMNS
from ddpbench.records.schema import Finding, Run
from ddpbench.records.terminal_text import escaped

if TYPE_CHECKING:
    import pandas as pd

    from ddpbench.analysis.lines import Line
    from ddpbench.analysis.step_lines import StepLine

Columns = tuple[str, ...] | None


def table(run: Run, columns: Columns = None, quiet: bool = False) -> str:
    """Format header, findings, tables and legends, as rank 0 prints them."""
    return _text(run, columns, quiet, TERMINAL)


def markdown(run: Run, columns: Columns = None, quiet: bool = False) -> str:
    """Format the same as Markdown, for a pull request or a README."""
    return _text(run, columns, quiet, MARKDOWN)


def csv(run: Run, columns: Columns = None, quiet: bool = False) -> str:
    """Format one row per case, every column by default, unrounded; empty cells are unknown."""
    return str(frame(run, columns).to_csv(index=False))


def frame(run: Run, columns: Columns = None) -> pd.DataFrame:
    """Return the rows of the CSV as a DataFrame of objects."""
    import pandas as pd

    names, rows_of_values = _values(run, columns)
    rows: pd.DataFrame = pd.DataFrame(rows_of_values, columns=names, dtype=object)
    return rows


def json(run: Run, columns: Columns = None, quiet: bool = False) -> str:
    """Format the whole run as stored, or only the chosen columns of its rows."""
    from json import dumps

    if columns is None:
        return dumps(asdict(run), indent=1, allow_nan=False) + "\n"
    names, rows_of_values = _values(run, columns)
    shown = [dict(zip(names, values, strict=True)) for values in rows_of_values]
    return dumps(shown, indent=1) + "\n"


FORMATS: dict[str, Callable[[Run, Columns, bool], str]] = {
    "table": escaped(table),
    "csv": escaped(csv),
    "json": json,
    "markdown": escaped(markdown),
}


def _values(run: Run, columns: Columns) -> tuple[list[str], list[list[Any]]]:
    """Return the chosen columns, by default all, and their values for each case or finding.

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
    return names, [[known[name].value(line) for name in names] for line in shown]


def _text(run: Run, columns: Columns, quiet: bool, style: Style) -> str:
    from ddpbench.present import header
    from ddpbench.present.collectives import tables as collective_tables
    from ddpbench.present.doctor import tables as doctor
    from ddpbench.present.steps import tables as step_tables
    from ddpbench.present.watch import tables as watch_tables

    blocks = [] if quiet else [style.gap.join(header.header(run))]
    if header.of_doctor(run):
        return "\n\n".join([*blocks, *doctor.blocks(run, columns, quiet, style)]) + "\n"
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
