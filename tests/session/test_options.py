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
from ddpbench.catalog import backends
from ddpbench.catalog.operations import OPERATIONS
from ddpbench.launch.placement import Refused
from ddpbench.runtime.subgroups import Partition
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


def test_without_options_the_defaults_stand() -> None:
    """Without options, every option has the default that its help names."""
    arguments = vars(parse())
    assert collectives.Options(**{**arguments, "modules": tuple(arguments["modules"])})
    assert arguments["op"] == ("all_reduce", "all_gather", "broadcast")
    assert (arguments["backend"], arguments["device"]) == (("auto",), "auto")
    options = replace(collectives.Options.of(parse("--op", "reduce")), device="cpu", ranks=2)
    world = [Partition("world", ((0, 1),), (2,))]
    cases = collectives.list_cases(options, backends.get("gloo"), options.plan(0), world)
    assert {(case.dtype, case.reduce_op) for case, _ in cases} == {("float32", "sum")}
    assert (arguments["launches"], arguments["precision"], arguments["case_time"]) == (
        None,
        2.5,
        None,
    )
    one, six = (collectives.Options.of(parse("--launches", n)).plan(0) for n in ("1", "6"))
    assert (one.slice_seconds, six.slice_seconds) == (2.0, 0.1)
    assert (arguments["timeout"], arguments["in_flight"], arguments["mode"]) == (
        60.0,
        20,
        "isolated",
    )
    unset = ("sizes", "ranks", "seed", "peak_bandwidth", "output")
    assert [arguments[name] for name in unset] == [None] * 5


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--op reduce,all_reduce,reduce", "op", ("reduce", "all_reduce")),
        ("--op all", "op", tuple(OPERATIONS)),
        ("--backend some-plug-in", "backend", ("some-plug-in",)),
        ("-n 4", "ranks", 4),
        ("--import a --import b", "modules", ["a", "b"]),
        ("--async", "async_op", True),
        ("--init-method tcp://host:29500", "init_method", "tcp://host:29500"),
        ("--init-method file:///tmp/x", "init_method", "file:///tmp/x"),
        ("--init-method env://", "init_method", "env://"),
        ("--master-port 65535", "master_port", 65535),
        ("--case-time 1e-1", "case_time", 0.1),
        ("--columns time,size", "columns", ("time", "size")),
    ],
)
def test_what_is_typed_is_what_is_asked(words: str, name: str, value: Any) -> None:
    """Lists lose repeats and keep their order, `all` stands for all names, numbers are numbers."""
    assert getattr(parse(*words.split()), name) == value


def test_cuda_tensors_are_not_asked_into_the_hosts_huge_pages(frozen: Frozen) -> None:
    """--buffers huge on CUDA is refused with what to type; CPU, or other buffers, are accepted."""
    arguments = collectives.Options.of(parse("--buffers", "huge", "--device", "cpu"))
    arguments.check()
    replace(arguments, device="cuda", buffers="torch").check()
    with pytest.raises(Refused) as caught:
        replace(arguments, device="cuda").check()
    frozen.text(str(caught.value))


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
        "--iters 20",
        "--check 1",
        "--dtype half",
        "--warp",
        "--op zzz",
        "--dtype float31",
        "--columns tim",
        "--op all_reduce,,reduce",
        "--sizes 8:4:x2",
        "-n two",
        "--master-port 0",
        "--in-flight 1",
        "--timeout 0",
        "--case-time inf",
        "--precision -1",
        "--init-method tcp://host",
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


def test_an_empty_word_is_refused_too(capsys: pytest.CaptureFixture[str]) -> None:
    """An empty word, as from a quoted empty shell variable, is refused in a sentence."""
    assert read_refusal(capsys, "") == "unknown option ''"
    assert read_refusal(capsys, "", "--op", "reduce") == "unknown option ''"


@pytest.mark.parametrize("words", ["-h", "--help"])
def test_help_shows_everything_that_can_be_asked(
    capsys: pytest.CaptureFixture[str], words: str
) -> None:
    """The help shows every option, operation, dtype and column, and hides internal options."""
    with pytest.raises(SystemExit) as error:
        make_parser().parse_args([words])
    assert error.value.code == 0
    help_text = " ".join(capsys.readouterr().out.split())
    for name in ("--op ", "--sizes", "--backend", *OPERATIONS, "float8_e5m2", "markdown"):
        assert name in help_text
    for hidden in ("--join", "--progress"):
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


def test_an_unknown_command_is_refused_by_rank_0_alone_or_without_a_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An unknown command is refused by rank 0, or by a process without a launcher. If a launcher's
    variables contradict each other, no process knows its rank, and each prints the sentence."""
    ranks = (LAUNCHERS["torchrun"](rank) for rank in (0, 1))
    environs = [{}, *ranks, {"RANK": "9", "WORLD_SIZE": "2"}]
    ended = [call_as(monkeypatch, environ, "colectives") for environ in environs]
    assert [(each.code, each.out) for each in ended] == [(2, "")] * 4
    assert [each.err.count("\n") for each in ended] == [1, 1, 0, 1]
    assert ["colectives" in each.err for each in ended] == [True, True, False, True]
