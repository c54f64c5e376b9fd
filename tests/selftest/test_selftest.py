"""The self-test: what it takes for found and for rightly named, its table, and real trials."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from command_lines import clean_environment
from rank_pool import RankPool
from stored_runs import a_run
from warm_python import warm_python

from ddpbench import cli
from ddpbench.analysis.selftest import Expected, Tried, collect_messages, judge_fault, judge_healthy
from ddpbench.records import store
from ddpbench.records.schema import Examination, Finding
from ddpbench.render.selftest import FORMATS, verdict
from ddpbench.selftest import command, trials
from ddpbench.selftest.ranks import call
from ddpbench.selftest.trials import NAMES, TRIALS

DEAD = Expected((5,), r"has died", r"rank 1 \(.*\) has died")


@pytest.mark.parametrize(
    ("code", "line", "found", "named"),
    [
        (5, "rank 1 (node, pid 7) has died, while rank 0 waited", True, True),
        (5, "rank 0 (node, pid 6) has died, while rank 1 waited", True, False),
        (5, "rank 1 (node, pid 7) is stopped", False, False),
        (0, "rank 1 (node, pid 7) has died, while rank 0 waited", False, False),
    ],
)
def test_a_fault_is_found_and_named(code: int, line: str, found: bool, named: bool) -> None:
    """By a line that tells it, with the right exit code; named by one with the right rank. What is
    not right is shown with its exit code."""
    row = judge_fault(
        "kill", "rank 1 is killed", DEAD, code=code, lines=["warning x: y", line], seconds=2.0
    )
    assert (row.found, row.named, row.right) == (found, named, named)
    assert row.said == (line if named else f"exit code {code}: {line}")


def test_what_is_told_is_findings_and_sentences() -> None:
    """Worse than notes, with code and next step; what was not checked; of stderr what ddpbench
    says, but not where it has stored the run."""
    late, note = (
        Finding("warning", "late-rank", "rank 1 is late", "look"),
        Finding("note", "a", "b"),
    )
    links = Examination("links", 0, "gloo", 1.0, unchecked=("GPUs",))
    run = replace(a_run(), findings=(late, note), examinations=(links,))
    stderr = "torch: noise\nddpbench: stored in /x\nddpbench: rank 1 has died\n"
    assert collect_messages(run, stderr) == [
        "warning late-rank: rank 1 is late. Next: look", "not checked: GPUs", "rank 1 has died",
    ]  # fmt: skip
    assert collect_messages(None, "") == []


def test_a_healthy_run_may_find_nothing() -> None:
    """But what is allowed; an exit code is an alarm too."""
    few = "warning oversubscribed: 2 ranks share 1 core"
    assert judge_healthy(0, ["not checked: GPUs"], 1.0, ()).right
    assert not judge_healthy(5, [], 1.0, ()).right
    alarm = judge_healthy(0, [few], 1.0, ())
    assert (alarm.right, alarm.found, alarm.said) == (False, True, few)
    assert judge_healthy(0, [few], 1.0, ("^warning oversubscribed:",)).right


# What was asked of the self-test, by the names that the faults have here.
WANTED = {
    "slow-rank", "stop", "kill", "slow-link", "slow-host", "wrong-shape", "wrong-dtype",
    "wrong-order", "skipped", "corrupted-result", "bit-flip", "learning-rate", "nan",
    "wrong-interface", "mixed-versions", "oversubscribed", "full-disk", "out-of-memory",
    "other-seed", "missed-sync", "one-rank-update", "flipped-shard",
}  # fmt: skip
# Fault → what tells it rightly; the first trial of a fault is meant.
SAID = {
    "slow-rank": ["warning slow-rank: rank 1 (node7) multiplies at 31 GFLOP/s"],
    "stop": ["rank 1 (node, pid 7) is stopped (SIGSTOP), last seen in stop (step_faults.py:9), "
             "before #4 all_reduce float32[64]; ranks 0, 2 wait"],
    "kill": ["rank 1 (node, pid 7) has died, last seen in kill (step_faults.py:9), before #4 "
             "all_reduce float32[64]; ranks 0, 2 wait"],
    "hang": ["rank 1 never joined #4 all_reduce float32[64]; it is in hang (step_faults.py:9); "
             "ranks 0, 2 wait"],
    "slow-link": ["warning slow-link: host1 and host2 reach each other at 11.8 MB/s"],
    "slow-host": ["warning slow-host: host3 is reached at 11.8 MB/s"],
    "wrong-shape": ["rank 1 calls #4 all_reduce float32[2048] of group 1 where ranks 2, 3 call "
                    "all_reduce float32[1024]"],
    "wrong-dtype": ["rank 1 calls #4 all_reduce float64[1024] where ranks 0, 2 call all_reduce "
                    "float32[1024]"],
    "wrong-order": ["rank 1 calls #4 all_gather float32[1024] where ranks 0, 2 call all_reduce "
                    "float32[1024]"],
    "skipped": ["rank 1 calls #4 all_reduce float32[8320] where ranks 0, 2 call all_gather "
                "float32[1024]"],
}  # fmt: skip


def test_every_fault_that_was_asked_for_has_a_trial() -> None:
    """By its name."""
    assert set(NAMES) >= WANTED


@pytest.mark.parametrize("fault", SAID)
def test_another_rank_or_host_is_not_named_rightly(fault: str) -> None:
    """What a trial looks for is in the sentence of its fault, and not in the same of others."""
    trial = next(trial for trial in TRIALS if trial.fault == fault)

    def judge(lines: list[str]) -> Tried:
        code = trial.expected.codes[0]
        return judge_fault(fault, "", trial.expected, code=code, lines=lines, seconds=1.0)

    assert judge(SAID[fault]).right
    for one, other in (("rank 1", "rank 0"), ("host1", "host4"), ("host3", "host2")):
        lines = [line.replace(one, other) for line in SAID[fault]]
        if lines != SAID[fault]:
            assert not judge(lines).named


ROWS = [
    Tried("stop", "rank 1 is stopped", True, True, 9.04, "rank 1 | stopped", True),
    Tried("kill", "rank 1 is killed", True, False, 3.0, "exit code 5: rank 0 has died", False),
    Tried("slow-link", "host1-host2", None, None, None, "network namespaces need root", None),
    Tried("healthy", "nothing", False, None, 40.0, "exit code 0", True),
]


def test_the_table_has_a_row_each_and_a_verdict() -> None:
    """Found, named, seconds, what was said; what is not right is told in full below; JSON has all
    of it."""
    text = FORMATS["table"](ROWS)
    assert text.splitlines()[0].split() == [
        "fault",
        "planted",
        "found",
        "named",
        "seconds",
        "message",
    ]
    first = text.splitlines()[2].split("  ")
    assert [cell.strip() for cell in first if cell] == [
        "stop", "rank 1 is stopped", "yes", "yes", "9.0", "rank 1 | stopped",
    ]  # fmt: skip
    assert "NO" in text
    assert (
        "1 of 2 planted faults found and named correctly; 1 not tried here; 1 of 1 healthy runs "
        "without a finding above note"
    ) in text
    assert text.endswith("kill, rank 1 is killed: exit code 5: rank 0 has died\n")
    assert "| fault" in FORMATS["markdown"](ROWS)
    assert [row["right"] for row in json.loads(FORMATS["json"](ROWS))] == [True, False, None, True]
    alarm = replace(ROWS[3], found=True, right=False)
    assert "FALSE ALARM" in FORMATS["table"]([alarm])
    assert verdict([alarm]) == "0 of 1 healthy runs without a finding above note"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--selftest", "bitflip"), "Did you mean bit-flip"),
        (("--selftest", "-n", "4"), "--selftest does not accept -n"),
        (("--selftest", "--format", "csv"), "choose table, markdown, json"),
        (("--healthy", "3"), "--healthy belongs to --selftest"),
        (("--inject", "stop"), "use ddp --inject stop"),
    ],
)
def test_bad_input_is_one_sentence(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, before anything is planted."""
    try:
        code: object = cli.main(["doctor", *words])
    except SystemExit as end:
        code = end.code
    printed = capsys.readouterr()
    assert (code, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert said in printed.err


def test_under_a_launcher_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It starts its ranks itself."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor", "--selftest"]) == 2
    assert "leave out the launcher (torchrun)" in capsys.readouterr().err


def test_what_needs_root_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the disk and the links are no trial that failed, but one that was not made."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for needs in (trials.no_mount, trials.no_hosts):
        needs.cache_clear()
    chosen = [trial for trial in TRIALS if trial.tiny_disk or trial.rates]
    rows = [command.run_trial(trial, tmp_path / "1") for trial in chosen]
    for needs in (trials.no_mount, trials.no_hosts):
        needs.cache_clear()
    assert [row.fault for row in rows] == ["slow-link", "slow-host", "full-disk"]
    assert all((row.found, row.right) == (None, None) and "root" in row.said for row in rows)


def test_real_faults_are_planted_found_and_named(tmp_path: Path) -> None:
    """A wrong variable and a full disk: in real ranks, each a row that is right or tells what it
    needs; exit code 0, and no run and no folder stays."""
    words = ["doctor", "--selftest", "wrong-interface,full-disk", "--healthy", "0"]
    done = subprocess.run(
        [*warm_python(), "-m", "ddpbench", *words, "--format", "json"],
        cwd=tmp_path, env=clean_environment(TMPDIR=str(tmp_path)), capture_output=True, text=True,
        check=False, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [Tried(**row) for row in json.loads(done.stdout)]
    assert [row.fault for row in rows] == ["wrong-interface", "full-disk", "full-disk"]
    assert all(row.right or (row.right is None and "root" in row.said) for row in rows), rows
    assert not [*tmp_path.glob("ddpbench-*"), *tmp_path.glob("results")]


@pytest.mark.parametrize("fault", ["other-seed", "missed-sync", "one-rank-update", "flipped-shard"])
def test_a_fault_of_a_mesh_is_found_and_named(fault: str, pool: RankPool, tmp_path: Path) -> None:
    """The command of its trial, in four real ranks, ends with exit code 4; the finding has the
    cause, the first bad step, the coordinates, the tensor and the shard, and the table says why."""
    trial = next(trial for trial in TRIALS if trial.fault == fault)
    if (obstacle := trial.find_obstacle()) is not None:
        pytest.skip(obstacle)
    name, _, ranks, *words = trial.arguments
    done = pool.call(int(ranks), tmp_path, name, *words)
    (folder,) = store.list_runs(tmp_path / "results")
    row = judge_fault(
        fault,
        trial.planted,
        trial.expected,
        code=done.returncode,
        lines=collect_messages(store.read(folder), done.stderr),
        seconds=1.0,
    )
    assert row.right, row.said
    assert "NOT EQUAL after step" in done.stdout


def test_a_command_that_hangs_is_ended() -> None:
    """At its deadline, with what it has started; what it had printed is told."""
    with pytest.raises(TimeoutError, match=r"not done in 0\.5 s: at work"):
        call(["sh", "-c", "sleep 77.7 & echo at work >&2; wait"], 0.5)
    left = [each.info["cmdline"] for each in psutil.process_iter(["cmdline"])]
    assert ["sleep", "77.7"] not in left
