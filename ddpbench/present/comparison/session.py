"""The tests of a pytest session that measured ranks, and verdicts if there are any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddpbench.present.columns import Column, text_column
from ddpbench.present.comparison.changes import (
    Change,
    draw_changes,
    format_noticeable,
    list_changes,
)
from ddpbench.present.comparison.labels import format_time, label
from ddpbench.present.document import Chart, Section, tabulate_rows
from ddpbench.records.schema import Finding
from ddpbench.records.wording import counted
from ddpbench.verdicts.comparison import ONLY_NEW
from ddpbench.verdicts.regression import Measured, Row, counts

COLUMNS: tuple[Column[Any], ...] = (
    text_column("saved in", lambda change: change.row.base.source),
    text_column(
        "torch",
        lambda change: " → ".join(
            dict.fromkeys(filter(None, (change.row.base.torch, change.row.new.torch)))
        ),
    ),
    Column("margin", lambda change: f"±{change.row.margin * 100:.3g} %"),
)


def build_section(
    measured: Mapping[str, Measured], rows: Sequence[Row] = (), *, drawn: bool = False
) -> Section:
    """Return the section of a session.

    measured: what each test measured, by its name. rows: the verdicts on them, if they were
    compared with saved runs. drawn: whether changes are a chart, with a table of
    launches below it.
    """
    names = _shorten(measured)
    rows = [replace(row, test=names[row.test]) for row in rows]
    judged = {row.test: row for row in rows}
    sides = {name: measured[test] for test, name in names.items()}
    sides |= {name: row.new for name, row in judged.items()}
    verdicts = ", ".join(f"{count} {name}" for name, count in counts(rows).items())
    changes = [
        Change(row.test, row.new.case, row.base.side, row.new.side, row)
        for row in rows
        if row.base is not None
    ]
    blocks = [list_changes("tests-changes", "test", changes, *COLUMNS)] if changes else []
    if drawn:
        blocks = [draw_changes(block, changes) for block in blocks]
        blocks.append(_list_launches(sides, judged))
    return Section(
        "tests",
        "Tests",
        f"{counted(len(names), 'test')} measured{f': {verdicts}' if verdicts else ''}.",
        findings=tuple(_find(sides, rows)),
        rows=tuple((block,) for block in blocks),
    )


def _list_launches(sides: Mapping[str, Measured], judged: Mapping[str, Row]) -> Chart:
    """Return the table of all launches, with the saved ones that they were compared with."""
    rows = []
    for test, new in sides.items():
        saved = judged[test].base if test in judged else None
        for name, one in (("saved", saved), ("new", new)):
            if one is not None:
                times = [format_time(one.case, seconds) for seconds in one.side.times]
                median = format_time(one.case, one.side.seconds)
                cells = {"test": test, "side": name, "case": label(one.case), "median": median}
                rows.append({**cells, "launches": ", ".join(times)})
    caption = "The time that each launch measured."
    return Chart("tests-launches", "Launches of each test", caption, tabulate_rows("", rows))


def _shorten(tests: Mapping[str, Measured]) -> dict[str, str]:
    """Return a name for each test: without its file, if that leaves names distinct."""
    short = {test: test.rpartition("::")[2] for test in tests}
    return short if len(set(short.values())) == len(short) else {test: test for test in tests}


def _find(sides: Mapping[str, Measured], rows: Sequence[Row]) -> Iterator[Finding]:
    """Yield what makes times and verdicts doubtful, and tests that have none."""
    bases = {row.test: row.base for row in rows if row.base is not None}
    for name, every in (("base", bases), ("new", sides)):
        for test, side in every.items():
            for warning in side.warnings:
                yield Finding("warning", "conditions", f"{name}, {test}: {warning}")
    if unknown := [row.test for row in rows if row.base is None]:
        sentence = f"{ONLY_NEW}, no saved run to compare with: {', '.join(unknown)}"
        yield Finding("note", "not-compared", sentence)
    if text := format_noticeable([row.noticeable for row in rows if row.shift]):
        yield Finding("note", "sensitivity", text)
