"""`ddpbench.watchdog` in scripts whose ranks really hang, stop, fail or disagree."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from command_lines import clean_environment
from warm_python import warm_python

import ddpbench
from ddpbench.hang import flight_recorder
from ddpbench.hang.status_board import StoreClient
from ddpbench.launch import placement

SCRIPT = Path(__file__).parent / "watched_scripts.py"
MPI = pytest.mark.skipif(
    placement.find_mpirun() is None, reason="there is no mpirun: install the extra `mpi`"
)
REDUCE = r"all_reduce float32\[1024\]"
HERE = r"\(watched_scripts\.py:\d+\)"
STOPPED = rf"rank 1 \([^)]+, pid \d+\) is stopped \(SIGSTOP\), last seen in load_batch {HERE}"
INSIDE = rf"{STOPPED.replace('load_batch', 'step')}, in #4 {REDUCE}; rank 0 waits"
RAISED = rf"rank 1: ValueError: bad batch, at load_batch {HERE}, before #2 {REDUCE}; rank 0 waits"


# So many at once do not keep each other waiting.
GLOO = (
    ("talk", "inside", "store", "raise", "receive", "quiet", "order", "shape"),
    (
        "pairs", "pipeline", "cycle", "ring", "posted", "cleanup", "uneven", "alive", "compute",
        "replicas", "finally", "short", "worker",
    ),
    ("connect", "model", "mixed", "loop"),
)  # fmt: skip


@contextlib.contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[str]]:
    """The script; nothing of it is left at the end."""
    process = subprocess.Popen(
        words, env=clean_environment(), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def mpirun() -> list[str]:
    """It starts two ranks."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [str(placement.find_mpirun()), *root, "--oversubscribe", "-n", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all plays over gloo have left."""
    path = tmp_path_factory.mktemp("plays")
    for plays in GLOO:
        # The first plays tell what ddpbench imports: in a warm Python it may all be there.
        python = [sys.executable] if "talk" in plays else warm_python()
        with running(*python, str(SCRIPT), str(path), *plays) as process:
            process.wait(100)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=5)
                (path / f"stdout of {plays[-1]} ended").touch()
    return path


def said(folder: Path, play: str) -> tuple[list[int], list[str], str]:
    """Exit codes of the ranks, verdicts, all of stderr."""
    err = (folder / f"{play}.err").read_text()
    codes = [int(code) for code in (folder / f"{play}.codes").read_text().split()]
    if play not in ("receive", "quiet") and "_dump_fr_trace" not in flight_recorder._recorders(()):
        assert verdicts(err), err
        pytest.skip("this torch records no call of gloo's: verdicts lack their number and shape")
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


def test_a_time_out_of_gloo_s_own_blames_the_rank_that_is_late(folder: Path) -> None:
    """It comes in the rank that waits, before the watchdog's: the late rank is named, not that."""
    codes, told, err = said(folder, "short")
    assert codes == [5, 5]
    late = rf"rank 1 never joined #2 {REDUCE}; it is in play_short {HERE}; rank 0 waited for it"
    assert len(told) == 2, err
    assert all(re.fullmatch(late, each) for each in told), err
    assert "Timed out waiting" in err


def test_a_skipped_collective_is_named(folder: Path) -> None:
    """The first call in which the ranks differ, and that the steps before tell what happened."""
    codes, told, err = said(folder, "order")
    assert codes == [5, 5]
    sentence = (
        rf"rank 1 calls #13 broadcast float32\[5\] at play_order {HERE} where rank 0 calls "
        rf"{REDUCE} at step {HERE}: rank 1 has skipped a collective"
    )
    assert len(told) == 2, err
    assert all(re.match(sentence, each) for each in told), err


def test_another_size_is_named_although_gloo_gives_up(folder: Path) -> None:
    """gloo ends the process from a thread of its own: the verdict comes before."""
    codes, told, err = said(folder, "shape")
    assert 0 not in codes
    pattern = rf"rank 1 calls #2 all_reduce float32\[1025\] at step {HERE} where rank 0 calls "
    assert told, err
    assert all(re.match(pattern, each) for each in told), err


def test_a_receive_that_hangs_is_told_and_a_busy_one_is_not(folder: Path) -> None:
    """20 receives that take 2 s in all, with a time-out of 1 s, are progress; the next is none."""
    codes, told, err = said(folder, "receive")
    assert codes == [5, 5]
    assert len(told) == 2, err
    pattern = rf"rank 0: in play_receive {HERE}; rank 1 waits in recv from rank 0 at play_receive "
    assert all(re.search(pattern, each) for each in told), err


def test_a_healthy_job_is_left_alone(folder: Path) -> None:
    """No word, exit code 0: with work between collectives, two watchdogs one after the other, ranks
    that leave at different times, and a forked child."""
    codes, told, err = said(folder, "quiet")
    assert codes == [0, 0], err
    assert told == []


STORE = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""


def test_no_thread_stays_in_a_store_that_does_not_answer() -> None:
    """If one were still in C++ when the interpreter ends, the process would be aborted."""
    with running(sys.executable, "-c", STORE) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        client = StoreClient(dist.TCPStore("127.0.0.1", port, wait_for_workers=False), 1)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert client.request(0.1, lambda store: store.add("left", 1)) is None
        client.close()
    assert "ddpbench-store" not in [thread.name for thread in threading.enumerate()]


HANGS = {
    "pairs": rf"rank 1 calls #1 barrier at play_pairs {HERE} where rank 0 calls {REDUCE} at step "
    rf"{HERE}.*",
    "pipeline": rf"rank 1: in forward {HERE}; rank 0 waits in (recv from|send to) rank 1 at "
    rf"play_pipeline {HERE}",
    "cycle": rf"rank 0 waits in #1 {REDUCE} of group 1 at play_cycle {HERE} for rank 1; rank 1 "
    rf"waits in #1 {REDUCE} of group 2 at play_cycle {HERE} for rank 0: a deadlock",
    "ring": rf"ranks 0, 1 wait in recv at play_ring {HERE} in a ring: 0 from 1, 1 from 0",
    "posted": rf"rank 0: has waited longer than 2 s, at play_posted {HERE}, in wait; "
    rf"rank 1: in play_posted {HERE}",
    "replicas": rf"rank 1 calls #1 barrier at play_replicas {HERE} where rank 0 calls .* at "
    rf"play_replicas {HERE}.*",
}


@pytest.mark.parametrize("play", HANGS)
def test_a_hang_is_told_whatever_the_ranks_wait_in(folder: Path, play: str) -> None:
    """A mismatch after a collective on a group that the other is no member of; a stage of a real
    pipeline; groups used in different order; messages in a ring; what was posted before; ddpbench's
    own lines, run from a checkout."""
    codes, told, err = said(folder, play)
    assert codes == [5, 5]
    assert len(told) == 2, err
    assert all(re.fullmatch(HANGS[play], each) for each in told), err


def said_unrecorded(folder: Path, play: str) -> tuple[list[int], list[str], str]:
    """Exit codes, verdicts and all of stderr of a play in which torch records nothing."""
    err = (folder / f"{play}.err").read_text()
    return [*map(int, (folder / f"{play}.codes").read_text().split())], verdicts(err), err


@pytest.mark.parametrize(
    ("play", "call"), [("connect", "all_reduce"), ("model", "DistributedDataParallel")]
)
def test_a_rank_that_is_missing_while_the_ranks_connect_is_seen(
    folder: Path, play: str, call: str
) -> None:
    """No backend has counted or recorded anything yet: the alarm comes because the main thread has
    been in one and the same call for so long, of a function or of DDP's constructor."""
    codes, told, err = said_unrecorded(folder, play)
    assert codes == [5, 5], err
    waits = (
        rf"rank 0: has waited longer than 2 s, at gloo \(unrecorded_backends\.py:\d+\), in {call}"
    )
    assert len(told) == 2, err
    assert all(re.fullmatch(rf"{waits}; rank 1: in play_{play} {HERE}", each) for each in told), err


def test_a_group_on_two_backends_is_seen_without_a_recorder(folder: Path) -> None:
    """Each backend counts its calls; that the watchdog sees less is told once, with a remedy."""
    codes, told, err = said_unrecorded(folder, "mixed")
    assert codes == [5, 5], err
    late = rf"rank 1 never joined #4 all_reduce on silent; it is in play_mixed {HERE}; rank 0 waits"
    verdict = [each for each in told if re.fullmatch(late, each)]
    assert len(verdict) == 2, err
    blind = [each for each in told if each not in verdict]
    if "_dump_fr_trace" in flight_recorder._recorders(()):
        (sentence,) = blind
        assert re.fullmatch(
            r"the flight recorder of gloo( and silent)? is off: the watchdog sees a hang only "
            r"while a rank is in a call of torch\.distributed\. Before init_process_group, set "
            r"TORCH_FR_BUFFER_SIZE=2000",
            sentence,
        ), err


def test_a_loop_of_unrecorded_calls_is_no_hang(folder: Path) -> None:
    """The main thread is in one line for three times the time-out, but not in one call."""
    assert said_unrecorded(folder, "loop") == ([0, 0], [], "")


def test_an_error_that_waits_for_its_finally_is_told(folder: Path) -> None:
    """A `finally` calls a collective, which does not end: the error would never be seen."""
    _, told, err = said(folder, "finally")
    assert re.match(r"rank 1 calls #2 barrier at play_finally ", told[0]), err
    handling = rf"; rank 1 is handling KeyError: 'label', at play_finally {HERE}$"
    assert re.search(handling, told[0], re.MULTILINE), err


def test_an_error_is_told_with_its_own_line(folder: Path) -> None:
    """Not with that of the `finally` which ran since."""
    codes, told, err = said(folder, "cleanup")
    assert codes == [5, 5]
    assert re.match(rf"rank 1: ValueError: bad batch, at play_cleanup {HERE}", told[0]), err
    number = re.search(r"watched_scripts\.py:(\d+)", told[0])
    assert number is not None
    lines = SCRIPT.read_text().splitlines()
    assert "raise ValueError" in lines[int(number[1]) - 1]


@pytest.mark.parametrize(
    ("play", "told"),
    [
        ("uneven", rf"rank 1 \([^)]+\) has left before #4 {REDUCE}"),
        ("alive", rf"rank 1 has called destroy_process_group before #4 {REDUCE}; it is in "),
    ],
)
def test_the_rank_that_left_early_is_named(folder: Path, play: str, told: str) -> None:
    """With its last call, whether it has gone or lives on; not the other, whose connection breaks
    and which has ended its groups as well."""
    codes, verdict, err = said(folder, play)
    assert codes == ([5, 0] if play == "uneven" else [5, 5])
    assert re.match(told, verdict[0]), err
    assert re.search(rf", after #3 {REDUCE} at step {HERE}; rank 0 waited for it$", verdict[0]), err


def test_a_long_computation_is_told_once_and_ends_nothing(folder: Path) -> None:
    """Nothing is known to be wrong: the places of all, without stacks, and the job goes on."""
    codes, told, err = said(folder, "compute")
    assert codes == [0, 0]
    assert len(told) == 1, err
    assert re.fullmatch(
        rf"no progress for 2\.25 s: ranks 0, 1: in play_compute {HERE}; the job goes on", told[0]
    ), err
    assert "play_compute\n" not in err


def test_a_verdict_ends_what_the_ranks_have_started(folder: Path) -> None:
    """Nothing keeps stdout open, so that a pipeline ends: not a worker that is stuck, not a process
    whose parent has gone."""
    codes, told, err = said(folder, "worker")
    assert codes == [5, 5], err
    assert told, err
    assert (folder / "stdout of worker ended").exists()


@MPI
def test_a_healthy_job_of_mpirun_ends_without_a_word() -> None:
    """Also where the rank in which the store lives leaves first: no client complains."""
    with running(*mpirun(), *warm_python(), str(SCRIPT), "-", "healthy") as process:
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


@MPI
def test_over_mpi_it_is_the_same() -> None:
    """A rank that is stopped inside MPI, while the other is there too: its own count tells it."""
    with running(*mpirun(), *warm_python(), str(SCRIPT), "-", "inside") as process:
        _, err = process.communicate(timeout=60)
    (sentence,) = verdicts(err)
    assert re.fullmatch(INSIDE, sentence), err


def test_without_a_process_group_it_is_refused() -> None:
    """With a sentence that says what to do; and a time-out that is none."""
    with pytest.raises(RuntimeError, match="there is no process group yet: call it after torch"):
        ddpbench.watchdog()
    with pytest.raises(ValueError, match="timeout is 0: give seconds above 0"):
        ddpbench.watchdog(timeout=0)
