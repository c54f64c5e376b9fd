"""Faults planted in real ranks, and the finding that each must have.

Frozen: the exit code, and code, severity and place of the findings. If a run ends without one, the
code is that of its end, "refused" or "failed", and the place is the rank that the message names,
with the calls.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import ddpbench_command, read_stored_run, run_command, run_ddpbench
from frozen import Frozen
from patience import PATIENCE_SECONDS
from rank_pool import RankPool
from simulated_hosts import Hosts
from warm_python import warm_python

from ddpbench.records import store
from ddpbench.records.schema import Finding, Run
from ddpbench.runtime import cpu

# Code, severity and place of each finding, with its sentence.
Results = list[tuple[tuple[str, str, str], str]]
ENDS = {2: "refused", 5: "failed"}  # exit code → code of a run that ends without a finding
# Of a place: the same in all trials, of this machine, or repeated by the code or the tensor.
LEFT_OUT = {"workload", "backend", "host", "tensors"}


@dataclass(frozen=True)
class Trial:
    """A fault.

    fault   as after --inject
    token   a planted figure that the sentence of the finding, or the message, must contain
    words   further words of the command line
    """

    fault: str
    token: str = ""
    words: str = ""


def name(trial: Trial) -> str:
    """Return the name of the fault, for the name of the test."""
    return trial.fault.partition(":")[0]


# --- in the set-up --------------------------------------------------------------------------------

PREFLIGHT = "doctor --only preflight --case-time 1 --fail-on warning --backend gloo --device cpu"
REFUSED = Trial("wrong-interface:rank=1", "GLOO_SOCKET_IFNAME=nonesuch0")
SET_UP = (Trial("mixed-versions:rank=1", "torch 1.0.0"), Trial("oversubscribed:per_core=3"))

# --- in a step ------------------------------------------------------------------------------------

STEP = "ddp --backend gloo --device cpu --workload mlp --width 64 --depth 2"
FEW = "--steps-per-round 1 --rounds 4 --no-breakdown"
DDP = (
    Trial("bit-flip:step=7,rank=1", "bit 12"),
    Trial("permute:step=6,rank=1"),
    Trial("nan:step=6,rank=0"),
    Trial("nan:step=6,rank=1", "1 NaN or infinite element"),
    Trial("optimizer-state:step=6,rank=1", words="--optimizer adam"),
    Trial("learning-rate:step=6,rank=1", "0.05"),
    Trial("corrupted-result:step=6,rank=1", "bit 20"),
    Trial("bypass:step=1"),
    Trial("no-sync:step=6", words="--accumulate 2"),
)
HSDP, TP = "--parallel hsdp", "--parallel tp"
MESH = (
    Trial("other-seed:rank=2", words=HSDP),
    Trial("missed-sync:rank=3,step=6", words=HSDP),
    Trial("one-rank-update:rank=1,step=6", words=TP),
    Trial("flipped-shard:rank=3,step=6", "bit 12", HSDP),
)

# --- that ends the run ----------------------------------------------------------------------------

# Long enough for the ranks of a busy machine, and short enough to wait for.
ENDING = f"{STEP} {FEW} -n 3 --timeout 20"
ENDED = (
    Trial("hang:rank=1,step=6", "hang (step_faults.py:"),
    Trial("out-of-memory:rank=1,step=6", "1073741824 bytes"),
    # gloo may end a neighbour of rank 1 then: of four ranks, two still agree.
    Trial("wrong-shape:rank=1,step=6", words="-n 4"),
    Trial("skipped:rank=1,step=6"),
)
MISMATCHED = (
    Trial("wrong-dtype:rank=1,step=6", words="-n 4"),
    Trial("wrong-order:rank=1,step=6"),
)


def format_place(finding: Finding) -> str:
    """Format the place of a finding, without what differs between machines."""
    words = (
        f"{key}={'|'.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in finding.place.items()
        if key not in LEFT_OUT and value not in ([], finding.code)
    )
    return " ".join(words).replace(", ", ",")


def list_results(run: Run, *codes: str) -> Results:
    """Return the findings of a run that are errors or have one of these codes."""
    return [
        ((f.code, f.severity, format_place(f)), f.sentence)
        for f in run.findings
        if f.severity == "error" or f.code in codes
    ]


def read_message(trial: Trial, exit_code: int, stderr: str) -> Results:
    """Return the message with which a run ended; its place: the first rank and the calls.

    Without the calls where the trial has a figure: a rank that fails may be in none.
    """
    lines = re.findall(r"^ddpbench: (?!stored in )(.*)$", stderr, re.MULTILINE)
    ranks, calls = re.findall(r"rank \d+", lines[0]), re.findall(r"\w+ \w+\[\d+\]", lines[0])
    place = " ".join(dict.fromkeys([*ranks[:1], *([] if trial.token else calls)]))
    return [((ENDS[exit_code], "error", place), lines[0])]


def check(trial: Trial, exit_code: int, results: Results, frozen: Frozen) -> None:
    """Assert that a fault has its frozen exit code and findings, one of them with its figure."""
    facts = [[trial.fault, exit_code, *result] for result, _ in results]
    frozen.facts(facts)
    assert any(trial.token in sentence for _, sentence in results), results


def test_faults_in_the_set_up_are_found(pool: RankPool, tmp_path: Path, frozen: Frozen) -> None:
    """With rank and variable. Without the faults, the same ranks have no such finding."""
    names = [name(trial) for trial in SET_UP]
    done = pool.call(2, tmp_path, *PREFLIGHT.split(), "--inject", REFUSED.fault)
    results = read_message(REFUSED, done.returncode, done.stderr)
    check(REFUSED, done.returncode, results, frozen)
    planted = [word for trial in SET_UP for word in ("--inject", trial.fault)]
    done = pool.call(2, tmp_path, *PREFLIGHT.split(), "--output", "planted", *planted)
    for trial in SET_UP:
        run = store.read(tmp_path / "planted")
        own = [each for each in list_results(run, *names) if each[0][0] == name(trial)]
        check(trial, done.returncode, own, frozen)
    done = pool.call(2, tmp_path, *PREFLIGHT.split(), "--output", "healthy")
    assert done.returncode not in ENDS
    assert list_results(store.read(tmp_path / "healthy"), *names) == []


def first_quick(*trials: Trial) -> pytest.MarkDecorator:
    """The first of these trials is in the first tier."""
    first, *others = trials
    rest = [pytest.param(trial, marks=pytest.mark.thorough) for trial in others]
    return pytest.mark.parametrize("trial", [first, *rest], ids=name)


@first_quick(*DDP)
def test_a_fault_in_a_replica_is_found_at_its_step(
    pool: RankPool, tmp_path: Path, trial: Trial, frozen: Frozen
) -> None:
    """Right after the step in which it was planted, with the tensor, the ranks and the cause."""
    words = f"{STEP} {FEW} --timeout 60 {trial.words}"
    done = pool.call(3, tmp_path, *words.split(), "--inject", trial.fault)
    run = read_stored_run(tmp_path)[1]
    check(trial, done.returncode, list_results(run), frozen)
    (result,) = run.steps
    assert result.replicas is not None
    assert not result.replicas.ok
    step = int(re.findall(r"step=(\d+)", trial.fault)[0])
    assert result.replicas.first_bad == step
    assert result.replicas.equal_until == (step - 1 or None)
    assert result.stop_reason == "replicas differ"
    assert run.exit_code == 4


@pytest.mark.thorough
@pytest.mark.parametrize("trial", MESH, ids=name)
def test_a_fault_in_a_mesh_is_found(
    pool: RankPool, tmp_path: Path, trial: Trial, frozen: Frozen
) -> None:
    """With the first bad step, the coordinates, the tensor and the shard."""
    version = torch.__version__.split(".")
    if trial.words == HSDP and tuple(map(int, version[:2])) < (2, 9):
        pytest.skip("gloo of this torch cannot average, which HSDP needs")
    words = f"{STEP} {FEW} --timeout 60 {trial.words}"
    done = pool.call(4, tmp_path, *words.split(), "--inject", trial.fault)
    check(trial, done.returncode, list_results(read_stored_run(tmp_path)[1]), frozen)
    assert "NOT EQUAL" in done.stdout


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[Trial, tuple[Path, Any]]:
    """The folder and the end of each run; four run at once, as most wait for their deadline."""
    trials = [*ENDED, *(MISMATCHED if os.environ.get("DDPBENCH_TEST_NIGHTLY") else ())]

    def run(trial: Trial) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(name(trial))
        words = [*f"{ENDING} {trial.words}".split(), "--inject", trial.fault]
        if name(trial) == "hang":  # In a warm Python, the place would be a line of the tests.
            return folder, run_command(ddpbench_command(*words), folder, 2 * PATIENCE_SECONDS)
        return folder, run_ddpbench(folder, *words, timeout=2 * PATIENCE_SECONDS)

    warm_python()  # before the threads, which all call it
    with ThreadPoolExecutor(4) as threads:
        return dict(zip(trials, threads.map(run, trials), strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "trial",
    [*ENDED, *(pytest.param(each, marks=pytest.mark.nightly) for each in MISMATCHED)],
    ids=name,
)
def test_a_rank_that_ends_the_run_is_named(
    ended: dict[Trial, tuple[Path, Any]], trial: Trial, frozen: Frozen
) -> None:
    """With its line or its call; what was measured is marked as partial."""
    folder, done = ended[trial]
    check(trial, done.returncode, read_message(trial, done.returncode, done.stderr), frozen)
    assert read_stored_run(folder)[1].state == "failed"


@pytest.mark.thorough
def test_a_full_disk_is_named(tmp_path: Path, frozen: Frozen) -> None:
    """The file that cannot be written, and why."""
    trial = Trial("full-disk", "File too large")
    done = run_ddpbench(tmp_path, *PREFLIGHT.split(), "-n", "2", "--inject", trial.fault)
    check(trial, done.returncode, read_message(trial, done.returncode, done.stderr), frozen)


# --- slow -----------------------------------------------------------------------------------------


@pytest.mark.measures_time
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a rank needs a core of its own")
@pytest.mark.skipif(cpu.queued_seconds() is None, reason="this kernel counts no wait for a core")
def test_a_rank_beside_busy_processes_is_named(
    pool: RankPool, tmp_path: Path, frozen: Frozen
) -> None:
    """Rank 1 is bound to a core that three processes keep busy. If rank 0, which is free, waits for
    a core as well, no rank is named, and the report says why."""
    trial = Trial("slow-rank:rank=1")
    words = "doctor --only stragglers --case-time 1 --fail-on warning --backend gloo --device cpu"
    done = pool.call(2, tmp_path, *words.split(), "--inject", trial.fault)
    run = read_stored_run(tmp_path)[1]
    results = list_results(run, "slow-rank")
    if not results and any("the host is busy" in each for each in run.examinations[0].unchecked):
        return
    check(trial, done.returncode, results, frozen)


def test_a_rank_with_a_slow_forward_is_named(
    pool: RankPool, tmp_path: Path, frozen: Frozen
) -> None:
    """A rank whose forward takes 40 ms more is the one the others wait for. The lead of the others
    after an arm without communication lengthens no step of the next arm."""
    trial = Trial("slow-rank:rank=1,step=1,ms=40")
    words = "ddp --backend gloo --device cpu --workload linear --rounds 12 --steps-per-round 1"
    done = pool.call(3, tmp_path, *words.split(), "--inject", trial.fault)
    run = read_stored_run(tmp_path)[1]
    check(trial, done.returncode, list_results(run, "late-rank"), frozen)
    (result,) = run.steps
    assert result.summary is not None
    budget = result.summary.budget
    (waiting,) = (part for part in budget if part.rank == 1 and part.resolved)
    assert waiting.figure.value > 0.030
    (exposed,) = (part for part in budget if part.name == "exposed communication")
    assert exposed.figure.value < waiting.figure.value / 2


@pytest.mark.measures_time
def test_a_slow_link_and_a_slow_host_are_found(
    hosts: Callable[..., Hosts], tmp_path: Path, frozen: Frozen
) -> None:
    """Of four hosts at 1 Gbit/s, the fourth, and the first two to each other, have a tenth of that.
    The rates are about the planted ones; tests/perf/links.py measures how close."""
    trial = Trial("host1-host2 and host4 at 100 Mbit/s")
    bench = hosts(4, rate=[1e9, 1e9, 1e9, 1e8], pairs={(0, 1): 1e8})
    words = "doctor --only links --by host --case-time 4 --fail-on warning --backend gloo"
    meet = {"LOCAL_RANK": "0", "MASTER_ADDR": bench[0].address}
    environs = [{**meet, "RANK": str(rank)} for rank in range(4)]
    with closing(bench.pool((1, 1, 1, 1))) as ranks:
        done = ranks.ask(tmp_path, environs, *words.split(), "--output", "run")
    run = store.read(tmp_path / "run")
    warnings = {finding.code for finding in run.findings if finding.severity == "warning"}
    check(trial, done.returncode, list_results(run, *warnings), frozen)
    confirmed = [each for each in run.examinations[0].figures["again"] if each["confirmed"]]
    assert len(confirmed) == 2
    for again in confirmed:
        assert 0.5e8 < again["bytes_per_second"] * 8 < 2e8
        assert 3e8 < again["others_bytes_per_second"] * 8 < 2e9
