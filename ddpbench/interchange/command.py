"""What a log tells of a test besides its results: the command above them, the name of the file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

LAUNCHER = re.compile(
    r"(?<![\w-])(mpirun|mpiexec(?:\.hydra)?|orterun|prterun|srun|aprun|flux run)\s+(.*)"
)
RANKS = re.compile(r"(?<!\S)(?:--?np?|--ntasks)[ =]*(\d+)(?!\S)")
NODES = re.compile(r"(?<!\S)(?:-N|--nodes)[ =]*(\d+)(?!\S)")
EACH = re.compile(r"(?<!\S)--n?tasks-per-node[ =]*(\d+)(?!\S)")
NAMED = re.compile(r"(?<![A-Za-z0-9])(?:np|n|w)([1-9]\d*)(?![A-Za-z0-9])")
CONTINUED = re.compile(r"\\\s*\n(?:>\s)?\s*")


def commands(lines: Sequence[str]) -> list[str]:
    """The lines with those that end in a backslash joined, the last line first."""
    return CONTINUED.sub(" ", "\n".join(lines)).split("\n")[::-1]


def ranks_of(command: str, program: str) -> int | None:
    """How many processes this command starts, from what stands before the program's name."""
    found = LAUNCHER.search(command)
    if found is None:
        return None
    given = found[2].partition(program)[0] if program else found[2]
    if many := RANKS.search(given):
        return int(many[1]) or None
    nodes, each = NODES.search(given), EACH.search(given)
    # The -N of mpirun is the processes of each node.
    if found[1] in ("srun", "flux run") and nodes and each:
        return int(nodes[1]) * int(each[1]) or None
    return None


def ranks_in_name(path: Path) -> int | None:
    """The number in the name of a file, or of its folder: a-n8.log, np4/a.txt."""
    names = (path.name, path.absolute().parent.name)
    return next((int(m[1]) for name in names if (m := NAMED.search(name))), None)
