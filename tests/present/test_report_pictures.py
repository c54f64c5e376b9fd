"""Pictures and Markdown of a run: `report --svg`, `--png`, `--markdown` and `--chart`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from command_lines import ROOT
from in_process import Outcome, call_in_process
from stored_runs import a_case, a_result, a_run

from ddpbench.records import store

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

from ddpbench.present import theme
from ddpbench.present.collectives import sections as collectives
from ddpbench.present.document import ReportRun
from ddpbench.present.writers import pictures

REFERENCE = ROOT / "results" / "reference" / "cpu-2-ranks"
pytestmark = pytest.mark.thorough
CHARTS = ("all_reduce-time", "all_reduce-bandwidth")
SVG = "{http://www.w3.org/2000/svg}"


def report(run: Path, *words: str | Path) -> Outcome:
    """Report a stored run."""
    return call_in_process(["report", str(run), *map(str, words)])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two sizes."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    store.create(folder, a_run(a_result(), a_result(a_case(nbytes=2**20, count=2**18))), "x")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, small: Path) -> Path:
    """A folder with two charts in both forms, and with Markdown that shows them."""
    folder = tmp_path_factory.mktemp("report")
    done = report(
        small, "--svg", folder / "new" / "my pictures", "--png", folder / "png",
        "--markdown", folder / "text" / "report.md", "--chart", ",".join(CHARTS),
    )  # fmt: skip
    assert (done.code, done.err) == (0, "")
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert sorted(done.out.splitlines()) == sorted(map(str, written))
    return folder


def test_each_chosen_chart_is_a_file_in_each_form(folder: Path, small: Path) -> None:
    """--svg and --png write the charts of --chart alone, as NAME.svg and NAME.png; no page is
    written beside them."""
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    drawn = {f"new/my pictures/{c}.svg" for c in CHARTS} | {f"png/{c}.png" for c in CHARTS}
    assert files == {*drawn, "text/report.md"}
    assert not (small / "report.html").exists()


def test_the_readme_shows_what_its_command_draws(tmp_path: Path) -> None:
    """The picture in the README has the lines and texts that its command draws today."""
    readme = (ROOT / "README.md").read_text()
    shown = REFERENCE / f"{CHARTS[0]}.svg"
    assert f"]({shown.relative_to(ROOT)})" in readme
    command = f"ddpbench report {REFERENCE.relative_to(ROOT)} --svg {REFERENCE.relative_to(ROOT)}"
    assert f"{command} --chart {CHARTS[0]}\n" in readme
    run = ReportRun("x", store.read(REFERENCE), REFERENCE)
    section = next(collectives.build_sections([run], drawn=True))
    charts = [chart for chart in section.charts if chart.name == CHARTS[0]]
    ((_, drawn),) = pictures.write(charts, tmp_path, "svg")
    advice = f"draw it again: {command} --chart {CHARTS[0]}"
    assert read_texts(shown) == read_texts(drawn), advice
    for color in theme.COLORS[:2]:
        assert read_line(shown, color) == pytest.approx(read_line(drawn, color), abs=0.01), advice


def read_texts(path: Path) -> set[str]:
    """Return the texts of a picture."""
    return {"".join(text.itertext()) for text in ElementTree.parse(path).iter(f"{SVG}text")}


def read_line(path: Path, color: str) -> Any:
    """Return the points [point, (x, y)] of the longest line of a colour, from 0 to 1."""
    paths = [e for e in ElementTree.parse(path).iter(f"{SVG}path") if e.get("stroke") == color]
    lines = [re.findall(r"[ML](-?[\d.]+),(-?[\d.]+)", path.get("d", "")) for path in paths]
    points = np.array(max(lines, key=len), dtype=float)
    assert len(points) == 13  # sizes
    return (points - points.min(axis=0)) / np.ptp(points, axis=0)


def test_markdown_links_its_pictures(folder: Path) -> None:
    """The Markdown has a summary, names each picture relative to itself, and has the tables."""
    text = (folder / "text" / "report.md").read_text()
    assert text.startswith("# small\n\n## ")
    links = re.findall(r"!\[.*\]\((.*)\)", text)
    assert links == [f"../new/my%20pictures/{name}.svg" for name in CHARTS]
    assert len(re.findall(r"^\| +4 KiB \| gloo ", text, re.MULTILINE)) == 1
