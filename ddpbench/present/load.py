"""CPU, memory and GPU load of the ranks over time: a chart for each that is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Lines, Rows
from ddpbench.present.columns import digits
from ddpbench.present.document import Chart, draw_chart
from ddpbench.records.load import Load


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f} MB"


# Of a field of Load: the end of its chart's name, title, caption, labels of the axis, and how a
# value is written.
KINDS: dict[str, tuple[str, str, str, str, Callable[[float], str]]] = {
    "cpu_cores": (
        *("cpu", "CPU"),
        "Cores in use by a rank's process, median over ranks.",
        *(theme.NUMBER_LABELS, digits),
    ),
    "memory_nbytes": (
        *("memory", "Memory", "Resident memory of the process of the rank that has most."),
        *(theme.MEGABYTE_LABELS, _megabytes),
    ),
    "gpu_share": (
        *("gpu", "GPU", "Share of the time in which a rank's GPU was busy, median over ranks."),
        *(theme.SHARE_LABELS, "{:.0%}".format),
    ),
    "gpu_memory_nbytes": (
        *("gpu-memory", "GPU memory"),
        "GPU memory that torch holds, its cache included, in the rank that has most.",
        *(theme.MEGABYTE_LABELS, _megabytes),
    ),
}


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
    for field, (end, title, caption, labels, show) in KINDS.items():
        rows = []
        for facts, load in known:
            if (value := getattr(load, field)) is not None:
                row = {**facts, "_y": value, title: show(value)}
                if field == "cpu_cores":
                    row["rank that has most"] = show(load.most_cpu_cores)
                rows.append(row)
        if rows:
            y = Axis(title, labels, zero=True)
            drawing = Lines(data=rows, x=x, y=y, rules=rules, height=110)
            yield draw_chart(f"{name}-{end}", title, f"{caption} A point for each {when}.", drawing)
