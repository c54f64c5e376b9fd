"""Training scripts that know nothing of ddpbench, under every launcher: watched and not, the same.

Exit codes, output and the digests of all parameters are compared. A few telling cells run by
default; .ci/nightly runs the whole matrix.
"""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from by_hand import run_by_hand
from command_lines import (
    mpirun,
    needs_mpirun,
    read_stored_run,
    run_command,
    running_command,
    torchrun,
)
from patience import PATIENCE_SECONDS, wait_until
from slurm_cluster import Cluster, explain_missing, start_cluster
from warm_python import warm_python

from ddpbench.launch.placement import free_port
from ddpbench.records import store

SCRIPTS = Path(__file__).parent / "scripts"
TUTORIAL = str(SCRIPTS / "tutorial.py")
WATCH = ["-m", "ddpbench.watch"]
LONG = 2 * PATIENCE_SECONDS
# In a job that is over at once, ranks do not meet.
ONCE_REPORTED = ("--epochs", "100000", "--after", "reported")
pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("warm_ranks")]

# What launchers other than torchrun leave to the user, who would write it into a job script.
BY_HAND = (
    "RANK=${OMPI_COMM_WORLD_RANK-$SLURM_PROCID} LOCAL_RANK=${OMPI_COMM_WORLD_LOCAL_RANK-"
    '$SLURM_LOCALID} WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=%d exec "$0" "$@"'
)

# What `ddpbench watch -n 2` does, without the watch.
UNWATCHED = (
    "import sys; from ddpbench.launch import scripts; "
    "sys.exit(scripts.run_on_host([sys.executable, *sys.argv[1:]], 2).code)"
)


def by_hand(words: list[str]) -> list[str]:
    """Return a command line for one rank, as one writes it for mpirun and srun."""
    return ["sh", "-c", BY_HAND % free_port(), *words]


def command(launcher: str, watch: bool, *script: str) -> list[str]:
    """Return the command line that starts a script in two ranks, watched or not."""
    python = [sys.executable] if launcher == "srun" else warm_python()
    words = [*(WATCH if watch else []), *script]
    if launcher == "torchrun":
        return [*torchrun(2), *words]
    if launcher == "ddpbench":
        start = ["-m", "ddpbench", "watch", "-n", "2"] if watch else ["-c", UNWATCHED]
        return [*python, *start, *script]
    line = by_hand([*python, *words])
    if launcher == "mpirun":
        return [*mpirun(2), *line]
    return ["srun", "-n", "2", *line]


def assert_same(
    plain: subprocess.CompletedProcess[str], watched: subprocess.CompletedProcess[str]
) -> None:
    """Assert that both ended alike and printed the same lines, in whatever order of ranks."""
    assert watched.returncode == plain.returncode, watched.stderr
    assert list_words(watched.stdout) == list_words(plain.stdout), watched.stderr


def list_words(text: str) -> list[str]:
    """Return what ranks have printed, independent of their order, and of who ends a line first."""
    return sorted(re.sub("(?=rank|step)", " ", text).split())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The script without ddpbench, in two ranks that are started by hand."""
    ranks = run_by_hand(tmp_path_factory.mktemp("plain"), 2, [*warm_python(), TUTORIAL])
    assert [rank.returncode for rank in ranks] == [0, 0]
    text = "".join(rank.stdout for rank in ranks)
    assert text.count(" of 2: ") == 2
    return subprocess.CompletedProcess(TUTORIAL, 0, text, "")


@pytest.mark.parametrize(
    ("launcher", "workers"),
    [
        ("torchrun", "0"),
        pytest.param("mpirun", "1", marks=needs_mpirun),
        pytest.param("ddpbench", "2", marks=pytest.mark.nightly),
    ],
)
def test_a_watched_script_gives_the_same_results(
    plain: subprocess.CompletedProcess[str], tmp_path: Path, launcher: str, workers: str
) -> None:
    """The same losses and the same bits of all parameters in both ranks, with worker processes."""
    done = run_command(command(launcher, True, TUTORIAL, "--workers", workers), tmp_path, LONG)
    assert_same(plain, done)


def run_until_reported(
    words: list[str], place: Path, then: Callable[[subprocess.Popen[str]], object] = id
) -> tuple[int, str]:
    """Let rank 1 of a watched script end early once both ranks are in the stored run.

    Calls `then` with the process that started the ranks. Returns its exit code and stderr.
    """

    def is_reported() -> bool:
        runs = store.list_runs(place / "results")
        return bool(runs) and len(store.read(runs[0]).launches[0].ranks) == 2

    with running_command(words, place) as process:
        wait_until(is_reported, "the first report of both ranks")
        (place / "reported").touch()
        then(process)
        _, err = process.communicate(timeout=LONG)
    return process.returncode, err


def assert_stored(place: Path, state: str, code: int, reason: str) -> None:
    """Assert how the only stored run ended, and that its table is stored."""
    folder, run = read_stored_run(place)
    assert (run.state, run.exit_code) == (state, code), run.state_reason
    assert (run.state_reason or "").startswith(reason)
    assert (folder / "table.txt").exists()


@pytest.mark.parametrize(
    ("launcher", "end", "code", "stored"),
    [
        ("ddpbench", "exit", 3, 3),
        ("torchrun", "raise", 1, 1),
        pytest.param("torchrun", "hang", 1, 5, marks=pytest.mark.nightly),
    ],
)
def test_the_rank_that_failed_first_is_stored(
    tmp_path: Path, launcher: str, end: str, code: int, stored: int
) -> None:
    """Its exit code, although the other rank fails as well; under torchrun, which ends rank 0 with
    the first rank that fails; and after a verdict."""
    words = ["--timeout", "10" if end == "hang" else "60", TUTORIAL, *ONCE_REPORTED, "--end", end]
    ended, err = run_until_reported(command(launcher, True, *words), tmp_path)
    assert ended == code, err
    assert_stored(tmp_path, "failed", stored, "rank 1")


def test_a_terminated_job_is_stored_as_interrupted(tmp_path: Path) -> None:
    """SIGTERM ends rank 0 at once; the process that started it stores and prints the table."""
    words = command("ddpbench", True, TUTORIAL, *ONCE_REPORTED, "--end", "hang")
    code, err = run_until_reported(words, tmp_path, subprocess.Popen.terminate)
    assert code == 5
    assert_stored(tmp_path, "interrupted", 5, "interrupted by SIGTERM")
    assert "stored in " in err


# --- the whole matrix -----------------------------------------------------------------------------

LAUNCHERS = ["torchrun", "ddpbench", pytest.param("mpirun", marks=needs_mpirun)]


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("end", ["raise", "exit", "_exit", "9", "15"])
def test_a_watched_script_ends_alike(tmp_path: Path, launcher: str, end: str) -> None:
    """Exceptions, exits and signals in one rank: the launcher's exit code is the same."""
    runs = [
        run_command(command(launcher, watch, TUTORIAL, "--end", end), tmp_path, LONG)
        for watch in (False, True)
    ]
    assert_same(*runs)
    assert runs[0].returncode != 0
    # The line `PARTIAL` of the watch, which it may still print, is not the error's own.
    own = re.compile("(?<!ended with )ValueError: rank 1 has had enough\n")
    count = [len(own.findall(run.stderr)) for run in runs]
    assert count[0] == count[1]


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_launcher_ends_alike(
    tmp_path: Path, launcher: str, number: signal.Signals
) -> None:
    """Ctrl-C and SIGTERM to the launcher, while the ranks train, end it with the same code."""
    codes = []
    for watch in (False, True):
        words = command(launcher, watch, TUTORIAL, "--epochs", "100000")
        with running_command(words, tmp_path) as process:
            assert process.stdout is not None
            while "epoch 3" not in process.stdout.readline():
                pass
            process.send_signal(number)
            process.communicate(timeout=LONG)
            codes.append(process.returncode)
    assert codes[0] == codes[1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Slurm of its own."""
    if (why := explain_missing()) is not None:
        pytest.skip(why)
    with start_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.mark.nightly
@pytest.mark.parametrize("words", [["--workers", "2"], ["--end", "raise"]])
def test_under_srun(tmp_path: Path, cluster: Cluster, words: list[str]) -> None:
    """On one node and over two, srun gives the same with and without a watch."""
    for nodes in ("1", "2"):
        runs = []
        for watch in (False, True):
            line = command("srun", watch, TUTORIAL, *words)
            line[1:1] = ["-N", nodes]
            runs.append(cluster.call(*line, cwd=tmp_path))
        assert_same(*runs)
