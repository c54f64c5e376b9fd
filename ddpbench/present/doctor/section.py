"""The examinations of a doctor's run: a section for each, whatever it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import compress

from ddpbench.present.document import Chart, ReportRun, Section, make_table, pair, plain_name
from ddpbench.records.schema import Examination


@dataclass(frozen=True)
class Examined:
    """An examination, and what tells it from the others of its name: "mpi, launch 1" or ""."""

    where: str
    examination: Examination


def build_sections(run: ReportRun, *, drawn: bool = False) -> Iterator[Section]:
    """Yield a section for each examination: its lines, and its stored tables.

    drawn: whether there are charts above the tables.
    """
    for name in dict.fromkeys(one.name for one in run.run.examinations):
        yield _build_section(name, run, drawn=drawn)


def find_examinations(run: ReportRun, name: str) -> tuple[Examined, ...]:
    """Return the examinations of this name, in the order of the run."""
    every = [one for one in run.run.examinations if one.name == name]
    backends = [one.backend for one in every]
    several = [len(set(backends)) > 1, len(set(backends)) < len(backends)]
    return tuple(
        Examined(", ".join(compress((one.backend, f"launch {one.launch}"), several)), one)
        for one in every
    )


def _build_section(name: str, run: ReportRun, *, drawn: bool) -> Section:
    """Return the section of one examination; of several launches, a table has the lines."""
    examined = find_examinations(run, name)
    origins: dict[str, list[str]] = {}
    for one in examined:
        for line in _lines(one.examination):
            origins.setdefault(line, []).append(one.where)
    charts = [*(_draw(name, examined) if drawn else ()), *_list_tables(name, examined)]
    section = Section(plain_name(name), _capitalize(name), rows=pair(charts))
    if len(examined) == 1:
        return replace(section, lines=tuple(origins))
    cells = [("; ".join(wheres), line) for line, wheres in origins.items()]
    table = make_table("", ("launch", "result"), cells, left=("launch", "result"))
    results = Chart(f"{section.name}-results", "Results", "", table)
    return replace(section, rows=(*section.rows, (results,)))


def _draw(name: str, examined: tuple[Examined, ...]) -> Iterator[Chart]:
    """Yield heat maps of links, and for any other examination the numbers of its tables."""
    from ddpbench.present.doctor import links, numbers  # load pandas

    if name == "links":
        yield from links.draw(examined)
        return
    for number, one in enumerate(examined, 1):
        places = [found.place for found in one.examination.findings]
        marked = {r for place in places for r in place.get("ranks", [place.get("rank")])}
        for table in one.examination.tables:
            title = f"{name}-{number}-{table.title}"
            yield from numbers.draw_numbers(title, table, marked)


def _lines(examination: Examination) -> Iterator[str]:
    for line in examination.told:
        yield f"{_capitalize(line)}."
    for question in examination.unchecked:
        yield f"Not checked: {question}."


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _list_tables(name: str, examined: tuple[Examined, ...]) -> Iterator[Chart]:
    """Yield each stored table; of facts, which have no headings, the first of each backend."""
    seen: set[tuple[str, str]] = set()
    for number, one in enumerate(examined):
        for table in one.examination.tables:
            key = (one.examination.backend, table.title)
            if key in seen and not any(column.heading for column in table.columns):
                continue
            seen.add(key)
            title = ", ".join(filter(None, (table.title, one.where)))
            chart = f"{plain_name(name)}-{number}-{plain_name(table.title)}"
            yield Chart(chart, _capitalize(title), "", replace(table, title=title))
