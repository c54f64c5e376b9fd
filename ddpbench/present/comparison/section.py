"""The verdicts of a comparison: how much each case changed, and what else differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddpbench.present.comparison import tables as render
from ddpbench.present.comparison.changes import Change, build_table, draw_changes
from ddpbench.present.comparison.labels import SHOWN
from ddpbench.present.document import Chart, Section, make_table
from ddpbench.records.wording import counted
from ddpbench.verdicts.comparison import Comparison, Row
from ddpbench.verdicts.verdict import INCOMPARABLE, INVALID

TITLE = "Verdicts"


def section(comparison: Comparison, number: int = 1) -> Section:
    rows = render.compared_rows(comparison)
    columns = render.columns(comparison)
    table = build_table("Verdicts", rows, columns)
    name_row = columns[0].show
    changes = [
        Change(name_row(row), row.case, row.base, row.new, row.shift, row)
        for row in rows
        if row.shift is not None
    ]
    name = _name(number)
    chart = draw_changes(
        f"{name}-changes", "Change of each case", changes, table, comparison.rule.confidence
    )
    base, new = comparison.base, comparison.new
    return Section(
        name,
        TITLE,
        f"{render.summarize(comparison)}.",
        lines=(
            f"BASE: {render.describe_side(base)}",
            f"NEW: {render.describe_side(new)}",
            *_list_wrong(rows, name_row),
            *(f"{line[:1].upper()}{line[1:]}" for line in render.explain(comparison)),
            *render.list_unmatched(comparison),
        ),
        rows=((chart,), *((each,) for each in _differences(comparison, name))),
    )


def explain_missing(base: str, new: str, why: str, number: int = 1) -> Section:
    """Return the section on two runs that cannot be compared."""
    return Section(_name(number), TITLE, f"No verdicts on {new} compared with {base}: {why}.")


def _name(number: int) -> str:
    return "verdicts" if number == 1 else f"verdicts-{number}"


def _list_wrong(rows: Sequence[Row], name_row: Callable[[Row], str]) -> list[str]:
    """List the cases that have no change to draw, because they are wrong or not the same."""
    wrong = [row for row in rows if row.verdict in (INVALID, INCOMPARABLE)]
    lines = [f"{row.verdict}: {name_row(row)}: {row.why}" for row in wrong[:SHOWN]]
    more = len(wrong) - SHOWN
    return [*lines, f"The table lists {counted(more, 'more such case')}."] if more > 0 else lines


def _differences(comparison: Comparison, name: str) -> list[Chart]:
    """Return the table of what differs between the environments; none if nothing does."""
    if not comparison.differences:
        return []
    headings = ("what", "base", "new")
    rows = [(d.name, ", ".join(d.base), ", ".join(d.new)) for d in comparison.differences]
    table = make_table("Differences", headings, rows, left=headings)
    caption = "Facts and settings that differ between BASE and NEW. One of them may be the cause."
    return [Chart(f"{name}-differences", "Other differences", caption, None, table)]
