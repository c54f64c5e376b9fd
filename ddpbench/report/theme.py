"""How charts look: colours of Okabe and Ito, which colour-blind readers can tell apart, and axes.

A spec names no colour of its own but through `backend_colors` or a position in the category range,
so that one spec serves light and dark pages; the page and the pictures add a config from CONFIGS.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"
# blue, vermilion, bluish green, reddish purple, orange, sky blue, yellow, grey
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a7a00", "#666666")
DARK = ("#56b4e9", "#ff8c42", "#2fd0a0", "#e39bc6", "#f2b632", "#8ecbf5", "#f0e442", "#aaaaaa")
BACKENDS = ("gloo", "mpi", "nccl")  # the first colours are theirs on every page


# Of a heat map, from little to much: grey printers and colour-blind readers see the same order.
# Up to the middle a value is written in ink of the style "on-low", beyond it in "on-high".
HEAT_LIGHT = ("#eef5fb", "#2f7fbc", "#06325f")
HEAT_DARK = ("#10304f", "#2f7fbc", "#d6eafb")
INK, PAPER = "#000000", "#ffffff"


def _config(
    text: str,
    muted: str,
    grid: str,
    colors: Sequence[str],
    heat: Sequence[str],
    inks: Sequence[str],
) -> Any:
    return {
        "background": None,
        "font": FONT,
        "view": {"stroke": None},
        "axis": {
            "labelColor": muted, "titleColor": text, "gridColor": grid, "domainColor": grid,
            "tickColor": grid, "labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": 500,
        },
        "legend": {"labelColor": text, "titleColor": text, "orient": "top", "titleFontSize": 12},
        "header": {"labelColor": text, "titleColor": text},
        "title": {"color": text, "fontSize": 13, "anchor": "start"},
        "text": {"color": text},
        "rule": {"color": muted},
        "range": {"category": list(colors), "heatmap": list(heat)},
        "style": {
            "on-low": {"color": inks[0]},
            "on-high": {"color": inks[1]},
            # What a finding names in a heat map.
            "marked": {"filled": False, "fill": None, "stroke": colors[1], "strokeWidth": 2.5},
        },
    }  # fmt: skip


CONFIGS: dict[str, dict[str, Any]] = {
    "light": _config("#1b1f24", "#57606a", "#e3e6ea", LIGHT, HEAT_LIGHT, (INK, PAPER)),
    "dark": _config("#e6edf3", "#9aa4af", "#30363d", DARK, HEAT_DARK, (PAPER, INK)),
}

# Labels of an axis whose values are bytes, seconds, or bytes per second.
SIZE_LABELS = (
    "datum.value < 1024 ? format(datum.value, 'd') + ' B' : datum.value < 1048576 ? "
    "format(datum.value / 1024, '~g') + ' KiB' : datum.value < 1073741824 ? "
    "format(datum.value / 1048576, '~g') + ' MiB' : format(datum.value / 1073741824, '~g') + ' GiB'"
)
TIME_LABELS = (
    "datum.value >= 1 ? format(datum.value, '~g') + ' s' : datum.value >= 0.001 ? "
    "format(datum.value * 1e3, '~g') + ' ms' : format(datum.value * 1e6, '~g') + ' µs'"
)
RATE_LABELS = "format(datum.value / 1e9, '~g')"  # GB/s


def backend_colors(backends: Sequence[str]) -> alt.Scale:
    """Return the scale that gives each backend its colour, the same on every page."""
    return alt.Scale(domain=[*BACKENDS, *sorted(set(backends) - set(BACKENDS))], range="category")


def size_axis(title: str = "message size") -> alt.X:
    """Return the x channel of the field `nbytes`: powers of two."""
    return alt.X(
        "nbytes:Q",
        title=title,
        scale=alt.Scale(type="log", base=2),
        axis=alt.Axis(labelExpr=SIZE_LABELS, tickCount=6),
    )


def choose_backends(chart: alt.Chart, backends: Sequence[str]) -> alt.Chart:
    """Show only the chosen backends: the page sets the parameter `backends` of its charts."""
    chosen = alt.param(name="backends", value=sorted(set(backends)))
    shown: alt.Chart = chart.add_params(chosen).transform_filter(
        "indexof(backends, datum.backend) >= 0"
    )
    return shown


def backend_swatches(backends: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return the backends of a page, each with its colour on a light and on a dark page."""
    names = [*BACKENDS, *sorted(set(backends) - set(BACKENDS))]
    colors = zip(names, LIGHT, DARK)  # noqa: B905
    return [(name, light, dark) for name, light, dark in colors if name in backends]
