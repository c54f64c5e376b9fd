"""Bad input: one sentence, one process, the right exit code; and files that cannot be written."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_lines import (
    ONE_SENTENCE,
    QUICK,
    assert_refused,
    clean_environment,
    ddpbench_command,
    run_command,
    run_ddpbench,
    torchrun,
)
from in_process import call_in_process
from warm_python import warm_python

from ddpbench import cli
from ddpbench.launch import placement


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["colectives"],
            r"unknown command 'colectives': choose ab, .*\. Did you mean collectives\?",
        ),
        (
            ["collectives", "--op", "all_redcue"],
            r"'all_redcue': choose .* Did you mean all_reduce\?",
        ),
        (["collectives", "--backend", "glo"], r"unknown backend 'glo'.*Did you mean gloo\?"),
        (["collectives", "--dtype", "float23"], r"unknown dtype 'float23'"),
        (["collectives", "--sizes", "4:64M"], r"'4:64M' is not a list of sizes: write 4:64M:x4"),
        (["collectives", "--sizes", "0"], r"smallest size is 1 byte"),
        (["collectives", "--size", "4"], r"unknown option --size\. Did you mean --sizes\?"),
        (["collectives", "--timeout", "0"], r"'0' is not a number above 0"),
        (["collectives", "--device", "cpu", "--backend", "nccl"], r"nccl carries CUDA tensors"),
        (["collectives", "--import", "no_such_module"], r"No module named 'no_such_module'"),
        (["collectives", "--output", "/proc/x"], r"results cannot be written to /proc/x"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, words: list[str], sentence: str) -> None:
    """What was given, what is allowed, what to type instead; exit 2; no results folder."""
    assert_refused(run_ddpbench(tmp_path, *words), sentence)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["launch", "--"],
            r"no command after --: choose collectives, .*, watch, your script.py or -m",
        ),
        (["launch", "--", "absent.py"], r"script absent.py does not exist"),
        (["watch", "--verify", "2", "absent.py"], r"script absent.py does not exist"),
        (["watch", "--every", "0", "absent.py"], r"--every: '0' is not a number above 0"),
        (["watch", "-n", "2"], r"no script: write train.py, or -m and the name of a module"),
        (["manifest", "--"], r"no command after --: choose collectives, ddp or doctor$"),
        (["collectives", "--backend", "fake"], r"unknown backend 'fake': choose gloo, nccl"),
        (["collectives", "--backend", "undefined"], r"unknown backend 'undefined'"),
        (["collectives", "--timeout", "0.001"], r"'0.001' is not a number of seconds from 1 on"),
        (["collectives", "--op", "\udcff"], r"unknown operation '\\udcff'"),
        (["collectives", "--init-method", "tcp://h"], r"write env://, tcp://HOST:PORT or file://"),
        (["launch", "--init-method", "tcp://h:99999"], r"write env://, tcp://HOST:PORT or file"),
        (["collectives", "--import", ".x"], r"--import .x: .*relative import"),
        (["collectives", "--import", ""], r"--import : Empty module name"),
        (["show", "x" * 5000], r"no run 'xxx"),
        (["show", "\udcff\udcfe"], r"no run '\\udcff\\udcfe'"),
    ],
)
def test_an_odd_request_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], sentence: str
) -> None:
    """No traceback for a name that only torch's list knows, half a command, a time in which nobody
    can meet, a port that is missing, arguments that are not UTF-8 or longer than a file's name."""
    monkeypatch.chdir(tmp_path)
    ended = call_in_process(words)
    assert ended.code == (3 if words[0] == "show" else 2)
    assert ONE_SENTENCE.fullmatch(ended.err), ended.err
    assert re.search(sentence, ended.err.removesuffix("\n")), ended.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"RANK": "9"}, r"RANK=9 does not fit WORLD_SIZE=2"),
        ({"RANK": "x"}, r"RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers"),
        ({"MASTER_PORT": "99999"}, r"could not meet the others at tcp://127.0.0.1:99999 .*0-65535"),
    ],
)
def test_variables_that_cannot_be_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], sentence: str
) -> None:
    """What a launcher's variables must be is told, without a traceback, by who knows no rank."""
    known = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**known, "MASTER_PORT": "1", **environ}.items():
        monkeypatch.setenv(name, value)
    ended = call_in_process(["collectives", "--backend", "gloo", "--timeout", "3"])
    assert ended.code == 2
    assert ONE_SENTENCE.fullmatch(ended.err), ended.err
    assert re.search(sentence, ended.err), ended.err


@pytest.mark.parametrize(
    ("limit", "sentence"),
    [
        ("-n 16", r"ulimit -n allows 16 open files, and 2 ranks need 28 each: type ulimit -n 4096"),
        ("-v 700000", r"ulimit -v allows 0.7 GB of addresses, and a rank needs 2 GB: type ulimit"),
    ],
)
def test_a_limit_that_is_too_low_is_told_before_the_ranks_start(
    tmp_path: Path, limit: str, sentence: str
) -> None:
    """One sentence with what is needed, where the ranks would fail in C++ or never end."""
    words = shlex.join(ddpbench_command("collectives", "-n", "2", "--backend", "gloo"))
    assert_refused(run_command(["bash", "-c", f"ulimit {limit}; {words}"], tmp_path), sentence)
    assert not (tmp_path / "results").exists()


def test_an_address_without_a_port_is_one_sentence(tmp_path: Path) -> None:
    """The port that the launcher's own store has is not taken for the one that is meant."""
    words = ["-n", "2", "--backend", "gloo", "--master-addr", "127.0.0.1", *QUICK]
    assert_refused(
        run_ddpbench(tmp_path, "collectives", *words),
        r"needs a port.*add --master-port",
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nccl_without_a_gpu_says_so(tmp_path: Path) -> None:
    """No traceback: why not, and what to do."""
    done = run_ddpbench(tmp_path, "collectives", "--backend", "nccl")
    assert_refused(done, r"no GPU is visible|CPU build|built without NCCL")


def test_under_torchrun_only_rank_0_speaks(tmp_path: Path) -> None:
    """A typo in three ranks is one sentence of ours; torchrun adds its own report."""
    done = run_command([*torchrun(3), "-m", "ddpbench.collectives", "--op", "all_redcue"], tmp_path)
    assert done.returncode != 0
    assert len(re.findall(r"^ddpbench: ", done.stderr, re.MULTILINE)) == 1


def test_mpi_under_torchrun_offers_the_command_that_works(tmp_path: Path) -> None:
    """torchrun's ranks are MPI worlds of their own; the sentence has the mpirun line."""
    done = run_command([*torchrun(2), "-m", "ddpbench.collectives", "--backend", "mpi"], tmp_path)
    assert done.returncode != 0
    told = re.findall(r"^ddpbench: .*", done.stderr, re.MULTILINE)
    assert len(told) == 1
    assert "mpirun -n 2 python -m ddpbench.collectives --backend mpi" in told[0]


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """The port and what to do are named."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = ["collectives", "--backend", "gloo", "--master-port", str(port)]
        done = run_ddpbench(tmp_path, *words)
    assert_refused(done, rf"--master-port {port} cannot be used \(Address already in use\)")
    assert not (tmp_path / "results").exists()


def test_a_launcher_that_is_missing_is_named_with_its_remedy(tmp_path: Path) -> None:
    """Without mpirun, mpi is refused with the pip line."""
    block = (
        "import sys; from ddpbench.launch import placement as at; at.find_mpirun = lambda: None; "
    )
    block += "from ddpbench.cli import main; sys.exit(main())"
    words = ["collectives", "--backend", "mpi", "-n", "2"]
    done = run_command([sys.executable, "-c", block, *words], tmp_path)
    assert_refused(
        done, r"no mpirun beside this Python.*pip install|mpi4py is not installed: pip install"
    )


def test_a_rank_that_never_starts_is_named(tmp_path: Path) -> None:
    """Two of three tasks come; the third is named when the time is up."""
    port = str(placement.free_port())
    started = [
        subprocess.Popen(
            [*warm_python(), "-m", "ddpbench.collectives", "--timeout", "5"],
            cwd=tmp_path,
            env=clean_environment(
                RANK=str(rank), WORLD_SIZE="3", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="3",
                MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
            ),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 2)
    ]  # fmt: skip
    told = [process.communicate(timeout=60)[1] for process in started]
    assert [process.returncode for process in started] == [2, 2]
    assert re.search(r"1 of 3 ranks did not join within 5 s \(--timeout\): 1;", told[0]), told
    assert told[1] == ""


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    """The second run into one --output is refused; the first stays."""
    words = ["collectives", "--backend", "gloo", "--op", "barrier", "--output", "mine", *QUICK]
    assert run_ddpbench(tmp_path, *words).returncode == 0
    before = (tmp_path / "mine" / "run.json").read_bytes()
    assert_refused(run_ddpbench(tmp_path, *words), r"mine already holds a run")
    assert (tmp_path / "mine" / "run.json").read_bytes() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_keeps_what_was_measured(tmp_path: Path) -> None:
    """The run stops with the reason; what was stored before loads, and is marked."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=60k", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this container may not mount")
    try:
        words = ["--op", "all_reduce", "--sizes", "4:64K:x2", "--slice", "0.1"]
        done = run_ddpbench(
            tmp_path, "collectives", "--backend", "gloo", *words, "--output", str(small / "run")
        )
        assert done.returncode == 5, done.stderr
        assert "any more (No space left on device)" in done.stderr
        assert "Traceback" not in done.stderr
        shown = run_ddpbench(tmp_path, "show", str(small / "run"))
        assert shown.returncode == 0
        assert "PARTIAL" in shown.stdout
        assert "gloo" in shown.stdout
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 99}', '{"schema": 1}'])
def test_stored_runs_that_cannot_be_read_exit_with_3(tmp_path: Path, content: str) -> None:
    """Empty, cut, foreign, newer and incomplete files: one sentence, exit 3."""
    folder = tmp_path / "results" / "x"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(content)
    assert_refused(run_ddpbench(tmp_path, "show", "x"), r"run\.json", code=3)


def test_help_is_quick_and_needs_no_torch(tmp_path: Path) -> None:
    """--help works where torch cannot be imported."""
    block = (
        "import sys; sys.modules['torch'] = None; from ddpbench.cli import main; sys.exit(main())"
    )
    done = run_command([sys.executable, "-c", block, "collectives", "--help"], tmp_path)
    assert done.returncode == 0
    assert "--backend" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Python without a package that the command imports gives one sentence and exit code 2."""
    monkeypatch.setitem(sys.modules, "ddpbench.commands.history", None)
    assert cli.main(["history", "x"]) == 2
    assert "ModuleNotFoundError" in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "ddpbench.commands.history")
    monkeypatch.setitem(sys.modules, "tabulate", None)
    assert cli.main(["list", "/nowhere"]) == 2
    sentence = f"ddpbench: tabulate is not installed for {sys.executable}: activate the environment"
    assert capsys.readouterr().err.startswith(sentence)
