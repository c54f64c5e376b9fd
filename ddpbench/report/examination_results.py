"""The examinations of a page's runs: which there are, their plain lines, their charts in rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ddpbench.records.schema import Examination
from ddpbench.records.table import Table, TableColumn
from ddpbench.report.chart import Chart, ReportRun, Section, side_by_side

MOST_LINES = 6  # of a section; more are a table


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
    found = []
    for label, one in every:
        names = (label, one.backend, f"launch {one.launch}")
        found.append(
            Examined(", ".join(n for n, shown in zip(names, several, strict=True) if shown), one)
        )
    return tuple(found)


def describe(
    name: str, title: str, examined: Sequence[Examined], rows: tuple[tuple[Chart, ...], ...]
) -> Section:
    """Return the section of these examinations: their lines, or a table of many, then the rows."""
    origins: dict[str, list[str]] = {}
    for one in examined:
        for line in _lines(one.examination):
            origins.setdefault(line, []).append(one.where)
    if len(origins) <= MOST_LINES:
        common = len(examined)
        lines = [
            line if len(wheres) == common else f"{'; '.join(wheres)}: {line}"
            for line, wheres in origins.items()
        ]
        return Section(name, title, lines=tuple(lines), rows=rows)
    results = Table(
        "Results",
        (TableColumn("launch", "left"), TableColumn("result", "left")),
        tuple(("; ".join(wheres), line) for line, wheres in origins.items()),
    )
    return Section(
        name, title, rows=(*rows, (Chart(f"{name}-results", "Results", "", None, results),))
    )


def _lines(examination: Examination) -> Iterator[str]:
    for line in examination.told:
        yield f"{line[0].upper()}{line[1:]}."
    for question in examination.unchecked:
        yield f"Not checked: {question}."


def arrange(
    runs: Sequence[ReportRun], make: Callable[[ReportRun], Sequence[Chart]]
) -> tuple[tuple[Chart, ...], ...]:
    """Return the charts of one run in pairs; those of several runs beside each other."""
    rows = side_by_side(runs, make)
    if len(runs) > 1:
        return rows
    charts = [chart for row in rows for chart in row]
    return tuple(tuple(charts[n : n + 2]) for n in range(0, len(charts), 2))
