"""Charts as pictures, drawn without a browser: SVG and PNG on white, in a font of their own.

A picture contains its title and caption, because readers see it outside its page.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpbench.present.document import Chart, Section
from ddpbench.records import store
from ddpbench.records.wording import did_you_mean

WIDTH = 720  # pixels: what GitHub shows without shrinking it
SCALE = 2  # pixels of a PNG per pixel of an SVG
CAPTION_COLUMNS = 116  # characters of a caption's line in this width
# vl-convert measures text in Liberation Sans, which it brings along. Arial and Helvetica have the
# same widths, so labels have room for their text wherever the picture is opened.
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"


def choose(sections: Sequence[Section], names: Sequence[str]) -> list[Section]:
    """Return the summary, and the charts of these names. Raises ValueError.

    names: empty: all charts and tables.
    """
    charts = [chart for section in sections for chart in section.charts]
    known = [chart.name for chart in charts if chart.spec is not None]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"unknown chart {unknown[0]!r}: these runs have {', '.join(known) or 'no charts'}"
            + did_you_mean(unknown[0], known)
        )
    if not names:
        return list(sections)
    chosen = [sections[0]]
    for i, section in enumerate(sections):
        rows = [tuple(chart for chart in row if chart.name in names) for row in section.rows]
        kept = replace(section, rows=tuple(filter(None, rows)))
        if i == 0:
            chosen[0] = kept
        elif kept.rows:
            chosen.append(kept)
    return chosen


def write(charts: Iterable[Chart], folder: Path, form: str) -> Iterator[tuple[str, Path]]:
    """Write each chart that can be drawn as FOLDER/NAME.svg or .png. Raises OSError.

    form: "svg" or "png". Yields the chart's name and its file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for chart in charts:
        if chart.spec is not None:
            path = folder / f"{chart.name}.{form}"
            store.replace_file(path, _draw(chart, form))
            yield chart.name, path


def _draw(chart: Chart, form: str) -> bytes:
    import vl_convert

    spec, config = make_spec(chart), _config()
    if form == "png":
        return vl_convert.vegalite_to_png(spec, config=config, scale=SCALE)
    return vl_convert.vegalite_to_svg(spec, config=config).encode()


def make_spec(chart: Chart) -> dict[str, Any]:
    """Return the Vega-Lite of a picture: the chart's own, with its width, title and caption."""
    assert chart.spec is not None
    caption = textwrap.wrap(chart.caption, CAPTION_COLUMNS)
    spec = {key: value for key, value in chart.spec.items() if key != "config"}
    spec["title"] = {"text": chart.title, "subtitle": caption, "anchor": "start"}
    return spec | {"width": WIDTH, "autosize": {"type": "fit-x", "contains": "padding"}}


def _config() -> dict[str, Any]:
    from ddpbench.present.theme import CONFIG, MUTED

    title = {"offset": 14, "subtitleColor": MUTED, "subtitlePadding": 6}
    return {
        **CONFIG,
        "background": "white",  # GitHub's dark mode shows it as it is
        "font": FONT,
        "padding": 12,
        "title": {**CONFIG["title"], **title, "frame": "bounds"},
    }
