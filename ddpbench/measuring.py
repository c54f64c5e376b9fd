"""The commands that measure, for those that have them run: by turns, on other nodes, in a job."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from types import ModuleType

from ddpbench import collectives, ddp, options

MEASURING: dict[str, ModuleType] = {"collectives": collectives, "ddp": ddp}


def checked(words: Sequence[str]) -> argparse.Namespace:
    """The options of a command line that begins with one of MEASURING: a typo is told at once.

    Raises Refused for options that do not go together; ends with exit code 2 for others.
    """
    name, *rest = words
    parser = options.Parser(prog=f"ddpbench {name}")
    MEASURING[name].add_arguments(parser)
    given = parser.parse_args(rest)
    MEASURING[name].Options.of(given).check()
    return given
