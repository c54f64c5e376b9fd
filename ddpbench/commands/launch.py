"""Start ranks on several hosts, with a different number on each if you like.

On every node, with its own --node-rank:
python -m ddpbench launch --node-rank 1 --ranks-per-node 4,4,2,2 --master-addr 10.0.0.1 \\
    -- collectives --op all_reduce
With a file of lines "NAME slots=N", node 0 first, each node finds itself in the list:
python -m ddpbench launch --hosts hosts.txt -- ddp --workload mlp
On one host, which starts the others over ssh:
python -m ddpbench launch --hosts hosts.txt --ssh -- collectives
Your own script, alone or watched:
python -m ddpbench launch --node-rank 1 --ranks-per-node 4,4,2,2 --master-addr 10.0.0.1 \\
    -- watch train.py --epochs 3
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

from ddpbench.launch import family, nodes, processes, scripts, supervise
from ddpbench.launch.nodes import Meeting, Nodes
from ddpbench.launch.placement import Refused
from ddpbench.launch.processes import Child
from ddpbench.launch.supervise import Deadline, Watch
from ddpbench.nested_runs.command_line import IN_RANKS, check
from ddpbench.records.wording import did_you_mean, list_choices
from ddpbench.session import options
from ddpbench.watch import command as watch_command
from ddpbench.watch.program.script import Program

GROUP = "measure"
HELP = "start ranks on several hosts, with a different number on each if you like"
PORT = 29500
REPEATED_NPROC = "leave out -n: --ranks-per-node or --hosts has the number of ranks"
PROGRAMS = ("watch", "your script.py", "-m MODULE")
SCRIPT = re.compile(r"/|\.(pyc?|zip)$")  # a name like this is no command
SSH_FAILED = 255  # exit code of ssh itself; any other comes from the command
# Variables that the ranks on other hosts need too; a launcher's own variables stay here.
SHARED = re.compile(r"(NCCL|GLOO|TORCH|OMP|MKL|UCX)_|PYTHONPATH$")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command; imports no torch."""
    _add_nodes(parser)
    _add_ssh(parser.add_argument_group("all nodes from one host"))
    add_command(parser, PROGRAMS)


NODES = f"""
--ranks-per-node  number of ranks on each node, node 0 first
--hosts           file with a line "NAME slots=N" for each node, node 0 first; replaces
                  --ranks-per-node
--init-method     how nodes meet: tcp://HOST:PORT, or env:// for MASTER_ADDR and MASTER_PORT
--master-addr     host name or address of node 0 (default: the first of --hosts)
--master-port     port on node 0 (default: {PORT})
--timeout         how long to wait for all nodes (default: 60); the command has its own --timeout
--node-rank       number of this node, from 0 (default with --hosts: found by name or address)
"""


def _add_nodes(parser: argparse.ArgumentParser) -> None:
    title = "nodes; all options but --node-rank must be the same on each node"
    add = options.add_group(parser, title, NODES)
    add("--ranks-per-node", kind=_ranks, metavar="N,N,…")
    add("--hosts", kind=Path, metavar="FILE")
    add("--init-method", kind=options.init_method, metavar="URL")
    add("--master-addr", metavar="HOST")
    add("--master-port", kind=options.whole(1, 65535), metavar="PORT")
    add("--timeout", kind=options.positive, default=60.0, metavar="SECONDS")
    add("--node-rank", kind=options.whole(0), metavar="I")


def _add_ssh(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--ssh", action="store_true", help="start every node of --hosts; the other hosts over ssh")
    add(
        "--ssh-command",
        default="ssh -o BatchMode=yes",
        metavar="WORDS",
        help="ssh with its options (default: %(default)s)",
    )
    add(
        "--remote-python",
        default=sys.executable,
        metavar="PATH",
        help="Python on the other hosts (default: the path of this one)",
    )
    add(
        "--remote-dir",
        type=Path,
        metavar="PATH",
        help="working directory on the other hosts (default: the path of this one)",
    )
    add("--signals-from-stdin", action="store_true", help=argparse.SUPPRESS)


def add_command(parser: argparse.ArgumentParser, more: Sequence[str] = ()) -> None:
    """Add the command that the ranks run, after `--`. more: what it may be besides IN_RANKS."""
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help=f"command that the ranks run: {list_choices([*IN_RANKS, *more])}, with its options",
    )


def _ranks(text: str) -> tuple[int, ...]:
    """Parse the value of `--ranks-per-node`."""
    if re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        return tuple(map(int, text.split(",")))
    raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers from 1 on: write 4,4,2,2")


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Start this node's ranks, or with --ssh every node's; return the exit code.

    On node 0 it is that of all nodes. Raises Refused.
    """
    script = read_script(namespace.command)
    command = script or read_command(namespace.command, PROGRAMS)
    all_nodes = _nodes(namespace)
    address, port = _master(namespace, all_nodes)
    if namespace.ssh:
        return _over_ssh(namespace, all_nodes, address, port, command)
    index = _index(namespace, all_nodes)
    if namespace.signals_from_stdin:
        threading.Thread(target=_obey_stdin, daemon=True).start()
    meeting = nodes.meet(all_nodes, index, address, port, namespace.timeout)
    if script:
        line = [sys.executable, *_watched(script)]
        code = scripts.await_all(
            scripts.start(line, all_nodes, index, address, port), meeting.has_failed
        )
    else:
        code = _run_command(command, meeting, address, port)
    return meeting.end(code)


def _run_command(command: list[str], meeting: Meeting, address: str, port: int) -> int:
    """Run a command of ddpbench in the ranks of this node; return its exit code."""
    options = check(command)
    with family.open_family() as kin:
        nproc = meeting.nodes.ranks[meeting.index]
        watch = Watch(kin, nproc, Deadline(options.timeout, options.watchdog == "end"))
        line = [sys.executable, "-m", f"ddpbench.{command[0]}", *command[1:]]
        ranks = []
        for environ in meeting.nodes.environ(meeting.index, address, port):
            ranks.append(processes.start_child(line, {**environ, **kin.environ()}))
            pid = ranks[-1].process.pid
            kin.add(pid)
            watch.ranks[int(environ["RANK"])] = psutil.Process(pid)
        with supervise.watch_ranks(watch):
            return processes.await_all(ranks, meeting.has_failed, watch)


def read_script(words: Sequence[str]) -> list[str]:
    """Return the words that start a user's script, or `watch` with these; [] for another command.

    Raises Refused for a script that does not exist, and for -n.
    """
    first, *rest = (words[1:] if words[:1] == ["--"] else words) or [""]
    if first == "watch":
        namespace, program = watch_command.parse(rest, "ddpbench watch")
        if namespace.nproc is not None:
            raise Refused(REPEATED_NPROC)
    elif first not in IN_RANKS and (first.startswith("-m") or SCRIPT.search(first)):
        program = Program.of([first, *rest])
    else:
        return []
    program.require()
    return [first, *rest]


def _watched(script: list[str]) -> list[str]:
    return ["-m", "ddpbench.watch", *script[1:]] if script[0] == "watch" else script


def read_command(words: Sequence[str], more: Sequence[str] = ()) -> list[str]:
    """Return the command that the ranks run. Its options are checked, before anything starts.

    more: what it may be besides IN_RANKS, for the sentence. Raises Refused.
    """
    name, *rest = (words[1:] if words[:1] == ["--"] else words) or [""]
    if name not in IN_RANKS:
        problem = f"unknown command {name!r}" if name else "no command"
        raise Refused(
            f"{problem} after --: choose {list_choices([*IN_RANKS, *more])}"
            f"{did_you_mean(name, [*IN_RANKS, *more])}"
        )
    options = check([name, *rest])
    for option in ("init_method", "master_addr", "master_port"):
        if getattr(options, option) is not None:
            raise Refused(f"give --{option.replace('_', '-')} before the --, to launch")
    if options.nproc is not None:
        raise Refused(REPEATED_NPROC)
    return [name, *rest]


def _nodes(namespace: argparse.Namespace) -> Nodes:
    if (namespace.hosts is None) == (namespace.ranks_per_node is None):
        raise Refused(
            "give the number of ranks on each node: --ranks-per-node 4,4,2,2 or --hosts FILE"
        )
    if namespace.hosts is None and namespace.ssh:
        raise Refused("--ssh needs the names of the nodes: give --hosts FILE")
    return (
        Nodes(namespace.ranks_per_node)
        if namespace.hosts is None
        else nodes.read_hosts(namespace.hosts)
    )


def _index(namespace: argparse.Namespace, all_nodes: Nodes) -> int:
    """Return which node this is."""
    count, index = len(all_nodes.ranks), namespace.node_rank
    if index is not None:
        if index >= count:
            raise Refused(
                f"--node-rank {index} is not one of the {count} nodes: choose 0 to {count - 1}"
            )
        return int(index)
    if not all_nodes.names:
        raise Refused(f"give this node's --node-rank, 0 to {count - 1}")
    local = nodes.find_local_nodes(all_nodes)
    if len(local) != 1:
        which = f"nodes {', '.join(map(str, local))}" if local else "none of the nodes"
        raise Refused(f"this host is {which} of --hosts {namespace.hosts}: give its --node-rank")
    return local[0]


def _master(namespace: argparse.Namespace, all_nodes: Nodes) -> tuple[str, int]:
    """Return the address and the port of node 0. Raises Refused."""
    address, port = namespace.master_addr, namespace.master_port
    if namespace.init_method is not None:
        if address is not None or port is not None:
            raise Refused(
                "--init-method has the address of node 0: leave out --master-addr and --master-port"
            )
        if namespace.init_method.startswith("file://"):
            raise Refused("nodes meet over TCP: write --init-method tcp://HOST:PORT")
        if namespace.init_method == "env://":
            address, port = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
            if not address or not (port or "").isdecimal():
                raise Refused("env:// needs MASTER_ADDR and MASTER_PORT in the environment")
        else:
            address, _, port = namespace.init_method.removeprefix("tcp://").rpartition(":")
    address = address or (all_nodes.names[0] if all_nodes.names else None)
    if address is None:
        raise Refused("give the host name or address of node 0: --master-addr HOST")
    return str(address), int(port or PORT)


def _over_ssh(
    namespace: argparse.Namespace, all_nodes: Nodes, address: str, port: int, command: list[str]
) -> int:
    """Start `launch` on every node, on this host without ssh; return the exit code.

    They read signals as lines on stdin, which ends when this process ends: ssh passes on none.
    """
    local = nodes.find_local_nodes(all_nodes)
    same = ["-m", "ddpbench", "launch", "--signals-from-stdin"]
    same += ["--timeout", f"{namespace.timeout:g}"]
    same += ["--ranks-per-node", ",".join(map(str, all_nodes.ranks))]
    same += ["--master-addr", address, "--master-port", str(port)]
    shared = [f"{name}={value}" for name, value in os.environ.items() if SHARED.match(name)]
    children = []
    for index, name in enumerate(all_nodes.names):
        words = [*same, "--node-rank", str(index), "--", *command]
        if index in local:
            words = [sys.executable, *words]
        else:
            there = shlex.join(["env", *shared, namespace.remote_python, *words])
            there = f"cd {shlex.quote(str(namespace.remote_dir or Path.cwd()))} && exec {there}"
            words = [*shlex.split(namespace.ssh_command), name, there]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
        children.append(Child(process, _signal_sender(process)))
    code = processes.await_all(children)
    closed = [
        all_nodes.label(index)
        for index, child in enumerate(children)
        if child.process.returncode == SSH_FAILED and index not in local
    ]
    if closed:
        raise Refused(
            f"ssh failed for node {', '.join(closed)}: `{namespace.ssh_command} NAME true` must "
            "work without a password"
        )
    return code


def _signal_sender(process: subprocess.Popen[bytes]) -> Any:
    def send(number: int) -> None:
        assert process.stdin is not None
        process.stdin.write(f"{number}\n".encode())
        process.stdin.flush()

    return send


def _obey_stdin() -> None:
    """Raise the signals that come as lines on stdin; end when it ends, with its sender."""
    for line in sys.stdin:
        with contextlib.suppress(ValueError):
            os.kill(os.getpid(), int(line))
    os.kill(os.getpid(), signal.SIGTERM)
