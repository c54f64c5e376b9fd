"""Ranks forked from a process that has torch: fresh, placed, ended together."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from command_lines import ONE_SENTENCE, clean_environment
from frozen import Frozen
from patience import PATIENCE_SECONDS, wait_until
from strikes import MARK, list_members
from warm_python import warm_python

# `main` of each rank: a Python expression of `place` and `dist`, run as `python -c`.
PROGRAM = """
import os, signal, sys, time
from ddpbench.launch import placement, starters, supervise
from ddpbench.runtime.world import join_world
supervise.LATE_SECONDS = 1.0
def main():
    place = placement.read_placement()
    {body}
sys.exit(starters.run_forked(main, {ranks}, deadline=supervise.Deadline(3.0)))
"""


def started(body: str, ranks: int = 2, **extra: str) -> subprocess.Popen[str]:
    """A program that forks ranks with this body; it stands in `ps` if `extra` has a mark for it."""
    program = PROGRAM.format(body=body, ranks=ranks)
    python = [sys.executable] if MARK in extra else warm_python()
    return subprocess.Popen(
        [*python, "-c", program], env=clean_environment(**extra), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ended(body: str, ranks: int = 2) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    process = started(body, ranks)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, out, err


def test_ranks_are_placed_and_meet() -> None:
    """Each knows its rank, the world and its launcher, and reads nothing of stdin; they meet at a
    store of the parent."""
    code, out, err = ended(
        "with join_world(place) as world:\n"
        "        pids = {member.pid for member in world.members}\n"
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
        ("return place.rank * 4", 4),
        ("sys.exit(place.rank)", 1),
        ("raise ValueError('mine')", 5),
    ],
)
def test_the_highest_exit_code_counts(body: str, code: int) -> None:
    """A rank that raises counts as 5; what it raised is shown."""
    got, _, err = ended(body)
    assert got == code
    assert ("ValueError: mine" in err) == ("ValueError" in body)


def test_when_one_fails_the_others_are_told_to_end(tmp_path: Path) -> None:
    """Rank 0 would sleep for ever: it gets SIGTERM as soon as rank 1 has left with 3, and that it
    dies of it is not what the ranks end with."""
    code, out, _ = ended(
        "die = lambda: (signal.signal(15, signal.SIG_DFL), os.kill(os.getpid(), 15))\n"
        "    signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'told'), die()))\n"
        f"    there = {str(tmp_path / 'there')!r}\n"
        "    if place.rank == 0: open(there, 'w').close(); time.sleep(600)\n"
        "    while not os.path.exists(there): time.sleep(0.01)\n"
        "    return 3"
    )
    assert (code, out) == (3, "told")


def test_a_signal_is_passed_on(tmp_path: Path) -> None:
    """What the parent gets each rank gets once, and the parent waits for them."""
    there = tmp_path / "there"
    process = started(
        "heard = []\n"
        "    signal.signal(signal.SIGINT, lambda n, _: heard.append(n))\n"
        f"    open({str(there)!r} + str(place.rank), 'w').close()\n"
        "    while not heard: time.sleep(0.01)\n"
        "    time.sleep(0.2)\n"
        "    os.write(1, f'{len(heard)}\\n'.encode())\n"
        "    return 130"
    )
    wait_until(lambda: all(Path(f"{there}{rank}").exists() for rank in range(2)))
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, out) == (130, "1\n1\n")


MEET = "with join_world(place, {}): pass\n"
BLOW = "if place.rank == 1: os.kill(os.getpid(), signal.{blow})\n"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(BLOW.format(blow="SIGKILL") + "    time.sleep(600)", id="killed"),
        pytest.param(
            BLOW.format(blow="SIGSTOP") + "    " + MEET.format(3.0), id="stopped",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            MEET.format(60.0) + "    " + BLOW.format(blow="SIGSTOP") + "    return 0",
            id="stopped at its end", marks=pytest.mark.thorough,
        ),
    ],
)  # fmt: skip
def test_a_rank_that_is_lost_before_or_after_the_others_met_is_named(
    body: str, frozen: Frozen
) -> None:
    """In one sentence, with the signal and a next step."""
    code, out, err = ended(body)
    assert (code, out) == (5, "")
    assert ONE_SENTENCE.fullmatch(err), err
    frozen.verdict(re.sub(r"\(\S+, pid \d+\)", "(HOST, pid PID)", err))


@pytest.mark.thorough
def test_nothing_is_left_where_the_parent_is_killed(tmp_path: Path) -> None:
    """Neither ranks, nor what they have started, nor a temporary folder."""
    token = uuid.uuid4().hex
    process = started(
        "import subprocess, tempfile\n"
        "    tempfile.mkdtemp()\n"
        "    subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"    open({str(tmp_path)!r} + f'/there{{place.rank}}', 'w').close()\n"
        "    time.sleep(600)",
        **{MARK: token, "TMPDIR": str(tmp_path)},
    )
    wait_until(lambda: len(list(tmp_path.glob("there*"))) == 2)
    assert len(list_members(token)) >= 5
    process.kill()
    process.communicate(timeout=PATIENCE_SECONDS)
    wait_until(lambda: not list_members(token), "the end of all processes")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there0", "there1"]
