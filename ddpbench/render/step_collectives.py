"""Table of what the layer groups of a sharded step communicate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpbench.analysis.step_lines import StepLine
from ddpbench.records.schema import Collective, Run
from ddpbench.render.step_budget import observer_cost
from ddpbench.render.step_columns import ms, percent, with_backend
from ddpbench.render.style import Style

MOST = 12  # rows; with more, equal layer groups share one
HEADINGS = (
    *("layers", "groups", "phase", "operation", "MB", "exposed ms", "hidden ms", "hidden %"),
    *("wait ms", "late rank"),
)
LEFT = ("layers", "phase", "operation")


def collectives(group: list[StepLine], run: Run, style: Style) -> str:
    """Format what each layer group communicates; empty if no collective was timed."""
    cells = [row for line in group for row in with_backend(line, rows(line))]
    if not cells:
        return ""
    table = style.table(cells, ["backend", *HEADINGS], ("backend", *LEFT))
    return style.block("layer groups", style.gap.join([table, *notes(group)]), 1)


def rows(line: StepLine) -> list[list[str]]:
    """Return a row for each layer group, phase and operation, equal ones merged if many."""
    known = line.summary.collectives if line.summary else ()
    return [_row(same, line.seconds) for same in merge(known)]


def notes(group: Sequence[StepLine]) -> Iterator[str]:
    """Yield what the timing costs."""
    costs = [f"{cost} on {line.case.backend}" for line in group for cost in observer_cost(line)]
    if costs:
        yield f"timing the collectives lengthens a step by {', '.join(costs)}"


def merge(collectives: Sequence[Collective]) -> list[list[Collective]]:
    """Put equal layer groups together: of one phase, operation and size, in order of the calls."""
    if len(collectives) <= MOST:
        return [[each] for each in collectives]
    merged: dict[tuple[str, str, int, int], list[Collective]] = {}
    for each in collectives:
        key = (each.phase, each.operation, each.nbytes, each.calls)
        merged.setdefault(key, []).append(each)
    return list(merged.values())


def name(same: Sequence[Collective]) -> str:
    """Return the name of merged layer groups."""
    first, last = same[0].layers, same[-1].layers
    return first if first == last else f"{first} … {last}"


def _row(same: Sequence[Collective], step: float | None) -> list[str]:
    exposed = sum(each.exposed.value for each in same)
    hidden = sum(each.hidden.value for each in same)
    late = sorted({each.late_rank for each in same if each.late_rank is not None})
    whole = exposed + hidden
    return [
        name(same),
        str(len(same)),
        same[0].phase,
        same[0].operation,
        f"{sum(each.nbytes for each in same) / 1e6:.2f}",
        ms(exposed, step),
        ms(hidden, step),
        percent(hidden / whole if whole else None),
        ms(sum(each.wait.value for each in same), step),
        " ".join(map(str, late)) or "-",
    ]
