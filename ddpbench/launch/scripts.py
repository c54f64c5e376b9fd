"""Start a user's own program in the ranks of one host, with the environment that torchrun sets."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial

from ddpbench.launch import sockets, supervise
from ddpbench.records.store import End
from ddpbench.records.terminal_text import tell

ADDRESS = "127.0.0.1"
# After one has failed: for the others to end by themselves, then after SIGTERM.
GRACE_SECONDS = (10.0, 10.0)


def run_on_host(line: Sequence[str], nproc: int) -> End:
    """Run a command line in nproc ranks of this host; return how they ended, as `await_all`."""
    ranks: list[subprocess.Popen[bytes]] = []
    with sockets.listen(ADDRESS, 0) as server, forward_to(ranks) as received:
        port = int(server.getsockname()[1])
        ranks.extend(start_rank(line, rank, nproc, port) for rank in range(nproc))
        # The ranks import torch, too; their connections wait in the socket meanwhile.
        store = sockets.serve_on(server, ADDRESS, timedelta(minutes=5))
        end = await_all(ranks, received)
        del store  # not before the ranks have ended
    return end


def start_rank(line: Sequence[str], rank: int, nproc: int, port: int) -> subprocess.Popen[bytes]:
    """Start a rank in a session of its own: Ctrl-C reaches it once, from here.

    Rank 0 keeps the standard input, for a debugger or a question. Scripts and libraries find the
    environment variables of torchrun.
    """
    environ = {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(nproc)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(port),
        # The store already listens in this process, so it outlives any rank.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": f"ddpbench-{ADDRESS}-{port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    if nproc > 1:
        environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return subprocess.Popen(
        line,
        stdin=subprocess.DEVNULL if rank else None,
        start_new_session=True,
        env={**os.environ, **environ},
    )


@contextlib.contextmanager
def forward_to(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Meanwhile forward signals to these ranks, and note them; at the end, leave no rank behind.

    As under torchrun, closing the terminal ends the ranks too, unless nohup prevents it.
    """
    others = (signal.SIGHUP, signal.SIGQUIT)
    heeded = [number for number in others if signal.getsignal(number) != signal.SIG_IGN]
    with supervise.forward_signals(ranks, heeded) as received:
        try:
            yield received
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    supervise.send_signal(rank.pid, signal.SIGKILL)
                rank.wait()


def await_all(ranks: Sequence[subprocess.Popen[bytes]], received: Sequence[int]) -> End:
    """Wait for all ranks; return the highest exit code of those that ended by themselves.

    Once one has failed, the rest must end in time. If signals ended all that failed, return 130 for
    Ctrl-C, else 5. Name the ranks that a signal ended first, unless it was one of `received` or a
    watchdog has printed its verdict.
    """
    wait = partial(supervise.await_first_end, seconds=supervise.LOOK_SECONDS)
    failed = supervise.await_children(ranks, wait, received, GRACE_SECONDS)
    codes = [rank.returncode for rank in ranks]
    reasons = []
    for rank in failed:
        name = supervise.describe_process(f"rank {rank}", ranks[rank].pid)
        death = supervise.describe_death(name, -codes[rank]) if codes[rank] < 0 else ""
        reasons.append(death.partition(". ")[0] or f"{name} ended with exit code {codes[rank]}")
        if death and 5 not in codes:
            tell(death)
    code = max(codes)
    if code <= 0 and min(codes) < 0:
        code = 130 if -signal.SIGINT in codes else 5
    if code and received and not reasons:
        reason = f"interrupted by {signal.Signals(received[0]).name}"
        return End("interrupted", reason, code)
    return End("failed" if code else "complete", "; ".join(reasons) or None, code)
