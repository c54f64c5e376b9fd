"""Texts shared by comparisons and lists: labels of cases, times, changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddpbench.analysis.stats import half_width
from ddpbench.catalog.parallel import format_mesh
from ddpbench.catalog.sizes import readable
from ddpbench.present.columns import Column, digits, format_subgroups, text_column
from ddpbench.present.document import Chart, build_table
from ddpbench.records.schema import StepCase
from ddpbench.records.wording import counted
from ddpbench.verdicts import comparison, regression
from ddpbench.verdicts.matching import AnyCase, Side
from ddpbench.verdicts.verdict import SAME, Shift

SHOWN = 8  # texts that one line lists


def label(case: AnyCase) -> str:
    """Name a case; --only searches in this text."""
    return " ".join(filter(None, label_parts(case)))


def label_parts(case: AnyCase) -> list[str]:
    """Return the parts of a label, each meaning the same at its position; "" is left out."""
    ranks = counted(case.world_size, "rank")
    device = "" if case.device == "cpu" else case.device
    if isinstance(case, StepCase):
        batch = f"batch {case.batch}" if case.batch else ""
        model = [case.workload, " ".join(case.settings), batch, case.optimizer]
        way = f"{case.parallel} {format_mesh(case.mesh)}" if case.mesh else ""
        return [*model, way, case.backend, device, ranks]
    return [
        case.operation,
        readable(case.nbytes) if case.nbytes else "",
        case.dtype if case.nbytes else "",
        case.reduce_op or "",
        "" if case.root is None else f"root {case.root}",
        "" if case.form == "tensor" else "list",
        ("in place" if case.in_place else "out of place") if case.nbytes else "",
        case.backend,
        device,
        ranks,
        format_subgroups(case),
    ]


def list_some(texts: Sequence[str], gap: str = ", ") -> str:
    """Return the first texts in one line, and how many more there are."""
    more = [f"and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return gap.join([*texts[:SHOWN], *more])


def format_time(case: AnyCase, seconds: float) -> str:
    """Format a time with its unit: ms for a DDP step, else µs."""
    scale, unit = (1e3, "ms") if isinstance(case, StepCase) else (1e6, "µs")
    return f"{digits(seconds * scale)} {unit}"


def format_change(log_ratio: float) -> str:
    """Format a log ratio as a change: "+12.3 %"."""
    return f"{math.expm1(log_ratio) * 100:+.1f} %"


def side_time(case: AnyCase, side: Side | None) -> str:
    return format_time(case, side.seconds) if side else "-"


def side_interval(side: Side | None) -> str:
    return f"±{half_width(side.interval) * 100:.1f} %" if side and side.interval else "-"


def shift_estimate(shift: Shift | None) -> str:
    return format_change(shift.estimate) if shift else "-"


def shift_interval(shift: Shift | None) -> str:
    return f"{format_change(shift.low)} … {format_change(shift.high)}" if shift else "-"


@dataclass(frozen=True)
class Change:
    """A case or a test that both sides have."""

    label: str
    case: AnyCase
    base: Side | None
    new: Side | None
    row: comparison.Row | regression.Row


def list_changes(name: str, head: str, changes: Sequence[Change], *others: Column[Any]) -> Chart:
    """Return the table of changes, the remarkable ones first; columns without a text are left out.

    head: heading of the labels. others: columns of Change before the verdict.
    """
    columns: tuple[Column[Any], ...] = (
        text_column(head, lambda change: change.label),
        Column("base", lambda change: side_time(change.case, change.base)),
        Column("95 %", lambda change: side_interval(change.base)),
        Column("new", lambda change: side_time(change.case, change.new)),
        Column("95 %", lambda change: side_interval(change.new)),
        Column("change", lambda change: shift_estimate(change.row.shift)),
        Column("range of change", lambda change: shift_interval(change.row.shift)),
        *others,
        text_column("verdict", lambda change: change.row.verdict),
        text_column("why", lambda change: change.row.why),
    )
    table = build_table("", columns, changes)
    remarkable = sum(change.row.verdict != SAME for change in changes)
    return Chart(name, f"Change of each {head}", "", table, remarkable=remarkable)


def format_noticeable(changes: Sequence[float | None]) -> str:
    """State how large a change a comparison could have noticed; "" if there is no case."""
    known = [
        f"{change * 100:.0f}" if change < 10 else "over 1000"
        for change in sorted(c for c in changes if c is not None)
    ]
    if not known:
        few = "this comparison could not have noticed any change: too few launches"
        return few if changes else ""
    several = known[0] != known[-1]
    shown = f"{known[0]} to {known[-1]} %, depending on the case" if several else f"{known[0]} %"
    return f"this comparison could have noticed a change of {shown}"
