"""A connection to a real store of the ranks, which is stopped."""

import os
import signal
import sys
import threading
from pathlib import Path

import torch.distributed as dist
from command_lines import running_command

from ddpbench.hang.status_board import StoreClient, find_store

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
