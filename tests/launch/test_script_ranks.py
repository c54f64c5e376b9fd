"""The ranks of `ddpbench watch -n`: their environment, their exit code, and that all end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import wait_until

from ddpbench.launch import placement, scripts
from ddpbench.launch.placement import Placement


@pytest.fixture(autouse=True)
def heed_sigint() -> Iterator[None]:
    """Where pytest runs in the background, SIGINT is ignored, and a shell keeps to that."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def shell(script: str) -> subprocess.Popen[bytes]:
    """One of two ranks, which runs a shell script."""
    return scripts.start_rank(["sh", "-c", script], 1, 2, 7)


def await_all(*ranks: subprocess.Popen[bytes], then: signal.Signals | None = None) -> int:
    """Return the exit code of a command with these ranks, which gets a signal a moment later."""
    with scripts.forward_to(ranks) as received:
        if then is not None:
            threading.Timer(0.3, signal.raise_signal, [then]).start()
        return scripts.await_all(ranks, received).code


def await_files(*paths: Path) -> None:
    """Wait until shells have created these files, when their traps are set."""
    wait_until(lambda: all(path.exists() for path in paths), "the shells' start")


def test_a_rank_has_the_environment_that_torchrun_sets() -> None:
    """It is a placement that a launcher may name; rank, world and port are in the variables."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    variables = dict(zip(names, ("1", "2", "1", "2"), strict=True))
    assert placement.read_placement(variables) == Placement("torchrun", 1, 2, 1, 2)
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "7", "GROUP_RANK": "0"}
    tests = " && ".join(f'test "${name}" = {value}' for name, value in variables.items())
    assert await_all(shell(tests)) == 0


def test_the_highest_exit_code_of_a_rank_that_ended_by_itself_is_given() -> None:
    """If signals ended all others: 5, or 130 for Ctrl-C. Handlers of signals are as before."""
    before = [signal.getsignal(number) for number in placement.PASSED_ON]
    assert await_all(shell("exit 0"), shell("exit 0")) == 0
    assert await_all(shell("exit 1"), shell("exit 7"), shell("exit 2")) == 7
    assert await_all(shell("kill -9 $$"), shell("exit 2")) == 2
    assert await_all(shell("kill -9 $$"), shell("exit 0")) == 5
    assert await_all(shell("kill -INT $$"), shell("exit 0")) == 130
    assert [signal.getsignal(number) for number in placement.PASSED_ON] == before


def test_the_rank_that_a_signal_ended_first_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """With the signal; not where a watchdog has printed its verdict, whose exit code is 5."""
    killed = shell("kill -9 $$")
    killed.wait()
    assert await_all(shell("exit 0"), killed) == 5
    (line,) = capsys.readouterr().err.splitlines()
    assert "rank 1 " in line
    assert "SIGKILL" in line
    assert await_all(shell("exit 5"), shell("kill -9 $$")) == 5
    assert capsys.readouterr().err == ""


def test_rank_0_has_the_standard_input() -> None:
    """As a debugger needs it; the others read nothing."""
    read, write = os.pipe()
    os.write(write, b"answer\n")
    os.close(write)
    before = os.dup(0)
    os.dup2(read, 0)
    try:
        line = ["sh", "-c", 'read word; test "$word" = "$EXPECTED"']
        ranks = [
            scripts.start_rank(["env", f"EXPECTED={word}", *line], rank, 2, 7)
            for rank, word in enumerate(("answer", ""))
        ]
        assert await_all(*ranks) == 0
    finally:
        os.dup2(before, 0)
        for file in (before, read):
            os.close(file)


def test_a_closed_terminal_ends_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is left, and nothing is reported as killed. What ignores the signal, as under nohup,
    would keep ignoring it."""
    number = signal.SIGHUP
    before = signal.signal(number, signal.SIG_DFL)
    ranks = [shell("sleep 600"), shell("sleep 600")]
    try:
        assert await_all(*ranks, then=number) == 5
    finally:
        signal.signal(number, before)
    assert [rank.returncode for rank in ranks] == [-number, -number]
    assert capsys.readouterr().err == ""


def test_none_stays_when_another_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ignores SIGTERM is killed."""
    monkeypatch.setattr(scripts, "GRACE_SECONDS", (0.2, 0.2))
    stuck = shell(f"trap '' TERM; : >'{tmp_path}/set'; sleep 600")
    await_files(tmp_path / "set")
    assert await_all(stuck, shell("exit 3")) == 3
    assert stuck.returncode == -signal.SIGKILL


def test_signals_reach_all_ranks_and_they_may_end_by_themselves(tmp_path: Path) -> None:
    """SIGTERM to this process goes to each; they end as they choose, in their time."""
    files = tmp_path / "0", tmp_path / "1"
    ranks = [
        shell(f"trap 'exit 130' TERM; : >'{file}'; while :; do sleep 0.05; done") for file in files
    ]
    await_files(*files)
    assert await_all(*ranks, then=signal.SIGTERM) == 130
    assert [rank.returncode for rank in ranks] == [130, 130]
