"""Charts of the CPU, memory and GPU load of the ranks over time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Lines
from ddpbench.present.columns import format_number
from ddpbench.present.document import Chart, draw_chart
from ddpbench.records.load import Load


def _format_megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f} MB"


# Field of Load, title, caption, labels of the axis, and format of a value.
KINDS: tuple[tuple[str, str, str, str, Callable[[float], str]], ...] = (
    ("cpu_cores", "CPU", "Cores in use by a rank's process, median over ranks.",
     theme.NUMBER_LABELS, format_number),
    ("memory_nbytes", "Memory", "Resident memory of the process of the rank that uses most.",
     theme.MEGABYTE_LABELS, _format_megabytes),
    ("gpu_share", "GPU", "Share of the time in which a rank's GPU was busy, median over ranks.",
     theme.SHARE_LABELS, "{:.0%}".format),
    ("gpu_memory_nbytes", "GPU memory", "GPU memory that torch has allocated, its cache included, "
     "in the rank that uses most.", theme.MEGABYTE_LABELS, _format_megabytes),
)  # fmt: skip


def draw_loads(
    name: str,
    loads: Iterable[tuple[Mapping[str, Any], Load | None]],
    x: Axis,
) -> Iterator[Chart]:
    """Yield a chart of each known kind of load, all with one x axis.

    name: begins the names of the charts. loads: columns of an epoch, as in `Lines.data`, and its
    load.
    """
    known = [(facts, load) for facts, load in loads if load is not None]
    for field, title, caption, labels, show in KINDS:
        rows = []
        for facts, load in known:
            if (value := getattr(load, field)) is not None:
                row = {**facts, "_y": value, title: show(value)}
                if field == "cpu_cores":
                    row["rank that uses most"] = show(load.most_cpu_cores)
                rows.append(row)
        if rows:
            drawing = Lines(data=rows, x=x, y=Axis(title, labels, zero=True), height=110)
            chart = f"{name}-{title.lower().replace(' ', '-')}"
            yield draw_chart(chart, title, f"{caption} A point for each epoch.", drawing)
