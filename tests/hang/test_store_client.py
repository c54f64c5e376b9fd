"""A connection to the ranks' store while its host accepts none: real sockets and a real store."""

import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from ddpbench.hang.status_board import Address, StoreClient

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
    server = Address(LOCAL, port, timedelta(seconds=60))
    thread = threading.Thread(target=lambda: clients.append(StoreClient(server)))
    thread.start()
    thread.join(1.0)
    assert not clients
    for each in [busy, *queued]:
        each.close()
    store = dist.TCPStore(LOCAL, port, is_master=True, wait_for_workers=False)
    thread.join(60)
    store.set("key", "value")
    assert clients[0].request(10.0, lambda client: client.get("key")) == b"value"
    clients[0].close()
    assert "frame #" not in capfd.readouterr().err


def test_a_store_that_never_accepts_is_given_up(capfd: pytest.CaptureFixture[str]) -> None:
    """Where nobody listens, the error is one sentence, after the store's own timeout."""
    with socket.socket() as unused:
        unused.bind((LOCAL, 0))
        server = Address(LOCAL, unused.getsockname()[1], timedelta(seconds=0.3))
        with pytest.raises(RuntimeError, match=r"accepted no connection within 0\.3 s"):
            StoreClient(server)
    assert not capfd.readouterr().err
