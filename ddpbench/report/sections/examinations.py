"""The other examinations of the doctor, which are tables: preflight, and those of plug-ins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ddpbench.records.table import Table
from ddpbench.report.chart import Chart, ReportRun, Section, side_by_side
from ddpbench.report.examination_results import describe, find_examinations

DRAWN = ("stragglers", "links", "capabilities")  # in sections of their own


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
