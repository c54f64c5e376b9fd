"""CPU, memory and GPU load of the ranks over time: a chart for each that is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import altair as alt
import pandas as pd

from ddpbench.catalog.sizes import readable
from ddpbench.present import theme
from ddpbench.present.columns import digits
from ddpbench.present.document import Chart, make_table
from ddpbench.records.load import Load
from ddpbench.records.table import Table

HEIGHT = 110  # pixels
EXTENT = 56  # pixels left of the y axis, so that charts one below the other have one x axis


@dataclass(frozen=True)
class Kind:
    """A field of Load that has a chart."""

    name: str
    field: str
    title: str
    axis: str
    caption: str
    labels: str  # expression of the axis
    text: str  # how a value is written: a key of TEXTS
    most: str = ""  # the field of the rank that has most, if that is another


TEXTS = {
    "cores": digits,
    "share": lambda value: f"{value * 100:.0f} %",
    "bytes": lambda value: readable(round(value)),
}
KINDS = (
    Kind(
        "cpu",
        "cpu_cores",
        "CPU",
        "cores in use",
        "CPU time of a rank's process per second, median over ranks; 1 is one core. "
        "The band reaches to the rank that used most.",
        "format(datum.value, '~g')",
        "cores",
        "most_cpu_cores",
    ),
    Kind(
        "memory",
        "memory_nbytes",
        "Memory",
        "resident memory",
        "Resident memory of the process of the rank that has most.",
        theme.SIZE_LABELS,
        "bytes",
    ),
    Kind(
        "gpu",
        "gpu_share",
        "GPU",
        "time in use",
        "Share of the time in which a rank's GPU was busy, median over ranks.",
        "format(datum.value, '.0%')",
        "share",
    ),
    Kind(
        "gpu-memory",
        "gpu_memory_nbytes",
        "GPU memory",
        "memory in use",
        "GPU memory that torch holds, its cache included, in the rank that has most.",
        theme.SIZE_LABELS,
        "bytes",
    ),
)


def load_charts(
    name: str,
    loads: Iterable[tuple[Mapping[str, Any], Load | None]],
    x: alt.X,
    when: str,
    *,
    notes: Sequence[str] = (),
    behind: Sequence[alt.Chart] = (),
) -> Iterator[Chart]:
    """Yield a chart of each kind of load that is known, all with one x axis.

    name: begins the names of the charts. loads: facts of a moment and its load. Facts are the field
    of `x`, "backend", and others that tell lines apart; tooltips and tables show them. when: what a
    moment is, "epoch". notes: facts that tell no lines apart, shown in place of the field of `x`.
    behind: layers that the charts have below their lines.
    """
    rows = [(dict(facts), load) for facts, load in loads if load is not None]
    if not rows:
        return
    x_field = str(x["shorthand"]).partition(":")[0]
    shown = [key for key in rows[0][0] if not notes or key != x_field]
    apart = [key for key in shown if key not in ("backend", x_field, *notes)]
    frame = pd.DataFrame([facts | asdict(load) for facts, load in rows])
    for kind in KINDS:
        known = frame[frame[kind.field].notna()]
        if len(known):
            yield Chart(
                f"{name}-{kind.name}",
                kind.title,
                f"{kind.caption} A point for each {when}.",
                theme.layered([*behind, *_draw(known, x, kind, shown, apart)], HEIGHT),
                _table(known, kind, shown),
            )


def _draw(
    frame: pd.DataFrame, x: alt.X, kind: Kind, shown: Sequence[str], apart: Sequence[str]
) -> list[alt.Chart]:
    """Return the layers of a chart. shown: facts of tooltips; apart: those that have lines."""
    fields = [name for name in (kind.field, kind.most) if name]
    x_field = str(x["shorthand"]).partition(":")[0]
    data = frame[list(dict.fromkeys([x_field, *shown, *fields]))].assign(
        text=frame[kind.field].map(TEXTS[kind.text])
    )
    tips = theme.tips(*shown, text=kind.axis)
    if kind.most:
        data["most"] = frame[kind.most].map(TEXTS[kind.text])
        tips += theme.tips(most="rank that has most")
    top = float(data[fields].max().max())
    ticks = _ticks(kind, top)
    base = theme.choose_backends(alt.Chart(data), list(data["backend"])).encode(
        x=x,
        y=alt.Y(
            f"{kind.field}:Q",
            title=kind.axis,
            axis=alt.Axis(labelExpr=kind.labels, minExtent=EXTENT, **ticks),
            scale=alt.Scale(domain=[0, max([top, *ticks.get("values", ())])], nice=True),
        ),
        color=theme.backend_color(data["backend"]),
        detail=list(apart),
    )
    layers = [base.mark_line(point=True).encode(tooltip=tips)]
    if kind.most:
        layers.insert(0, base.mark_area().encode(y2=f"{kind.most}:Q"))
    return layers


def _ticks(kind: Kind, top: float) -> dict[str, Any]:
    """Return few ticks; of bytes, multiples of a power of two."""
    if kind.text != "bytes" or top <= 0:
        return {"tickCount": 4}
    step = 2.0 ** (int(top).bit_length() - 2)
    return {"values": [step * n for n in range(int(top // step) + 2)]}


def _table(frame: pd.DataFrame, kind: Kind, keys: Sequence[str]) -> Table:
    fields = {kind.field: kind.axis, **({kind.most: "rank that has most"} if kind.most else {})}
    shown = frame[[*keys, *fields]].copy()
    for field in fields:
        shown[field] = frame[field].map(TEXTS[kind.text])
    rows = shown.astype(object).itertuples(index=False, name=None)
    left = [key for key in keys if frame[key].dtype == object]
    return make_table(kind.title, [*keys, *fields.values()], rows, left)
