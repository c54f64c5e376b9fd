"""What the watchdog sees of a silent rank, and what it does at a deadline."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

import pytest
import torch.distributed as dist
from frozen import Frozen, verdict_facts
from patience import wait_until

from ddpbench.hang import watchdog
from ddpbench.hang.status_board import RankIdentity, identify, observe_state
from ddpbench.hang.verdict import ALIVE, DIED, STOPPED
from ddpbench.hang.watchdog import CommandWatchdog

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


HERE = RankIdentity(0, "node", os.getpid(), "boot")


def await_state(process: subprocess.Popen[bytes], state: str) -> None:
    """Wait until the process is seen in this state: signals take a moment."""
    who = RankIdentity(3, "node", process.pid, "boot")
    wait_until(lambda: observe_state(who, HERE) == state, state)


def test_a_process_is_seen_alive_stopped_alive_again_and_dead(
    child: subprocess.Popen[bytes],
) -> None:
    """A real child: waiting it is alive, after SIGSTOP stopped, after SIGCONT alive, killed but
    not yet waited for (a zombie) dead, and gone dead too."""
    await_state(child, ALIVE)
    child.send_signal(signal.SIGSTOP)
    await_state(child, STOPPED)
    child.send_signal(signal.SIGCONT)
    await_state(child, ALIVE)
    child.kill()
    await_state(child, DIED)
    child.wait()
    await_state(child, DIED)


@pytest.mark.parametrize(
    "other",
    [RankIdentity(3, "other", os.getpid(), "other boot"), replace(HERE, processes="other")],
    ids=("another host", "another namespace"),
)
def test_a_process_of_which_a_pid_means_nothing_here_cannot_be_seen(other: RankIdentity) -> None:
    """Two containers of one machine share its boot id, but not their pids."""
    assert observe_state(other, HERE) == CUT_OFF


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes with which this process would have ended."""
    codes: list[int] = []

    def leave(code: int) -> NoReturn:
        codes.append(code)
        sys.exit()  # the watchdog's thread

    monkeypatch.setattr(watchdog, "end_process", leave)
    return codes


def a_watchdog(is_on: bool = True) -> CommandWatchdog:
    """Of the only rank, with a deadline of 0.2 s."""
    return CommandWatchdog(dist.HashStore(), 0, [identify(0)], 0.2, is_on=is_on)


def test_a_deadline_may_be_off(left: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    """--watchdog off: nothing is printed, and the rank goes on."""
    dog = a_watchdog(is_on=False)
    dog.begin_phase("a long phase")
    time.sleep(0.5)
    dog.close()
    assert (left, capfd.readouterr().err) == ([], "")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_missed_deadline_ends_the_rank(
    left: list[int], frozen: Frozen, capfd: pytest.CaptureFixture[str]
) -> None:
    """As by default: one sentence with the line of the main thread, and exit code 5."""
    dog = a_watchdog()
    dog.on_end = lambda *end: left.append(0)
    dog.begin_phase("a long phase")
    wait_until(lambda: 5 in left, "the end of the rank")
    dog.close()
    (line,) = re.findall("^ddpbench: (.*)", capfd.readouterr().err, re.MULTILINE)
    frozen.facts({"exit": left[:2], "blamed": verdict_facts(line)["blamed"]})
    assert re.search(r"0\.2 s .*\((patience|test_watchdog)\.py:\d+\)", line)


def test_a_signal_that_another_rank_got_may_come_late() -> None:
    """Slurm signals node by node: the rank whose end it is already ignores its own from then on."""
    previous = {number: signal.getsignal(number) for number in watchdog.SIGNALS}
    dog = a_watchdog(is_on=False)  # a missed deadline would end pytest
    dog.expect_signal()
    dog.close()
    ignored = {number for number in previous if signal.getsignal(number) is signal.SIG_IGN}
    for number, handler in previous.items():
        signal.signal(number, handler)
    assert ignored == set(previous)
