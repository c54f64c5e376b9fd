"""`ddpbench.watchdog` in scripts whose ranks really hang, stop, fail or disagree."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from command_lines import clean_environment
from frozen import Frozen, verdict_facts
from warm_python import warm_python

import ddpbench
from ddpbench.hang import flight_recorder
from ddpbench.hang.status_board import StoreClient, find_store
from ddpbench.launch import placement

SCRIPT = Path(__file__).parent / "watched_scripts.py"
MPI = pytest.mark.skipif(
    placement.find_mpirun() is None, reason="there is no mpirun: install the extra `mpi`"
)


# So many at once do not keep each other waiting.
GLOO = (
    ("talk", "inside", "store", "raise", "receive", "quiet", "order", "shape"),
    (
        "pairs", "pipeline", "cycle", "ring", "posted", "cleanup", "uneven", "alive", "compute",
        "replicas", "finally", "short", "worker",
    ),
    ("detail", "sent"),
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


def stated(told: list[str]) -> list[dict[str, Any]]:
    """Return what verdicts state, once if ranks tell the same; lines as they read in the script."""
    lines = {f"{SCRIPT.name}:{n}": text.strip() for n, text in enumerate(SCRIPT.open(), 1)}
    facts: list[dict[str, Any]] = []
    for each in map(verdict_facts, told):
        each["places"] = sorted(lines.get(place, "another file") for place in each["places"])
        facts += [each] if each not in facts else []
    return facts


def test_who_waits_is_told_and_the_job_goes_on(frozen: Frozen, folder: Path) -> None:
    """Rank 1 is late, then stopped in user code: two verdicts, the same in both ranks, with the
    collective, the line and who waits; with end=False the job goes on after each, and the stacks
    are printed once."""
    codes, told, err = said(folder, "talk")
    frozen.facts({"exit": codes, "told": len(told), "verdicts": stated(told)})
    assert ["SIGSTOP" in each for each in told] == [False, False, True, True], err
    assert err.count("in load_batch\n    time.sleep(4.0)") == 1, err


def test_an_exception_ends_all_ranks_with_one_verdict(frozen: Frozen, folder: Path) -> None:
    """Long before the time-out: the traceback, then in both ranks which one failed, where and
    before which collective. Both end as Python ends them: atexit handlers are called, and buffered
    files are written."""
    codes, told, err = said(folder, "raise")
    frozen.facts({"exit": codes, "told": len(told), "verdicts": stated(told)})
    assert all("ValueError: bad batch" in each for each in told), err
    assert err.count("Traceback") == 1
    for rank in range(2):
        assert (folder / f"log of rank {rank}").read_text() == "buffered"
        assert (folder / f"handler of rank {rank}").exists()


def test_a_time_out_of_gloo_s_own_blames_the_rank_that_is_late(
    frozen: Frozen, folder: Path
) -> None:
    """It comes in the rank that waits, before the watchdog's: the late rank is named, not that."""
    codes, told, err = said(folder, "short")
    frozen.facts({"exit": codes, "told": len(told), "verdicts": stated(told)})
    assert "Timed out waiting" in err


def test_another_size_is_named_although_gloo_gives_up(frozen: Frozen, folder: Path) -> None:
    """gloo ends the process from a thread of its own: the verdict comes before."""
    codes, told, err = said(folder, "shape")
    assert 0 not in codes
    frozen.facts(stated(told))
    assert all("float32[1025]" in each for each in told), err


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
        client = StoreClient(find_store(dist.TCPStore("127.0.0.1", port, wait_for_workers=False)))
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert client.request(0.1, lambda store: store.add("left", 1)) is None
        client.close()
    assert "ddpbench-store" not in [thread.name for thread in threading.enumerate()]


def test_the_file_in_which_ranks_met_goes_with_their_group(tmp_path: Path) -> None:
    """Otherwise a group that meets there again would find the old one's addresses."""
    path, until = tmp_path / "store", time.monotonic() + 20
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    with ddpbench.watchdog():
        assert path.exists()
        dist.destroy_process_group()
        while path.exists():
            assert time.monotonic() < until
            time.sleep(0.05)


# Plays and words that their verdicts contain beside ranks, calls and lines.
HANGS = {
    "inside": ["SIGSTOP"],
    "store": ["SIGSTOP", "store"],
    "order": ["float32[5]", "skipped"],
    "receive": ["recv"],
    "pairs": ["float32[1024]"],
    "pipeline": [],
    "cycle": ["group 1", "group 2", "deadlock"],
    "ring": ["0 from 1", "1 from 0"],
    "posted": ["2 s", "wait"],
    "replicas": [],
}


@pytest.mark.parametrize("play", HANGS)
def test_a_hang_is_told_whatever_the_ranks_wait_in(frozen: Frozen, folder: Path, play: str) -> None:
    """A rank that stops in a collective, or is the one in which the store lives: it is not left
    behind. A skipped collective; a receive after 20 that were busy for longer than the time-out; a
    mismatch after a collective on a group that the other is no member of; a stage of a real
    pipeline; groups used in different order; messages in a ring; what was posted before; ddpbench's
    own lines, run from a checkout."""
    codes, told, err = said(folder, play)
    frozen.facts({"exit": codes, "told": len(told), "verdicts": stated(told)})
    assert all(word in each for each in told for word in HANGS[play]), err


@pytest.mark.parametrize(("play", "calls"), [("detail", []), ("sent", ["#1 all_reduce"])])
def test_a_call_that_another_rank_has_not_made_is_not_its(
    folder: Path, play: str, calls: list[str]
) -> None:
    """gloo's count contains messages and lacks the call that torch checks first
    (TORCH_DISTRIBUTED_DEBUG=DETAIL): nothing is concluded from it, and both ranks' lines are named.
    """
    codes, told, err = said(folder, play)
    (facts,) = stated(told)
    assert (codes, facts["ranks"], facts["calls"]) == ([5, 5], [0, 1], calls), err
    assert "time.sleep(30)" in facts["places"], err


def said_unrecorded(folder: Path, play: str) -> tuple[list[int], list[str], str]:
    """Exit codes, verdicts and all of stderr of a play in which torch records nothing."""
    err = (folder / f"{play}.err").read_text()
    return [*map(int, (folder / f"{play}.codes").read_text().split())], verdicts(err), err


@pytest.mark.parametrize(
    ("play", "call"), [("connect", "all_reduce"), ("model", "DistributedDataParallel")]
)
def test_a_rank_that_is_missing_while_the_ranks_connect_is_seen(
    frozen: Frozen, folder: Path, play: str, call: str
) -> None:
    """No backend has counted or recorded anything yet: the alarm comes because the main thread has
    been in one and the same call for so long, of a function or of DDP's constructor."""
    codes, told, err = said_unrecorded(folder, play)
    frozen.facts({"exit": codes, "told": len(told), "verdicts": stated(told)})
    assert all(call in each for each in told), err


def test_a_group_on_two_backends_is_seen_without_a_recorder(frozen: Frozen, folder: Path) -> None:
    """Each backend counts its calls; that the watchdog sees less is told once, with a remedy."""
    codes, told, err = said_unrecorded(folder, "mixed")
    blind = [each for each in told if "TORCH_FR_BUFFER_SIZE=2000" in each]
    verdict = [each for each in told if each not in blind]
    frozen.facts({"exit": codes, "told": len(verdict), "verdicts": stated(verdict)})
    assert all("on silent" in each for each in verdict), err
    assert len(blind) == 1 or "_dump_fr_trace" not in flight_recorder._recorders(()), err


def test_a_loop_of_unrecorded_calls_is_no_hang(folder: Path) -> None:
    """The main thread is in one line for three times the time-out, but not in one call."""
    assert said_unrecorded(folder, "loop") == ([0, 0], [], "")


def test_an_error_that_waits_for_its_finally_is_told(frozen: Frozen, folder: Path) -> None:
    """A `finally` calls a collective, which does not end: the error would never be seen."""
    _, told, err = said(folder, "finally")
    frozen.facts(stated(told[:1]))
    assert "KeyError: 'label'" in told[0], err


def test_an_error_is_told_with_its_own_line(frozen: Frozen, folder: Path) -> None:
    """Not with that of the `finally` which ran since."""
    codes, told, err = said(folder, "cleanup")
    frozen.facts({"exit": codes, "verdicts": stated(told)})
    assert "ValueError: bad batch" in told[0], err


@pytest.mark.parametrize(("play", "how"), [("uneven", "left"), ("alive", "destroy_process_group")])
def test_the_rank_that_left_early_is_named(
    frozen: Frozen, folder: Path, play: str, how: str
) -> None:
    """With its last call, whether it has gone or lives on; not the other, whose connection breaks
    and which has ended its groups as well."""
    codes, told, err = said(folder, play)
    frozen.facts({"exit": codes, "verdicts": stated(told)})
    assert how in told[0], err


def test_a_long_computation_is_told_once_and_ends_nothing(frozen: Frozen, folder: Path) -> None:
    """Nothing is known to be wrong: the places of all, without stacks, and the job goes on."""
    codes, told, err = said(folder, "compute")
    frozen.facts({"exit": codes, "told": len(told), "verdicts": stated(told)})
    assert "2.25 s" in told[0], err
    assert "play_compute\n" not in err


def test_a_verdict_ends_what_the_ranks_have_started(frozen: Frozen, folder: Path) -> None:
    """Nothing keeps stdout open, so that a pipeline ends: not a worker that is stuck, not a process
    whose parent has gone."""
    codes, told, _ = said(folder, "worker")
    frozen.facts({"exit": codes, "blamed": verdict_facts(told[0])["blamed"]})
    assert (folder / "stdout of worker ended").exists()


@MPI
def test_a_healthy_job_of_mpirun_ends_without_a_word() -> None:
    """Also where the rank in which the store lives leaves first: no client complains."""
    with running(*mpirun(), *warm_python(), str(SCRIPT), "-", "healthy") as process:
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


@MPI
def test_over_mpi_it_is_the_same(frozen: Frozen) -> None:
    """A rank that is stopped inside MPI, while the other is there too: its own count tells it."""
    with running(*mpirun(), *warm_python(), str(SCRIPT), "-", "inside") as process:
        _, err = process.communicate(timeout=60)
    frozen.facts(stated(verdicts(err)))
    assert "SIGSTOP" in err


def test_without_a_process_group_it_is_refused(frozen: Frozen) -> None:
    """With a sentence that says what to do; and a time-out that is none."""
    with pytest.raises(RuntimeError) as caught:
        ddpbench.watchdog()
    frozen.text(str(caught.value))
    with pytest.raises(ValueError, match="timeout") as refused:
        ddpbench.watchdog(timeout=0)
    frozen.text(str(refused.value))
