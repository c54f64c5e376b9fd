"""What a step communicates: DDP's buckets, and layer groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ddpbench.analysis.spans import OPERATIONS
from ddpbench.analysis.step_lines import StepLine
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Bars
from ddpbench.present.document import Chart, tabulate_rows
from ddpbench.present.steps.breakdown import is_known
from ddpbench.present.steps.columns import bounded, ms, percent
from ddpbench.records.schema import Bucket, Collective

BUCKETS = 12  # rows of a text
NAME = 24  # characters of a parameter's name
LAYERS = 12  # rows; with more, equal layer groups share one
LAYER_CAPTION = (
    "How long each group of layers communicates in a step, in the rank that waits least; "
    "median over rounds. Full colour: exposed, the compute waits. Pale: hidden, the compute "
    "goes on."
)


def build_buckets(name: str, group: Sequence[StepLine]) -> Iterator[Chart]:
    """Yield DDP's buckets in the order of reduction, if they were timed."""
    known = [(line, b) for line in group if line.summary for b in line.summary.buckets]
    if not known:
        return
    table = tabulate_rows("buckets", [_format_bucket(*each) for each in known], ("parameters",))
    table = replace(table, legend=_timing_cost(group, "buckets"))
    more: dict[str, Any] = {"grouped": True, "most": BUCKETS, "spread": True}
    yield Chart(name, "Buckets", "", table, **more)


def _format_bucket(line: StepLine, bucket: Bucket) -> dict[str, str]:
    first, last = _shorten(bucket.first), _shorten(bucket.last)
    return {
        "backend": line.case.backend,
        "#": str(bucket.index),
        "MB": f"{bucket.nbytes / 1e6:.2f}",
        "n": str(bucket.parameters),
        "parameters": first if bucket.parameters == 1 else f"{first} … {last}",
        "ready after ms": ms(bucket.handed_seconds, line.seconds),
        "wire ms": ms(bucket.wire.value, line.seconds),
        "wait ms": ms(bucket.wait.value, line.seconds),
        "late rank": "-" if bucket.late_rank is None else str(bucket.late_rank),
    }


def _shorten(name: str) -> str:
    return name if len(name) <= NAME else f"…{name[1 - NAME :]}"


def _timing_cost(group: Sequence[StepLine], what: str) -> tuple[str, ...]:
    """State by how much taking the time of the buckets, or the collectives, lengthens a step."""
    costs = []
    for line in group:
        summary = line.summary
        part = summary.observer if summary and (summary.buckets or summary.collectives) else None
        if part is not None and is_known(part):
            value, interval = bounded(part, line.seconds)
            costs.append(f"{value} ms {interval} on {line.case.backend}")
    return (f"timing the {what} lengthens a step by {', '.join(costs)}",) if costs else ()


def build_layers(name: str, group: Sequence[StepLine]) -> Iterator[Chart]:
    """Yield what each layer group communicates, if the collectives were timed."""
    timed = [line for line in group if line.summary and line.summary.collectives]
    if not timed:
        return
    merged = [(line, same) for line in timed for same in _merge_layers(line)]
    rows = [_format_layers(*each) for each in merged]
    table = replace(tabulate_rows("layer groups", rows), legend=_timing_cost(group, "collectives"))
    drawing = Bars(
        data=[bar for each in merged for bar in _draw_layers(*each)],
        x=Axis("time in a step", theme.TIME_LABELS),
        row="layers",
        within="backend",
        color="operation",
        order=OPERATIONS,
    )
    yield Chart(name, "Layer groups", LAYER_CAPTION, table, drawing, grouped=True)


def _merge_layers(line: StepLine) -> list[list[Collective]]:
    """Put equal layer groups together: of one phase, operation and size, in order of the calls."""
    collectives = line.summary.collectives if line.summary else ()
    if len(collectives) <= LAYERS:
        return [[each] for each in collectives]
    merged: dict[tuple[str, str, int, int], list[Collective]] = {}
    for each in collectives:
        key = (each.phase, each.operation, each.nbytes, each.calls)
        merged.setdefault(key, []).append(each)
    return list(merged.values())


def _name_layers(same: Sequence[Collective]) -> str:
    first, last = same[0].layers, same[-1].layers
    return first if first == last else f"{first} … {last}"


def _format_layers(line: StepLine, same: Sequence[Collective]) -> dict[str, str]:
    exposed = sum(each.exposed.value for each in same)
    hidden = sum(each.hidden.value for each in same)
    late = sorted({each.late_rank for each in same if each.late_rank is not None})
    whole = exposed + hidden
    return {
        "backend": line.case.backend,
        "layers": _name_layers(same),
        "groups": str(len(same)),
        "phase": same[0].phase,
        "operation": same[0].operation,
        "MB": f"{sum(each.nbytes for each in same) / 1e6:.2f}",
        "exposed ms": ms(exposed, line.seconds),
        "hidden ms": ms(hidden, line.seconds),
        "hidden %": percent(hidden / whole if whole else None),
        "wait ms": ms(sum(each.wait.value for each in same), line.seconds),
        "late rank": " ".join(map(str, late)) or "-",
    }


def _draw_layers(line: StepLine, same: Sequence[Collective]) -> Iterator[dict[str, Any]]:
    """Yield the exposed and the hidden time of each operation, one behind the other in a row."""
    for what in ("exposed", "hidden"):
        seconds = sum(getattr(each, what).value for each in same)
        yield {
            "layers": f"{_name_layers(same)}, {same[0].phase}",
            "operation": same[0].operation,
            "part": what,
            "backend": line.case.backend,
            "ms": ms(seconds, line.seconds),
            "_end": seconds,
            "_pale": what == "hidden",
        }
