"""Pictures and Markdown of a run: `report --svg`, `--png`, `--markdown` and `--chart`."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_lines import ROOT
from in_process import capture_command

from ddpbench.records.schema import Finding
from ddpbench.records.table import Table, TableColumn

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

from ddpbench.report import markdown, pictures
from ddpbench.report.chart import Chart, Section

REFERENCE = ROOT / "results" / "reference" / "cpu-2-ranks"
CHART = "all_reduce-float32-sum-time"
SVG = "{http://www.w3.org/2000/svg}"


def test_charts_become_svg_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each chart becomes NAME.svg of 720 pixels, on white, in fonts of the same widths; the paths
    are printed, and no page is written."""
    done = capture_command(capsys, str(REFERENCE), "--svg", str(tmp_path), command="report")
    assert done.code == 0
    written = [Path(line) for line in done.out.splitlines()]
    assert sorted(written) == sorted(tmp_path.iterdir())
    assert tmp_path / f"{CHART}.svg" in written
    assert not (REFERENCE / "report.html").exists()
    picture = ElementTree.parse(tmp_path / f"{CHART}.svg").getroot()
    assert picture.get("width") == "720"
    rectangle = picture.find(f"{SVG}rect")
    assert rectangle is not None
    assert rectangle.get("fill") == "white"
    texts = list(picture.iter(f"{SVG}text"))
    assert {text.get("font-family") for text in texts} == {pictures.FONT}
    assert {"gloo", "mpi", "1 MiB"} <= {"".join(text.itertext()) for text in texts}


def test_a_chosen_chart_becomes_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--chart writes this chart alone; a PNG has two pixels for each pixel of the SVG."""
    folder = tmp_path / "new" / "folder"
    words = (str(REFERENCE), "--png", str(folder), "--chart", CHART)
    done = capture_command(capsys, *words, command="report")
    assert (done.code, done.out) == (0, f"{folder / CHART}.png\n")
    content = (folder / f"{CHART}.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">I", content[16:20]) == (1440,)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--svg", "x", "--chart", "nothing"), rf"unknown chart 'nothing': .*{CHART}"),
        (("--chart", CHART), "--chart chooses pictures: add --svg FOLDER"),
        (("--png", __file__), "is a file: --png needs a folder"),
    ],
)
def test_a_wrong_request_is_refused(
    words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A chart that the runs lack, a choice without pictures, or a file as folder: one sentence."""
    done = capture_command(capsys, str(REFERENCE), *words, command="report")
    assert (done.code, done.out) == (2, "")
    assert re.search(sentence, done.err)
    assert done.err.count("\n") == 1
    assert not Path("x").exists()


def test_markdown_links_its_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The Markdown names every picture relative to itself, and holds the tables."""
    target = tmp_path / "text" / "report.md"
    words = (str(REFERENCE), "--svg", str(tmp_path / "my pictures"), "--markdown", str(target))
    done = capture_command(capsys, *words, "--chart", CHART, command="report")
    assert done.code == 0
    text = target.read_text()
    (link,) = re.findall(r"!\[.*\]\((.*)\)", text)
    assert link == f"../my%20pictures/{CHART}.svg"
    assert re.search(r"\| +4 B \| mpi +\|", text)


def test_markdown_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """`--markdown -` prints the Markdown and nothing else."""
    words = (str(REFERENCE), "--markdown", "-", "--chart", CHART)
    done = capture_command(capsys, *words, command="report")
    assert done.code == 0
    assert done.out.startswith("# cpu-2-ranks\n")
    assert "![" not in done.out
    assert "Next: " in done.out or "## " in done.out


def test_markdown_shows_names_as_text() -> None:
    """HTML, pipes and control characters in names are text; findings have their next step; a long
    table is folded away."""
    host = "<script>alert(1)</script>|\x1b"
    table = Table(host, (TableColumn("host", "left"),), ((host,),) * 20, (host,))
    finding = Finding("error", "slow-rank", f"rank 1 on {host} is slow", "look at it")
    section = Section(
        "x", host, host, (host,), (finding,), ((Chart("c", host, host, None, table),),)
    )
    text = markdown.make_markdown([section], host, {})
    assert "<script>" not in text
    assert "\x1b" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;\\|\\x1b |") == 20
    assert "- **ERROR** (slow-rank): rank 1 on &lt;script&gt;" in text
    assert "is slow. Next: look at it\n" in text
    assert "<details><summary>" in text
