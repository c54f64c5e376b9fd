"""Run a training script unmodified in this rank, and show why it is slow.

torchrun, mpirun or srun starts the ranks; `ddpbench watch` starts them on this host. All options
before the script belong to ddpbench, all after it to the script.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ddpbench.catalog import backends
from ddpbench.launch.placement import Refused, read_placement, require_world_size
from ddpbench.runtime import devices
from ddpbench.session import options

NOTE = "DDPBENCH_WATCH_NOTE"  # names a file in which rank 0 notes the folder of the stored run
USAGE = """%(prog)s [options] SCRIPT [the script's own options]
       %(prog)s [options] -m MODULE [the module's own options]"""
OPTIONS = """
--ranks       number of ranks to start on this host if no launcher started them (default: 2, or one
              per GPU)
--verify      compare the replicas bit for bit in every N-th step (default: never)
--timeout     report a hang after this time and end the job with exit code 5 (default: never)
--output      folder for the stored run; none stores nothing
--prometheus  serve metrics for Prometheus on this port (default: no metrics)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command. Imports no torch."""
    parser.usage = USAGE
    add = options.add_group(parser, "watch", OPTIONS)
    add("-n", "--ranks", kind=options.whole(1), metavar="N")
    add("--verify", kind=options.whole(1), metavar="N")
    add("--timeout", kind=options.whole(1), metavar="SECONDS")
    add("--output", default="results", metavar="FOLDER")
    add("--prometheus", kind=options.whole(1, 65535), metavar="PORT")
    # All that follows a script or -m is the program's.
    parser.add_argument("-m", nargs=argparse.REMAINDER, dest="module", help=argparse.SUPPRESS)
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


class Request(NamedTuple):
    """What a command line asks for.

    options: the arguments of `ddpbench.watch`; program: a script or a module, and its own words.
    """

    ranks: int | None
    options: dict[str, Any]
    program: list[str]
    is_module: bool


def parse(words: Sequence[str], prog: str = "python -m ddpbench.watch") -> Request:
    """Return what a command line asks for.

    Raises Refused without a program, and if -n contradicts the launcher that has started the ranks;
    ends the process with exit code 2 for a wrong option.
    """
    parser = options.Parser(prog=prog, description=__doc__)
    add_arguments(parser)
    namespace = parser.parse_args(words)
    require_world_size(namespace.ranks, read_placement())
    arguments = {
        "verify": namespace.verify or 0,
        "timeout": namespace.timeout or 0.0,
        "output": None if namespace.output == "none" else Path(namespace.output).absolute(),
        "prometheus": namespace.prometheus,
    }
    is_module = namespace.module is not None
    program = [*(namespace.module or ()), *namespace.program]
    if not program:
        raise Refused("no program: write the path of a script, or -m and the name of a module")
    if not is_module and not Path(program[0]).is_file():
        raise Refused(f"{program[0]} is not a file: write the path of a script, or -m MODULE")
    return Request(namespace.ranks, arguments, program, is_module)


def usual_ranks() -> int:
    """Return how many ranks to start on this host if the user names no number."""
    return devices.get(backends.choose_device(("auto",), "auto")).usual_ranks()
