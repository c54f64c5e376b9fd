"""Options that the measuring commands share, and strict types for their values. No torch.

`RunOptions` has their parsed values; `resolve` decides what depends on the device or the launcher.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

from ddpbench.catalog import backends, faults
from ddpbench.interchange import sources
from ddpbench.launch.placement import Placement, Refused
from ddpbench.present.columns import Column
from ddpbench.present.document import describe_columns
from ddpbench.present.writers import WRITERS, page_file, text
from ddpbench.records.schema import Plan
from ddpbench.records.terminal_text import tell
from ddpbench.records.wording import did_you_mean, explain_unknown
from ddpbench.runtime import devices
from ddpbench.session.errors import refuse

if TYPE_CHECKING:
    from typing_extensions import Self

INSTEAD = {  # what to type in place of an option of nccl-tests or torchrun
    **dict.fromkeys(("-b", "-e", "-f", "--minbytes", "--maxbytes"), "--sizes 8:128M:x2"),
    **dict.fromkeys(("-g", "--ngpus", "--nproc-per-node", "--nproc_per_node"), "-n"),
    "--iters": "--case-time",
}
T = TypeVar("T", bound="RunOptions")
V = TypeVar("V")


class Parser(argparse.ArgumentParser):
    """A strict parser. It takes no abbreviations. An error is one sentence, with exit code 2."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown arguments, even when this parses a subcommand."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """Refuse with the message; under a launcher, only rank 0 prints it."""
        unknown = re.fullmatch(r"unrecognized arguments: (.*)", message)
        if unknown:
            word = (unknown[1].split() or ["''"])[0]
            known = [option for action in self._actions for option in action.option_strings]
            typed = word.split("=")[0]
            advice = (
                f": use {INSTEAD[typed]}" if typed in INSTEAD else did_you_mean(typed, known, 0.72)
            )
            message = f"unknown option {word}{advice}"
        choice = re.fullmatch(r"(argument \S+: )invalid choice: (.+) \(choose from (.*)\)", message)
        if choice:
            table = [word.strip("'") for word in choice[3].split(", ")]
            message = choice[1] + explain_unknown("choice", choice[2].strip("'"), table)
        message = re.sub(r"^argument (\S+?)(/\S+)*: ", r"\1: ", message)
        refuse(f"{message} (see {self.prog} --help)")


def names(kind: str, known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Return the type of a comma-separated list of known names; `all` means all of them."""
    table = list(known)

    def parse(text: str) -> tuple[str, ...]:
        words = listed(text)
        if "all" in words:
            return tuple(table)
        for word in words:
            if word not in table:
                unknown = explain_unknown(kind, word, [*table, "all"])
                raise argparse.ArgumentTypeError(unknown)
        return words

    return parse


def listed(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list: drop repeated words, refuse empty ones."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise argparse.ArgumentTypeError(f"{text!r}: empty name in the list; write a,b,c")
    return tuple(dict.fromkeys(words))


def checked(parse: Callable[[str], V]) -> Callable[[str], V]:
    """Return the type of what `parse` reads; its ValueError is the message."""

    def read(text: str) -> V:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return the type of an integer within bounds."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text) or int(text) < least or int(text) > (most or 2**62):
            raise argparse.ArgumentTypeError(f"{text!r}: must be an integer {bounds}")
        return int(text)

    return parse


def positive(text: str) -> float:
    """Parse a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number above 0")
    return value


def page(text: str) -> Path:
    """Parse the name of a page's file. Raises Refused without the packages that make a page."""
    if missing := page_file.explain_missing("--report-file"):
        raise Refused(missing)
    if unusable := page_file.explain_unusable(Path(text)):
        raise argparse.ArgumentTypeError(unusable)
    return Path(text)


def fault(kind: str) -> Callable[[str], str]:
    """Return the type of `--inject` for faults of one kind."""

    def parse(text: str) -> str:
        faults.parse(text, kind)
        return text

    return checked(parse)


def import_modules(words: Sequence[str]) -> None:
    """Import the modules that --import names, before a command adds options for what they register.

    Raises Refused for a module that cannot be imported.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--import", action="append", default=[], dest="modules")
    with contextlib.suppress(argparse.ArgumentError):  # the command's own parser reports it
        for module in parser.parse_known_args(words)[0].modules:
            try:
                import_module(module)
            except (ImportError, TypeError, ValueError) as error:
                hint = "write my_op for the file my_op.py in this folder"
                raise Refused(f"--import {module}: {error}; {hint}") from None


def add_group(parser: argparse.ArgumentParser, title: str, texts: str) -> Callable[..., None]:
    """Add a group of options. Return a function that adds an option to it.

    texts: the help of all options; each begins with its option at the start of a line. The function
    takes the option's flags, its type, its default, and keywords for argparse. It ends the help
    with the default, unless the help already names one.
    """
    group = parser.add_argument_group(title)
    help_of = dict(re.findall(r"^(--\S+) +(.+(?:\n +.+)*)", texts, re.MULTILINE))

    def add(*flags: str, kind: Any = None, default: Any = None, **settings: Any) -> None:
        text = " ".join(help_of[flags[-1]].split())
        if default is not None:
            settings["default"] = default
            if "(default:" not in text:
                shown = ",".join(default) if isinstance(default, tuple) else default
                text += (
                    f" (default: {shown:g})" if isinstance(shown, float) else f" (default: {shown})"
                )
        if kind is not None:
            settings["type"] = kind
        group.add_argument(*flags, help=text, **settings)

    return add


MEASURING = """
--backend      backends to measure in turns: {backends}, any other that torch has, auto (the best
               for the device) or all (all that can run here)
--device       device of the tensors (default: auto, which is cuda for nccl, cpu for another named
               backend, else cuda if there is a GPU)
--ranks        number of ranks to start on this host if no launcher started them (default: 2, or
               one per GPU)
--import       module to import first, which adds a backend or an operation; can be repeated
               (default: none)
--share-gpu    allow two ranks to use the same GPU, for tests
--timeout      longest time that a rank waits for the others, in seconds
--watchdog     what to do when a deadline is missed: end the run, or ignore it
--launches     repeat everything in R launches, each with new processes; intervals over launches
               need at least 6 (default: {launches})
--seed         seed of {seeded} (default: {seed})
--output       folder for the results (default: a new folder in results/)
"""


def add_measuring(
    parser: argparse.ArgumentParser,
    columns: Mapping[str, Column[Any]],
    seeded: str,
    launches: int = 1,
    seed: int | None = None,
) -> None:
    """Add the options of `RunOptions`, which every measuring command has.

    columns: of its tables. seeded: names what the seed determines. launches, seed: the defaults;
    None is a random seed.
    """
    texts = MEASURING.format(
        backends=", ".join(backends.BACKENDS),
        launches=f"{launches}; 1 if a launcher started the ranks" if launches > 1 else launches,
        seeded=seeded,
        seed="a random number, stored with the run" if seed is None else seed,
    )
    add = add_group(parser, "where", texts)
    add("--backend", kind=listed, default=("auto",), metavar="NAME,…")
    add("--device", default="auto", choices=("auto", *devices.KINDS))
    add("-n", "--ranks", kind=whole(1), metavar="N")
    add("--import", default=[], dest="modules", action="append", metavar="MODULE")
    add("--share-gpu", action="store_true")
    add("--timeout", kind=whole(1), default=60, metavar="SECONDS")
    add("--watchdog", default="end", choices=("end", "off"))
    add = add_group(parser, "how often", texts)
    add("--launches", kind=whole(1), metavar="R")
    add("--seed", kind=whole(0), default=seed, metavar="N")
    add_shown(parser, columns)
    add_group(parser, "what is stored", texts)("--output", metavar="FOLDER")
    # ddpbench itself starts ranks with these.
    parser.add_argument("--join", help=argparse.SUPPRESS)
    parser.add_argument("--launch", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--paced", action="store_true", help=argparse.SUPPRESS)


SHOWN = """
--format       output format on stdout
--columns      columns to show: names, all, or help, which lists them (default: those that fit the
               results)
--quiet        show only the tables: no header, no legend, no progress
"""


def add_shown(
    parser: argparse.ArgumentParser, *tables: Mapping[str, Column[Any]], check: bool = True
) -> None:
    """Add the options on format and columns.

    tables: the columns of each kind of run, by name. check: whether every column suits every run of
    this command.
    """
    add = add_group(parser, "what is shown", SHOWN)
    add("--format", default="table", choices=tuple(WRITERS))
    add("--columns", kind=_columns(tables, check), metavar="COLUMN,…")
    add("--quiet", action="store_true")


def _columns(
    tables: Sequence[Mapping[str, Column[Any]]], check: bool
) -> Callable[[str], tuple[str, ...]]:
    """Return the type of --columns; `help` lists all columns and ends the program."""
    parse = names("column", dict.fromkeys(chain.from_iterable(tables))) if check else listed

    def read(words: str) -> tuple[str, ...]:
        if words != "help":
            return parse(words)
        shown = (text.lay_out(describe_columns(table.values())) for table in tables)
        sys.stdout.write("\n\n".join(shown) + "\n")
        sys.exit(0)

    return read


LOGS = """
--op           operation, if the log does not print it: {operations} (default: from the log)
--ranks        number of ranks, if the log does not print it; OSU never does (default: from the log)
"""


def add_logs(parser: argparse.ArgumentParser) -> None:
    """Add the options on facts that other tools' logs may lack."""
    texts = LOGS.format(operations=", ".join(sources.OPERATIONS))
    add = add_group(parser, "logs of other tools", texts)
    add("--op", choices=sources.OPERATIONS, metavar="NAME")
    add("--ranks", kind=whole(1, 2**20), metavar="N")


@dataclass(frozen=True)
class RunOptions:
    """Options of every measuring command. None: the default depends on device or launcher."""

    command: ClassVar[str]
    usual_launches: ClassVar[int] = 1  # if ddpbench starts the ranks

    backend: tuple[str, ...]
    device: str
    ranks: int | None
    modules: tuple[str, ...]
    share_gpu: bool
    timeout: int
    watchdog: str
    launches: int | None
    seed: int | None
    format: str
    columns: tuple[str, ...] | None
    quiet: bool
    output: str | None
    join: str | None  # the folder of the run, in ranks that ddpbench started
    launch: int  # number of the launch in the run
    paced: bool  # each launch waits for a line on stdin and writes its exit code to stdout

    @classmethod
    def of(cls, namespace: argparse.Namespace) -> Self:
        values = {field.name: getattr(namespace, field.name) for field in fields(cls)}
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**values | lists)

    @property
    def subjects(self) -> tuple[str, ...]:
        """Return the names of what is measured."""
        raise NotImplementedError

    def plan(self, seed: int) -> Plan:
        """Return the protocol as it is stored with the run."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise Refused for options that exclude each other."""

    def inject_faults(self, placement: Placement) -> contextlib.AbstractContextManager[object]:
        """Return the context of the faults that act before the ranks meet."""
        return contextlib.nullcontext()

    def named(self) -> dict[str, object]:
        """Return the values that must be equal in all ranks, by the names of the options."""
        names = {"async_op": "async", "modules": "import"}
        return {names.get(k, k.replace("_", "-")): v for k, v in asdict(self).items()}


def resolve(options: T, placement: Placement | None) -> T:
    """Return the options with device, backends, ranks and launches decided.

    placement: of this rank; None if ddpbench starts the ranks. Raises Refused if this host lacks a
    device or backend, and as `RunOptions.check`.
    """
    warn = tell if placement is None or placement.local_rank == 0 else lambda sentence: None
    device = backends.choose_device(options.backend, options.device, warn)
    names = backends.choose(options.backend, device, placement.launcher if placement else None)
    launches = options.launches or (options.usual_launches if placement is None else 1)
    if placement is not None and launches > 1:
        raise Refused(
            "--launches needs ddpbench to start the ranks: leave out the launcher and type "
            f"ddpbench {options.command} -n {placement.world_size} --launches {launches} …"
        )
    ranks = placement.world_size if placement else options.ranks
    ranks = ranks or devices.get(device).usual_ranks()
    options = replace(options, device=device, backend=names, launches=launches, ranks=ranks)
    options.check()
    return options
