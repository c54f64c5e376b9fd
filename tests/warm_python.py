"""Start Python programs as forks of a Python that has imported torch, which saves seconds.

`warm_python()` replaces `[sys.executable]` in a command line. It starts this module, small and
without torch: it sends its words, folder, environment, cores and streams to a server, which forks
and runs them as `python WORDS…` would. It passes signals on and ends as the program does. The
server has imported other packages, but nothing of ddpbench. `ps` shows the program's words, but the
program isn't a child of the caller, and /proc has the server's environment for it. Started on a
simulated host, it runs there. PYTHON_EXEC in the environment becomes the program's sys.executable;
torchrun uses it, too.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from functools import cache
from importlib import import_module
from typing import Any

PRELOADED = (
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",  # which the first optimizer imports
    "scipy.special",
    "pandas",
    "pyarrow.parquet",
    "msgspec",
    "psutil",
)
SHOWN_BYTES = 4096  # of a program's words, in `ps`
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@cache
def warm_python() -> list[str]:
    """Return the words that replace `python` in a command line; they work until pytest ends.

    Libraries that read the environment when they are loaded have read OMP_NUM_THREADS=1.
    """
    listener = socket.socket(socket.AF_UNIX)
    # A file, as simulated hosts share no abstract names. The server removes it.
    path = tempfile.mkdtemp(prefix="warm-python-") + "/socket"
    listener.bind(path)
    listener.listen(64)
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    server = subprocess.Popen(
        [sys.executable, __file__, "serve", str(listener.fileno()), path, "-" * SHOWN_BYTES],
        stdin=subprocess.PIPE,
        pass_fds=[listener.fileno()],
        # With NVML asked whether there is a GPU, CUDA stays untouched, and forks can use it.
        env={**environ, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        start_new_session=True,
    )
    listener.close()

    def end() -> None:
        assert server.stdin is not None
        server.stdin.close()
        server.wait(30)

    atexit.register(end)
    return [sys.executable, "-IS", __file__, "run", path]


def _ask(path: str, words: list[str]) -> int:
    """Have the server run `python WORDS…`; return its status, as `os.waitpid` does."""
    request = {"words": words, "environ": dict(os.environ), "cpus": [*os.sched_getaffinity(0)]}
    body = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [len(body).to_bytes(4, "big")], [0, 1, 2, os.open(".", os.O_PATH)])
        server.sendall(body)
        for number in PASSED_ON:
            signal.signal(number, lambda received, _: server.send(bytes([received])))
        status = server.recv(4, socket.MSG_WAITALL)
    return int.from_bytes(status, "big") if status else 1 << 8


def _serve(listener: socket.socket, path: str) -> dict[str, Any]:
    """Fork for each request until standard input ends; return, in the fork, what it must run."""
    from pathlib import Path

    for name in PRELOADED:
        import_module(name)
    gc.collect()
    gc.freeze()  # a program does not look through what was imported, least of all at its end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        if 0 in select.select([listener, 0], [], [])[0]:
            shutil.rmtree(Path(path).parent)
            os._exit(0)
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return _watch_over(client)
        client.close()


def _watch_over(client: socket.socket) -> dict[str, Any]:
    """Fork the program, and end with it or with its client; return, in the fork, what it runs."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, streams, _, _ = socket.recv_fds(client, 4, 4)
    body = client.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
    program = os.fork()
    if program == 0:
        _enter_namespaces(client)
        client.close()
        os.setsid()
        os.fchdir(streams.pop())
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return dict(json.loads(body))
    for stream in (0, 1, 2, *streams):
        os.close(stream)
    end = os.pidfd_open(program)
    while end not in select.select([client, end], [], [])[0]:
        received = client.recv(1)
        os.kill(program, received[0] if received else signal.SIGKILL)
        if not received:
            break
    client.send(os.waitpid(program, 0)[1].to_bytes(4, "big"))
    os._exit(0)


def _enter_namespaces(client: socket.socket) -> None:
    """Go to the client's network, host name and files in /etc, if it is on a simulated host."""
    import ctypes
    from pathlib import Path

    pid, _, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    for name in ("net", "uts", "mnt"):
        theirs = Path(f"/proc/{pid}/ns/{name}")
        if theirs.readlink() != Path(f"/proc/self/ns/{name}").readlink():
            namespace = os.open(theirs, os.O_RDONLY)
            if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
                raise OSError(ctypes.get_errno(), f"setns {theirs}")
            os.close(namespace)


def _show_words(words: list[str]) -> None:
    """Write these words over those that the server was started with, for `ps`."""
    import ctypes
    from pathlib import Path

    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    shown = "\0".join([sys.executable, *words]).encode(errors="surrogateescape")
    ctypes.memmove(begin, shown[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)


def _run(words: list[str], environ: dict[str, str], cpus: list[int]) -> None:
    """Run what `python WORDS…` runs, in a module __main__ of its own."""
    import runpy
    from pathlib import Path
    from types import ModuleType

    os.environ.clear()
    os.environ.update(environ)
    os.sched_setaffinity(0, cpus)
    _show_words(words)
    if environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    sys.executable = environ.get("PYTHON_EXEC", sys.executable)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    sys.path[:1] = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first, *rest = words
    if first == "-u":
        sys.stdout.reconfigure(write_through=True)
        first, *rest = words = rest
    sys.argv = rest if first == "-m" else words
    if first == "-m":
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(rest[0], main.__dict__)
    else:
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _run(**_serve(socket.socket(fileno=int(sys.argv[2])), sys.argv[3]))
    else:
        status = _ask(sys.argv[2], sys.argv[3:])
        if os.WIFSIGNALED(status):
            if os.WTERMSIG(status) in PASSED_ON:
                signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
            os.kill(os.getpid(), os.WTERMSIG(status))
        sys.exit(os.waitstatus_to_exitcode(status))
