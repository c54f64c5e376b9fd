"""`ddpbench report RUN` and `compare --report-file`: pages, and why there may be none."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from frozen import Frozen
from in_process import Outcome, call_in_process, forbid_processes
from stored_runs import (
    base_and_new,
)
from without_torch import run_without_torch

from ddpbench.records import store
from ddpbench.records.schema import Run
from ddpbench.records.wording import install_extra

EXTRA = install_extra("report")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which commands run and find stored runs by name."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(name: str, run: Run) -> Path:
    """Store a run in results/."""
    folder = Path("results") / name
    folder.mkdir(parents=True)
    store.write(folder, replace(run, id=name))
    return folder


# --- compare --report-file ---------------------------------------------------------------------


def verdict_lines(page: str) -> str:
    """Return the title of a page and its sentences on verdicts."""
    (title,) = re.findall("<h1>(.*?)</h1>", page)
    section = page.split('<section id="verdicts"')[1].split("</section>")[0]
    return "\n".join((title, *re.findall(r"<(?:p|li)\b[^>]*>(.*?)</(?:p|li)>", section, re.DOTALL)))


def test_compare_writes_a_page_besides_its_output(frozen: Frozen) -> None:
    """`--report-file` leaves table and exit code as they are; the page has the verdicts and both
    runs are on the page."""
    base, new = base_and_new(1.2)
    put("base", base)
    put("new", new)
    alone = call_in_process(["compare", "base", "new"])
    done = call_in_process(["compare", "base", "new", "--report-file", "pages/page.html"])
    assert (done.code, done.out) == (alone.code, alone.out)
    assert alone.code == 1
    page = Path("pages/page.html").read_text()
    assert "1 SLOWER" in page
    frozen.text(done.err)
    frozen.text(verdict_lines(page))


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.fixture
def no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Altair is not installed."""
    monkeypatch.setitem(sys.modules, "altair", None)


@pytest.mark.parametrize(
    "words",
    [
        ("report", "mine"),
        ("compare", "mine", "mine", "--report-file", "page.html"),
    ],
)
@pytest.mark.usefixtures("no_extra")
def test_a_missing_extra_is_refused_before_anything_is_done(words: tuple[str, ...]) -> None:
    """Without altair, a command that is to write a page ends at once with the words to type."""
    put("mine", base_and_new(1)[0])
    with forbid_processes():
        done = call_in_process(words)
    what = {"report": "a report", "compare": "--report-file"}[words[0]]
    assert done == Outcome(2, "", f"ddpbench: {what} needs altair: {EXTRA}\n")
    assert [path.name for path in Path("results").iterdir()] == ["mine"]


def test_all_else_works_without_the_extra() -> None:
    """The overview, the help of `report`, `show` and `compare` import nothing of the extra."""
    base, new = base_and_new(1.5)
    put("base", base)
    put("new", new)
    program = """
from ddpbench.cli import main
for words in (["--help"], ["show", "base"], ["compare", "base", "new"], ["report", "--help"]):
    try: main(words)
    except SystemExit: pass
"""
    out = run_without_torch(program, forbidden=("altair", "jinja2", "vl_convert", "torch"))
    assert "1 SLOWER" in out
    assert "--markdown" in out


@contextmanager
def small_files(nbytes: int) -> Iterator[None]:
    """Let this process write no larger files, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(
    "command",
    [("report", "mine", "--report-file"), ("compare", "mine", "other", "--report-file")],
    ids=["report", "compare"],
)
def test_a_page_that_cannot_be_written_is_one_sentence(
    command: tuple[str, ...], frozen: Frozen
) -> None:
    """A folder, a device, a file in the place of a folder, and a full disk: exit code 2, one
    sentence with the name, and no file is left."""
    put("mine", base_and_new(1)[0])
    put("other", base_and_new(1)[1])
    Path("plain").touch()
    outputs = ("results", "/dev/null", "plain/page.html")
    refused = [call_in_process([*command, output]) for output in outputs]
    with small_files(100_000):
        refused.append(call_in_process([*command, "page.html"]))
    assert [(done.code, done.err.count("\n")) for done in refused] == [(2, 1)] * 4
    frozen.text("".join(done.err for done in refused))
    assert sorted(path.name for path in Path().iterdir()) == ["plain", "results"]
