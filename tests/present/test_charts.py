"""The four kinds of chart: what they draw and what their tables show, from small data."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("altair")

from ddpbench.present import theme
from ddpbench.present.charts.draw import draw
from ddpbench.present.charts.kinds import Axis, Bars, Drawing, Lines, Rows, draw_pairs
from ddpbench.present.document import draw_chart
from ddpbench.records.table import Table

TIME = Axis("time", theme.TIME_LABELS)
LOGARITHMIC = Axis("time", theme.TIME_LABELS, log=True)


def some_rows(count: int, **columns: Any) -> Rows:
    """Rows of these columns; one that is no list is the same in each row."""
    lists = {n: v if isinstance(v, list) else [v] * count for n, v in columns.items()}
    return [dict(zip(lists, cells, strict=True)) for cells in zip(*lists.values(), strict=True)]


def drawn(drawing: Drawing) -> Rows:
    """The data of a chart."""
    rows: Rows = draw(drawing)["datasets"]["data"]
    return rows


def layers(drawing: Drawing, mark: str) -> list[dict[str, Any]]:
    """The layers of a chart with this mark."""
    return [layer for layer in draw(drawing)["layer"] if layer["mark"]["type"] == mark]


def tabulated(drawing: Drawing) -> Table:
    """The table of what a chart shows."""
    return draw_chart("name", "", "", drawing).table


def fields(layer: dict[str, Any], channel: str = "tooltip") -> list[str]:
    return [each["field"] for each in layer["encoding"][channel]]


def test_what_is_shown_is_not_what_is_drawn() -> None:
    """Columns that begin with an underscore are drawn; all others are the tooltip and the table,
    unless nothing is known in any row."""
    data = some_rows(2, rank=[0, 1], why="", _x=[0, 1], _y=[1.0, None], backend="a")
    lines = Lines(data=data, x=TIME, y=TIME)
    (points,) = layers(lines, "point")
    assert fields(points) == ["rank", "backend"]
    assert [c.heading for c in tabulated(lines).columns] == ["rank", "backend"]
    assert [row["_y"] for row in drawn(lines)] == [1.0, None]


def test_bars_of_a_row_are_stacked() -> None:
    """A bar begins where the one before it in its row ends."""
    data = some_rows(3, rank=["0", "0", "1"], part=["a", "b", "a"], _end=[1.0, 2.0, 4.0])
    rows = drawn(Bars(data=data, x=TIME, row="rank", color="part"))
    assert [(row["_begin"], row["_end"]) for row in rows] == [(0, 1), (1, 3), (0, 4)]


@pytest.mark.parametrize(
    ("values", "scale"), [([1.0, 100.0], "log"), ([1.0, 3.0], "linear"), ([0.0, 0.0], "linear")]
)
def test_heat_covers_orders_of_magnitude(values: list[float], scale: str) -> None:
    """Its scale is logarithmic if it has to be; the table says what is outlined."""
    names = {"from": ["a", "b"], "to": ["b", "a"]}
    data = some_rows(2, **names, _value=values, _marked=["", "slow"])
    matrix = draw_pairs(data, ("a", "b"), "host", "MB/s")
    cells, outline = layers(matrix, "rect")
    assert cells["encoding"]["color"]["scale"]["type"] == scale
    assert outline["transform"] == [{"filter": "datum._marked"}]
    first, second = (f"{value:g}" for value in values)
    assert tabulated(matrix).rows == (("a", None, first), ("b", f"{second} slow", None))


def test_a_name_has_one_colour_on_all_charts() -> None:
    """The domain of colours has all names that could be there, the legend those that are."""
    data = some_rows(1, part="blocked", rank="0", _end=1.0)
    bars = Bars(data=data, x=TIME, row="rank", color="part", order=theme.PHASES)
    colors = layers(bars, "bar")[0]["encoding"]["color"]
    assert colors["scale"]["domain"] == list(theme.PHASES)
    assert colors["legend"] is None
    data = some_rows(2, backend=["x", "mpi"], _x=[0, 1], _y=[1.0, 2.0])
    (line,) = layers(Lines(data=data, x=TIME, y=LOGARITHMIC), "line")
    assert line["encoding"]["color"]["scale"]["domain"] == [*theme.BACKENDS, "x"]
    assert line["encoding"]["color"]["legend"]["values"] == ["mpi", "x"]
