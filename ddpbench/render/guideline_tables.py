"""The guidelines of a run as a table and as findings: whom they accuse, by how much, what to do."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddpbench.analysis import lines
from ddpbench.catalog.sizes import readable
from ddpbench.records.schema import Finding, Run
from ddpbench.records.table import Table, TableColumn
from ddpbench.render import header
from ddpbench.render.column import format_ranks, format_subgroups
from ddpbench.render.doctor import table_blocks
from ddpbench.render.labels import format_change, format_time, shift_interval
from ddpbench.render.style import Style
from ddpbench.verdicts import guidelines
from ddpbench.verdicts.guidelines import VIOLATED, Check
from ddpbench.verdicts.verdict import INCONCLUSIVE, MARGIN, MOST

COLUMNS = ("guideline", "backend", "size", "verdict", "change", "95 %", "time", "at most", "data")
LEFT = {"guideline", "backend", "data", "verdict"}
LEGEND = (
    "at most: time of the operations that do the same, one after the other, or of the next larger "
    "size; medians over launches",
    f"VIOLATED: longer by more than {MARGIN * 100:g} %; HOLDS: not longer; INCONCLUSIVE: the "
    "interval of the change, over pairs from one launch, leaves both open. A row of several sizes "
    "shows the one with the largest change",
)
# What Open MPI calls an operation in the names of its parameters, where it is not the same word.
OPEN_MPI = {"broadcast": "bcast", "reduce_scatter": "reduce_scatter"}


def blocks(run: Run, style: Style) -> list[str]:
    """Return the blocks of text that `show --guidelines` adds to a run."""
    checks = guidelines.check(lines.lines(run))
    if not checks:
        return [
            "guidelines: nothing to compare. Next: measure, for example, ddpbench collectives "
            "--op all_reduce,reduce,broadcast"
        ]
    found = list(header.format_findings(findings(checks)))
    return [*table_blocks(table(checks), style), *([style.gap.join(found)] if found else [])]


def table(checks: Sequence[Check]) -> Table:
    """Return a row for each violation, and one for all sizes with another verdict."""
    columns = tuple(TableColumn(name, "left" if name in LEFT else "right") for name in COLUMNS)
    rows = tuple(_row(group) for group in guidelines.merge(checks))
    return Table("guidelines", columns, rows, LEGEND)


def _row(group: Sequence[Check]) -> tuple[str, ...]:
    worst = max(group, key=lambda c: c.shift.estimate if c.shift else c.seconds / c.bound)
    case = worst.line.case
    size = readable(case.nbytes) if case.nbytes else ""
    if len(group) > 1:
        size += f" (worst of {len(group)})"
    data = [case.dtype if case.nbytes else "", case.reduce_op or "", format_ranks(case)]
    estimate = worst.shift.estimate if worst.shift else math.log(worst.seconds / worst.bound)
    return (
        worst.label,
        case.backend,
        size,
        verdict_text(worst),
        format_change(estimate),
        shift_interval(worst.shift),
        format_time(case, worst.seconds),
        format_time(case, worst.bound),
        " ".join(filter(None, [*data, format_subgroups(case)])),
    )


def verdict_text(check: Check) -> str:
    """Format the verdict, with the launches that it needs if they are too few."""
    if check.verdict != INCONCLUSIVE or check.needed is None or check.needed > MOST:
        return check.verdict
    return f"{check.verdict}: needs about {check.needed} launches"


def findings(checks: Sequence[Check]) -> tuple[Finding, ...]:
    """Return a warning for each guideline and backend that is violated, at its worst size."""
    groups: dict[tuple[str, str], list[Check]] = {}
    for check in checks:
        groups.setdefault((check.label, check.line.case.backend), []).append(check)
    return tuple(
        _finding(violated, len(group))
        for group in groups.values()
        if (violated := [check for check in group if check.verdict == VIOLATED])
    )


def _finding(violated: Sequence[Check], sizes: int) -> Finding:
    worst = max(violated, key=lambda c: c.shift.estimate if c.shift else 0.0)
    case, shift = worst.line.case, worst.shift
    assert shift is not None  # of a violation
    than = f"one of {readable(worst.others[0].case.nbytes)}, which takes"
    if not worst.monotone:
        takes = "take" if len(worst.others) > 1 else "takes"
        than = f"{worst.instead.replace(' + ', ' and then ')}, which {takes}"
    of = f" of {readable(case.nbytes)}" if case.nbytes else ""
    change, low, high = (
        f"{math.expm1(x) * 100:.1f} %" for x in (shift.estimate, shift.low, shift.high)
    )
    sentence = (
        f"{case.called}{of} on {case.backend} takes {format_time(case, worst.seconds)}, "
        f"{change} ({low} to {high}) longer than {than} {format_time(case, worst.bound)}"
    )
    if sizes > 1:
        sentence += f"; violated at {len(violated)} of {sizes} sizes"
    place = {"operation": case.operation, "backend": case.backend, "nbytes": case.nbytes}
    return Finding("warning", "guideline", sentence, _advice(worst), place)


def _advice(check: Check) -> str:
    """Return what the user of this library can do."""
    case = check.line.case
    instead = f"call {check.instead.replace(' + ', ' and ')} instead"
    if check.monotone:
        instead = f"pad these messages to {readable(check.others[0].case.nbytes)}"
    if case.backend == "nccl":
        return f"compare NCCL_ALGO=Ring with NCCL_ALGO=Tree, or {instead}"
    if case.backend == "mpi":
        name = OPEN_MPI.get(case.operation, case.operation.replace("_", ""))
        return (
            "try other algorithms (Open MPI: OMPI_MCA_coll_tuned_use_dynamic_rules=1 "
            f"OMPI_MCA_coll_tuned_{name}_algorithm=1, then 2, …), or {instead}"
        )
    return instead
