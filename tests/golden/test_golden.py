"""The output of stored runs and command lines is frozen: facts in facts/, wording in text/.

runs/ holds real runs of two virtual cores, of which three were damaged afterwards.
"""

from __future__ import annotations

import csv
import io
import re
import shlex
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from frozen import COLLECTED, GOLDEN, Frozen, finding_facts, read_facts, read_texts
from in_process import Outcome, call_in_process, forbid_processes

from ddpbench.records import store

RUNS = sorted(path.name for path in (GOLDEN / "runs").iterdir())
DAMAGED = ("damaged", "newer")  # no command can read these
# Their pages as Markdown have every title, caption, sentence, table and legend of a page.
MARKDOWN = ("sweep", "step", "hsdp", "diverged", "doctor", "doctor-slow", "watch-late")
WORDING = ("sentence", "next_step", "reason", "why")  # columns of text

# Command lines by the name of their text file. They run in a folder with golden/runs as results/.
COMMAND_LINES = {
    "show": (
        *(f"show {name}" for name in RUNS),
        "show last",
        "show sweep --format markdown --quiet",
        "show sweep --columns op,size,backend,time,low,high,p99,flags",
        "show sweep --format json --columns op,size,backend,time",
        "show step --columns workload,backend,step,exposed,equal",
        "show doctor-slow --format csv --columns severity,code,place",
        "show sweep --columns tiem",
        "show sweep --format cvs",
        "show nowhere",
        "show",
    ),
    "list": (
        "list",
        "list nowhere",
    ),
    "compare": (
        "compare sweep changed",
        "compare sweep changed --strict --allow-missing",
        "compare sweep changed --margin 50 --only all_reduce,gloo --format markdown",
        "compare ab-a ab-b",
        "compare ab-b ab-a",
        "compare sweep pipelined",
        "compare wrong operations",
        "compare sweep doctor",
        "compare sweep damaged",
        "compare sweep sweep",
        "compare sweep changed --only nothing",
        "compare sweep changed --margin 0",
        "compare sweep",
        "compare sweep changed --margin nan",
        "compare sweep changed --format html",
        "compare sweep changed --only a,,b",
        "compare sweep changed --strikt",
        "compare sweep nowhere",
    ),
    "baseline": (
        "baseline save main sweep",
        "baseline save main sweep && baseline check main changed",
        "baseline save main sweep && baseline save main changed",
        "baseline save slow ab-b && baseline check slow ab-a",
        "baseline save bad damaged",
        "baseline check unknown",
        "baseline save a/b sweep",
    ),
    "report": (
        *(f"report {name} --markdown -" for name in MARKDOWN),
        "report sweep --svg pictures",
        "report step --svg pictures",
        "report hsdp --svg pictures",
        "report doctor --svg pictures --chart links-bandwidth",
        "report watch-late --svg pictures",
        "report step --report-file page.html",
        "report sweep --svg pictures --chart all_reduce-tim",
        "report sweep --svg pictures --chart facts",
        "report sweep --chart all_reduce-time",
        "report sweep --markdown .",
        "report sweep --png results/sweep/run.json",
        "report damaged",
        "report nowhere",
    ),
    "guide": ("guide nothing", "guide contribuiting"),
    "collectives": (
        "collectives --backend gloo",
        "collectives --op all_redcue",
        "collectives --backend glo",
        "collectives --dtype float23",
        "collectives --sizes 4:64M",
        "collectives --sizes 0",
        "collectives --launches 0",
        "collectives --case-time -1",
        "collectives --mode pipelined --sync barrier",
        "collectives -n 0",
        "collectives --output results/sweep --backend gloo",
        "collectives --bakend gloo",
    ),
    "ddp": (
        "ddp --backend gloo",
        "ddp --workload mpl",
        "ddp --inject bit-flap",
        "ddp --inject bit-flip:stepp=3",
        "ddp --parallel hsdp --mesh 2x3 -n 4",
        "ddp --epochs 3",
        "ddp --static-graph --accumulate 2",
        "ddp --workload linear --width 8",
        "ddp --workload mlp --mesh 4",
        "ddp --workload mlp --parallel fsdp --bucket-cap-mb 3",
        "ddp --workload mlp --parallel fsdp --mesh 2x2 -n 4",
        "ddp --parallel fsdp --workload convnet",
        "ddp --workload mlp --parallel hsdp --mesh 2y2",
        "ddp --workload mlp --parallel tp --no-prefetch",
        "ddp --workload mlp --parallel tp -n 3 --width 64",
        "ddp --parallel tp -n 4 --workload transformer --width 64",
        "ddp --workload mlp --reshard-after-forward no",
        "ddp --resume",
        "ddp --rounds 0",
        "ddp --verify sometimes",
    ),
    "doctor": ("doctor --backend gloo", "doctor --only link", "doctor --inject bit-flip"),
    "watch": ("watch -n 2 missing.py", "watch", "watch --verify 0 train.py"),
    "ab": (
        'ab --a "OMP_NUM_THREADS=1" --b "OMP_NUM_THREADS=2" collectives --backend gloo',
        'ab --a "--backend gloo" --b "--dtype float23" collectives',
        'ab --a "" --b "X=1" show last',
    ),
    "help": ("", "help show", "colectives"),
}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with the frozen runs in results/ the current one."""
    shutil.copytree(GOLDEN / "runs", tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def run_line(line: str) -> Outcome:
    """Run the words of a command line in this process; it may start no other."""
    with forbid_processes():
        return call_in_process(shlex.split(line))


def read_rows(text: str) -> list[dict[str, str | float]]:
    """Return the figures of a CSV output, row by row, without empty cells and without wording."""

    def parse(cell: str) -> str | float:
        try:
            return float(cell)
        except ValueError:
            return cell

    return [
        {name: parse(cell) for name, cell in row.items() if cell and name not in WORDING}
        for row in csv.DictReader(io.StringIO(text))
    ]


def read_tables(markdown: str) -> list[list[dict[str, str]]]:
    """Return the tables of a Markdown text as rows; cells of four words or more are wording."""
    tables = []
    for block in re.findall(r"(?:^\|.*\n)+", markdown + "\n", re.MULTILINE):
        head, _, *rows = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for line in block.splitlines()
        ]
        tables.append(
            [
                {name: cell for name, cell in zip(head, row, strict=True) if len(cell.split()) < 4}
                for row in rows
            ]
        )
    return tables


@pytest.mark.parametrize("name", RUNS)
def test_a_stored_run_keeps_its_facts(results: Path, frozen: Frozen, name: str) -> None:
    """The end, each case's figures, all findings and the figures of all tables are frozen."""
    shown = {form: run_line(f"show {name} --format {form}") for form in ("csv", "markdown")}
    assert {each.code for each in shown.values()} == {3 if name in DAMAGED else 0}
    if name in DAMAGED:
        return
    run = store.read(results / "results" / name)
    examined = [finding for each in run.examinations for finding in each.findings]
    replicas = [each for step in run.steps if step.replicas for each in step.replicas.findings]
    frozen.facts(
        {
            "state": [run.state, run.exit_code],
            "findings": [finding_facts(each) for each in (*run.findings, *examined, *replicas)],
            "cases": read_rows(shown["csv"].out),
            "tables": read_tables(shown["markdown"].out),
        }
    )


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, id=line, marks=[pytest.mark.thorough] if "--svg" in line else [])
        for lines in COMMAND_LINES.values()
        for line in lines
    ],
)
def test_a_command_line_keeps_its_facts(
    results: Path, line: str, request: pytest.FixtureRequest
) -> None:
    """The exit code (none: it would start ranks now), files, verdicts and wording are frozen."""
    before = {path for path in results.rglob("*") if path.is_file()}
    outcomes = [run_line(words) for words in line.split(" && ")]
    new = {path for path in results.rglob("*") if path.is_file()} - before
    last = outcomes[-1]
    facts: dict[str, Any] = {
        "exit": [outcome.code for outcome in outcomes],
        "files": sorted(generalise(str(path.relative_to(results)), results) for path in new),
    }
    if line.startswith("compare") and last.code != 2 and last.out and "--format" not in line:
        facts["verdicts"] = read_rows(run_line(f"{line} --format csv").out)
    (command,) = [name for name, lines in COMMAND_LINES.items() if line in lines]
    frozen = Frozen(command, f"ddpbench {line}", request.config.getoption("--rewrite-text"))
    frozen.facts(facts)
    printed = [text for outcome in outcomes for text in (outcome.out, outcome.err) if text]
    frozen.text(generalise("\n".join(printed), results))


def generalise(text: str, folder: Path) -> str:
    """Replace the folder, the time and the host, which differ from call to call."""
    text = re.sub(rf"{re.escape(str(folder))}\b", "FOLDER", text)
    host = re.escape(re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname()))
    return re.sub(rf"\d{{8}}T\d{{6}}Z((?:-\w+)*)-{host}\b", r"TIME\1-HOST", text)


def test_nothing_is_frozen_that_no_test_reads(pytestconfig: pytest.Config) -> None:
    """Each frozen key is that of a command line above, or of a test that was collected."""
    collected = pytestconfig.stash[COLLECTED]
    modules = {module for module, _ in collected}
    for path in (*(GOLDEN / "facts").glob("*.json"), *(GOLDEN / "text").glob("*.txt")):
        keys = set(read_facts(path) if path.suffix == ".json" else read_texts(path))
        if path.stem in COMMAND_LINES:
            known = {f"ddpbench {line}" for line in COMMAND_LINES[path.stem]}
        elif path.stem in modules:
            known = {name for module, name in collected if module == path.stem}
            keys = {re.sub(r" \d+$", "", key) if key not in known else key for key in keys}
        else:  # this call collects other modules
            assert list(GOLDEN.parent.rglob(f"{path.stem}.py")), path
            continue
        assert keys <= known, path


def test_no_further_test_measures_time(
    request: pytest.FixtureRequest, pytestconfig: pytest.Config
) -> None:
    """Such tests are listed under this test's name in facts/; the list may only shrink."""
    tests = pytestconfig.stash[COLLECTED]
    modules = {module for module, _ in tests}
    marked = {f"{module}::{name}" for (module, name), measures in tests.items() if measures}
    listed = read_facts(GOLDEN / "facts" / "test_golden.json")[request.node.name]
    assert marked == {test for test in listed if test.partition("::")[0] in modules}
