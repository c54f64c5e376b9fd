"""Options that the measuring commands share, and the strict types of their values. No torch."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from ddpbench.catalog import backends, faults, sizes
from ddpbench.interchange import sources
from ddpbench.launch import placement
from ddpbench.records.choices import did_you_mean, explain_unknown
from ddpbench.render.formats import FORMATS, WITHOUT_COLUMNS
from ddpbench.session.errors import refuse


class Parser(argparse.ArgumentParser):
    """Strict: no abbreviations; an error is one sentence, from one process, exit code 2."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings
        )

    def print_help(self, file: Any = None) -> None:
        """Print the help; unlike argparse's own, not silently into a stdout that takes nothing."""
        (file or sys.stdout).write(self.format_help())

    def parse_known_args(self, *args: Any, **settings: Any) -> Any:
        """Refuses what it does not know, also as the parser of an action of a command."""
        namespace, unknown = super().parse_known_args(*args, **settings)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """End with the sentence; under a launcher in rank 0 only."""
        unknown = re.fullmatch(r"unrecognized arguments: (.*)", message)
        if unknown:
            word = (unknown[1].split() or ["''"])[0]
            known = [option for action in self._actions for option in action.option_strings]
            message = f"unknown option {word}" + did_you_mean(word.split("=")[0], known)
        message = re.sub(r"^argument (\S+?)(/\S+)*: ", r"\1: ", message)
        refuse(f"{message} (see {self.prog} --help)")


def names(kind: str, known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """The type of a comma list of known names; `all` means every one."""
    table = list(known)

    def parse(text: str) -> tuple[str, ...]:
        words = listed(text)
        if "all" in words:
            return tuple(table)
        for word in words:
            if word not in table:
                raise argparse.ArgumentTypeError(explain_unknown(kind, word, [*table, "all"]))
        return words

    return parse


def listed(text: str) -> tuple[str, ...]:
    """The type of a comma list: each word once, none empty."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name: write a,b,c")
    return tuple(dict.fromkeys(words))


def size_list(text: str) -> tuple[int, ...]:
    """The type of `--sizes`."""
    try:
        return sizes.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of a whole number within bounds."""
    bounds = f"from {least} on" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text) or int(text) < least or int(text) > (most or 2**62):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {bounds}")
        return int(text)

    return parse


def positive(text: str) -> float:
    """The type of a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def time_limit(text: str) -> float:
    """The type of `--timeout`: ranks cannot even meet in less than a second."""
    if (value := positive(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 on")
    return value


def fault(kind: str) -> Callable[[str], str]:
    """The type of `--inject`, of faults of one kind."""

    def parse(text: str) -> str:
        try:
            faults.parse(text, kind)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return parse


def init_method(text: str) -> str:
    """The type of `--init-method`."""
    if re.match(r"\w+://[^/]*@|tcp://.*@", text):
        raise argparse.ArgumentTypeError(
            "it holds a user name or password, which no rendezvous asks for: write tcp://HOST:PORT"
        )
    tcp = re.fullmatch(r"tcp://[^/]+:(\d{1,5})", text)
    if tcp and 0 < int(tcp[1]) < 65536:
        return text
    if text == "env://" or re.fullmatch(r"file:///.+", text):
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is not an init method: write env://, tcp://HOST:PORT or file:///PATH"
    )


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
                raise placement.Refused(f"--import {module}: {error}") from None


def add_where(parser: argparse.ArgumentParser) -> None:
    """Backend, device, and how ranks start and meet."""
    where = parser.add_argument_group("where")
    add = where.add_argument
    add(
        "--backend",
        type=listed,
        default=("auto",),
        metavar="NAME,…",
        help=f"of: {', '.join(backends.BACKENDS)}, any other that torch has registered; auto: the "
        "best for the device (default); all: all that can run here; a list is run side by side",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto")
    add(
        "-n",
        "--nproc",
        type=whole(1),
        metavar="N",
        help="ranks to start on this host where no launcher did; default 2, or one a GPU",
    )
    add(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this first, e.g. a plug-in that registers a backend",
    )
    add("--share-gpu", action="store_true", help="let several ranks use one GPU, to try things")
    add(
        "--init-method",
        type=init_method,
        metavar="URL",
        help="env://, tcp://HOST:PORT or file:///PATH; default: as the launcher says",
    )
    add("--master-addr", metavar="HOST", help="where rank 0 listens")
    add("--master-port", type=whole(1, 65535), metavar="PORT", help="and on which port")
    add(
        "--timeout",
        type=time_limit,
        default=60.0,
        metavar="SECONDS",
        help="deadline of every wait, at least 1; default 60",
    )
    add(
        "--watchdog",
        choices=("end", "report", "off"),
        type=lambda action: {"tell": "report"}.get(action, action),  # as it was called
        default="end",
        help="what to do when a deadline is missed: end the run, report it, or ignore it "
        "(default: end)",
    )


def add_repeats(parser: argparse.ArgumentParser, seed: str, launches: int = 1) -> None:
    """Launches, how many there are where ddpbench starts the ranks, and the seed: the help on what
    it is for."""
    add = parser.add_argument_group("how often").add_argument
    add(
        "--launches",
        type=whole(1),
        metavar="R",
        help="repeat in R sets of fresh processes; from 6 on, intervals hold over launches; "
        f"default {launches}"
        + (", and 1 where a launcher has started the ranks" if launches > 1 else ""),
    )
    add("--seed", type=whole(0), help=seed)


def add_shown(parser: argparse.ArgumentParser, columns: Iterable[str], told: str = "") -> None:
    """Format and columns. told: of these columns, after their names."""
    shown = parser.add_argument_group("what is shown")
    add = shown.add_argument
    add("--format", choices=tuple(FORMATS), default="table", help="on stdout; default table")
    add(
        "--columns",
        type=names("column", columns),
        metavar="COLUMN,…",
        help="of: " + ", ".join(columns) + told,
    )
    add("--quiet", action="store_true", help="the tables only: no header, no legend, no progress")


def add_logs(parser: argparse.ArgumentParser) -> None:
    """What other tools' logs may not tell."""
    add = parser.add_argument_group("logs of other tools").add_argument
    add(
        "--op",
        choices=sources.OPERATIONS,
        metavar="NAME",
        help="operation of tests that the log does not name (default: from the command above them, "
        f"the file's name or busbw / algbw): {', '.join(sources.OPERATIONS)}",
    )
    add(
        "--ranks",
        type=whole(1, 2**20),
        metavar="N",
        help="number of ranks of tests that do not print it (default: likewise)",
    )


def require_columns(form: str, columns: Iterable[str] | None) -> None:
    """Raises Refused where columns are chosen of a format that has none."""
    if columns is not None and form in WITHOUT_COLUMNS:
        raise placement.Refused(f"--format {form} has no columns: leave out --columns")


def add_stored(parser: argparse.ArgumentParser) -> None:
    """Where results go; and what ddpbench tells the ranks that it starts itself."""
    parser.add_argument("--output", metavar="FOLDER", help="default: a new one in results/")
    parser.add_argument("--join", help=argparse.SUPPRESS)
    parser.add_argument("--launch", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--progress", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--paced", action="store_true", help=argparse.SUPPRESS)
