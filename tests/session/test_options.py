"""Command lines: what is accepted, and that an error is one sentence from one process, code 2."""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ddpbench
from ddpbench import collectives
from ddpbench.catalog.operations import OPERATIONS
from ddpbench.launch.placement import Refused
from ddpbench.session import options

ROOT = Path(ddpbench.__file__).parents[1]


def parser() -> options.Parser:
    """The parser of a measuring command."""
    made = options.Parser(prog="ddpbench collectives")
    collectives.add_arguments(made)
    return made


def asked(*words: str) -> argparse.Namespace:
    """What these words ask for."""
    return parser().parse_args(words)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that these words end in, with exit code 2."""
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(words)
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"ddpbench: .* \(see ddpbench collectives --help\)\n", said.err)
    return said.err.removeprefix("ddpbench: ").removesuffix(" (see ddpbench collectives --help)\n")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are not ranks, whatever started them."""
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def test_without_options_the_defaults_stand() -> None:
    """Every option has the default that its help names, and makes complete Options."""
    known = vars(asked())
    assert collectives.Options(**{**known, "modules": tuple(known["modules"])})
    assert known["op"] == ("all_reduce", "all_gather", "broadcast")
    assert (known["backend"], known["device"], known["dtype"]) == (("auto",), "auto", ("float32",))
    assert (known["launches"], known["precision"], known["slice"]) == (None, 2.5, None)
    one, six = (collectives.Options.of(asked("--launches", n)).plan(0) for n in ("1", "6"))
    assert (one.slice_seconds, six.slice_seconds) == (2.0, 0.1)
    assert (known["timeout"], known["depth"], known["issue"]) == (60.0, 20, "isolated")
    assert [known[name] for name in ("sizes", "nproc", "seed", "limit", "output")] == [None] * 5


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--op reduce,all_reduce,reduce", "op", ("reduce", "all_reduce")),
        ("--op all", "op", tuple(OPERATIONS)),
        ("--sizes 4:64:x4,1K", "sizes", (4, 16, 64, 1024)),
        ("--backend gloo,mpi", "backend", ("gloo", "mpi")),
        ("--backend some-plug-in", "backend", ("some-plug-in",)),
        ("-n 4", "nproc", 4),
        ("--nproc=4", "nproc", 4),
        ("--import a --import b", "modules", ["a", "b"]),
        ("--async", "async_op", True),
        ("--buffers huge", "buffers", "huge"),
        ("--init-method tcp://host:29500", "init_method", "tcp://host:29500"),
        ("--init-method file:///tmp/x", "init_method", "file:///tmp/x"),
        ("--init-method env://", "init_method", "env://"),
        ("--master-port 65535", "master_port", 65535),
        ("--seed 0", "seed", 0),
        ("--precision 0.5", "precision", 0.5),
        ("--slice 1e-1", "slice", 0.1),
        ("--columns time,size", "columns", ("time", "size")),
        ("--format csv", "format", "csv"),
    ],
)
def test_what_is_typed_is_what_is_asked(words: str, name: str, value: Any) -> None:
    """Lists lose repeats and keep their order, `all` is every one, numbers are numbers."""
    assert getattr(asked(*words.split()), name) == value


def test_cuda_tensors_are_not_asked_into_the_hosts_huge_pages() -> None:
    """Refused in one sentence, with what to type; elsewhere, and without them, nothing is."""
    known = collectives.Options.of(asked("--buffers", "huge", "--device", "cpu"))
    known.check()
    replace(known, device="cuda", buffers="torch").check()
    with pytest.raises(Refused, match="leave it out, or add --device cpu"):
        replace(known, device="cuda").check()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--opp all", "unknown option --opp. Did you mean --op?"),
        ("--size=4", "unknown option --size=4. Did you mean --sizes?"),
        ("--launch-es 2", "unknown option --launch-es. Did you mean --launches?"),
        ("--warp", "unknown option --warp"),
        ("4K", "unknown option 4K"),
        ("--op all_redcue",
         "--op: unknown operation 'all_redcue': choose all_reduce, "),
        ("--op zzz", "--op: unknown operation 'zzz': choose all_reduce, all_gather, "),
        ("--dtype float31", "--dtype: unknown dtype 'float31': choose "),
        ("--reduce-op plus", "--reduce-op: unknown reduce op 'plus'"),
        ("--columns tim", "--columns: unknown column 'tim'. Did you mean time?"),
        ("--op all_reduce,,reduce", "--op: 'all_reduce,,reduce' has an empty name: write a,b,c"),
        ("--sizes 8:4:x2", "--sizes: '8:4:x2' goes from 8 down to 4: write the smaller size first"),
        ("-n 0", "-n: '0' is not a whole number from 1 on"),
        ("-n two", "-n: 'two' is not a whole number from 1 on"),
        ("-n 1.0", "-n: '1.0' is not a whole number from 1 on"),
        ("--master-port 0", "--master-port: '0' is not a whole number from 1 to 65535"),
        ("--master-port 65536", "--master-port: '65536' is not a whole number from 1 to 65535"),
        ("--depth 1", "--depth: '1' is not a whole number from 2 on"),
        ("--seed -1", "--seed: '-1' is not a whole number from 0 on"),
        ("--timeout 0", "--timeout: '0' is not a number above 0"),
        ("--timeout nan", "--timeout: 'nan' is not a number above 0"),
        ("--slice inf", "--slice: 'inf' is not a number above 0"),
        ("--precision -1", "--precision: '-1' is not a number above 0"),
        ("--init-method tcp://host", "--init-method: 'tcp://host' is not an init method: "),
        ("--init-method file:/x", "--init-method: 'file:/x' is not an init method: "),
        ("--device tpu", "--device: invalid choice: 'tpu'"),
        ("--op", "--op: expected one argument"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    """Abbreviations, typos, empty names and numbers out of bounds: one line with the option, what
    was got and what is allowed, and exit code 2."""
    assert refused(capsys, *words.split()).startswith(sentence)


def test_an_empty_word_is_refused_too(capsys: pytest.CaptureFixture[str]) -> None:
    """A shell variable that is empty but quoted gives an argument '': a sentence, no traceback."""
    assert refused(capsys, "") == "unknown option ''"
    assert refused(capsys, "", "--op", "reduce") == "unknown option ''"


@pytest.mark.parametrize("words", ["-h", "--help"])
def test_help_shows_everything_that_can_be_asked(
    capsys: pytest.CaptureFixture[str], words: str
) -> None:
    """Every option, operation, dtype and column stands in the help; internal options do not."""
    with pytest.raises(SystemExit) as caught:
        parser().parse_args([words])
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name in ("--op ", "--sizes", "--backend", *OPERATIONS, "float8_e5m2", "p99.9", "markdown"):
        assert name in shown
    for hidden in ("--join", "--progress"):
        assert hidden not in shown


def test_an_operation_that_is_added_can_be_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One entry of the table is enough: it is accepted, means itself under `all`, and is in the
    help."""
    mine = replace(OPERATIONS["barrier"], name="my_op")
    monkeypatch.setitem(OPERATIONS, "my_op", mine)
    assert asked("--op", "my_op").op == ("my_op",)
    assert asked("--op", "all").op[-1] == "my_op"
    assert "my_op" in parser().format_help()
    assert "Did you mean my_op?" in refused(capsys, "--op", "my_opp")


# --- which process speaks -------------------------------------------------------------------------

Environ = Callable[[int], dict[str, str]]
LAUNCHERS: dict[str, Environ] = {
    "torchrun": lambda r: {"RANK": str(r), "WORLD_SIZE": "2", "LOCAL_RANK": str(r)},
    "mpirun": lambda r: {"OMPI_COMM_WORLD_RANK": str(r), "OMPI_COMM_WORLD_SIZE": "2"},
    "srun": lambda r: {"SLURM_PROCID": str(r), "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"},
}


def ranks(words: list[str], environs: list[dict[str, str]]) -> list[subprocess.Popen[str]]:
    """This command in one process for each environment, side by side."""
    command = [sys.executable, "-m", "ddpbench", *words]
    return [
        subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": str(ROOT), **environ}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for environ in environs
    ]  # fmt: skip


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_under_a_launcher_rank_0_alone_speaks(launcher: str) -> None:
    """A bad option in every rank gives exit code 2 in every rank, and one line, from rank 0."""
    words = ["collectives", "--sizes", "8:4:x2"]
    started = ranks(words, [LAUNCHERS[launcher](rank) for rank in (0, 1)])
    said = [process.communicate(timeout=60) for process in started]
    assert [process.returncode for process in started] == [2, 2]
    assert said == [
        ("", "ddpbench: --sizes: '8:4:x2' goes from 8 down to 4: write the smaller size first "
         "(see ddpbench collectives --help)\n"),
        ("", ""),
    ]  # fmt: skip


def test_an_unknown_command_is_refused_by_rank_0_alone_or_without_a_launcher() -> None:
    """The same for the command's name; without a launcher this process speaks; with contradicting
    variables every process does, because none knows its rank."""
    started = ranks(
        ["colectives"],
        [{}, *(LAUNCHERS["torchrun"](rank) for rank in (0, 1)), {"RANK": "9", "WORLD_SIZE": "2"}],
    )
    said = [process.communicate(timeout=60) for process in started]
    assert [process.returncode for process in started] == [2] * 4
    assert [out for out, _ in said] == [""] * 4
    sentence = "ddpbench: unknown command 'colectives': choose ab, baseline, "
    assert [err.startswith(sentence) for _, err in said] == [True, True, False, True]
    assert [err.count("\n") for _, err in said] == [1, 1, 0, 1]
