"""The four kinds of chart: what they draw and what their tables show, from small data."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest

pytest.importorskip("altair")

from ddpbench.present import theme
from ddpbench.present.charts.draw import draw
from ddpbench.present.charts.kinds import Axis, Bars, Drawing, Lines, Matrix, Spans
from ddpbench.present.document import draw_chart
from ddpbench.records.table import Table

TIME = Axis("time", theme.TIME_LABELS)
LOGARITHMIC = Axis("time", theme.TIME_LABELS, log=True)


def a_frame(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame(columns)


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
    unless they are empty in all rows."""
    data = a_frame(rank=[0, 1], why=["", "-"], _x=[0, 1], _y=[1.0, math.nan], backend=["a", "a"])
    lines = Lines(data=data, x=TIME, y=TIME)
    (points,) = layers(lines, "point")
    assert fields(points) == ["rank", "backend"]
    assert [c.heading for c in tabulated(lines).columns] == ["rank", "why", "backend"]
    assert [row["_y"] for row in draw(lines)["datasets"]["data"]] == [1.0, None]


def test_backends_can_be_hidden_in_every_dataset() -> None:
    """A parameter holds the backends that are there; it filters bars and their ticks."""
    bars = a_frame(part=["p", "p"], backend=["mpi", "gloo"], _begin=[0, 0], _end=[1.0, 2.0])
    ticks = a_frame(part=["p"], backend=["gloo"], _end=[3.0])
    spec = draw(Bars(data=bars, x=TIME, row="part", within="backend", ticks=ticks))
    assert spec["params"] == [{"name": "backends", "value": ["gloo", "mpi"]}]
    (tick,) = [layer for layer in spec["layer"] if layer["mark"]["type"] == "tick"]
    for filtered in (spec, tick):
        assert filtered["transform"] == [{"filter": "indexof(backends, datum.backend) >= 0"}]
    alone = Spans(data=bars.drop(columns="backend"), x=TIME, lane="part", color="")
    assert "params" not in draw(alone)


def test_bars_of_a_row_are_stacked_and_their_text_is_behind_all_marks() -> None:
    """A bar begins where the one before it in its row ends; a text follows the last tick."""
    data = a_frame(rank=["0", "0", "1"], part=["a", "b", "a"], _end=[1.0, 2.0, 4.0], _text="x")
    ticks = a_frame(rank=["1"], _end=[9.0])
    frame = Bars(data=data, x=TIME, row="rank", color="part", ticks=ticks).datasets["data"]
    assert list(zip(frame["_begin"], frame["_end"], frame["_right"], strict=True)) == [
        (0.0, 1.0, 3.0), (1.0, 3.0, 3.0), (0.0, 4.0, 9.0),
    ]  # fmt: skip


def test_a_cursor_shows_all_lines_of_any_name() -> None:
    """The tooltip at an x and the table have a column for each line, even of a hostile name."""
    names = ["v.[0]", "</script>'"]
    points = {"step": [1, 1, 2], "_x": [0, 0, 1], "_y": [1, 2, 3], "_text": ["a", "b", "c"]}
    data = a_frame(name=[*names, names[0]], **points)
    lines = Lines(data=data, x=TIME, y=TIME, color="name", cursor=True)
    *_, cursor = draw(lines)["layer"]
    assert fields(cursor) == ["step", "t0", "t1"]
    assert [each["title"] for each in cursor["encoding"]["tooltip"]] == ["step", *names]
    assert tabulated(lines).rows == ((1, "a", "b"), (2, "c", "-"))


def test_spans_above_a_lane_share_its_pixels() -> None:
    """The first row is uppermost; the lane itself is lowest and higher than they are."""
    data = a_frame(lane="r", _begin=[0, 0, 0], _end=[1, 1, 1], _above=[0, 1, 2])
    frame = Spans(data=data, x=TIME, lane="lane", color="", above=2).datasets["data"]
    lane, first, second = zip(frame["_top"], frame["_bottom"], strict=True)
    assert first[0] == 0
    assert first[1] <= second[0] < second[1] <= lane[0]
    assert lane[1] - lane[0] > first[1] - first[0]


@pytest.mark.parametrize(
    ("values", "scale", "dark"),
    [
        ([1.0, 10.0, 100.0], "log", [False, False, True]),
        ([0.0, 1.0, 3.0], "linear", [False, False, True]),
        ([0.0, 0.0, 0.0], "linear", [False, False, False]),
    ],
)
def test_heat_covers_orders_of_magnitude(values: list[float], scale: str, dark: list[bool]) -> None:
    """Its scale is logarithmic if it has to be, and ink is light where the colour is dark."""
    data = a_frame(a=list("xyz"), b="r", _value=values, _text="t", _marked=["", "slow", ""])
    matrix = Matrix(data=data, column="a", row="b", unit="MB/s")
    cells, outline = layers(matrix, "rect")
    assert cells["encoding"]["color"]["scale"]["type"] == scale
    assert outline["transform"] == [{"filter": "datum._marked"}]
    assert list(matrix.datasets["data"]["_dark"]) == dark
    assert tabulated(matrix).rows == (("r", "t", "t slow", "t"),)


def test_a_name_has_one_colour_on_all_charts() -> None:
    """The domain of colours has all names that could be there, the legend those that are."""
    data = a_frame(part=["blocked"], rank="0", _end=[1.0])
    bars = Bars(data=data, x=TIME, row="rank", color="part", order=theme.PHASES)
    colors = layers(bars, "bar")[0]["encoding"]["color"]
    assert colors["scale"]["domain"] == list(theme.PHASES)
    assert colors["legend"] is None
    data = a_frame(backend=["x", "mpi"], _x=[0, 1], _y=[1.0, 2.0])
    (line,) = layers(Lines(data=data, x=TIME, y=LOGARITHMIC), "line")
    assert line["encoding"]["color"]["scale"]["domain"] == [*theme.BACKENDS, "x"]
    assert line["encoding"]["color"]["legend"]["values"] == ["mpi", "x"]


def test_runs_have_dashes_and_limits_of_their_own() -> None:
    """The lines of one backend in two runs are told apart, also where they have a reference."""
    data = a_frame(backend="gloo", run=["a", "b"], _x=[1, 2], _y=[1.0, 2.0], _reference=[3.0, 4.0])
    reference, line = layers(
        Lines(data=data, x=LOGARITHMIC, y=LOGARITHMIC, dash="run", detail=("run",)), "line"
    )
    assert fields(reference, "detail") == ["run"]
    assert line["encoding"]["strokeDash"]["field"] == "run"


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        (Axis("rank", theme.COUNT_LABELS, domain=(-0.5, 1.5)), [0, 1]),
        (Axis("rank", theme.COUNT_LABELS, domain=(-0.5, 63.5)), [0, 20, 40, 60]),
        (Axis("time", theme.TIME_LABELS, log=True), [1, 10, 100, 1000, 10000]),
        (Axis("memory", theme.SIZE_LABELS), [0, 4096, 8192]),
    ],
)
def test_labels_are_at_round_numbers(axis: Axis, values: list[float]) -> None:
    """Counts are whole, bytes multiples of powers of two, and orders of magnitude powers of ten."""
    data = a_frame(backend="gloo", _x=[1.0, 10_000.0], _y=[0.0, 1.0])
    (points,) = layers(Lines(data=data, x=axis, y=TIME, connected=False), "point")
    assert points["encoding"]["x"]["axis"]["values"] == values
