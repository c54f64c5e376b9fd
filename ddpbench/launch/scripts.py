"""Start a user's own program in the ranks of one host, with the environment that torchrun sets."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta

from ddpbench.launch import processes, rendezvous
from ddpbench.launch.nodes import Nodes


def run_on_host(line: Sequence[str], nproc: int) -> int:
    """Run a command line in nproc ranks of this host; return their exit code, as `run`."""
    with rendezvous.listen("127.0.0.1", 0) as server:
        port = int(server.getsockname()[1])
        ranks = start(line, Nodes((nproc,)), 0, "127.0.0.1", port)
        # The ranks import torch, too; their connections wait in the socket meanwhile.
        store = rendezvous.serve_on(server, "127.0.0.1", timedelta(minutes=5))
        code = await_all(ranks)
        del store  # not before the ranks have ended
    return code


def start(
    line: Sequence[str], nodes: Nodes, index: int, address: str, port: int
) -> list[processes.Child]:
    """Start a command line in each rank of one node.

    The environment is that of torchrun, by which scripts and libraries find out where they are.
    """
    same = {
        "TORCHELASTIC_RUN_ID": f"ddpbench-{address}-{port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(nodes.world_size),
    }
    if nodes.ranks[index] > 1:
        same["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return [
        processes.start_child(line, {**environ, **same, "ROLE_RANK": environ["RANK"]})
        for environ in nodes.environ(index, address, port)
    ]


def await_all(
    ranks: Sequence[processes.Child], has_failed: Callable[[], bool] = lambda: False
) -> int:
    """Wait for all ranks; return the highest exit code of those that ended by themselves.

    If each other rank was ended by a signal: 130 if by Ctrl-C, else 5.
    """
    processes.await_all(ranks, has_failed)
    codes = [rank.process.returncode for rank in ranks]
    if max(codes) > 0 or min(codes) == 0:
        return max(codes)
    return 130 if -signal.SIGINT in codes else 5
