"""The commands that run in ranks, for those that have them run: by turns, on nodes, in a job."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from types import ModuleType

from ddpbench import collectives, ddp, doctor, options

MEASURING: dict[str, ModuleType] = {"collectives": collectives, "ddp": ddp}
IN_RANKS: dict[str, ModuleType] = {**MEASURING, "doctor": doctor}


def checked(words: Sequence[str]) -> argparse.Namespace:
    """The options of a command line that begins with one of IN_RANKS: a typo is told at once.

    Raises Refused for options that do not go together; ends with exit code 2 for others.
    """
    name, *rest = words
    parser = options.Parser(prog=f"ddpbench {name}")
    IN_RANKS[name].add_arguments(parser)
    given = parser.parse_args(rest)
    IN_RANKS[name].Options.of(given).check()
    return given
