"""Looks of charts: axes, and colours that colour-blind readers can distinguish (Okabe and Ito).

A spec names no colour of its own, only a position in the category range; the page and the pictures
add CONFIG.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"
# blue, vermilion, bluish green, reddish purple, orange, sky blue, yellow, grey
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a7a00", "#666666")
BACKENDS = ("gloo", "mpi", "nccl")  # have the first colours on every page
# Phases of a step, in the order of the colours: computing is blue, waiting warm, other time grey.
PHASES = ("forward", "blocked", "optimizer", "input", "transfer", "backward", "-", "other")
TEXT, MUTED, GRID = "#1b1f24", "#57606a", "#e3e6ea"
HEAT = ["#eef5fb", "#2f7fbc", "#06325f"]  # from little to much
CONFIG: dict[str, Any] = {
    "background": None,
    "font": FONT,
    "aria": False,  # the page names the whole picture
    "view": {"stroke": None},
    "axis": {
        "labelColor": MUTED,
        "titleColor": MUTED,
        "gridColor": GRID,
        "domainColor": MUTED,
        "tickColor": MUTED,
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": 500,
        "titlePadding": 8,
        "domainOpacity": 0.5,
        "tickOpacity": 0.5,
        "tickSize": 4,
        "labelPadding": 4,
    },
    "axisX": {"grid": False},
    "axisLeft": {
        "titleAngle": 0,
        "titleAlign": "left",
        "titleBaseline": "bottom",
        "titleX": 0,
        "titleY": -8,
        "domain": False,
        "ticks": False,
    },
    "legend": {
        "labelColor": TEXT,
        "titleColor": MUTED,
        "labelFontSize": 12,
        "titleFontWeight": 500,
        "titleFontSize": 11,
        "orient": "top",
        "offset": 22,
        "symbolSize": 90,
        "symbolStrokeWidth": 2,
        "labelLimit": 300,
    },
    "title": {"color": TEXT, "fontSize": 13, "anchor": "start"},
    "text": {"color": TEXT},
    "rule": {"color": MUTED},
    "line": {"strokeWidth": 2, "strokeJoin": "round"},
    "point": {"size": 36, "filled": True},
    "mark": {"color": COLORS[0]},
    "range": {"category": list(COLORS), "heatmap": HEAT, "ramp": HEAT},
    # Marks that findings name.
    "style": {"marked": {"filled": False, "color": COLORS[1], "strokeWidth": 2.5}},
}

# Expressions that format the labels of an axis.
SIZE_LABELS = (
    "datum.value < 1024 ? format(datum.value, 'd') + ' B' : datum.value < 1048576 ? "
    "format(datum.value / 1024, '~g') + ' KiB' : datum.value < 1073741824 ? "
    "format(datum.value / 1048576, '~g') + ' MiB' : format(datum.value / 1073741824, '~g') + ' GiB'"
)
TIME_LABELS = (
    "datum.value == 0 ? '0' : abs(datum.value) >= 1 ? format(datum.value, '~g') + ' s' : "
    "abs(datum.value) >= 0.001 ? format(datum.value * 1e3, '~g') + ' ms' : "
    "format(datum.value * 1e6, '~g') + ' µs'"
)
RATE_LABELS = (
    "datum.value >= 1e9 ? format(datum.value / 1e9, '~g') + ' GB/s' : datum.value >= 1e6 ? "
    "format(datum.value / 1e6, '~g') + ' MB/s' : format(datum.value / 1e3, '~g') + ' kB/s'"
)
COUNT_LABELS = "format(datum.value, 'd')"
NUMBER_LABELS = "format(datum.value, '~g')"
SHARE_LABELS = "format(datum.value, '+.3~%')"


def order_backends(backends: Iterable[str]) -> list[str]:
    """Return BACKENDS, then the others: each has one colour on every page."""
    return [*BACKENDS, *sorted(set(backends) - set(BACKENDS))]


def powers_of_ten(values: Iterable[float]) -> list[float]:
    """Return powers of ten around the values, at most 9; with three decades also 2 and 5."""
    known = list(values)
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    steps = (1, 2, 5) if high - low <= 3 else (1,)
    powers = range(low, high + 1, math.ceil((high - low + 1) / 9))
    return [step * 10.0**power for power in powers for step in steps]


def backend_swatches(backends: Iterable[str]) -> list[tuple[str, str]]:
    """Return the backends of a page, each with its colour."""
    shown = set(backends)
    return [
        (name, COLORS[i % len(COLORS)])
        for i, name in enumerate(order_backends(shown))
        if name in shown
    ]
