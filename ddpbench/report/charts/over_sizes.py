"""Charts of a value over message sizes: points, intervals, limits; backends and runs overlaid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd

from ddpbench.analysis.flags import UNUSABLE
from ddpbench.analysis.lines import Line
from ddpbench.render.collective_columns import COLUMNS
from ddpbench.report import theme
from ddpbench.report.chart import ReportRun

Point = tuple[ReportRun, Line]
HEIGHT = 260
STATES = {"no flag": "circle", "flagged": "diamond", "do not use": "cross"}  # of a point → shape
POINTS = "points"  # the dataset
LIMIT_DASH = [2, 3]
RATE_LABELS = (
    "datum.value >= 1e9 ? format(datum.value / 1e9, '~g') + ' GB/s' : datum.value >= 1e6 ? "
    "format(datum.value / 1e6, '~g') + ' MB/s' : format(datum.value / 1e3, '~g') + ' kB/s'"
)
AXES = {
    "seconds": {"title": "time of a call", "labels": theme.TIME_LABELS},
    "rate": {"title": "busbw", "labels": RATE_LABELS},
}


def _state(line: Line) -> str:
    names = list(STATES)
    return names[2] if UNUSABLE & set(line.flags) else names[1] if line.flags else names[0]


def point_frame(shown: Sequence[Point], names: Sequence[str]) -> pd.DataFrame:
    """Return a row per point: its numbers, and the texts of the named columns for its tooltip."""
    rows: list[dict[str, Any]] = []
    several = len({run.label for run, _ in shown}) > 1
    for run, line in shown:
        limits = [r.limit for r in line.results if r.limit and line.fraction is not None]
        ends = (line.interval.low, line.interval.high) if line.interval else (None, None)
        row: dict[str, Any] = {
            "nbytes": line.case.nbytes,
            "seconds": line.seconds,
            "seconds_low": ends[0],
            "seconds_high": ends[1],
            "rate": line.busbw or None,
            "rate_low": _rate(line, ends[1]),
            "rate_high": _rate(line, ends[0]),
            "limited": sum(x.bytes_per_second for x in limits) / len(limits) if limits else None,
            "source": limits[0].source if limits else None,
            "backend": line.case.backend,
            "run": run.label,
            "of": f"{line.case.backend} {run.label}" if several else line.case.backend,
            "state": _state(line),
        }
        texts = {name: COLUMNS[name].show(line) for name in names}
        rows.append({**row, **{f"{name}_": text for name, text in texts.items()}})
    frame: pd.DataFrame = pd.DataFrame(rows)
    return frame


def _rate(line: Line, seconds: float | None) -> float | None:
    """Return the busbw of a call that takes so many seconds."""
    return seconds and line.busbw and line.seconds and line.busbw * line.seconds / seconds


def over_sizes(data: pd.DataFrame, value: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the chart of a column of `point_frame`, its interval and its limit.

    value: "seconds" or "rate". names: the columns of the tooltip.
    """
    several = data["run"].nunique() > 1
    columns = ["nbytes", "backend", "of", "state", value, f"{value}_low", f"{value}_high"]
    columns += ["run"] if several else []
    columns += [*(["limited", "source"] if value == "rate" else []), *(f"{n}_" for n in names)]
    data = data.loc[data[value] > 0, columns]
    if data["nbytes"].nunique() > 1:
        data = data[data["nbytes"] > 0].drop(columns="of")  # a logarithmic axis
    present = [state for state in STATES if state in set(data["state"])]
    shapes = alt.Scale(domain=present, range=[STATES[state] for state in present])
    legend = alt.Legend(title=None) if present != ["no flag"] else None
    shape = alt.Shape("state:N", scale=shapes, legend=legend)
    place, along, to = _places(data)
    values = {along: _log_channel(along, value, data[value])}
    solid = {"strokeDash": alt.value([1, 0])}
    base = _base(data, several).encode(**place)
    layers: list[alt.Chart] = []
    if data[f"{value}_low"].notna().any():
        known = base.transform_filter(f"datum.{value}_low > 0")
        bars = known.mark_rule(opacity=0.55, strokeWidth=2)
        layers.append(bars.encode(**{along: f"{value}_low:Q", to: f"{value}_high:Q"}, **solid))
    if along == "y":
        layers.append(base.mark_line(strokeWidth=1.5).encode(**values))
    points = base.mark_point(filled=True, size=50, opacity=1)
    layers.append(
        points.encode(shape=shape, tooltip=_tooltip(data, names, several), **values, **solid)
    )
    if value == "rate" and data["limited"].notna().any():
        layers.insert(0, _limit(base, along, several))
    height = HEIGHT if along == "y" else 40 + 32 * data["of"].nunique()
    spec: dict[str, Any] = alt.layer(*layers).properties(height=height).to_dict()
    rows = data.astype(object).where(data.notna(), None).to_dict("records")
    return {**spec, "datasets": {POINTS: rows}}


def _places(data: pd.DataFrame) -> tuple[dict[str, Any], str, str]:
    """Return where the points stand: along sizes, or in a row per backend if there is one size.

    Also returns the channels of the value and of the end of its interval.
    """
    if data["nbytes"].nunique() > 1:
        return {"x": theme.size_axis()}, "y", "y2"
    return {"y": alt.Y("of:N", title=None)}, "x", "x2"


def _base(data: pd.DataFrame, several: bool) -> alt.Chart:
    """Return the chart of this data without a mark: its colours, and a dash per run."""
    backends = list(data["backend"])
    scale = theme.backend_colors(backends)
    present = [backend for backend in scale.domain if backend in backends]
    legend = alt.Legend(title=None, values=present, symbolOpacity=1)
    encodings: dict[str, Any] = {"color": alt.Color("backend:N", scale=scale, legend=legend)}
    if several:
        runs = list(dict.fromkeys(data["run"]))
        encodings["strokeDash"] = alt.StrokeDash("run:N", sort=runs, title=None)
    # By name: altair would copy and hash the data of every layer.
    chart = alt.Chart(alt.NamedData(name=POINTS)).encode(**encodings)
    return theme.choose_backends(chart, backends)


def _log_channel(channel: str, field: str, values: pd.Series[float]) -> Any:
    """Return a logarithmic channel with ticks at decades, of few decades also at 2 and 5."""
    low, high = (math.floor(math.log10(end)) for end in (values.min(), values.max()))
    decades = 3 if channel == "y" else 2  # that have room for more labels
    steps = (1,) if high - low >= decades else (1, 2, 5)
    ticks = [step * 10.0**decade for decade in range(low - 1, high + 2) for step in steps]
    return {"x": alt.X, "y": alt.Y}[channel](
        f"{field}:Q",
        title=AXES[field]["title"],
        scale=alt.Scale(type="log"),
        axis=alt.Axis(labelExpr=AXES[field]["labels"], values=ticks),
    )


def _limit(base: alt.Chart, along: str, several: bool) -> alt.Chart:
    """Return each backend's limit: a dotted line, or of one size a mark."""
    known = base.transform_filter("datum.limited > 0")
    line = known.mark_line(opacity=0.8) if along == "y" else known.mark_tick(thickness=3, size=24)
    dash = {"strokeDash": alt.value(LIMIT_DASH)} if along == "y" else {}
    limit: alt.Chart = line.encode(
        **{along: "limited:Q"},
        **dash,
        tooltip=[alt.Tooltip("backend:N"), alt.Tooltip("source:N", title="limit")],
        **({"detail": "run:N"} if several else {}),
    )
    return limit


def _tooltip(data: pd.DataFrame, names: Sequence[str], several: bool) -> list[alt.Tooltip]:
    """Return the lines of a tooltip: columns of the table that hold anything."""
    known = [name for name in names if not data[f"{name}_"].isin(["-", ""]).all()]
    shown = [alt.Tooltip(f"{name}_:N", title=COLUMNS[name].heading) for name in known]
    return [*([alt.Tooltip("run:N")] if several else []), *shown]
