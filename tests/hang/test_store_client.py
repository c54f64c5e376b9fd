"""A connection to the ranks' store: real sockets and a real store, also one that is stopped."""

import os
import signal
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from command_lines import running_command
from patience import PATIENCE_SECONDS

from ddpbench.hang.status_board import Address, StoreClient, find_store

LOCAL = "127.0.0.1"


def test_a_store_that_accepts_late_is_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    """A client connects once the store accepts connections, and torch prints no C++ stack."""
    busy = socket.create_server((LOCAL, 0), backlog=0)  # which accepts nobody
    port = busy.getsockname()[1]
    queued = [socket.socket() for _ in range(4)]
    for each in queued:
        each.setblocking(False)
        each.connect_ex((LOCAL, port))
    clients: list[StoreClient] = []
    server = Address(LOCAL, port, timedelta(seconds=PATIENCE_SECONDS))
    thread = threading.Thread(target=lambda: clients.append(StoreClient(server)))
    thread.start()
    thread.join(1.0)
    assert not clients
    for each in [busy, *queued]:
        each.close()
    store = dist.TCPStore(LOCAL, port, is_master=True, wait_for_workers=False)
    thread.join(PATIENCE_SECONDS)
    store.set("key", "value")
    assert clients[0].request(PATIENCE_SECONDS, lambda client: client.get("key")) == b"value"
    clients[0].close()
    assert "frame #" not in capfd.readouterr().err


STORE = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def test_no_thread_stays_in_a_store_that_does_not_answer(tmp_path: Path) -> None:
    """If one were still in C++ when the interpreter ends, the process would be aborted."""
    with running_command([sys.executable, "-c", STORE], tmp_path) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        client = StoreClient(find_store(dist.TCPStore("127.0.0.1", port, wait_for_workers=False)))
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert client.request(0.1, lambda store: store.add("left", 1)) is None
        client.close()
    assert "ddpbench-store" not in [thread.name for thread in threading.enumerate()]
