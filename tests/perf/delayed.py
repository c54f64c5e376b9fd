"""`--import delayed`: every all_reduce takes DELAYED_SECONDS longer, for verdicts.py."""

import os
import time
from typing import Any

import torch.distributed as dist

SECONDS = float(os.environ.get("DELAYED_SECONDS", "0"))
plain = dist.all_reduce


def all_reduce(*arguments: Any, **named: Any) -> Any:
    until = time.perf_counter() + SECONDS
    if SECONDS > 2e-4:
        time.sleep(SECONDS - 1e-4)  # what a sleep adds, tens of µs, is left to the loop
    while time.perf_counter() < until:
        pass
    return plain(*arguments, **named)


dist.all_reduce = all_reduce
