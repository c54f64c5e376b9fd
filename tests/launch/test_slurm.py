"""Slurm: what a step's ranks are told, the batch script, and a real Slurm of two nodes."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_lines import ROOT, clean_environment
from rank_pool import Done, RankPool
from slurm_cluster import Cluster, explain_missing, start_cluster
from warm_python import warm_python

from ddpbench import cli
from ddpbench.commands import slurm as command
from ddpbench.launch import placement
from ddpbench.launch import slurm_nodes as nodes
from ddpbench.launch.placement import Placement, Refused
from ddpbench.records import store

TINY = ("--device", "cpu", "--op", "all_reduce", "--sizes", "4,1K", "--slice", "0.1")
NOWHERE = "n0.invalid"  # RFC 2606: resolves nowhere


def program(folder: Path, name: str, *lines: str) -> None:
    """A shell script of this name."""
    path = folder / name
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)


# --- who and where --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "4"},
        {"SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "1", "SLURM_PTY_PORT": "41511"},
        {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "SLURM_PTY_PORT": "41511"},
        {"SLURM_NTASKS": "4"},
    ],
)
def test_a_shell_of_slurm_s_is_no_rank(environ: dict[str, str]) -> None:
    """The shell of salloc, that of srun --pty and a batch script have a task's variables, and are
    where ranks are to be started."""
    task = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert placement.read_placement({**task, **environ}) is None


def test_a_task_started_from_such_a_shell_is_a_rank() -> None:
    """It inherits the shell's terminal, but has a step of its own."""
    environ = {
        "SLURM_STEP_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0",
        "SLURM_PTY_PORT": "41511",
    }  # fmt: skip
    assert placement.read_placement(environ) == Placement("srun", 2, 4, 0, None)


def test_a_node_is_reached_by_name_or_as_slurm_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that resolves is taken as it is; for another, scontrol is asked for the address."""
    program(tmp_path, "scontrol", 'echo "NodeName=$4 Arch=x86_64 NodeAddr=127.0.0.9 Port=1"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    place = Placement("srun", 1, 2, 0, None)
    assert nodes.node_address("localhost", place) == "localhost"
    assert nodes.node_address(NOWHERE, place) == "127.0.0.9"


@pytest.mark.parametrize(("local_rank", "speaker"), [(0, 5), (1, -1)])
def test_an_unknown_node_is_one_sentence_of_each_host(
    local_rank: int, speaker: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a name service nor scontrol knows the node: its name and the option that helps are
    told, by the first rank of a host only."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for line in (None, "exit 1", f"echo NodeAddr={NOWHERE}"):
        if line is not None:
            program(tmp_path, "scontrol", line)
        with pytest.raises(Refused, match=rf"{NOWHERE}, the first .* --master-addr$") as caught:
            nodes.node_address(NOWHERE, Placement("srun", 5, 8, local_rank, None))
        assert caught.value.speaker == speaker


# --- signals --------------------------------------------------------------------------------------


WARNED = """\
import os, pathlib, signal, threading, time

def warn():
    here = pathlib.Path.cwd()
    while not any(here.glob("results/*/samples.parts/part-*")):
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGUSR1)

if os.environ["RANK"] == "1":
    threading.Thread(target=warn, daemon=True).start()
"""


def test_sigusr1_ends_a_run_with_what_was_measured(tmp_path: Path, pool: RankPool) -> None:
    """One rank alone gets Slurm's warning in the middle: all stop, the run is marked with the
    signal's name and the rank, its cases are kept, and the exit code is 130."""
    (tmp_path / "warned.py").write_text(WARNED)
    words = ("--device", "cpu", "--op", "all_reduce", "--sizes", "4:4K:+32", "--slice", "0.1")
    done: Done = pool.call(2, tmp_path, "collectives", *words, "--import", "warned")
    assert done.returncode == 130, done.stderr
    assert "PARTIAL (interrupted): interrupted by SIGUSR1 (rank 1); gloo " in done.stdout
    run = store.read(store.find(str(next((tmp_path / "results").iterdir()))))
    assert (run.state, run.exit_code) == ("interrupted", 130)
    assert run.state_reason == "interrupted by SIGUSR1 (rank 1)"
    assert run.outcomes


RANK = """\
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(130))
os.kill(os.getppid(), signal.SIGUSR1)
time.sleep(60)
sys.exit(9)
"""


def test_sigusr1_is_passed_on_to_the_ranks_that_ddpbench_starts(tmp_path: Path) -> None:
    """A batch script may run `python -m ddpbench …` itself: the signal that this process gets, its
    ranks get too, and the exit code is that of an interruption."""
    (tmp_path / "rank.py").write_text(RANK)
    code = (
        "from ddpbench.launch import starters; raise SystemExit(starters.torchrun(['rank.py'], 1))"
    )
    words = [sys.executable, "-c", code]
    environ = clean_environment()
    done = subprocess.run(words, cwd=tmp_path, env=environ, timeout=60, check=False)
    assert done.returncode == 130


# --- the batch script -----------------------------------------------------------------------------


def made(*words: str) -> str:
    """The script for these words."""
    given, asked = command.split(words)
    return command.script(words, given, command.read_commands(asked))


@pytest.mark.parametrize(
    ("words", "tasks", "device"),
    [
        ("", "--ntasks-per-node=2", "cpu"),
        ("-N2 --time=5", "--ntasks-per-node=2", "cpu"),
        ("-N2 -n4", None, "cpu"),
        ("--ntasks-per-node 4", None, "cpu"),
        ("--gres=ssd:1", "--ntasks-per-node=2", "cpu"),
        ("-N2 --gres=gpu:h100:8", "--ntasks-per-gpu=1", "cuda"),
        ("--gres gpu:2", "--ntasks-per-gpu=1", "cuda"),
        ("-G4", "--ntasks-per-gpu=1", "cuda"),
        ("--gpus-per-node=4", "--ntasks-per-gpu=1", "cuda"),
        ("--gpus-per-node=4 -n8", None, "cuda"),
        ("-n8 --gpus-per-task=1", None, "cuda"),
        ("-n8 --tres-per-task=cpu:4,gres/gpu:1", None, "cuda"),
        ("-N2 --tres-per-task=cpu:4", None, "cpu"),
    ],
)
def test_tasks_and_device_follow_the_options(words: str, tasks: str | None, device: str) -> None:
    """Without a number of tasks it is two a node, or one a GPU; GPUs among the options mean CUDA,
    with every rank seeing all of its node's."""
    text = made(*words.split())
    assert re.findall(r"^#SBATCH (--ntasks.*)", text, re.M) == ([] if tasks is None else [tasks])
    assert re.findall(r"^measure .*", text, re.M) == [
        f"measure collectives --device {device}", f"measure ddp --device {device}",
    ]  # fmt: skip
    assert ("--gpu-bind=none" in text) == (device == "cuda")


def test_the_script_is_bash_and_keeps_words_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run with a srun that prints its words: this Python, each command with its options, quoted as
    given. An exit code is kept, the higher of two; after an interruption nothing more is begun."""
    program(tmp_path, "srun", 'printf \'<%s>\' "$@"; echo " $PYTHONPATH"; exit ${STUB:-0}')
    monkeypatch.setenv("PYTHONPATH", "/a b")
    text = made("-N2", "--comment", "a b", "--", "--backend", "gloo")
    assert "\nexit 9" not in made("--comment", "a\nexit 9")
    lines = {}
    for code in (0, 4, 130):
        environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "STUB": str(code)}
        done = subprocess.run(
            ["bash", "-c", text], env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        lines[code] = done.stdout.splitlines()
    first, second = lines[0]
    start = f"<--export=ALL><{sys.executable}><-m>"
    rest = "<--device><cpu><--backend><gloo> /a b"
    assert first == f"{start}<ddpbench.collectives>{rest}"
    assert second == f"{start}<ddpbench.ddp>{rest}"
    assert lines[4] == [first, second]
    assert lines[130] == [first]
    assert f"sbatch {shlex.join(['-N2', '--comment', 'a b'])} results/" in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["-N2", "ddp"], "write ddp and its options after --, and sbatch's options before it: "),
        (["--", "dpd"], "unknown command 'dpd': choose collectives, ddp or doctor"),
        (["--", "ddp", "--sice", "1"], "unknown option --sice. Did you mean "),
        (["--", "collectives", "--sizes", "4;8"], "--sizes: "),
        (["--", "--slice", "1"], "unknown option --slice"),
        (["--", "--output", "here"], "--output is the folder of one run: "),
        (["-N2"], "sbatch is not in PATH: "),
    ],
)
def test_what_cannot_be_submitted_is_one_sentence(
    words: list[str], sentence: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Exit code 2 before anything is submitted or written: a job may wait for days to say so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    try:
        code = cli.main(["slurm", *words])
    except SystemExit as end:
        code = int(str(end.code))
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.startswith(f"ddpbench: {sentence}")
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_job_is_told_with_its_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What sbatch gets is kept under the job's number, which is printed with how to follow the job
    and how to end it; sbatch's exit code is passed on, 2 where it took no job."""
    program(tmp_path, "sbatch", 'echo "$@" >words', "cat >got", "echo '42;north'", "exit 3")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert cli.main(["slurm", "--wait", "-N2"]) == 3  # with --wait: the job's
    assert (tmp_path / "words").read_text() == "--parsable --wait -N2\n"
    assert (tmp_path / "got").read_text() == (tmp_path / "results" / "slurm-42.sh").read_text()
    told = capsys.readouterr().out
    assert told.startswith("job 42: collectives, then ddp\n")
    assert "tail -F results/slurm-42.out\n" in told
    assert "scancel 42 " in told
    program(tmp_path, "sbatch", "cat >got", "exit 255")
    assert cli.main(["slurm", "-N99"]) == 2
    assert capsys.readouterr().out == ""


# --- a real Slurm ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A Slurm of two nodes. Where there can be none: skipped, but in CI an error."""
    if (reason := explain_missing()) is not None:
        (pytest.fail if os.environ.get("DDPBENCH_TEST_ALL") else pytest.skip)(f"no Slurm: {reason}")
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder,
        start_cluster(Path(folder)) as up,
    ):
        yield up


def measured(folder: Path) -> bool:
    """Whether the run in a folder's results/ has a case on disk."""
    return any(store.read(each.parent).results for each in folder.glob("results/*/run.json"))


def submitted(cluster: Cluster, folder: Path, *words: str | Path) -> str:
    """The number of the job that this command line submits in a new folder."""
    folder.mkdir()
    done = cluster.call(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return re.match(r"job (\d+): ", done.stdout)[1]  # type: ignore[index]


def test_a_job_and_a_direct_srun_leave_complete_runs(cluster: Cluster, tmp_path: Path) -> None:
    """At the same time on the same two nodes, whose names resolve nowhere: four ranks of a bare
    srun, unequally spread, and a job of run_bench.sh. Both meet, measure, and store what they
    measured where they were started; the job's output lies beside its run."""
    direct, job = tmp_path / "direct", tmp_path / "job"
    direct.mkdir()
    words = ("srun", "-N2", "-n4", *warm_python(), "-m", "ddpbench.collectives", *TINY)
    running = cluster.begin(*words, cwd=direct)
    try:
        bench_sh = (ROOT / "run_bench.sh", "slurm", "-N2", "-n2", "--", "collectives", *TINY)
        number = submitted(cluster, job, *bench_sh)
        out, err = running.communicate(timeout=150)
    finally:
        running.kill()
    assert running.returncode == 0, err
    assert "where     4 ranks" in out
    output = job / "results" / f"slurm-{number}.out"
    assert cluster.until(lambda: output.exists() and "stored in " in output.read_text())
    for folder, world in ((direct, 4), (job, 2)):
        run = store.read(store.find(str(next(folder.glob("results/*/run.json")).parent)))
        assert (run.state, run.exit_code, len(run.outcomes)) == ("complete", 0, 2)
        assert run.launches[0].launcher == "srun"
        assert run.launches[0].world_size == world
        seen = [rank["variables"] for rank in run.launches[0].ranks]
        assert [int(each["SLURM_PROCID"]) for each in seen] == list(range(world))
        assert {each["SLURM_NODEID"] for each in seen} == {"0", "1"}


@pytest.mark.parametrize(("how", "name"), [((), "SIGTERM"), (("--signal", "USR1"), "SIGUSR1")])
def test_scancel_leaves_a_marked_partial_run(
    how: tuple[str, ...], name: str, cluster: Cluster, tmp_path: Path
) -> None:
    """Cancelled or warned in the middle, a job's run is marked with the signal, keeps its cases,
    and the table of what was measured still reaches the job's output."""
    words = ("--op", "all_reduce", "--sizes", "4:4K:+32", "--slice", "0.1")
    call = (sys.executable, "-m", "ddpbench", "slurm", "-N2", "-n2", "--", "collectives", *words)
    job, folder = "", tmp_path / "job"
    job = submitted(cluster, folder, *call)
    assert cluster.until(lambda: measured(folder))
    assert cluster.call("scancel", *how, job, cwd=folder).returncode == 0
    output = folder / "results" / f"slurm-{job}.out"
    assert cluster.until(lambda: "stored in " in output.read_text(), 30), output.read_text()
    assert f"PARTIAL (interrupted): interrupted by {name}" in output.read_text()
    run = store.read(store.find(str(next(folder.glob("results/*/run.json")).parent)))
    assert (run.state, run.exit_code) == ("interrupted", 130)
    assert run.outcomes


@pytest.mark.parametrize("options", [[], ["-N2", "--gres=gpu:2"], ["-N2", "-G", "4"]])
def test_slurm_accepts_the_script(options: list[str], cluster: Cluster, tmp_path: Path) -> None:
    """sbatch finds that the CPU job and the GPU job could be run, with the tasks that they ask."""
    words = (sys.executable, "-m", "ddpbench", "slurm", "--test-only", *options)
    done = cluster.call(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert f"using {4 if '-N2' in options else 2} processors" in done.stderr


def test_a_refusal_under_srun_is_one_rank_s(cluster: Cluster, tmp_path: Path) -> None:
    """Four tasks with a typo: one sentence, exit code 2."""
    words = ("srun", "-N2", "-n4", *warm_python(), "-m", "ddpbench.collectives", "--sise", "4")
    done = cluster.call(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("ddpbench: unknown option --sise. Did you mean ") == 1
