"""CPU, memory and GPU load of the ranks over time: a chart for each that is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from ddpbench.catalog.sizes import readable
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Lines
from ddpbench.present.columns import digits
from ddpbench.present.document import Chart, draw_chart
from ddpbench.records.load import Load


@dataclass(frozen=True)
class Kind:
    """A field of Load that has a chart; most: the field of the rank that has most, if another."""

    name: str
    field: str
    title: str
    axis: str
    caption: str
    labels: str  # expression of the axis
    show: Callable[[float], str]
    most: str = ""


def _readable(nbytes: float) -> str:
    return readable(round(nbytes))


CPU = (
    "CPU time of a rank's process per second, median over ranks; 1 is one core. "
    "The band reaches to the rank that used most."
)
MEMORY = "Resident memory of the process of the rank that has most."
GPU = "Share of the time in which a rank's GPU was busy, median over ranks."
GPU_MEMORY = "GPU memory that torch holds, its cache included, in the rank that has most."
NUMBER, SHARE, SIZE = theme.NUMBER_LABELS, theme.SHARE_LABELS, theme.SIZE_LABELS
KINDS = (
    Kind("cpu", "cpu_cores", "CPU", "cores in use", CPU, NUMBER, digits, "most_cpu_cores"),
    Kind("memory", "memory_nbytes", "Memory", "resident memory", MEMORY, SIZE, _readable),
    Kind("gpu", "gpu_share", "GPU", "time in use", GPU, SHARE, "{:.0%}".format),
    Kind(
        *("gpu-memory", "gpu_memory_nbytes", "GPU memory", "memory in use"),
        *(GPU_MEMORY, SIZE, _readable),
    ),
)


def load_charts(
    name: str,
    loads: Iterable[tuple[Mapping[str, Any], Load | None]],
    x: Axis,
    when: str,
    *,
    detail: Sequence[str] = (),
    rules: pd.DataFrame | None = None,
) -> Iterator[Chart]:
    """Yield a chart of each kind of load that is known, all with one x axis.

    name: begins the names of the charts. loads: columns of a moment, as `Lines` draws and shows
    them, and its load. when: what a moment is, "epoch". detail: columns that tell lines apart.
    """
    known = [(facts, asdict(load)) for facts, load in loads if load is not None]
    for kind in KINDS:
        rows = [
            {**facts, **_measure(kind, load)}
            for facts, load in known
            if load[kind.field] is not None
        ]
        if rows:
            drawing = Lines(
                data=pd.DataFrame(rows),
                x=x,
                y=Axis(kind.axis, kind.labels, zero=True),
                detail=tuple(detail),
                rules=rules,
                band=True,
                height=110,
            )
            caption = f"{kind.caption} A point for each {when}."
            yield draw_chart(f"{name}-{kind.name}", kind.title, caption, drawing)


def _measure(kind: Kind, load: Mapping[str, Any]) -> dict[str, Any]:
    value = load[kind.field]
    row = {"_y": value, kind.axis: kind.show(value)}
    if kind.most and (most := load[kind.most]) is not None:
        row |= {"_low": value, "_high": most, "rank that has most": kind.show(most)}
    return row
