"""The command line: find the command, parse its options, run it, report its errors.

Each module of ddpbench/commands/ is a command with the module's name; so are collectives.py and
ddp.py in ddpbench/. It has a docstring (the description in its --help), two constants, each in one
line, GROUP (one of GROUPS) and HELP (its line in the overview), and two functions:
add_arguments(parser), and run(namespace, words) → the exit code.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pkgutil import get_data, iter_modules
from types import ModuleType

from ddpbench import commands
from ddpbench.records.terminal_text import prepare_streams
from ddpbench.records.wording import explain_unknown
from ddpbench.session.errors import refuse, report_errors
from ddpbench.version import VERSION

MEASURING = ("collectives", "ddp")  # the commands in ddpbench/ itself
CALLS = {"watchdog": "hangs", "verify": "replicas"}  # of a script → chapter of the guide
GROUPS = ("measure", "diagnose", "compare", "results", "manual")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit code: see `ddpbench guide results`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    prepare_streams()
    if "" not in sys.path:  # python -m searches the current folder, the ddpbench script does not
        sys.path.append("")
    return report_errors(lambda: _run(words))


def _run(words: list[str]) -> int:
    if words[:1] == ["help"] and len(words) > 1:
        words = [words[1], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(_format_overview())
        return 0 if words else 2
    if words[0] == "--version":
        sys.stdout.write(f"ddpbench {VERSION}\n")
        return 0
    name, rest = words[0], words[1:]
    if name not in list_names():
        from ddpbench import guide

        if name in guide.ORDER:
            refuse(f"{name} is a chapter of the manual: type ddpbench guide {name}")
        if name in CALLS:
            refuse(f"{name} is a call in a script: see ddpbench guide {CALLS[name]}")
        if name.endswith(".py"):
            refuse(f"to watch a script, type ddpbench watch {name}")
        refuse(explain_unknown("command", name, list_names()))
    from ddpbench.session import options

    command = load(name)
    if getattr(command, "IMPORTS", False):  # it has the option --import
        options.import_modules(rest)
    parser = options.Parser(prog=f"ddpbench {name}", description=command.__doc__)
    command.add_arguments(parser)
    own = rest
    if getattr(command, "PASSES_ON", False):  # its words, except --help, are for another program
        own = rest[:1] if rest[:1] in (["-h"], ["--help"]) else []
    return int(command.run(parser.parse_args(own), rest))


def list_names() -> list[str]:
    """Return the names of all commands, in alphabetical order."""
    return sorted([*MEASURING, *(module.name for module in iter_modules(commands.__path__))])


def load(name: str) -> ModuleType:
    """Import the module of a command."""
    return import_module(f"{_package_of(name)}.{name}")


def _package_of(name: str) -> str:
    return "ddpbench" if name in MEASURING else commands.__name__


def read_groups() -> dict[str, dict[str, str]]:
    """Return the name and the one-line help of every command, by group.

    Imports no command, because most commands load modules that only running them needs.
    """
    groups: dict[str, dict[str, str]] = {group: {} for group in GROUPS}
    for name in list_names():
        constants = _read_constants(name)
        groups.setdefault(constants["GROUP"], {})[name] = constants["HELP"]
    return groups


def _read_constants(name: str) -> dict[str, str]:
    """Return the string constants that a command's module assigns at its top level, in one line."""
    source = get_data(_package_of(name), f"{name}.py") or b""
    return dict(re.findall(r'^([A-Z]+) = "(.*)"$', source.decode(), re.MULTILINE))


def _format_overview() -> str:
    width = max(map(len, list_names()))
    groups = "\n\n".join(
        "\n".join([f"{title}:", *(f"  {name:<{width}}  {text}" for name, text in entries.items())])
        for title, entries in read_groups().items()
    )
    return (
        f"ddpbench {VERSION}: benchmark and diagnose PyTorch distributed training\n\n"
        f"usage: ddpbench COMMAND [options]\n\n{groups}\n\n"
        "Show the options of a command: ddpbench COMMAND --help\n"
    )
