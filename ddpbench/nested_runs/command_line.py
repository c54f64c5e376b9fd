"""Check or run command lines of the commands that measure times, for another command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from types import ModuleType

from ddpbench import collectives, ddp
from ddpbench.launch.placement import Refused
from ddpbench.records.wording import explain_unknown
from ddpbench.session import options as shared_options
from ddpbench.session.options import resolve

MEASURING: dict[str, ModuleType] = {"collectives": collectives, "ddp": ddp}


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line that begins with one of MEASURING.

    Raises Refused for another command; ends the process with exit code 2 for a wrong option.
    """
    name, *rest = words or [""]
    if name not in MEASURING:
        raise Refused(explain_unknown("command", name, MEASURING))
    shared_options.import_modules(rest)
    parser = shared_options.Parser(prog=f"ddpbench {name}")
    MEASURING[name].add_arguments(parser)
    return parser.parse_args(rest)


def check(words: Sequence[str], resolved: bool) -> None:
    """Validate a command line before it is run. Raises Refused and SystemExit, as `parse`.

    resolved: whether to look for its device and backend, because this Python will run it.
    """
    options = MEASURING[words[0]].Options.of(parse(words))
    if resolved:
        resolve(options, None)
    else:
        options.check()


def run(words: Sequence[str]) -> int:
    """Run a command line that begins with one of MEASURING in this process; return its exit code.

    Raises Refused, as `parse`, and the errors of the command.
    """
    return int(MEASURING[words[0]].run(parse(words), words[1:]))


def last_message(stderr: str) -> str:
    """Return the last message on ddpbench's stderr, except the one on where it stored the run."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("ddpbench: ") and ": stored in " not in line]
    errors = [line for line in lines if "rror" in line]
    return (own or errors or lines or ["ddpbench ended without a message"])[-1].removeprefix(
        "ddpbench: "
    )
