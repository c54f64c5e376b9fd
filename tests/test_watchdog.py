"""What the watchdog sees of a silent rank, and the sentence it makes of it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ddpbench.runtime import watchdog
from ddpbench.runtime.watchdog import ALIVE, DIED, STOPPED, Report, Who, state_of, verdict

CUT_OFF = "did not answer (stopped, dead or cut off)"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits to be told to end."""
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


HERE = Who(0, "node", os.getpid(), "boot")


def seen_as(process: subprocess.Popen[bytes], state: str) -> bool:
    """Whether the process is seen in this state within 5 s: signals take a moment."""
    who = Who(3, "node", process.pid, "boot")
    until = time.monotonic() + 5
    while state_of(who, HERE) != state and time.monotonic() < until:
        time.sleep(0.01)
    return state_of(who, HERE) == state


def test_a_process_is_seen_alive_stopped_alive_again_and_dead(
    child: subprocess.Popen[bytes],
) -> None:
    """A real child: waiting it is alive, after SIGSTOP stopped, after SIGCONT alive, killed but
    not yet waited for (a zombie) dead, and gone dead too."""
    assert seen_as(child, ALIVE)
    child.send_signal(signal.SIGSTOP)
    assert seen_as(child, STOPPED)
    child.send_signal(signal.SIGCONT)
    assert seen_as(child, ALIVE)
    child.kill()
    assert seen_as(child, DIED)
    child.wait()
    assert seen_as(child, DIED)


def test_a_process_of_another_host_cannot_be_seen(child: subprocess.Popen[bytes]) -> None:
    """Its pid means nothing here, even if a process of this host has the same one."""
    assert state_of(Who(3, "other", child.pid, "other boot"), HERE) == CUT_OFF
    assert state_of(Who(3, "other", os.getpid(), "other boot"), HERE) == CUT_OFF


def test_a_process_of_another_namespace_cannot_be_seen(child: subprocess.Popen[bytes]) -> None:
    """Two containers of one machine share its boot id, but not their pids."""
    assert state_of(Who(3, "node", child.pid, "boot", processes="other"), HERE) == CUT_OFF


LATE = Report("case 3 of 9: all_reduce", "missed the deadline of 5 s", True, "loop.py:7")
FAILED = Report("case 3 of 9: all_reduce", "RuntimeError: closed by peer", False, "loop.py:7")
ONE, TWO, THREE = (Who(rank, f"node{rank}", 100 + rank, "boot") for rank in (1, 2, 3))


def test_a_silent_rank_is_blamed_and_those_that_waited_are_named() -> None:
    """Rank, host, pid and state of each silent rank; then who waited, and in what."""
    assert verdict([(ONE, STOPPED)], {0: LATE, 2: LATE}, 0) == (
        "rank 1 (node1, pid 101) is stopped (SIGSTOP), while ranks 0, 2 waited in "
        "case 3 of 9: all_reduce"
    )
    assert verdict([(ONE, DIED), (TWO, CUT_OFF)], {3: LATE}, 3) == (
        "rank 1 (node1, pid 101) has died; rank 2 (node2, pid 102) did not answer (stopped, dead "
        "or cut off), while rank 3 waited in case 3 of 9: all_reduce"
    )


def test_a_dead_rank_is_blamed_whatever_the_others_say() -> None:
    """The others' errors are consequences: only the rank that died is named as the cause."""
    sentence = verdict([(ONE, DIED)], {0: FAILED, 2: LATE}, 0)
    assert sentence.startswith("rank 1 (node1, pid 101) has died, while ranks 0, 2 waited in ")
    assert "RuntimeError" not in sentence


def test_a_silent_rank_that_lives_is_blamed_only_once_the_deadline_is_over() -> None:
    """After a missed deadline it should have spoken; after an error elsewhere it may not yet have
    noticed, and the rank that failed is the one to name."""
    late = verdict([(ONE, ALIVE)], {0: LATE, 2: LATE}, 0)
    assert late.startswith("rank 1 (node1, pid 101) is alive but did not answer, while ranks 0, 2 ")
    failed = verdict([(ONE, ALIVE)], {0: FAILED}, 0)
    assert failed == (
        "rank 0: RuntimeError: closed by peer, at loop.py:7 (in case 3 of 9: all_reduce)"
    )
    both = verdict([(ONE, ALIVE), (THREE, DIED)], {0: FAILED}, 0)
    assert both.startswith("rank 3 (node3, pid 103) has died, while rank 0 waited in ")


def test_without_a_silent_rank_every_report_is_told_the_same_ones_together() -> None:
    """Ranks with the same cause, place and phase share a sentence, in order of rank."""
    other = Report("start", "ValueError: x", False, "group.py:1")
    assert verdict([], {2: LATE, 0: LATE, 1: other, 3: LATE}, 0) == (
        "ranks 0, 2, 3: missed the deadline of 5 s, at loop.py:7 (in case 3 of 9: all_reduce); "
        "rank 1: ValueError: x, at group.py:1 (in start)"
    )


def test_every_verdict_is_one_line() -> None:
    """Whatever is silent and whoever reports, the verdict is one sentence on one line."""
    for state in (DIED, STOPPED, ALIVE, CUT_OFF):
        for report in (LATE, FAILED):
            sentence = verdict([(ONE, state)], {0: report}, 0)
            assert sentence
            assert "\n" not in sentence


def test_signals_give_the_ranks_time_but_never_for_ever() -> None:
    """Ctrl-C, a time limit and SIGTERM leave seconds for a common end, well within the half minute
    after which torchrun and Slurm kill; mpirun's SIGTERM leaves half a second."""
    asked = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
    assert set(watchdog.SIGNAL_SECONDS) == set(watchdog.HURRIED_SECONDS) == asked
    assert all(1 < seconds < 20 for seconds in watchdog.SIGNAL_SECONDS.values())
    assert watchdog.HURRIED_SECONDS[signal.SIGTERM] < 1 < watchdog.HURRIED_SECONDS[signal.SIGINT]
