"""Where the ranks' store listens, and that nothing read from others can run code."""

from __future__ import annotations

import ast
import contextlib
import re
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_lines import ROOT, running_command
from patience import PATIENCE_SECONDS
from warm_python import warm_python

from ddpbench.launch import sockets

EVERYWHERE = {"0.0.0.0", "::"}
SWEEP = (
    "collectives", "--op", "all_reduce", "--sizes", "4K", "--case-time", "0.2", "--launches", "1",
    "--backend", "gloo",
)  # fmt: skip
# A warm Python is no child of the test: it writes its process's number.
NUMBERED = "import os, sys; print(os.getpid(), flush=True); "
DDPBENCH = NUMBERED + "from ddpbench import cli; sys.exit(cli.main(sys.argv[1:]))"


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """Address and port of each listening socket of a process and its children."""
    found = set()
    for each in (process, *process.children(recursive=True)):
        try:
            connections = each.net_connections("tcp")
        except psutil.Error:
            continue
        found |= {(c.laddr.ip, c.laddr.port) for c in connections if c.status == "LISTEN"}
    return found


def seen_listening(code: str, words: list[str], cwd: Path) -> set[tuple[str, int]]:
    """All that a program and its ranks listened on until their end, which must be a good one."""
    seen: set[tuple[str, int]] = set()
    with running_command([*warm_python(), "-c", code, *words], cwd) as process:
        assert process.stdout is not None
        program = psutil.Process(int(process.stdout.readline()))
        until = time.monotonic() + PATIENCE_SECONDS
        while process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(psutil.Error):
                seen |= listening(program)
            time.sleep(0.02)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, err
    return seen


@pytest.mark.thorough
def test_on_one_host_nothing_listens_beyond_it(tmp_path: Path) -> None:
    """Of the launcher and its ranks every socket that ever listened was on loopback: the store, the
    control group, the streams that calibrate. (The tested gloo listens where gloo does in any job,
    which is told to be loopback here.)"""
    seen = seen_listening(DDPBENCH, [*SWEEP, "-n", "2"], tmp_path)
    assert {address for address, _ in seen} == {"127.0.0.1"}


@pytest.fixture
def named_like_loopback(monkeypatch: pytest.MonkeyPatch) -> str:
    """A name that means loopback here, as Debian's /etc/hosts makes of a host's own."""
    real = socket.getaddrinfo

    def look_up(name: str, *rest: Any, **options: Any) -> Any:
        return real("127.0.1.1" if name == "node7" else name, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return "node7"


def test_a_store_listens_where_its_clients_look(named_like_loopback: str) -> None:
    """On the one address that is given; on all only where clients may use another that this host
    cannot tell: a forwarded address, and its own name where that means loopback just here."""

    def where(address: str, one_host: bool) -> str:
        with sockets.listen(address, 0, one_host) as server:
            return str(server.getsockname()[0])

    assert where("127.0.0.1", False) == where("localhost", False) == "127.0.0.1"
    assert where(named_like_loopback, True) == "127.0.1.1"
    assert where(named_like_loopback, False) in EVERYWHERE
    assert where("192.0.2.1", False) in EVERYWHERE  # a forwarder's
    own = [e.address for each in psutil.net_if_addrs().values() for e in each if e.family == 2]
    assert [where(address, False) for address in own] == own


# --- nothing that runs what it reads --------------------------------------------------------------

# torch's flight recorder has lines of code in its pickle only, made and read in one process. The
# watch executes the script that the user names.
ALLOWED = {"ddpbench/hang/flight_recorder.py": {"pickle"}, "ddpbench/watch/__main__.py": {"exec"}}
UNSAFE = re.compile(
    r"pickle|cPickle|marshal|shelve|dill|cloudpickle|joblib|eval|exec|os\.system|os\.popen|"
    r"(torch|np|numpy|yaml)\.load|.*(_object|_object_list|_pickle)"
)


def find_unsafe(text: str) -> set[str]:
    """Return what in a program could run code that somebody else has written."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Call):
            options = {word.arg: ast.unparse(word.value) for word in node.keywords}
            names |= {"eval"} if options.get("shell") == "True" else set()
            if options.get("weights_only") != "True":
                names.add(ast.unparse(node.func))
    return {name for name in names if UNSAFE.fullmatch(name)}


def test_the_package_runs_nothing_that_it_reads() -> None:
    """No pickle, no collective of objects (torch pickles them), no torch.load of more than
    tensors, no eval, no shell. Each of these would be found."""
    for text in ("import pickle", "from pickle import loads", "dist.all_gather_object(a, b)",
                 "torch.load(f)", "torch.load(f, weights_only=False)", "eval(x)",
                 "frame.to_pickle(f)", "subprocess.run(x, shell=True)"):  # fmt: skip
        assert find_unsafe(text), text
    for path in sorted((ROOT / "ddpbench").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        assert find_unsafe(path.read_text()) <= ALLOWED.get(name, set()), name
