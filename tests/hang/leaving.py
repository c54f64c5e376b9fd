"""A process that ends while its store has not answered the watchdog: `python leaving.py`."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from ddpbench.hang.board import Line


class Slow:
    """Keeps the interpreter ending for longer than the store takes to answer."""

    def __del__(self) -> None:
        time.sleep(2.0)


slow = Slow()
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
line = Line(store)
assert line.ask(0.1, lambda client: client.wait(["never"], timedelta(seconds=1.0))) is None
line.close()
