"""The doctor's examinations: sections of those with charts, and one of those that are tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

from ddpbench.present.document import (
    Chart,
    ReportRun,
    Rows,
    Section,
    arrange,
    make_table,
    side_by_side,
)
from ddpbench.records.schema import Examination
from ddpbench.records.table import Table

DRAWN = ("stragglers", "links", "capabilities")  # in sections of their own
MOST_LINES = 6  # of a section; more are a table


def section(runs: Sequence[ReportRun]) -> Section | None:
    examined = find_examinations(runs, _is_table)
    if not examined:
        return None
    rows = side_by_side(runs, _tables)
    return describe("examinations", "Examinations", examined, rows)


def _is_table(name: str) -> bool:
    return name not in DRAWN


def _tables(run: ReportRun) -> Iterator[Chart]:
    """Yield each table; facts that several launches list under one title are one table."""
    facts: dict[str, list[tuple[str, Table]]] = {}
    examined = find_examinations([run], _is_table)
    for number, (one, table) in enumerate((e, t) for e in examined for t in e.examination.tables):
        title = f"{one.examination.name}: {table.title}"
        if any(column.heading for column in table.columns):
            title = ", ".join(filter(None, (title, one.where)))
            yield Chart(f"examination-{number}", title, "", None, table)
        else:
            facts.setdefault(title, []).append((one.where, table))
    for number, (title, tables) in enumerate(facts.items()):
        yield Chart(f"facts-{number}", title, "", None, _folded(tables))


def _folded(tables: Sequence[tuple[str, Table]]) -> Table:
    """Return the facts of all launches: one that differs names its launches."""
    launches: dict[tuple[Any, ...], list[str]] = {}
    for where, table in tables:
        for row in table.rows:
            launches.setdefault(row, []).append(where)
    rows = [
        row if len(wheres) == len(tables) else (*row[:-1], f"{row[-1]} ({'; '.join(wheres)})")
        for row, wheres in launches.items()
    ]
    names = list(dict.fromkeys(row[0] for row in rows))
    return replace(tables[0][1], rows=tuple(sorted(rows, key=lambda row: names.index(row[0]))))


@dataclass(frozen=True)
class Examined:
    """An examination, and what tells it from the others of its name: "mpi, launch 1" or ""."""

    where: str
    examination: Examination


def find_examinations(
    runs: Sequence[ReportRun], wanted: Callable[[str], bool]
) -> tuple[Examined, ...]:
    """Return the examinations whose name is wanted, in the order of the runs."""
    every = [(run.label, one) for run in runs for one in run.run.examinations if wanted(one.name)]
    several = [
        len({label for label, _ in every}) > 1,
        len({one.backend for _, one in every}) > 1,
        len({(label, one.backend, one.launch) for label, one in every})
        > len({(label, one.backend) for label, one in every}),
    ]
    return tuple(
        Examined(", ".join(compress((label, one.backend, f"launch {one.launch}"), several)), one)
        for label, one in every
    )


def make_section(
    name: str,
    title: str,
    runs: Sequence[ReportRun],
    make: Callable[[ReportRun], Iterable[Chart]],
) -> Section | None:
    """Return the section of the examinations of this name; None if no run has any.

    make: returns the charts of one run.
    """
    examined = find_examinations(runs, name.__eq__)
    return describe(name, title, examined, arrange(runs, make)) if examined else None


def describe(name: str, title: str, examined: Sequence[Examined], rows: Rows) -> Section:
    """Return the section of these examinations: their lines, or a table of many, then the rows."""
    origins: dict[str, list[str]] = {}
    for one in examined:
        for line in _lines(one.examination):
            origins.setdefault(line, []).append(one.where)
    if len(origins) <= MOST_LINES:
        lines = [
            line if len(wheres) == len(examined) else f"{'; '.join(wheres)}: {line}"
            for line, wheres in origins.items()
        ]
        return Section(name, title, lines=tuple(lines), rows=rows)
    headings = ("launch", "result")
    cells = [("; ".join(wheres), line) for line, wheres in origins.items()]
    table = make_table("Results", headings, cells, left=headings)
    return Section(
        name, title, rows=(*rows, (Chart(f"{name}-results", "Results", "", None, table),))
    )


def _lines(examination: Examination) -> Iterator[str]:
    for line in examination.told:
        yield f"{line[0].upper()}{line[1:]}."
    for question in examination.unchecked:
        yield f"Not checked: {question}."
