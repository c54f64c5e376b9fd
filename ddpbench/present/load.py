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
from ddpbench.present.document import Chart, make_table
from ddpbench.records.load import Load

HEIGHT = 110  # pixels


@dataclass(frozen=True)
class Kind:
    """A field of Load that has a chart."""

    name: str
    field: str
    title: str
    axis: str
    caption: str
    labels: str  # expression of the axis
    show: Callable[[float], str]
    most: str = ""  # the field of the rank that has most, if that is another


def _readable(nbytes: float) -> str:
    return readable(round(nbytes))


KINDS = (
    Kind(
        "cpu",
        "cpu_cores",
        "CPU",
        "cores in use",
        "CPU time of a rank's process per second, median over ranks; 1 is one core. "
        "The band reaches to the rank that used most.",
        theme.NUMBER_LABELS,
        digits,
        "most_cpu_cores",
    ),
    Kind(
        "memory",
        "memory_nbytes",
        "Memory",
        "resident memory",
        "Resident memory of the process of the rank that has most.",
        theme.SIZE_LABELS,
        _readable,
    ),
    Kind(
        "gpu",
        "gpu_share",
        "GPU",
        "time in use",
        "Share of the time in which a rank's GPU was busy, median over ranks.",
        theme.SHARE_LABELS,
        "{:.0%}".format,
    ),
    Kind(
        "gpu-memory",
        "gpu_memory_nbytes",
        "GPU memory",
        "memory in use",
        "GPU memory that torch holds, its cache included, in the rank that has most.",
        theme.SIZE_LABELS,
        _readable,
    ),
)


def load_charts(
    name: str,
    loads: Iterable[tuple[Mapping[str, Any], Load | None]],
    x: Axis,
    when: str,
    *,
    shown: Sequence[str],
    detail: Sequence[str] = (),
    rules: pd.DataFrame | None = None,
) -> Iterator[Chart]:
    """Yield a chart of each kind of load that is known, all with one x axis.

    name: begins the names of the charts. loads: facts of a moment and its load. Facts are the field
    of `x`, and those `shown` in tooltips and tables, of which `detail` tell lines apart. when: what
    a moment is, "epoch".
    """
    rows = [{**facts, **asdict(load)} for facts, load in loads if load is not None]
    frame = pd.DataFrame(rows)
    for kind in KINDS if rows else ():
        known = frame[frame[kind.field].notna()]
        if len(known):
            data, titles = _measure(known, kind, [x.field, *shown])
            columns = {**dict(zip(shown, shown, strict=True)), **titles}
            drawing = Lines(
                data=data,
                x=x,
                y=Axis("value", kind.axis, kind.labels, zero=True),
                tips=columns,
                detail=tuple(detail),
                band=True,
                rules=rules,
                height=HEIGHT,
            )
            cells = data[list(columns)].itertuples(index=False, name=None)
            table = make_table(kind.title, columns.values(), cells, left=("backend", "time"))
            caption = f"{kind.caption} A point for each {when}."
            yield Chart(f"{name}-{kind.name}", kind.title, caption, drawing, table)


def _measure(
    frame: pd.DataFrame, kind: Kind, facts: Sequence[str]
) -> tuple[pd.DataFrame, dict[str, str]]:
    """Return the facts and the values of a kind, and the titles of the columns of texts."""
    data = frame[list(dict.fromkeys(facts))].assign(
        value=frame[kind.field], text=frame[kind.field].map(kind.show)
    )
    titles = {"text": kind.axis}
    if kind.most:
        data = data.assign(
            low=frame[kind.field], high=frame[kind.most], most=frame[kind.most].map(kind.show)
        )
        titles["most"] = "rank that has most"
    return data, titles
