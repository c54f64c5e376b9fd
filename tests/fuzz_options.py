"""Options at random: whatever is typed, the end is an exit code of the table and one sentence.

python tests/fuzz_options.py --seconds 600 --seed 1

The options and their choices come from the parsers of the commands, so that a new option is tried
without a change here. A command runs in this process until it would start another; one of 200 runs
as a process too. The same seed tries the same command lines.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from unittest import mock

from command_lines import ROOT
from fuzz_harness import Tally, fault_of, main, process, typed
from in_process import call_in_process, forbid_processes

from ddpbench import cli
from ddpbench.launch import placement
from ddpbench.session import options

# What nobody means, and somebody's shell gives. No path leads out of the folder below.
NASTY = (
    "", " ", ",", "a,,b", "-", "--", "-1", "0", "00", "1", "2", "1e999", "nan", "inf", "-0",
    "1e-320", "1_000", "0x10", "9" * 5000, "2**64", str(2** 64), "٣", "²", "é", "µ", "\u202e",
    "\x1b[31m", "a\nb", "\r", "\x07", "\udcff\udcfe", "%s", "%(prog)s", "{}", "{0}", "$HOME", "~",
    "*", "a=b", "=", ":", "::", "tcp://h", "tcp://h:0", "tcp://h:99999", "tcp://:1",
    "tcp://[::1]:1", "file:///", "env://", "./x", "x/run.json", "no/such", ".", "..", "run",
    "run/run.json", "last", "a log", "empty", "binary", "/proc/x", "/dev/null", "/dev/null/x",
    "x" * 300, "x" * 5000, ".x", "x.", "a.b:c", "4:64M:x4", "8:4:x2", "4K,1M", "1T", "0:0:x1",
    "1:1e9:x1", "all", "auto", "gloo", "mpi", "fake", "undefined", "cuda", "rank=0", "kill:step=0",
    "slow:rank=-1", "--help", "-h", "--nproc", "--format=csv", "collectives", "ddp", "doctor",
    "localhost", "1,1", "0,1", "NAME=1", "3%",
)  # fmt: skip
SHARE_AS_PROCESS = 200


def vocabulary() -> dict[tuple[str, ...], list[argparse.Action]]:
    """The actions of each command, and of each action of a command, from their parsers."""
    found = {}
    for name in cli.list_names():
        command = import_module(f"ddpbench.commands.{name}")
        parser = options.Parser(prog=f"ddpbench {name}")
        command.add_arguments(parser)
        found[(name,)] = parser._actions
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for sub, inner in action.choices.items():
                    found[(name, sub)] = inner._actions
    return found


def command_line(
    rng: random.Random, known: dict[tuple[str, ...], list[argparse.Action]]
) -> list[str]:
    """A command with some of its options and positionals, values often of those that it takes."""
    command = rng.choice(list(known))
    words = list(command)
    sense = rng.choice((0.5, 0.95))  # of the values; where all make sense the command goes further
    for action in rng.sample(
        known[command], min(len(known[command]), rng.choice((0, 1, 1, 2, 3, 6)))
    ):
        if action.option_strings:
            words.append(rng.choice(action.option_strings))
        if action.nargs != 0:
            value = _value(rng, action, sense)
            if action.option_strings and rng.random() < 0.2:
                words[-1] += f"={value}"
            else:
                words.append(value)
    if any(action.nargs == argparse.REMAINDER for action in known[command]) and rng.random() < 0.5:
        words += [rng.choice(("--", "", "-")), *command_line(rng, known)][: rng.randint(1, 6)]
    while rng.random() < (1 - sense) / 4:
        words.insert(rng.randint(0, len(words)), rng.choice(NASTY))
    return words


def environ(rng: random.Random) -> dict[str, str]:
    """Mostly nothing; now and then what a launcher sets, or something like it."""
    if rng.random() < 0.95:
        return {}
    names = [name for _, *each in placement._VARIABLES for name in each if name]
    names += ["MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID", "SLURM_JOB_ID", "OMP_NUM_THREADS"]
    values = ("0", "1", "2", "-1", "", "x", "99999", "9" * 30, "µ", "\udcff")
    return {name: rng.choice(values) for name in rng.sample(names, rng.randint(1, 6))}


def _value(rng: random.Random, action: argparse.Action, sense: float) -> str:
    """A value of the action's choices, of those named in its help, its default, or a nasty one.

    sense: the share of those that are not nasty.
    """
    known = [str(each) for each in action.choices or ()]
    known += re.findall(r"[\w.:-]+", (action.help or "").replace("%", "")) if not known else []
    if isinstance(action.default, (tuple, list)):
        known += map(str, action.default)
    elif action.default is not None:
        known.append(str(action.default))
    some = rng.choices(known, k=rng.choice((1, 1, 1, 2))) if known else []
    return ",".join(some) if some and rng.random() < sense else rng.choice(NASTY)


@contextlib.contextmanager
def place() -> Iterator[Path]:
    """A folder deep enough that `..` stays in it, with a run, a log, and what is neither."""
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


def fuzz(rng: random.Random, seconds: float) -> Tally:
    """Command lines until the time is over."""
    tally, known, until = Tally(), vocabulary(), time.monotonic() + seconds
    with place() as here:
        while time.monotonic() < until:
            words = command_line(rng, known)
            extra = environ(rng)
            with forbid_processes(), mock.patch.dict(os.environ, extra):
                ended = call_in_process(words)
            os.chdir(here)
            silent = bool(extra) and ended.code == 2 and not ended.err  # not rank 0
            tally.add(f"{extra} {typed(words)}", ended, None if silent else fault_of(ended))
            plain = not any("\0" in word for word in words)
            if plain and ended.code is not None and rng.randrange(SHARE_AS_PROCESS) == 0:
                ended = process(words, here)
                tally.add(f"as a process: {typed(words)}", ended, fault_of(ended))
    return tally


if __name__ == "__main__":
    main(__doc__.splitlines()[0], fuzz)
