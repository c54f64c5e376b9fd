"""Pictures and Markdown of a run: `report --svg`, `--png`, `--markdown` and `--chart`."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_lines import ROOT
from in_process import call_in_process
from stored_runs import a_case, a_result, a_run

from ddpbench.records import store

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

from ddpbench.present.collectives import sections as collectives
from ddpbench.present.document import ReportRun
from ddpbench.present.writers import pictures

REFERENCE = ROOT / "results" / "reference" / "cpu-2-ranks"
pytestmark = pytest.mark.thorough
CHARTS = ("all_reduce-time", "all_reduce-bandwidth")
SVG = "{http://www.w3.org/2000/svg}"


def test_chosen_charts_are_files_in_each_form(tmp_path: Path) -> None:
    """--svg, --png and --markdown write the charts of --chart alone, and no page. The Markdown has
    a summary and the tables, and names each picture relative to itself."""
    small = tmp_path / "small"
    store.create(small, a_run(a_result(), a_result(a_case(nbytes=2**20, count=2**18))), "x")
    folder = tmp_path / "report"
    words = ["--svg", folder / "my pictures", "--png", folder / "png"]
    words += ["--markdown", folder / "text" / "report.md", "--chart", ",".join(CHARTS)]
    done = call_in_process(["report", str(small), *map(str, words)])
    assert (done.code, done.err) == (0, "")
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert sorted(done.out.splitlines()) == sorted(map(str, written))
    drawn = {f"my pictures/{c}.svg" for c in CHARTS} | {f"png/{c}.png" for c in CHARTS}
    assert {str(path.relative_to(folder)) for path in written} == {*drawn, "text/report.md"}
    assert not (small / "report.html").exists()
    text = (folder / "text" / "report.md").read_text()
    assert text.startswith("# small\n\n## ")
    links = re.findall(r"!\[.*\]\((.*)\)", text)
    assert links == [f"../my%20pictures/{name}.svg" for name in CHARTS]
    assert len(re.findall(r"^\| +4 KiB \| gloo ", text, re.MULTILINE)) == 1


def test_the_readme_shows_what_its_command_draws(tmp_path: Path) -> None:
    """The picture in the README has the texts that its command draws today."""
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


def read_texts(path: Path) -> set[str]:
    """Return the texts of a picture."""
    return {"".join(text.itertext()) for text in ElementTree.parse(path).iter(f"{SVG}text")}
