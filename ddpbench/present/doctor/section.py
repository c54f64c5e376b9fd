"""The examinations of a doctor's run: a section for each, whatever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from types import MappingProxyType

from ddpbench.present.document import Chart, ReportRun, Section, arrange, make_table, plain_name
from ddpbench.records.schema import Examination
from ddpbench.records.table import Table

Draw = Callable[[ReportRun], Iterable[Chart]]
NOT_DRAWN: Mapping[str, Draw] = MappingProxyType({})
MOST_LINES = 6  # of a section; more are a table


@dataclass(frozen=True)
class Examined:
    """An examination, and what tells it from the others of its name: "mpi, launch 1" or ""."""

    where: str
    examination: Examination


def build_sections(
    runs: Sequence[ReportRun], drawn: Mapping[str, Draw] = NOT_DRAWN
) -> list[Section]:
    """Return a section for each examination: its lines, and its stored tables.

    drawn: makes charts of an examination, by its name, which replace the tables.
    """
    names = dict.fromkeys(one.name for run in runs for one in run.run.examinations)
    return [_build_section(name, runs, drawn.get(name)) for name in names]


def find_examinations(runs: Sequence[ReportRun], name: str) -> tuple[Examined, ...]:
    """Return the examinations of this name, in the order of the runs."""
    every = [(run.label, one) for run in runs for one in run.run.examinations if one.name == name]
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


def _build_section(name: str, runs: Sequence[ReportRun], draw: Draw | None) -> Section:
    """Return the section of one examination; launches that agree share a line."""

    def list_charts(run: ReportRun) -> list[Chart]:
        return (list(draw(run)) if draw else []) or list(_list_tables(name, run))

    examined = find_examinations(runs, name)
    origins: dict[str, list[str]] = {}
    for one in examined:
        for line in _lines(one.examination):
            origins.setdefault(line, []).append(one.where)
    rows = arrange(runs, list_charts)
    if len(origins) > MOST_LINES:
        cells = [("; ".join(wheres), line) for line, wheres in origins.items()]
        table = make_table("", ("launch", "result"), cells, left=("launch", "result"))
        rows = (*rows, (Chart(f"{plain_name(name)}-results", "Results", "", None, table),))
        origins = {}
    lines = [
        line if len(wheres) == len(examined) else f"{'; '.join(wheres)}: {line}"
        for line, wheres in origins.items()
    ]
    return Section(plain_name(name), _capitalize(name), lines=tuple(lines), rows=rows)


def _lines(examination: Examination) -> Iterator[str]:
    for line in examination.told:
        yield f"{_capitalize(line)}."
    for question in examination.unchecked:
        yield f"Not checked: {question}."


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _list_tables(name: str, run: ReportRun) -> Iterator[Chart]:
    """Yield each stored table; facts that several launches list under one title are one table."""
    facts: dict[str, list[tuple[str, Table]]] = {}
    tables: list[Table] = []
    for one in find_examinations([run], name):
        for table in one.examination.tables:
            if any(column.heading for column in table.columns):
                title = ", ".join(filter(None, (_capitalize(table.title), one.where)))
                tables.append(replace(table, title=title))
            else:
                facts.setdefault(_capitalize(table.title), []).append((one.where, table))
    tables += [_merge_facts(title, same) for title, same in facts.items()]
    for number, table in enumerate(tables):
        yield Chart(f"{plain_name(name)}-table-{number}", table.title, "", None, table)


def _merge_facts(title: str, tables: Sequence[tuple[str, Table]]) -> Table:
    """Return the facts of all launches: one that differs names its launches."""
    launches: dict[tuple[str, ...], list[str]] = {}
    for where, table in tables:
        for row in table.rows:
            launches.setdefault(row, []).append(where)
    rows = [
        row if len(wheres) == len(tables) else (*row[:-1], f"{row[-1]} ({'; '.join(wheres)})")
        for row, wheres in launches.items()
    ]
    names = list(dict.fromkeys(row[0] for row in rows))
    rows.sort(key=lambda row: names.index(row[0]))
    return replace(tables[0][1], title=title, rows=tuple(rows))
