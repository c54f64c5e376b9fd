"""The command line of a watch: its own options, then the program, whose words stay untouched."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpbench.catalog import backends
from ddpbench.launch.placement import Refused, read_placement, require_world_size
from ddpbench.present.formats import FORMATS
from ddpbench.runtime import devices
from ddpbench.session import options
from ddpbench.watch.settings import Settings, explain_wrong_port

USAGE = """%(prog)s [options] SCRIPT [the script's own options]
       %(prog)s [options] -m MODULE [the module's own options]"""

DESCRIPTION = """Run a training script unmodified in this rank, and show why it is slow.

torchrun, mpirun or srun starts the ranks; `ddpbench watch` starts them on this host. All options
before the script belong to ddpbench, all after it to the script.
"""
OPTIONS = """
--ranks       number of ranks to start on this host if no launcher started them (default: 2, or one
              per GPU)
--verify      compare the replicas bit for bit in every N-th step (default: never)
--timeout     report a hang after this time and end the job with exit code 5 (default: never)
--every       print a line on the terminal every so many seconds
--output      folder for the stored run; none stores nothing
--prometheus  write metrics for Prometheus: to this file, or serve them on this port (default:
              neither)
--format      format of the table that rank 0 prints to stderr at the end
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command. Imports no torch."""
    parser.usage = USAGE
    add = options.add_group(parser, "watch", OPTIONS)
    add("-n", "--ranks", kind=options.whole(1), metavar="N")
    add("--verify", kind=options.whole(1), metavar="N")
    add("--timeout", kind=options.whole(1), metavar="SECONDS")
    add("--every", kind=options.positive, default=30.0, metavar="SECONDS")
    add("--output", default="results", metavar="FOLDER")
    add("--prometheus", kind=_file_or_port, metavar="FILE|PORT")
    add("--format", default="table", choices=tuple(FORMATS))
    # All that follows a script or -m is the program's.
    parser.add_argument("-m", nargs=argparse.REMAINDER, dest="module", help=argparse.SUPPRESS)
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _file_or_port(text: str) -> str:
    if wrong := explain_wrong_port(text):
        raise argparse.ArgumentTypeError(wrong)
    return text if text.isdecimal() else str(Path(text).absolute())


@dataclass(frozen=True)
class Program:
    """A script or a module, and its own words."""

    name: str
    arguments: tuple[str, ...]
    is_module: bool = False

    @classmethod
    def of(cls, namespace: argparse.Namespace) -> Program:
        """Return the program that a command line starts. Raises Refused if there is none."""
        is_module = namespace.module is not None
        words = [*(namespace.module or ()), *namespace.program]
        if not is_module and words[:1] == ["--"]:
            del words[0]
        if not words and is_module:
            raise Refused("no module after -m: write -m and the name of a module")
        if not words:
            raise Refused("no script: write train.py, or -m and the name of a module")
        return cls(words[0], tuple(words[1:]), is_module)

    def require(self) -> None:
        """Raise Refused if there is no such script."""
        if not self.is_module and not Path(self.name).is_file():
            raise Refused(f"{self.name} is not a file: write the path of a script, or -m MODULE")


def parse(
    words: Sequence[str], prog: str = "python -m ddpbench.watch"
) -> tuple[argparse.Namespace, Program]:
    """Return the options and the program of a command line.

    Raises Refused without a program, and if -n contradicts the launcher that has started the ranks;
    ends the process with exit code 2 for a wrong option.
    """
    parser = options.Parser(prog=prog, description=DESCRIPTION)
    add_arguments(parser)
    namespace = parser.parse_args(words)
    require_world_size(namespace.ranks, read_placement())
    return namespace, Program.of(namespace)


def read_settings(namespace: argparse.Namespace, program: Program) -> Settings:
    """Return the settings that the options ask for."""
    return Settings(
        verify=namespace.verify or 0,
        timeout=namespace.timeout or 0.0,
        every=namespace.every,
        output=None if namespace.output == "none" else Path(namespace.output).absolute(),
        prometheus=namespace.prometheus,
        format=namespace.format,
        script=program.name,
    )


def usual_ranks() -> int:
    """Return how many ranks to start on this host if the user names no number."""
    return devices.get(backends.choose_device(("auto",), "auto")).usual_ranks()
