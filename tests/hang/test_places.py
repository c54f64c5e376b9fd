"""Which line of a stack is told: the program's own before a library's, ddpbench's or torch's."""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE_SECONDS, wait_until

import ddpbench
from ddpbench.hang.places import find_distributed_call, find_error_place

OURS = str(Path(ddpbench.__file__).parent / "replicas" / "verifier.py")
MACHINERY = str(Path(ddpbench.__file__).parent / "hang" / "guard.py")
TORCH = str(Path(torch.__file__).parent / "nn" / "module.py")
TORCH_LIKE = str(Path(torch.__file__).parents[1] / "torchmetrics" / "metric.py")
COMMAND = sysconfig.get_path("scripts") + "/ddpbench"


def failing(*paths: str) -> BaseException:
    """An error raised in the last of these files, called from the one before, and so on."""
    call: Callable[[], Any] | None = None
    for path in reversed(paths):
        code = "def run():\n    call() if call else 1 / 0\n"
        names: dict[str, Any] = {"call": call}
        exec(compile(code, path, "exec"), names)
        call = names["run"]
    assert call is not None
    with pytest.raises(ZeroDivisionError) as caught:
        call()
    trace = caught.value.__traceback__
    assert trace is not None
    return caught.value.with_traceback(trace.tb_next)  # without this function


@pytest.mark.parametrize(
    ("paths", "told"),
    [
        (("/home/me/train.py", OURS, TORCH), "train.py"),
        (("/home/me/train.py", TORCH, "/home/me/model.py", TORCH), "model.py"),
        (("<string>", "/home/me/train.py", OURS), "train.py"),
        (("<string>", TORCH_LIKE, TORCH), "metric.py"),
        ((COMMAND, OURS, MACHINERY, TORCH), "verifier.py"),
        (("/home/me/train.py", "/tmp/torchinductor_me/ab/cab.py"), "train.py"),
    ],
)
def test_the_innermost_line_of_the_program_is_told(paths: tuple[str, ...], told: str) -> None:
    """ddpbench's own lines, code without a file, the command that started it and what torch has
    compiled are no program's; where there is nothing else, the best of them is told."""
    assert find_error_place(failing(*paths)) == f"run ({told}:2)"


def called_in_a_thread(
    wait: Callable[[], object], end: Callable[[], object], expected: str
) -> set[str]:
    """All that a thread has called of torch.distributed, seen again and again while it waits.

    Ends its wait once the expected call was seen, and 20 calls in all.
    """
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    seen: list[str] = []

    def see() -> bool:
        seen.append(find_distributed_call(sys._current_frames()[thread.ident or 0]))
        return expected in seen and len(seen) >= 20

    wait_until(see, "the expected call")
    end()
    thread.join()
    return set(seen)


def test_a_wait_in_c_is_known_by_its_call_and_others_are_not_taken_for_it() -> None:
    """It has no frame; a wait for a thread of the program's own has, and sleep is no wait."""
    store, event, long = dist.HashStore(), threading.Event(), timedelta(seconds=PATIENCE_SECONDS)
    slept = threading.Event()

    def sleep() -> None:
        while not slept.is_set():
            time.sleep(0.1)

    found = called_in_a_thread(
        lambda: store.wait(["key"], long), lambda: store.set("key", ""), "wait"
    )
    assert "wait" in found
    assert called_in_a_thread(event.wait, event.set, "") == {""}
    assert called_in_a_thread(sleep, slept.set, "") == {""}
