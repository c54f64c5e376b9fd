"""Type options at random: each command must end with a known exit code and one sentence.

python tests/fuzz_options.py --cases 10000 --seed 1

It reads options and choices from the commands' parsers, so it tries a new option without a change
here. A command runs in this process until it would start another. The same seed tries the same
command lines.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from command_lines import ROOT
from fuzz_harness import Tally, fault_of, main, typed
from in_process import call_in_process, forbid_processes

from ddpbench import cli
from ddpbench.launch import placement
from ddpbench.session import options

# Values that nobody means but a shell may pass. No path leads out of the working folder.
NASTY = (
    "", " ", ",", "a,,b", "-", "--", "-1", "0", "00", "1", "2", "1e999", "nan", "inf", "-0",
    "1e-320", "1_000", "0x10", "9" * 5000, "2**64", str(2** 64), "٣", "²", "é", "µ", "\u202e",
    "\x1b[31m", "a\nb", "\r", "\x07", "\udcff\udcfe", "%s", "%(prog)s", "{}", "{0}", "$HOME", "~",
    "*", "a=b", "=", ":", "::", "./x", "x/run.json", "no/such", ".", "..", "run",
    "run/run.json", "last", "a log", "empty", "binary", "/proc/x", "/dev/null", "/dev/null/x",
    "x" * 300, "x" * 5000, ".x", "x.", "a.b:c", "4:64M:x4", "8:4:x2", "4K,1M", "1T", "0:0:x1",
    "1:1e9:x1", "all", "auto", "gloo", "mpi", "fake", "undefined", "cuda", "rank=0", "kill:step=0",
    "slow:rank=-1", "--help", "-h", "--ranks", "--format=csv", "collectives", "ddp", "doctor",
    "localhost", "1,1", "0,1", "NAME=1", "3%",
)  # fmt: skip


def read_actions() -> dict[tuple[str, ...], list[argparse.Action]]:
    """Return the argparse actions of each command and of each subcommand."""
    actions = {}
    for name in cli.list_names():
        command = cli.load(name)
        parser = options.Parser(prog=f"ddpbench {name}")
        command.add_arguments(parser)
        actions[(name,)] = parser._actions
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for sub, inner in action.choices.items():
                    actions[(name, sub)] = inner._actions
    return actions


def choose_command_line(
    rng: random.Random, actions: dict[tuple[str, ...], list[argparse.Action]]
) -> list[str]:
    """Choose a command and some of its options and positionals, mostly with valid values."""
    command = rng.choice(list(actions))
    words = list(command)
    sense = rng.choice(
        (0.5, 0.95)
    )  # share of valid values; if all are valid, the command goes further
    for action in rng.sample(
        actions[command], min(len(actions[command]), rng.choice((0, 1, 1, 2, 3, 6)))
    ):
        if action.option_strings:
            words.append(rng.choice(action.option_strings))
        if action.nargs != 0:
            value = _choose_value(rng, action, sense)
            if action.option_strings and rng.random() < 0.2:
                words[-1] += f"={value}"
            else:
                words.append(value)
    if (
        any(action.nargs == argparse.REMAINDER for action in actions[command])
        and rng.random() < 0.5
    ):
        words += [rng.choice(("--", "", "-")), *choose_command_line(rng, actions)][
            : rng.randint(1, 6)
        ]
    while rng.random() < (1 - sense) / 4:
        words.insert(rng.randint(0, len(words)), rng.choice(NASTY))
    return words


def choose_environment(rng: random.Random) -> dict[str, str]:
    """Return mostly no variables; now and then those of a launcher, or something similar."""
    if rng.random() < 0.95:
        return {}
    names = [name for _, *each in placement._VARIABLES for name in each if name]
    names += ["MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID", "SLURM_JOB_ID", "OMP_NUM_THREADS"]
    values = ("0", "1", "2", "-1", "", "x", "99999", "9" * 30, "µ", "\udcff")
    return {name: rng.choice(values) for name in rng.sample(names, rng.randint(1, 6))}


def _choose_value(rng: random.Random, action: argparse.Action, sense: float) -> str:
    """Choose from the action's choices, from the words of its help, its default, or NASTY.

    sense: the share of values that are not from NASTY.
    """
    choices = [str(choice) for choice in action.choices or ()]
    choices += re.findall(r"[\w.:-]+", (action.help or "").replace("%", "")) if not choices else []
    if isinstance(action.default, (tuple, list)):
        choices += map(str, action.default)
    elif action.default is not None:
        choices.append(str(action.default))
    chosen = rng.choices(choices, k=rng.choice((1, 1, 1, 2))) if choices else []
    return ",".join(chosen) if chosen and rng.random() < sense else rng.choice(NASTY)


@contextlib.contextmanager
def working_folder() -> Iterator[Path]:
    """Work in a temporary folder, deep enough for `..`, with a run, a log and two other files."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as back:
        back.callback(os.chdir, before)
        here = Path(folder) / "a/b/c"
        (here / "results").mkdir(parents=True)
        for name in ("run", "results/stored"):
            shutil.copytree(ROOT / "results/reference/ddp-cpu-2-ranks", here / name)
        (here / "a log").write_text("# OSU MPI Allreduce Latency Test v7.4\n# Size\n4 2.0\n")
        (here / "empty").touch()
        (here / "binary").write_bytes(bytes(range(256)))
        os.chdir(here)
        yield here


def fuzz(rng: random.Random, cases: int) -> Tally:
    """Try so many command lines."""
    tally, actions = Tally(), read_actions()
    with working_folder() as here:
        for _ in range(cases):
            words = choose_command_line(rng, actions)
            extra = choose_environment(rng)
            with forbid_processes(), mock.patch.dict(os.environ, extra):
                outcome = call_in_process(words)
            os.chdir(here)
            silent = bool(extra) and outcome.code == 2 and not outcome.err  # not rank 0
            tally.add(f"{extra} {typed(words)}", outcome, None if silent else fault_of(outcome))
    return tally


if __name__ == "__main__":
    main(__doc__.splitlines()[0], fuzz)
