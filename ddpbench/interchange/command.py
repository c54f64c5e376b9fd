"""Read what a log says about a test besides its results: the command above, the file's name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

LAUNCHER = re.compile(
    r"(?<![\w-])(mpirun|mpiexec(?:\.hydra)?|orterun|prterun|srun|aprun|flux run)\s+(.*)"
)
RANKS = re.compile(r"(?<!\S)(?:--?np?|--ntasks)[ =]*(\d+)(?!\S)")
NODES = re.compile(r"(?<!\S)(?:-N|--nodes)[ =]*(\d+)(?!\S)")
PER_NODE = re.compile(r"(?<!\S)--n?tasks-per-node[ =]*(\d+)(?!\S)")
NAMED = re.compile(r"(?<![A-Za-z0-9])(?:np|n|w)([1-9]\d*)(?![A-Za-z0-9])")
CONTINUED = re.compile(r"\\\s*\n(?:>\s)?\s*")


def join_commands(lines: Sequence[str]) -> list[str]:
    """Join the lines that end in a backslash with the next; return the last line first."""
    return CONTINUED.sub(" ", "\n".join(lines)).split("\n")[::-1]


def count_started_ranks(command: str, program: str) -> int | None:
    """Return how many processes a command starts, read before the program's name; else None."""
    launcher = LAUNCHER.search(command)
    if launcher is None:
        return None
    options = launcher[2].partition(program)[0] if program else launcher[2]
    if ranks := RANKS.search(options):
        return int(ranks[1]) or None
    nodes, per_node = NODES.search(options), PER_NODE.search(options)
    # The -N of mpirun is the number of processes per node.
    if launcher[1] in ("srun", "flux run") and nodes and per_node:
        return int(nodes[1]) * int(per_node[1]) or None
    return None


def read_ranks_in_name(path: Path) -> int | None:
    """Read the number of ranks in the name of a file or its folder: a-n8.log, np4/a.txt."""
    names = (path.name, path.absolute().parent.name)
    return next((int(m[1]) for name in names if (m := NAMED.search(name))), None)
