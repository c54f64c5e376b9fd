"""Lines and bars in a terminal, drawn by plotext."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_letters
from typing import Any, TextIO

Point = tuple[float, float]
LEAST_COLUMNS, MOST_COLUMNS, ROWS = 40, 110, 18
# Of 256 colours, those that can be read on black and on white. The first are those of the page.
COLORS = {"gloo": 33, "mpi": 208, "nccl": 36}
OTHER_COLORS = (170, 75, 178, 245)


@dataclass(frozen=True)
class Screen:
    """Width and abilities of a stream."""

    columns: int
    color: bool
    braille: bool  # else letters make the lines


@dataclass(frozen=True)
class Axis:
    """A title, and where the axis has labels; no labels: plotext chooses."""

    title: str
    labels: Mapping[float, str]


@dataclass(frozen=True)
class Lines:
    """Lines in one frame. Coordinates are drawn as they are: pass logarithms for a log axis."""

    title: str
    series: Mapping[str, Sequence[Point]]
    x: Axis
    y: Axis


@dataclass(frozen=True)
class Bars:
    """A bar from 0 for each name."""

    title: str
    values: Mapping[str, float]


def explain_missing(wanted: str) -> str | None:
    """Return the sentence on a missing plotext; None if plots can be drawn.

    wanted: what needs it, such as "--plot".
    """
    try:
        import plotext
    except ImportError:
        return f"{wanted} needs plotext: type pip install 'ddpbench[report]'"
    if not hasattr(plotext, "simple_bar"):  # 6 is another library under the same name
        return f"{wanted} needs plotext 5, not {plotext.__version__}: type pip install 'plotext<6'"
    return None


def read_screen(stream: TextIO) -> Screen:
    """Return what this stream shows: no colours in a file or a pipe, or if NO_COLOR is set."""
    terminal = stream.isatty()
    columns = shutil.get_terminal_size().columns if terminal else 80
    color = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    try:
        "⠤▇─".encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return Screen(_fit(columns), color, False)
    return Screen(_fit(columns), color, color)  # without colours, lines of dots look the same


def _fit(columns: int) -> int:
    return max(LEAST_COLUMNS, min(columns, MOST_COLUMNS))


def draw(plot: Lines | Bars, screen: Screen) -> str:
    """Return the plot as lines of text."""
    import plotext

    plotext.clear_figure()
    plotext.limit_size(False, False)  # by the terminal, which a test or a pipe does not have
    if isinstance(plot, Lines):
        _draw_lines(plotext, plot, screen)
    else:
        names, values = list(plot.values), list(plot.values.values())
        plotext.simple_bar(names, values, width=screen.columns)
    text = str(plotext.build())
    if not screen.color or isinstance(plot, Bars):
        text = plotext.uncolorize(text)
    lines = [line.rstrip() for line in text.strip("\n").split("\n")]
    return "\n".join([plot.title, *lines]) + "\n"  # plotext leaves out a title that is too long


def _draw_lines(plotext: Any, plot: Lines, screen: Screen) -> None:
    plotext.theme("clear")
    plotext.plot_size(screen.columns, ROWS)
    others = iter(OTHER_COLORS * len(plot.series))
    for letter, (name, points) in zip(
        _choose_letters(plot.series), plot.series.items(), strict=True
    ):
        plotext.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=name,
            marker="braille" if screen.braille else letter,
            color=COLORS[name] if name in COLORS else next(others),
        )
    plotext.xlabel(plot.x.title)
    for axis, ticks in ((plot.x, plotext.xticks), (plot.y, plotext.yticks)):
        if axis.labels:
            ticks(list(axis.labels), list(axis.labels.values()))
    heights = [y for points in plot.series.values() for _, y in points] + [*plot.y.labels]
    low, high = min(heights), max(heights)
    # The legend is in the upper left corner: leave its lines free.
    free = (high - low or abs(high) or 1) * len(plot.series) / (ROWS - 6 - len(plot.series))
    plotext.ylim(low, high + free)


def _choose_letters(names: Iterable[str]) -> list[str]:
    """Return a letter for each name: one of its own that no earlier name has."""
    letters: list[str] = []
    for name in names:
        free = [c for c in [*name, *ascii_letters] if c.isascii() and c.isalnum()]
        letters.append(next((c for c in free if c not in letters), "*"))
    return letters
