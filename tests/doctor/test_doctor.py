"""The doctor: examinations, their order on disk, the verdict, the exit code."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from frozen import Frozen
from rank_pool import RankPool
from stored_runs import a_run

from ddpbench.analysis import findings
from ddpbench.doctor.examinations import EXAMINATIONS
from ddpbench.present.formats import show
from ddpbench.records import store
from ddpbench.records.schema import Examination, Finding, Plan, Run


def examined(*found: Finding, fail_on: str = "error") -> Run:
    """A doctor's run in which this was found."""
    each = Examination("preflight", 0, "gloo", 1.0, ("2 ranks",), ("GPUs: none here",), found)
    run = replace(
        a_run(), command="doctor", results=(), steps=(), findings=(), examinations=(each,),
        plan=Plan(fail_on=fail_on),
    )  # fmt: skip
    return replace(run, findings=findings.findings(run))


def test_the_exit_code_is_1_from_the_severity_asked_for_on() -> None:
    """--fail-on; a wrong result is 4 whatever was asked."""
    severities = ("note", "warning", "error")
    for (i, severity), (j, fail_on) in product(enumerate(severities), repeat=2):
        run = examined(Finding(severity, "slow-link", "it is slow"), fail_on=fail_on)
        assert findings.exit_code(run) == int(i >= j)
        wrong = examined(Finding("error", "wrong-result", "it is wrong"), fail_on=fail_on)
        assert findings.exit_code(wrong) == 4


def test_the_verdict_counts_what_is_worse_than_a_note(frozen: Frozen) -> None:
    """Findings stand at the end with their next step."""
    run = examined(Finding("note", "a", "so it is"))
    (examination,) = run.examinations
    for each in (
        replace(run, state="interrupted"),
        run,
        replace(run, examinations=(replace(examination, unchecked=()),)),
        examined(Finding("error", "a", "bad"), Finding("warning", "b", "odd", "look")),
    ):
        frozen.text(show("table", each))


def test_two_ranks_are_examined(pool: RankPool, tmp_path: Path) -> None:
    """All examinations are stored, in their order; the run is a doctor's and can be shown again."""
    done = pool.call(2, tmp_path, "doctor", "--case-time", "1", "--format", "json")
    # gloo of torch 2.7 sums in reduce_scatter whatever it is asked for: 4 where there was time to
    # find it.
    codes = (0, 4) if torch.__version__ < "2.9" else (0,)
    assert done.returncode in codes, done.stdout + done.stderr
    assert [each["name"] for each in json.loads(done.stdout)["examinations"]] == [*EXAMINATIONS]
    (folder,) = store.list_runs(tmp_path / "results")
    run = store.read(folder)
    assert (run.command, run.state) == ("doctor", "complete")
    assert (folder / "table.txt").read_text() == show("table", run)
