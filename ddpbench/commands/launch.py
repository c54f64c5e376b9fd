"""Start the ranks of one node of several, which may hold unequal numbers of them.

On every node, with its own --node-rank:
python -m ddpbench launch --node-rank 1 --ranks-per-node 4,4,2,2 --master-addr 10.0.0.1 \\
    -- collectives --op all_reduce
With a file of lines "NAME slots=N" a node finds itself, the first is node 0:
python -m ddpbench launch --hosts hosts.txt -- ddp --workload mlp
On one machine, which starts the others over ssh:
python -m ddpbench launch --hosts hosts.txt --ssh -- collectives
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from ddpbench.launch import family, nodes, processes, supervise
from ddpbench.launch.nodes import Nodes
from ddpbench.launch.placement import Refused
from ddpbench.launch.processes import Child
from ddpbench.launch.supervise import Deadline, Watch
from ddpbench.nested.command_line import IN_RANKS, check
from ddpbench.session import options

GROUP = "measure"
HELP = "start ranks on several hosts, with a different number on each if you like"
PORT = 29500
SSH_FAILED = 255  # ssh's own exit code; any other is that of the command
# What steers the ranks on other machines too; a launcher's own variables stay here.
SHARED = re.compile(r"(NCCL|GLOO|TORCH|OMP|MKL|UCX)_|PYTHONPATH$")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command; imports no torch."""
    add = parser.add_argument_group("the nodes, the same on all of them").add_argument
    add(
        "--ranks-per-node",
        type=_ranks,
        metavar="N,N,…",
        help="how many ranks each node holds, node 0 first",
    )
    add(
        "--hosts",
        type=Path,
        metavar="FILE",
        help='instead: a file with a line "NAME slots=N" for each node, node 0 first',
    )
    add("--init-method", type=options.init_method, metavar="URL", help="tcp://HOST:PORT or env://")
    add(
        "--master-addr",
        metavar="HOST",
        help="where node 0 listens, for all others; default: the first of --hosts",
    )
    add(
        "--master-port",
        type=options.whole(1, 65535),
        metavar="PORT",
        help=f"and on which port; default {PORT}",
    )
    add(
        "--timeout",
        type=options.positive,
        default=60.0,
        metavar="SECONDS",
        help="for all nodes to come; default 60 (the ranks have a --timeout of their own)",
    )
    add = parser.add_argument_group("this node").add_argument
    add(
        "--node-rank",
        type=options.whole(0),
        metavar="I",
        help="its place in the list, from 0; with --hosts it is found by name or address",
    )
    add = parser.add_argument_group("all nodes from one machine").add_argument
    add("--ssh", action="store_true", help="start every node of --hosts, the others over ssh")
    add(
        "--ssh-command", default="ssh -o BatchMode=yes", metavar="WORDS", help="default %(default)s"
    )
    add("--remote-python", default=sys.executable, metavar="PATH", help="default: the one here")
    add("--remote-dir", type=Path, metavar="PATH", help="where they run; default: as here")
    add("--signals-from-stdin", action="store_true", help=argparse.SUPPRESS)
    add_command(parser)


def add_command(parser: argparse.ArgumentParser) -> None:
    """The words of another command, after `--`."""
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help=f"what the ranks do, one of {', '.join(IN_RANKS)}, and its options",
    )


def _ranks(text: str) -> tuple[int, ...]:
    """The type of `--ranks-per-node`."""
    if re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        return tuple(map(int, text.split(",")))
    raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers from 1 on: write 4,4,2,2")


def run(asked: argparse.Namespace, words: Sequence[str]) -> int:
    """Start this node's ranks, or with --ssh every node's; the exit code, in node 0 of all."""
    wanted = command(asked.command)
    given = check(wanted)
    all_nodes = _nodes(asked)
    address, port = _master(asked, all_nodes)
    if asked.ssh:
        return _over_ssh(asked, all_nodes, address, port, wanted)
    index = _index(asked, all_nodes)
    if asked.signals_from_stdin:
        threading.Thread(target=_hear, daemon=True).start()
    meeting = nodes.meet(all_nodes, index, address, port, asked.timeout)
    with family.open_family() as kin:
        watch = Watch(kin, all_nodes.ranks[index], Deadline(given.timeout, given.watchdog == "end"))
        own = [sys.executable, "-m", f"ddpbench.{wanted[0]}", *wanted[1:]]
        ranks = []
        for environ in all_nodes.environ(index, address, port):
            ranks.append(processes.start_child(own, {**environ, **kin.environ()}))
            pid = ranks[-1].process.pid
            kin.add(pid)
            watch.ranks[int(environ["RANK"])] = psutil.Process(pid)
        with supervise.watch_ranks(watch):
            code = processes.await_all(ranks, meeting.has_failed, watch)
    return meeting.end(code)


def command(words: Sequence[str]) -> list[str]:
    """What the ranks are to do, its options checked here: a typo is told once, at once."""
    name, *rest = (words[1:] if words[:1] == ["--"] else words) or [""]
    if name not in IN_RANKS:
        raise Refused(
            f"after -- comes what the ranks do, one of {', '.join(IN_RANKS)}"
            + (f", not {name!r}" if name else "")
        )
    given = check([name, *rest])
    for option in ("init_method", "master_addr", "master_port"):
        if getattr(given, option) is not None:
            raise Refused(f"--{option.replace('_', '-')} belongs before the -- of launch")
    if given.nproc is not None:
        raise Refused("-n goes without launch: --ranks-per-node or --hosts says how many ranks")
    return [name, *rest]


def _nodes(asked: argparse.Namespace) -> Nodes:
    if (asked.hosts is None) == (asked.ranks_per_node is None):
        raise Refused(
            "say how many ranks each node holds: --ranks-per-node 4,4,2,2 or --hosts FILE"
        )
    if asked.hosts is None and asked.ssh:
        raise Refused("--ssh needs the names of the nodes: give --hosts FILE")
    return Nodes(asked.ranks_per_node) if asked.hosts is None else nodes.read_hosts(asked.hosts)


def _index(asked: argparse.Namespace, all_nodes: Nodes) -> int:
    """Which node this is."""
    count, index = len(all_nodes.ranks), asked.node_rank
    if index is not None:
        if index >= count:
            raise Refused(f"--node-rank {index} is none of the {count} nodes 0 to {count - 1}")
        return int(index)
    if not all_nodes.names:
        raise Refused(f"say which of the {count} nodes this is: --node-rank 0 to {count - 1}")
    mine = nodes.find_local_nodes(all_nodes)
    if len(mine) != 1:
        which = f"nodes {', '.join(map(str, mine))} of" if mine else "none of the nodes in"
        raise Refused(f"this machine is {which} --hosts {asked.hosts}: say --node-rank")
    return mine[0]


def _master(asked: argparse.Namespace, all_nodes: Nodes) -> tuple[str, int]:
    """Where node 0 listens."""
    address, port = asked.master_addr, asked.master_port
    if asked.init_method is not None:
        if address is not None or port is not None:
            raise Refused("--init-method says where node 0 listens: leave out --master-addr, -port")
        if asked.init_method.startswith("file://"):
            raise Refused("nodes meet over TCP: write --init-method tcp://HOST:PORT")
        if asked.init_method == "env://":
            address, port = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
            if not address or not (port or "").isdecimal():
                raise Refused("env:// needs MASTER_ADDR and MASTER_PORT in the environment")
        else:
            address, _, port = asked.init_method.removeprefix("tcp://").rpartition(":")
    address = address or (all_nodes.names[0] if all_nodes.names else None)
    if address is None:
        raise Refused("say where node 0 listens: --master-addr HOST")
    return str(address), int(port or PORT)


def _over_ssh(
    asked: argparse.Namespace, all_nodes: Nodes, address: str, port: int, wanted: list[str]
) -> int:
    """A launcher a node; that of this machine without ssh. They take signals as lines on stdin,
    which ends when this process does: ssh passes on no signals."""
    mine = nodes.find_local_nodes(all_nodes)
    same = [
        "-m", "ddpbench", "launch", "--signals-from-stdin", "--timeout", f"{asked.timeout:g}",
        "--ranks-per-node", ",".join(map(str, all_nodes.ranks)),
        "--master-addr", address, "--master-port", str(port),
    ]  # fmt: skip
    shared = [f"{name}={value}" for name, value in os.environ.items() if SHARED.match(name)]
    children = []
    for index, name in enumerate(all_nodes.names):
        words = [*same, "--node-rank", str(index), "--", *wanted]
        if index in mine:
            words = [sys.executable, *words]
        else:
            there = shlex.join(["env", *shared, asked.remote_python, *words])
            there = f"cd {shlex.quote(str(asked.remote_dir or Path.cwd()))} && exec {there}"
            words = [*shlex.split(asked.ssh_command), name, there]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
        children.append(Child(process, _teller(process)))
    code = processes.await_all(children)
    closed = [
        all_nodes.label(index)
        for index, child in enumerate(children)
        if child.process.returncode == SSH_FAILED and index not in mine
    ]
    if closed:
        raise Refused(
            f"ssh failed for node {', '.join(closed)}: `{asked.ssh_command} NAME true` must work "
            "without a password"
        )
    return code


def _teller(process: subprocess.Popen[bytes]) -> Any:
    def tell(number: int) -> None:
        assert process.stdin is not None
        process.stdin.write(f"{number}\n".encode())
        process.stdin.flush()

    return tell


def _hear() -> None:
    """Signals that come as lines on stdin; its end is that of whoever asked for this node."""
    for line in sys.stdin:
        with contextlib.suppress(ValueError):
            os.kill(os.getpid(), int(line))
    os.kill(os.getpid(), signal.SIGTERM)
