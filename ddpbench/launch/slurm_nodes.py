"""Address of a Slurm node: its name need not resolve, and Slurm knows how to reach it."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess

from ddpbench.launch.placement import Placement, Refused

SCONTROL_SECONDS = 10.0


def node_address(name: str, placement: Placement) -> str:
    """The name if it resolves here, else the address by which Slurm reaches the node.

    Raises Refused if there is neither; the first rank of each such node reports it.
    """
    if _resolves(name):
        return name
    address = re.search(r"\bNodeAddr=(\S+)", _scontrol("show", "node", name))
    if address and _resolves(address[1]):
        return address[1]
    raise Refused(
        f"the ranks would meet on {name}, the first node of this step, but {socket.gethostname()} "
        "cannot resolve that name, and scontrol shows no address for it: give the address of rank "
        "0 with --master-addr",
        speaker=placement.rank if placement.local_rank == 0 else -1,
    )


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):
        return False
    return True


def _scontrol(*arguments: str) -> str:
    """The output of scontrol; empty if it is missing, fails or is late."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            ["scontrol", "--oneliner", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SCONTROL_SECONDS,
            check=False,
        ).stdout
    return ""
