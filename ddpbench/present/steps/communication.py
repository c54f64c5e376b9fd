"""Communication of a step: DDP's buckets, or the layer groups of a sharded step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ddpbench.analysis.spans import OPERATIONS
from ddpbench.analysis.step_lines import StepLine
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Bars
from ddpbench.present.document import Chart, tabulate_rows
from ddpbench.present.steps.columns import format_ms, format_percent
from ddpbench.records.schema import Bucket, Collective

BUCKETS = 12  # rows of a text
NAME = 24  # characters of a parameter's name
EXPLAINED = ("alone", "queue", "contention", "unexplained")  # these add up to the wire
LAYERS = 12  # rows; with more, equal layer groups share one
LAYER_CAPTION = (
    "Communication time of each group of layers in a step, in the rank that waits least; median "
    "over rounds. Full colour: exposed, the compute waits. Pale: hidden, the compute goes on."
)


def build_buckets(name: str, group: Sequence[StepLine]) -> Iterator[Chart]:
    """Yield DDP's buckets in the order of reduction, if they were timed."""
    known = [(line, b) for line in group if line.summary for b in line.summary.buckets]
    if known:
        rows = [_format_bucket(line, bucket) for line, bucket in known]
        table = tabulate_rows("buckets", rows, ("parameters",))
        yield Chart(name, "Buckets", "", table, grouped=True, most=BUCKETS, spread=True)


def _format_bucket(line: StepLine, bucket: Bucket) -> dict[str, Any]:
    names = bucket.first, bucket.last
    first, last = (n if len(n) <= NAME else f"…{n[1 - NAME :]}" for n in names)
    return {
        "backend": line.case.backend,
        "#": str(bucket.index),
        "MB": f"{bucket.nbytes / 1e6:.2f}",
        "n": str(bucket.parameters),
        "parameters": first if bucket.parameters == 1 else f"{first} … {last}",
        "ready after ms": format_ms(bucket.handed_seconds, line.seconds),
        "wire ms": format_ms(bucket.wire.value, line.seconds),
        **{f"{name} ms": _format_figure(bucket, name, line) for name in EXPLAINED},
        "wait ms": format_ms(bucket.wait.value, line.seconds),
        "late rank": "-" if bucket.late_rank is None else str(bucket.late_rank),
    }


def _format_figure(bucket: Bucket, name: str, line: StepLine) -> str | None:
    figure = getattr(bucket, name)
    return None if figure is None else format_ms(figure.value, line.seconds)


def build_layers(name: str, group: Sequence[StepLine]) -> Iterator[Chart]:
    """Yield the communication of each layer group, if the collectives were timed."""
    merged = [(line, same) for line in group for same in _merge_layers(line)]
    if not merged:
        return
    table = tabulate_rows("layer groups", [_format_layers(*each) for each in merged])
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
    """Join layer groups of equal phase, operation and size if there are many; in call order."""
    collectives = line.summary.collectives if line.summary else ()
    merged: dict[tuple[Any, ...], list[Collective]] = {}
    for i, each in enumerate(collectives):
        alike = (each.phase, each.operation, each.nbytes, each.calls)
        merged.setdefault(alike if len(collectives) > LAYERS else (i,), []).append(each)
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
        "exposed ms": format_ms(exposed, line.seconds),
        "hidden ms": format_ms(hidden, line.seconds),
        "hidden %": format_percent(hidden / whole if whole else None),
        "wait ms": format_ms(sum(each.wait.value for each in same), line.seconds),
        "late rank": " ".join(map(str, late)) or "-",
    }


def _draw_layers(line: StepLine, same: Sequence[Collective]) -> Iterator[dict[str, Any]]:
    """Yield the exposed and the hidden time of an operation, which share a row."""
    for part in ("exposed", "hidden"):
        seconds = sum(getattr(each, part).value for each in same)
        yield {
            "layers": f"{_name_layers(same)}, {same[0].phase}",
            "operation": same[0].operation,
            "part": part,
            "backend": line.case.backend,
            "ms": format_ms(seconds, line.seconds),
            "_end": seconds,
            "_pale": part == "hidden",
        }
