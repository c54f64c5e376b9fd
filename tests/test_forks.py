"""Ranks forked from a process that has torch: fresh, placed, ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import environment

# `main` of each rank: a Python expression of `place` and `dist`, run as `python -c`.
PROGRAM = """
import os, signal, sys, time
from ddpbench.runtime import forks, launch
def main():
    place = launch.placement()
    {body}
sys.exit(forks.run(main, {ranks}))
"""


def started(body: str, ranks: int = 2) -> subprocess.Popen[str]:
    """A program that forks ranks with this body."""
    program = PROGRAM.format(body=body, ranks=ranks)
    return subprocess.Popen(
        [sys.executable, "-c", program], env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ended(body: str, ranks: int = 2) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    process = started(body, ranks)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_ranks_are_placed_and_meet() -> None:
    """Each knows its rank, the world and its launcher; they meet at a store that is no rank's, and
    what they read of stdin is nothing."""
    code, out, err = ended(
        "from ddpbench.runtime.group import Rendezvous, opened\n"
        "    with opened(place, Rendezvous()) as group:\n"
        "        pids = {who.pid for who in group.who}\n"
        "    os.write(1, f'{place.rank} of {place.world_size} by {place.launcher}, "
        "{len(pids)} processes, {sys.stdin.read()!r}\\n'.encode())\n"
        "    return 0",
        3,
    )
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [
        f"{rank} of 3 by fork, 3 processes, ''" for rank in range(3)
    ]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("return 0", 0),
        ("return place.rank * 4", 4),
        ("sys.exit(place.rank)", 1),
        ("raise ValueError('mine')", 5),
        ("os.kill(os.getpid(), signal.SIGKILL)", 5),
    ],
)
def test_the_highest_exit_code_counts(body: str, code: int) -> None:
    """A rank that is killed, or raises, counts as 5; what it raised is shown."""
    got, _, err = ended(body)
    assert got == code
    assert ("ValueError: mine" in err) == ("ValueError" in body)


def test_when_one_fails_the_others_are_told_to_end() -> None:
    """Rank 0 would sleep for long: it gets SIGTERM as soon as rank 1 has left with 3, and that it
    dies of it is not what the ranks end with."""
    began = time.monotonic()
    code, out, _ = ended(
        "die = lambda: (signal.signal(15, signal.SIG_DFL), os.kill(os.getpid(), 15))\n"
        "    signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'told'), die()))\n"
        "    if place.rank == 1: time.sleep(0.5); return 3\n"
        "    time.sleep(60); return 0"
    )
    assert (code, out) == (3, "told")
    assert time.monotonic() - began < 50


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on(tmp_path: Path, number: signal.Signals) -> None:
    """What the parent gets each rank gets once, and the parent waits for them."""
    there = tmp_path / "there"
    process = started(
        "heard = []\n"
        f"    signal.signal({int(number)}, lambda n, _: heard.append(n))\n"
        f"    open({str(there)!r} + str(place.rank), 'w').close()\n"
        "    until = time.monotonic() + 30\n"
        "    while not heard and time.monotonic() < until: time.sleep(0.01)\n"
        "    time.sleep(0.2)\n"
        "    os.write(1, f'{len(heard)}\\n'.encode())\n"
        "    return 130"
    )
    until = time.monotonic() + 60
    while not all(Path(f"{there}{rank}").exists() for rank in range(2)):
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(process.pid, number)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "1\n1\n")
