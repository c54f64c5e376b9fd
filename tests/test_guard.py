"""`ddpbench.watchdog` in scripts whose ranks really hang, stop, fail or disagree."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import environment

import ddpbench
from ddpbench.runtime import launch

SCRIPT = Path(__file__).parent / "guarded.py"
MPI = pytest.mark.skipif(
    launch.find_mpirun() is None, reason="there is no mpirun: install the extra `mpi`"
)
REDUCE = r"all_reduce float32\[1024\]"
HERE = r"\(guarded\.py:\d+\)"
STOPPED = rf"rank 1 \([^)]+, pid \d+\) is stopped \(SIGSTOP\), last seen in load_batch {HERE}"
INSIDE = rf"{STOPPED.replace('load_batch', 'step')}, in #4 {REDUCE}; rank 0 waits"
RAISED = rf"rank 1: ValueError: bad batch, at load_batch {HERE}, before #2 {REDUCE}; rank 0 waits"


GLOO = ("talk", "inside", "store", "raise", "receive", "quiet", "order", "shape")


@contextlib.contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[str]]:
    """The script; nothing of it is left at the end."""
    process = subprocess.Popen(
        words, env=environment(), text=True, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all plays over gloo have left; they run at once."""
    path = tmp_path_factory.mktemp("plays")
    with running(sys.executable, str(SCRIPT), str(path), *GLOO) as process:
        process.wait(100)
    return path


def said(folder: Path, play: str) -> tuple[list[int], list[str], str]:
    """Exit codes of the ranks, verdicts, all of stderr."""
    err = (folder / f"{play}.err").read_text()
    codes = [int(code) for code in (folder / f"{play}.codes").read_text().split()]
    return codes, verdicts(err), err


def verdicts(err: str) -> list[str]:
    """The lines that are ddpbench's."""
    return re.findall(r"^ddpbench: (.*)$", err, re.MULTILINE)


def test_who_waits_is_told_and_the_job_goes_on(folder: Path) -> None:
    """Rank 1 is late, then stopped in user code: two verdicts, the same in both ranks, with the
    collective, the line and who waits; with end=False the job goes on after each, and the stacks
    are printed once."""
    codes, told, err = said(folder, "talk")
    absent = rf"rank 1 never joined #4 {REDUCE}; it is in load_batch {HERE}; rank 0 waits"
    stopped = rf"{STOPPED}, before #5 {REDUCE}; rank 0 waits"
    for pattern in (absent, stopped):
        assert len([each for each in told if re.fullmatch(pattern, each)]) == 2, err
    assert len(told) == 4, err
    assert err.count("in load_batch\n    time.sleep(4.0)") == 1, err
    assert codes == [0, 0]


def test_a_rank_that_stops_in_a_collective_is_seen_there(folder: Path) -> None:
    """The job ends with 5, and the stopped rank is not left behind."""
    codes, told, err = said(folder, "inside")
    assert len(told) == 1, err
    assert re.fullmatch(INSIDE, told[0]), err
    assert codes == [5, -signal.SIGKILL]


def test_the_store_s_own_rank_may_be_the_one_that_stops(folder: Path) -> None:
    """Its last heartbeat is with the others: they name its line without the store."""
    codes, told, err = said(folder, "store")
    assert len(told) == 1, err
    assert re.fullmatch(
        rf"{STOPPED.replace('rank 1', 'rank 0')}, before #2 {REDUCE}; rank 1 waits; the ranks' "
        "store does not answer, so this is what rank 1 can see",
        told[0],
    ), err
    assert codes == [-signal.SIGKILL, 5]


def test_an_exception_ends_all_ranks_with_one_verdict(folder: Path) -> None:
    """Long before the time-out: the traceback, then in both ranks which one failed, where and
    before which collective."""
    codes, told, err = said(folder, "raise")
    assert codes == [5, 5]
    assert len(told) == 2, err
    assert all(re.fullmatch(RAISED, each) for each in told), err
    assert err.count("Traceback") == 1


def test_a_skipped_collective_is_named(folder: Path) -> None:
    """The first call in which the ranks differ, and that the steps before tell what happened."""
    codes, told, err = said(folder, "order")
    assert codes == [5, 5]
    sentence = (
        "rank 1 calls #13 broadcast float32[5] where rank 0 calls all_reduce float32[1024]: "
        "rank 1 has skipped a collective"
    )
    assert len(told) == 2, err
    assert all(each.startswith(sentence) for each in told), err


def test_another_size_is_named_although_gloo_gives_up(folder: Path) -> None:
    """gloo ends the process from a thread of its own: the verdict comes before."""
    codes, told, err = said(folder, "shape")
    assert 0 not in codes
    pattern = rf"rank 1 calls #2 all_reduce float32\[1025\] where rank 0 calls {REDUCE}"
    assert told, err
    assert all(re.match(pattern, each) for each in told), err


def test_a_receive_that_hangs_is_told_and_a_busy_one_is_not(folder: Path) -> None:
    """20 receives that take 2 s in all, with a time-out of 1 s, are progress; the next is none."""
    codes, told, err = said(folder, "receive")
    assert codes == [5, 5]
    assert len(told) == 2, err
    pattern = rf"rank 1: has waited longer than 1 s, at play_receive {HERE}, in recv"
    assert all(re.search(pattern, each) for each in told), err


def test_a_healthy_job_is_left_alone(folder: Path) -> None:
    """No word, exit code 0: with work between collectives, two watchdogs one after the other, ranks
    that leave at different times, and a forked child."""
    codes, told, err = said(folder, "quiet")
    assert codes == [0, 0], err
    assert told == []


@MPI
def test_over_mpi_it_is_the_same() -> None:
    """A rank that is stopped inside MPI, while the other is there too: its own count tells it."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    mpirun = [str(launch.find_mpirun()), *root, "--oversubscribe", "-n", "2"]
    with running(*mpirun, sys.executable, str(SCRIPT), "-", "inside") as process:
        _, err = process.communicate(timeout=60)
    (sentence,) = verdicts(err)
    assert re.fullmatch(INSIDE, sentence), err


def test_without_a_process_group_it_is_refused() -> None:
    """With a sentence that says what to do; and a time-out that is none."""
    with pytest.raises(RuntimeError, match="there is no process group yet: call it after torch"):
        ddpbench.watchdog()
    with pytest.raises(ValueError, match="timeout is 0: give seconds above 0"):
        ddpbench.watchdog(timeout=0)
