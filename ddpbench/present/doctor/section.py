"""The examinations of a doctor's run: a section for each, whatever it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import compress

from ddpbench.present.doctor.links import draw_links
from ddpbench.present.doctor.numbers import draw_numbers
from ddpbench.present.document import Chart, ReportRun, Section, make_table, plain_name
from ddpbench.records.schema import Examination

# An examination, and what tells it from the others of its name: "mpi, launch 1" or "".
Examined = tuple[str, Examination]


def build_sections(run: ReportRun, *, drawn: bool = False) -> Iterator[Section]:
    """Yield a section for each examination: its lines, and its stored tables.

    drawn: whether there are charts above the tables.
    """
    for name in dict.fromkeys(one.name for one in run.run.examinations):
        yield _build_section(name, run, drawn=drawn)


def _find_examinations(run: ReportRun, name: str) -> list[Examined]:
    """Return the examinations of this name, in the order of the run."""
    every = [one for one in run.run.examinations if one.name == name]
    backends = [one.backend for one in every]
    several = [len(set(backends)) > 1, len(set(backends)) < len(backends)]
    return [(", ".join(compress((x.backend, f"launch {x.launch}"), several)), x) for x in every]


def _build_section(name: str, run: ReportRun, *, drawn: bool) -> Section:
    """Return the section of one examination; of several launches, a table has the lines."""
    examined = _find_examinations(run, name)
    origins: dict[str, list[str]] = {}
    for where, one in examined:
        for line in _lines(one):
            origins.setdefault(line, []).append(where)
    charts = [*(_draw(name, examined) if drawn else ()), *_list_tables(name, examined)]
    rows = tuple(tuple(charts[n : n + 2]) for n in range(0, len(charts), 2))
    section = Section(plain_name(name), _capitalize(name), rows=rows)
    if len(examined) == 1:
        return replace(section, lines=tuple(origins))
    cells = [("; ".join(wheres), line) for line, wheres in origins.items()]
    table = make_table("", ("launch", "result"), cells, left=("launch", "result"))
    results = Chart(f"{section.name}-results", "Results", "", table)
    return replace(section, rows=(*section.rows, (results,)))


def _draw(name: str, examined: list[Examined]) -> Iterator[Chart]:
    """Yield heat maps of links, and for any other examination the numbers of its tables."""
    for number, (where, one) in enumerate(examined):
        if name == "links" and one.figures.get("cells"):
            yield from draw_links(one.figures, f"-{number}" if number else "", where or one.backend)
        places = [found.place for found in one.findings]
        marked = {r for place in places for r in place.get("ranks", [place.get("rank")])}
        for table in one.tables if name != "links" else ():
            yield from draw_numbers(f"{name}-{number + 1}-{table.title}", table, marked)


def _lines(examination: Examination) -> Iterator[str]:
    for line in examination.told:
        yield f"{_capitalize(line)}."
    for question in examination.unchecked:
        yield f"Not checked: {question}."


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _list_tables(name: str, examined: list[Examined]) -> Iterator[Chart]:
    """Yield each stored table; of facts, which have no headings, the first of each backend."""
    seen: set[tuple[str, str]] = set()
    for number, (where, one) in enumerate(examined):
        for table in one.tables:
            key = (one.backend, table.title)
            if key in seen and not any(column.heading for column in table.columns):
                continue
            seen.add(key)
            title = ", ".join(filter(None, (table.title, where)))
            chart = f"{plain_name(name)}-{number}-{plain_name(table.title)}"
            yield Chart(chart, _capitalize(title), "", replace(table, title=title))
