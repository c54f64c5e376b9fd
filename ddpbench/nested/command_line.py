"""The commands that run in ranks, for those that have them run: by turns, on nodes, in a job."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

from ddpbench import collectives, ddp
from ddpbench.catalog import backends
from ddpbench.doctor import command as doctor
from ddpbench.records.schema import Case, StepCase
from ddpbench.session import options

MEASURING: dict[str, ModuleType] = {"collectives": collectives, "ddp": ddp}
IN_RANKS: dict[str, ModuleType] = {**MEASURING, "doctor": doctor}


def planned(words: Sequence[str]) -> list[Case | StepCase] | None:
    """The cases that a command line of MEASURING asks for; None: only its ranks can know them.

    Raises Refused where this host does not have the device or a backend.
    """
    module, given = MEASURING[words[0]], checked(words)
    asked = module.Options.of(given)
    if asked.modules:  # they may add cases
        return None
    device = backends.choose_device(asked.backend, asked.device)
    if device != "cpu" and asked.nproc is None:
        return None  # a rank a GPU
    asked = replace(asked, device=device, nproc=asked.nproc or 2)
    found: list[Case | StepCase] = []
    for name in backends.choose(asked.backend, device, None):
        cases = module.planned(asked, backends.get(name))
        if cases is None:
            return None
        found += cases
    return found


def last_message(said: str) -> str:
    """The last sentence of a ddpbench's stderr, other than where it stored what there is."""
    lines = [line for line in said.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("ddpbench: ") and ": stored in " not in line]
    errors = [line for line in lines if "rror" in line]
    return (own or errors or lines or ["ddpbench ended without a message"])[-1].removeprefix(
        "ddpbench: "
    )


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
