"""Options are parsed strictly; an error is one sentence from one process, with exit code 2."""

import argparse
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from frozen import Frozen
from in_process import Outcome, call_in_process, forbid_processes

from ddpbench import collectives
from ddpbench.catalog.operations import OPERATIONS
from ddpbench.launch.placement import Refused
from ddpbench.session import options


def make_parser() -> options.Parser:
    """Return the parser of a measuring command."""
    parser = options.Parser(prog="ddpbench collectives")
    collectives.add_arguments(parser)
    return parser


def parse(*words: str) -> argparse.Namespace:
    """Return the options in these words."""
    return make_parser().parse_args(words)


def read_refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Parse invalid words and return the sentence printed for them; the exit code is 2."""
    with pytest.raises(SystemExit) as error:
        make_parser().parse_args(words)
    assert error.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert re.fullmatch(r"ddpbench: .* \(see ddpbench collectives --help\)\n", output.err)
    return output.err.removeprefix("ddpbench: ").removesuffix(
        " (see ddpbench collectives --help)\n"
    )


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process no rank, whatever started it."""
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--op reduce,all_reduce,reduce", "op", ("reduce", "all_reduce")),
        ("", "op", ("all_reduce", "all_gather", "broadcast")),
        ("", "timeout", 60),
        ("--op all", "op", tuple(OPERATIONS)),
        ("--backend some-plug-in", "backend", ("some-plug-in",)),
        ("-n 4", "ranks", 4),
        ("--import a --import b", "modules", ["a", "b"]),
        ("--async", "async_op", True),
        ("--case-time 1e-1", "case_time", 0.1),
        ("--columns time,size", "columns", ("time", "size")),
    ],
)
def test_what_is_typed_is_what_is_asked(words: str, name: str, value: Any) -> None:
    """Lists lose repeats and keep their order, `all` stands for all names, numbers are numbers."""
    assert getattr(parse(*words.split()), name) == value


@pytest.mark.parametrize(
    "words", ["--op all_reduce,broadcast --place out", "--op barrier --dtype int8"]
)
def test_an_option_that_all_operations_lack_is_refused(words: str, frozen: Frozen) -> None:
    """--form, --place, --dtype or --reduce-op; it is accepted if one operation has it."""
    collectives.Options.of(parse("--op", "gather,barrier", "--form", "list")).check()
    with pytest.raises(Refused) as caught:
        collectives.Options.of(parse(*words.split())).check()
    frozen.text(str(caught.value))


@pytest.mark.parametrize(
    "words",
    [
        "--opp all",
        "--size=4",
        "-b 8 -e 1M -f 2",
        "--nproc-per-node 2",
        "--nnodes 2",
        "--op zzz",
        "--dtype float31",
        "--columns tim",
        "--op all_reduce,,reduce",
        "--sizes 8:4:x2",
        "-n two",
        "--in-flight 1",
        "--timeout 0",
        "--case-time inf",
        "--precision -1",
        "--device tpu",
        "--op",
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], words: str, frozen: Frozen
) -> None:
    """Abbreviations, typos, empty names and numbers out of bounds end with exit code 2 and one
    line: the option, the value given, and the values allowed."""
    frozen.text(read_refusal(capsys, *words.split()))


def test_help_shows_everything_that_can_be_asked() -> None:
    """The help shows every option, operation, dtype and column, and hides internal options."""
    help_text = " ".join(make_parser().format_help().split())
    for name in ("--op ", "--sizes", "--backend", *OPERATIONS, "float8_e5m2", "markdown"):
        assert name in help_text
    for hidden in ("--join", "--paced"):
        assert hidden not in help_text


def test_an_operation_that_is_added_can_be_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation that is only added to the table is accepted, is part of `all`, and stands in the
    help."""
    added = replace(OPERATIONS["barrier"], name="my_op")
    monkeypatch.setitem(OPERATIONS, "my_op", added)
    assert parse("--op", "my_op").op == ("my_op",)
    assert parse("--op", "all").op[-1] == "my_op"
    assert "my_op" in make_parser().format_help()
    assert "Did you mean my_op?" in read_refusal(capsys, "--op", "my_opp")


# --- which process speaks -------------------------------------------------------------------------

Environ = Callable[[int], dict[str, str]]
LAUNCHERS: dict[str, Environ] = {
    "torchrun": lambda r: {"RANK": str(r), "WORLD_SIZE": "2", "LOCAL_RANK": str(r)},
    "mpirun": lambda r: {"OMPI_COMM_WORLD_RANK": str(r), "OMPI_COMM_WORLD_SIZE": "2"},
    "srun": lambda r: {"SLURM_PROCID": str(r), "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"},
}


def call_as(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], *words: str) -> Outcome:
    """Run a command as the process that a launcher starts with these variables."""
    with monkeypatch.context() as patch, forbid_processes():
        for name, value in environ.items():
            patch.setenv(name, value)
        return call_in_process(words)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_under_a_launcher_rank_0_alone_speaks(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all ranks get a bad option, all end with exit code 2, and only rank 0 prints the line."""
    words = ("collectives", "--sizes", "8:4:x2")
    first, second = (call_as(monkeypatch, LAUNCHERS[launcher](rank), *words) for rank in (0, 1))
    assert (first.code, first.out, first.err.count("\n")) == (2, "", 1)
    assert first.err.startswith("ddpbench: --sizes: ")
    assert second == Outcome(2, "", "")


def test_if_no_process_knows_its_rank_each_prints_the_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A launcher's variables that contradict each other do not hide a refusal."""
    ended = call_as(monkeypatch, {"RANK": "9", "WORLD_SIZE": "2"}, "colectives")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert "colectives" in ended.err
