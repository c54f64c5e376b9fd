"""The breakdown of a step: its parts, and the possible gain."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ddpbench.analysis import steps
from ddpbench.analysis.step_lines import StepLine
from ddpbench.analysis.steps import EXPOSED_OF, HIDDEN_OF, SAVES, WOULD_SAVE
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Bars
from ddpbench.present.document import Chart, tabulate_rows
from ddpbench.present.steps.columns import format_part, format_percent, mark_noise
from ddpbench.records.schema import Figure, Part

STEP, LATE = "= step", "waiting for a rank"
COMPONENTS = (steps.TRANSFER, *EXPOSED_OF.values(), steps.OVERHEAD)  # of the exposed communication
BEFORE = (steps.HIDDEN, *HIDDEN_OF.values())  # drawn so that they end where it begins
CAPTION = (
    "Median, and share of the step. Each part begins where the one before ends; hidden "
    "communication ends where exposed communication begins. Pale: not clearly above 0. Rules: "
    "95 % interval."
)


def build_breakdown(name: str, group: Sequence[StepLine]) -> Iterator[Chart]:
    """Yield the parts of a step."""
    measured = [line for line in group if line.summary and line.summary.budget]
    known = [line for line in measured if any(map(_is_known, _parts(line)))]
    rows = [row for line in known for row in _rows(line)]
    notes = []
    if few := [line.case.backend for line in measured if line not in known]:
        notes.append(f"no breakdown on {', '.join(few)}: it needs six rounds, or six launches")
    notes += [text for line in group for text in _peak_memory(line)]
    if rows or notes:
        table = replace(tabulate_rows("breakdown", rows), legend=tuple(notes))
        drawing = Bars(
            data=[bar for line in known for bar in _bars(line)],
            x=Axis("time of a step", theme.TIME_LABELS),
            row="part of a step",
            within="backend",
        )
        drawn = drawing if rows else None
        yield Chart(name, "Breakdown of a step", CAPTION, table, drawn, grouped=True)


def _parts(line: StepLine) -> tuple[Part, ...]:
    return line.summary.budget if line.summary else ()


def _is_known(part: Part) -> bool:
    return part.resolved or part.figure.interval is not None


def _row(line: StepLine, part: Part) -> dict[str, Any]:
    value, interval = format_part(part, line.seconds)
    return {
        "backend": line.case.backend,
        "part of a step": part.name,
        "ms": value,
        "95 %": interval,
        "% of step": mark_noise(part, format_percent(part.share)),
    }


def _whole(line: StepLine, seconds: float) -> Part:
    return Part(STEP, Figure(seconds, line.interval), 1.0, True)


def _rows(line: StepLine) -> Iterator[dict[str, Any]]:
    """Format one row per part, and the step below the parts that make it up."""
    total = 0.0
    for part in _parts(line):
        # An unresolved wait names no rank.
        unnamed = part.rank is not None and not part.resolved
        yield _row(line, replace(part, name="waiting for any one rank") if unnamed else part)
        total += part.figure.value
        if part.name == steps.EXPOSED and math.isclose(total, line.seconds or 0.0, rel_tol=1e-6):
            yield _row(line, _whole(line, total))


def _bars(line: StepLine) -> Iterator[dict[str, Any]]:
    """Yield a bar for each part of the step, and for the step."""
    whole, exposed = line.seconds or 0.0, line.part(steps.EXPOSED)
    late = line.part(steps.WAITING)
    named = {name: line.part(name) for name in (*COMPONENTS, *BEFORE, SAVES, WOULD_SAVE)}
    chain = [part for name in steps.CHAIN if (part := line.part(name))]
    before = sum(part.figure.value for part in chain if part.name != steps.EXPOSED)
    parts = (  # and where they begin, or end
        (chain, 0.0, 1),
        ([_whole(line, whole)] if exposed else [], 0.0, 1),
        ([named[name] for name in COMPONENTS], before, 1),
        ([named[name] for name in BEFORE], before, -1),
        ([named[SAVES]], whole, 1),
        ([named[WOULD_SAVE]], whole, -1),
        ([late and replace(late, name=LATE)], 0.0, 1),
    )
    for same, place, way in parts:
        for part in filter(None, same):
            yield _bar(line, part, place, way)
            place += part.figure.value if way > 0 else 0.0


def _bar(line: StepLine, part: Part, place: float, way: int) -> dict[str, Any]:
    """Return a bar that begins at a place, or ends there if `way` is -1."""
    text = mark_noise(part, f"{format_percent(part.share)} %")
    if part.rank is not None and part.resolved:
        text += f": rank {part.rank}"
    bounds, ends = part.figure.interval, sorted((place, place + way * part.figure.value))
    return {
        **_row(line, part),
        "_text": text,
        "_pale": not part.resolved,
        "_begin": ends[0],
        "_end": ends[1],
        "_low": place + way * bounds.low if bounds else None,
        "_high": place + way * bounds.high if bounds else None,
    }


def _peak_memory(line: StepLine) -> Iterator[str]:
    if line.summary and line.summary.peak_nbytes:
        on_device = line.case.clock == "device"
        what = "tensors" if on_device else "resident memory, with Python and its libraries"
        size = f"{line.summary.peak_nbytes / 1e6:.0f} MB of {what}"
        yield f"peak of a step on {line.case.backend}: {size}, in the rank that needs most"
