"""Bad input: one sentence, one process, the right exit code; and files that cannot be written."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import (
    ONE_SENTENCE,
    QUICK,
    assert_refused,
    run_command,
    run_ddpbench,
    torchrun,
)
from frozen import Frozen
from in_process import call_in_process, forbid_processes
from stored_runs import a_run

from ddpbench import cli
from ddpbench.catalog import backends
from ddpbench.launch import placement
from ddpbench.records import store


@pytest.mark.parametrize(
    "words",
    [
        ["watch", "--verify", "2", "absent.py"],
        ["watch", "--timeout", "0", "absent.py"],
        ["watch", "-n", "2"],
        ["collectives", "--size", "4"],
        ["collectives", "--timeout", "0"],
        ["collectives", "--device", "cpu", "--backend", "nccl"],
        ["collectives", "--backend", "fake"],
        ["collectives", "--backend", "undefined"],
        ["collectives", "--op", "\udcff"],
        ["collectives", "--output", "/proc/x"],
        ["collectives", "--import", "no_such_module"],
        ["show", "\udcff\udcfe"],
    ],
    ids=lambda words: " ".join(words)[:50],
)
def test_an_odd_request_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], frozen: Frozen
) -> None:
    """What was given, what is allowed, what to type instead; no results folder. No traceback for
    a name that only torch's list knows, half a command, or arguments that are not UTF-8."""
    monkeypatch.chdir(tmp_path)
    ended = call_in_process(words)
    assert ended.code == (3 if words[0] == "show" else 2)
    assert ended.out == ""
    assert ONE_SENTENCE.fullmatch(ended.err), ended.err
    frozen.text(ended.err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("environ", "token"),
    [
        ({"RANK": "9"}, "RANK=9"),
        ({"RANK": "x"}, "'x'"),
        ({"MASTER_PORT": "99999"}, "tcp://127.0.0.1:99999"),
    ],
)
def test_variables_that_cannot_be_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], token: str
) -> None:
    """What a launcher's variables must be is told, without a traceback, by who knows no rank."""
    known = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**known, "MASTER_PORT": "1", **environ}.items():
        monkeypatch.setenv(name, value)
    ended = call_in_process(["collectives", "--backend", "gloo"])
    assert ended.code == 2
    assert ONE_SENTENCE.fullmatch(ended.err), ended.err
    assert token in ended.err


def assert_refused_here(words: list[str], pattern: str = "") -> None:
    """Assert that a command is refused in one sentence before it starts a process."""
    with forbid_processes():
        ended = call_in_process(words)
    assert (ended.code, ended.out) == (2, "")
    assert ONE_SENTENCE.fullmatch(ended.err), ended.err
    assert re.search(pattern, ended.err)
    assert not Path("results").exists()


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.thorough
def test_mpi_under_torchrun_offers_the_command_that_works(tmp_path: Path) -> None:
    """torchrun's ranks are MPI worlds of their own; only rank 0 speaks, and has the mpirun line."""
    done = run_command([*torchrun(2), "-m", "ddpbench.collectives", "--backend", "mpi"], tmp_path)
    assert done.returncode != 0
    told = re.findall(r"^ddpbench: .*", done.stderr, re.MULTILINE)
    assert len(told) == 1
    assert "mpirun -n 2 python -m ddpbench.collectives --backend mpi" in told[0]


@pytest.mark.usefixtures("empty_folder")
def test_a_launcher_that_is_missing_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without mpirun, mpi is refused with the pip line."""
    monkeypatch.setattr(backends, "find_mpirun", lambda: None)
    assert_refused_here(["collectives", "--backend", "mpi", "-n", "2"], "pip install")


@pytest.mark.thorough
def test_a_rank_that_never_starts_is_named(tmp_path: Path, frozen: Frozen) -> None:
    """One of two tasks comes, and names the other when the time is up: until then it only waits."""
    words = ["collectives", "--backend", "gloo", "--timeout", "6"]
    rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    port = str(placement.free_port())
    done = run_ddpbench(tmp_path, *words, **rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert_refused(done)
    frozen.text(done.stderr)


@pytest.mark.usefixtures("empty_folder")
def test_a_folder_that_holds_a_run_is_not_overwritten() -> None:
    """A run into the --output of another is refused; the first stays."""
    store.create(Path("mine"), a_run(), "x")
    before = Path("mine/run.json").read_bytes()
    assert_refused_here(["collectives", "--backend", "gloo", "--output", "mine", *QUICK])
    assert Path("mine/run.json").read_bytes() == before


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_keeps_what_was_measured(tmp_path: Path) -> None:
    """The run stops with the reason; what was stored before loads, and is marked."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=60k", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this container may not mount")
    try:
        words = ["--op", "all_reduce", "--sizes", "4:64K:x2", "--case-time", "0.1"]
        done = run_ddpbench(
            tmp_path, "collectives", "--backend", "gloo", *words, "--output", str(small / "run")
        )
        assert done.returncode == 5, done.stderr
        assert os.strerror(errno.ENOSPC) in done.stderr
        assert "Traceback" not in done.stderr
        shown = run_ddpbench(tmp_path, "show", str(small / "run"))
        assert shown.returncode == 0
        assert "PARTIAL" in shown.stdout
        assert "gloo" in shown.stdout
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 99}', '{"schema": 1}'])
@pytest.mark.usefixtures("empty_folder")
def test_stored_runs_that_cannot_be_read_exit_with_3(content: str) -> None:
    """Empty, cut, foreign, newer and incomplete files: one sentence, exit 3."""
    Path("results/x").mkdir(parents=True)
    Path("results/x/run.json").write_text(content)
    ended = call_in_process(["show", "x"])
    assert (ended.code, ended.out) == (3, "")
    assert ONE_SENTENCE.fullmatch(ended.err)
    assert "run.json" in ended.err


def test_a_missing_package_is_named_with_its_remedy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    frozen: Frozen,
) -> None:
    """A Python without a package that the command imports gives one sentence and exit code 2."""
    monkeypatch.setitem(sys.modules, "ddpbench.commands.show", None)
    assert cli.main(["show", "x"]) == 2
    assert "ModuleNotFoundError" in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "ddpbench.commands.show")
    monkeypatch.setitem(sys.modules, "tabulate", None)
    store.create(tmp_path / "one", a_run(), "x")
    assert cli.main(["list", str(tmp_path)]) == 2
    frozen.text(capsys.readouterr().err.replace(sys.executable, "PYTHON"))
