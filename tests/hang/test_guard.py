"""`ddpbench.watchdog` in scripts whose ranks really hang, stop, fail or disagree."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from command_lines import mpirun, needs_mpirun, running_command
from frozen import Frozen, verdict_facts
from patience import PATIENCE_SECONDS
from warm_python import warm_python

import ddpbench
from ddpbench.hang import flight_recorder
from ddpbench.launch.placement import find_mpirun

pytestmark = pytest.mark.thorough

SCRIPT = Path(__file__).parent / "watched_scripts.py"
AT_ONCE = 4  # so many do not keep each other waiting
OVER_MPI = "inside"
# Those that take longest come first.
PLAYS = (
    "talk", "store", OVER_MPI, "worker", "connect", "pipeline", "quiet", "raise", "shape", "uneven",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all plays have left."""
    path = tmp_path_factory.mktemp("plays")
    # The play `talk` tells what ddpbench imports: in a warm Python it may all be there.
    pythons = {"talk": [sys.executable], OVER_MPI: [*mpirun(2), *warm_python()]}

    def run(play: str) -> None:
        words = [*pythons.get(play, warm_python()), str(SCRIPT), str(path), play]
        with running_command(words, path) as process:
            process.wait(PATIENCE_SECONDS + 20)  # a play ends with all stacks before
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, err = process.communicate(timeout=PATIENCE_SECONDS)
                (path / f"end of {play}").write_text(err)

    with ThreadPoolExecutor(AT_ONCE) as lanes:
        list(lanes.map(run, (each for each in PLAYS if each != OVER_MPI or find_mpirun())))
    return path


def said(folder: Path, play: str) -> tuple[list[int], list[str], str]:
    """Exit codes of the ranks, verdicts, all of stderr."""
    err = (folder / f"{play}.err").read_text()
    codes = [int(code) for code in (folder / f"{play}.codes").read_text().split()]
    if play != "quiet" and "_dump_fr_trace" not in flight_recorder.find_recorders():
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
    assert (codes, told, err) == ([0, 0], [], "")


@pytest.mark.parametrize(
    ("play", "words"),
    [("store", ["SIGSTOP", "store"]), ("pipeline", [])],
    ids=["store", "pipeline"],
)
def test_a_hang_is_told_whatever_the_ranks_wait_in(
    frozen: Frozen, folder: Path, play: str, words: list[str]
) -> None:
    """A collective, while the rank in which the store lives is stopped: it is not left behind. Or a
    message from the stage of a real pipeline."""
    codes, told, err = said(folder, play)
    frozen.facts({"exit": codes, "told": len(told), "verdicts": stated(told)})
    assert all(word in each for each in told for word in words), err


def test_a_rank_that_is_missing_while_the_ranks_connect_is_seen(
    frozen: Frozen, folder: Path
) -> None:
    """The backend has counted the call, and not recorded it yet."""
    codes, told, err = said(folder, "connect")
    frozen.facts({"exit": codes, "told": len(told), "verdicts": stated(told)})
    assert all("all_reduce" in each for each in told), err


def test_the_rank_that_left_early_is_named(frozen: Frozen, folder: Path) -> None:
    """With its last call; not the other, whose connection breaks and which has ended its groups as
    well."""
    codes, told, err = said(folder, "uneven")
    frozen.facts({"exit": codes, "verdicts": stated(told)})
    assert "left" in told[0], err


def test_a_verdict_ends_what_the_ranks_have_started(frozen: Frozen, folder: Path) -> None:
    """Nothing keeps stdout open, not even a worker that is stuck, so that a pipeline ends."""
    codes, told, _ = said(folder, "worker")
    frozen.facts({"exit": codes, "blamed": verdict_facts(told[0])["blamed"]})
    assert (folder / "end of worker").exists()


@needs_mpirun
def test_over_mpi_it_is_the_same(frozen: Frozen, folder: Path) -> None:
    """A rank that is stopped inside MPI, while the other is there too: its own count tells it."""
    err = (folder / f"end of {OVER_MPI}").read_text()
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
