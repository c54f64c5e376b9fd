"""CPU, memory and GPU load of the ranks over time: a chart for each that is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Lines, Rows
from ddpbench.present.columns import digits
from ddpbench.present.document import Chart, draw_chart
from ddpbench.records.load import Load


@dataclass(frozen=True)
class Kind:
    """A field of Load that has a chart."""

    field: str
    name: str
    title: str
    caption: str
    labels: str  # expression of the axis
    show: Callable[[float], str]


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f} MB"


KINDS = (
    Kind(
        *("cpu_cores", "cpu", "CPU"),
        "Cores in use by a rank's process, median over ranks. The band reaches to the rank that "
        "used most.",
        theme.NUMBER_LABELS,
        digits,
    ),
    Kind(
        *("memory_nbytes", "memory", "Memory"),
        "Resident memory of the process of the rank that has most.",
        theme.MEGABYTE_LABELS,
        _megabytes,
    ),
    Kind(
        *("gpu_share", "gpu", "GPU"),
        "Share of the time in which a rank's GPU was busy, median over ranks.",
        theme.SHARE_LABELS,
        "{:.0%}".format,
    ),
    Kind(
        *("gpu_memory_nbytes", "gpu-memory", "GPU memory"),
        "GPU memory that torch holds, its cache included, in the rank that has most.",
        theme.MEGABYTE_LABELS,
        _megabytes,
    ),
)


def load_charts(
    name: str,
    loads: Iterable[tuple[Mapping[str, Any], Load | None]],
    x: Axis,
    when: str,
    rules: Rows = (),
) -> Iterator[Chart]:
    """Yield a chart of each kind of load that is known, all with one x axis.

    name: begins the names of the charts. loads: columns of a moment, as `Lines` draws and shows
    them, and its load. when: what a moment is, "epoch".
    """
    known = [(facts, load) for facts, load in loads if load is not None]
    for kind in KINDS:
        rows = []
        for facts, load in known:
            if (value := getattr(load, kind.field)) is not None:
                row = {**facts, "_y": value, kind.title: kind.show(value)}
                if kind.field == "cpu_cores":
                    most = load.most_cpu_cores
                    row |= {"_low": value, "_high": most, "rank that has most": kind.show(most)}
                rows.append(row)
        if rows:
            y = Axis(kind.title, kind.labels, zero=True)
            drawing = Lines(data=rows, x=x, y=y, rules=rules, band=True, height=110)
            caption = f"{kind.caption} A point for each {when}."
            yield draw_chart(f"{name}-{kind.name}", kind.title, caption, drawing)
