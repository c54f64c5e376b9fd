"""Formats of a run, for people and machines: one entry of FORMATS adds an output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ddpbench.present.collectives.columns import COLUMNS
from ddpbench.present.columns import Column, choose_names
from ddpbench.present.doctor.document import FINDING_COLUMNS, build_document
from ddpbench.present.document import Document, Section, make_table
from ddpbench.present.steps.columns import STEP_COLUMNS
from ddpbench.present.writers import WRITERS
from ddpbench.records.schema import Finding, Run
from ddpbench.records.table import Table

if TYPE_CHECKING:
    from ddpbench.analysis.lines import Line
    from ddpbench.analysis.step_lines import StepLine

Columns = tuple[str, ...] | None


def show(form: str, run: Run, columns: Columns = None, quiet: bool = False) -> str:
    """Return a run in one of WRITERS.

    columns: default: the usual ones; every one in CSV, and the whole run, as stored, in JSON.
    quiet: without header, findings and legends.
    """
    from ddpbench.present import header  # loads numpy

    if form == "csv":
        document = Document("", (), list_values(run, columns))
    elif form == "json":
        document = Document("", (), data=_list_data(run, columns))
    elif header.of_doctor(run):
        document = build_document(run, columns, quiet)
    else:
        document = _build_document(run, columns, quiet)
    return WRITERS[form](document)


FORMATS: dict[str, Callable[[Run, Columns, bool], str]] = {
    form: partial(show, form) for form in WRITERS
}


def _list_data(run: Run, columns: Columns) -> Any:
    if columns is None:
        return asdict(run)
    values = list_values(run, columns)
    names = [column.heading for column in values.columns]
    return [dict(zip(names, row, strict=True)) for row in values.rows]


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
    names = choose_names(columns, known, every=True)
    if "reason" not in names:
        shown = [line for line in shown if isinstance(line, Finding) or line.results]
    return make_table("", names, [[known[name].value(line) for name in names] for line in shown])


def _build_document(run: Run, columns: Columns, quiet: bool) -> Document:
    """Return the document of a run that measured, or watched, something."""
    from ddpbench.present import header
    from ddpbench.present.collectives import tables as collective_tables
    from ddpbench.present.steps import tables as step_tables
    from ddpbench.present.watch import tables as watch_tables

    if header.of_watch(run) and columns is None:
        sections = [*watch_tables.build_sections(run)]
    elif header.of_steps(run):
        sections = [*step_tables.build_sections(run, columns)]
    else:
        sections = [*collective_tables.build_sections(run, columns, fitted=not quiet)]
    result = Section("result", "", lines=tuple(header.partial(run)))
    if quiet:
        return Document("", (*(replace(each, lines=()) for each in sections), result))
    findings, more = header.choose_findings(run)
    result = replace(result, findings=findings, lines=(*result.lines, *more))
    return Document(header.title(run), (header.build_setup(run, ""), *sections, result))
