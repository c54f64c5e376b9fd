"""A real Slurm cluster on this machine for the tests: a controller and two nodes, n0 and n1.

Configuration, munge key and socket, state and logs are in one folder, and daemons listen on free
ports of 127.0.0.1. The node names cannot be resolved, as on some clusters. It needs root, because
slurmd starts tasks as the user who submitted them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from command_lines import clean_environment
from patience import PATIENCE_SECONDS

from ddpbench.launch.placement import free_port

NODES = ("n0", "n1")
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "sinfo", "setpriv")
SYSTEM = "/usr/sbin:/sbin"  # where the daemons are, even if PATH lacks it
CONFIGURATION = """\
ClusterName=ddpbench
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
TmpFS={folder}/tmp.%n
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
LaunchParameters=use_interactive_step
MpiDefault=none
ReturnToService=2
MailProg=/bin/true
PartitionName=all Nodes=n0,n1 Default=YES State=UP
"""
NODE = "NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4\n"


def explain_missing() -> str | None:
    """Return the reason why Slurm cannot run here, or None if it can."""
    path = f"{os.environ.get('PATH', '')}:{SYSTEM}"
    if missing := [name for name in NEEDED if shutil.which(name, path=path) is None]:
        return f"{', '.join(missing)} not found: Debian's slurm-wlm and munge have them"
    return None if os.geteuid() == 0 else "only root can run a Slurm"


@dataclass(frozen=True)
class Cluster:
    """A running Slurm: the environment with which Slurm's commands reach it."""

    environ: Mapping[str, str]

    def call(
        self, *words: str | Path, cwd: Path, seconds: float = PATIENCE_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Run a command until it ends."""
        return subprocess.run(
            words, cwd=cwd, env=dict(self.environ), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip

    def begin(self, *words: str | Path, cwd: Path) -> subprocess.Popen[str]:
        """Start a command."""
        return subprocess.Popen(
            words, cwd=cwd, env=dict(self.environ), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def list_states(self) -> list[str]:
        """Return the state of each node."""
        return self.call("sinfo", "-h", "-N", "-o", "%T", cwd=Path()).stdout.split()

    def until(self, happened: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> bool:
        """Wait for an event; return whether it happened within `seconds`."""
        deadline = time.monotonic() + seconds
        while not (result := happened()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return result


@contextlib.contextmanager
def start_cluster(folder: Path) -> Iterator[Cluster]:
    """Start a Slurm of two idle nodes in this folder; stop it at the end.

    Raises RuntimeError with the daemons' logs when it does not come up.
    """
    for name in ("munge", "state", *NODES, *(f"tmp.{node}" for node in NODES)):
        (folder / name).mkdir(mode=0o711)
    host = os.uname().nodename.split(".")[0]
    configuration = folder / "slurm.conf"
    ports = {"controller": free_port()}
    configuration.write_text(
        CONFIGURATION.format(host=host, folder=folder, **ports)
        + "".join(NODE.format(node=node, host=host, port=free_port()) for node in NODES)
    )
    key = folder / "munge" / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    environ = clean_environment(SLURM_CONF=str(configuration), MASTER_ADDR="127.0.0.1")
    environ["PATH"] = f"{environ['PATH']}:{SYSTEM}"
    munge = {
        f"--{what}-file": folder / "munge" / what for what in ("key", "pid", "log", "seed")
    } | {"--socket": folder / "munge" / "socket"}
    daemons = [
        ["munged", "--foreground", "--force", *(f"{name}={path}" for name, path in munge.items())],
        ["slurmctld", "-D", "-f", str(configuration)],
        *(["slurmd", "-D", "-f", str(configuration), "-N", node] for node in NODES),
    ]
    with contextlib.ExitStack() as running:
        for number, words in enumerate(daemons):
            running.enter_context(_daemon(words, environ, folder / f"{number}-{words[0]}.log"))
        up = Cluster(environ)
        if not up.until(lambda: up.list_states() == ["idle"] * len(NODES)):
            logs = "".join(
                f"\n{log.name}: {log.read_text()[-600:]}" for log in folder.glob("*.log")
            )
            raise RuntimeError(f"no idle Slurm, nodes {up.list_states()}:{logs}")
        try:
            yield up
        finally:
            up.call("scancel", "--user", "root", "--full", "--signal", "KILL", cwd=folder)
            up.until(lambda: not up.call("squeue", "-h", cwd=folder).stdout, 10)


@contextlib.contextmanager
def _daemon(words: list[str], environ: Mapping[str, str], log: Path) -> Iterator[None]:
    """Run a daemon in the foreground; the kernel kills it when this process ends."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *words],
            env=dict(environ), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
