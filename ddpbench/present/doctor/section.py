"""The examinations of a doctor's run: a section for each, whatever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from types import MappingProxyType

from ddpbench.present.document import Chart, ReportRun, Section, arrange, make_table, plain_name
from ddpbench.records.schema import Examination

Draw = Callable[[ReportRun], Iterable[Chart]]
NOT_DRAWN: Mapping[str, Draw] = MappingProxyType({})


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
    """Return the section of one examination; of several launches, a table has the lines."""

    def list_charts(run: ReportRun) -> list[Chart]:
        return (list(draw(run)) if draw else []) or list(_list_tables(name, run))

    examined = find_examinations(runs, name)
    origins: dict[str, list[str]] = {}
    for one in examined:
        for line in _lines(one.examination):
            origins.setdefault(line, []).append(one.where)
    section = Section(plain_name(name), _capitalize(name), rows=arrange(runs, list_charts))
    if len(examined) == 1:
        return replace(section, lines=tuple(origins))
    cells = [("; ".join(wheres), line) for line, wheres in origins.items()]
    table = make_table("", ("launch", "result"), cells, left=("launch", "result"))
    results = Chart(f"{section.name}-results", "Results", "", None, table)
    return replace(section, rows=(*section.rows, (results,)))


def _lines(examination: Examination) -> Iterator[str]:
    for line in examination.told:
        yield f"{_capitalize(line)}."
    for question in examination.unchecked:
        yield f"Not checked: {question}."


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _list_tables(name: str, run: ReportRun) -> Iterator[Chart]:
    """Yield each stored table; of facts, which have no headings, the first of each backend."""
    seen: set[tuple[str, str]] = set()
    for number, one in enumerate(find_examinations([run], name)):
        for table in one.examination.tables:
            key = (one.examination.backend, table.title)
            if key in seen and not any(column.heading for column in table.columns):
                continue
            seen.add(key)
            title = ", ".join(filter(None, (table.title, one.where)))
            chart = f"{plain_name(name)}-{number}-{plain_name(table.title)}"
            yield Chart(chart, _capitalize(title), "", None, replace(table, title=title))
