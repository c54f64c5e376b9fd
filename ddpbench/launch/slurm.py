"""Where the ranks of a Slurm step meet: a node's name need not resolve, Slurm knows its address."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess

from ddpbench.launch.placement import Placement, Refused

SCONTROL_SECONDS = 10.0


def node_address(name: str, place: Placement) -> str:
    """The name, where it resolves here; else the address under which Slurm reaches that node.

    Raises Refused when neither is to be had, told by the first rank of each node that lacks it.
    """
    if _resolves(name):
        return name
    told = re.search(r"\bNodeAddr=(\S+)", _scontrol("show", "node", name))
    if told and _resolves(told[1]):
        return told[1]
    raise Refused(
        f"the ranks would meet on {name}, the first node of this step, but {socket.gethostname()} "
        "finds no address for that name, nor does scontrol tell one: say where rank 0 can be "
        "reached with --master-addr",
        speaker=place.rank if place.local_rank == 0 else -1,
    )


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):
        return False
    return True


def _scontrol(*words: str) -> str:
    """What scontrol prints; nothing where it is missing, fails or is late."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            ["scontrol", "--oneliner", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SCONTROL_SECONDS,
            check=False,
        ).stdout
    return ""
