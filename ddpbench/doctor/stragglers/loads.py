"""What one rank computes and copies by itself, and how long that takes it.

One entry of EFFORTS adds a load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddpbench.doctor.stragglers.causes import Load
from ddpbench.measure import clock

if TYPE_CHECKING:
    import torch

SIDE = {"cpu": 512, "cuda": 4096}  # of the square matrices: some ms on a core, or on a GPU
COPY_NBYTES = {"cpu": 2**26, "cuda": 2**28}  # beyond all caches that one rank can use
LEAST_COPY_NBYTES = 2**23
COPIES = {"cpu": 1, "cuda": 4}  # of a repetition
FEWEST = 2  # repetitions of a slice


@dataclass(frozen=True)
class Effort:
    """A load that is ready to be carried, and its buffers."""

    load: Load
    call: Callable[[], object]  # one repetition; on a GPU it returns before that is done
    once: Callable[[], float]  # the same, and its seconds


def _matmul(device: torch.device, nbytes: int) -> tuple[float, Callable[[], object]]:
    """FLOP, and the call."""
    import torch

    side = SIDE[device.type]
    one, other = (torch.rand(side, side, device=device) for _ in range(2))
    out = torch.empty(side, side, device=device)
    return 2.0 * side**3, lambda: torch.mm(one, other, out=out)


def _copy(device: torch.device, nbytes: int) -> tuple[float, Callable[[], object]]:
    """Bytes that are copied, and the call."""
    import torch

    size = nbytes if device.type == "cpu" else COPY_NBYTES[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target, count = torch.zeros_like(source), COPIES[device.type]

    def call() -> None:
        for _ in range(count):
            target.copy_(source)

    return float(size * count), call


Prepare = Callable[["torch.device", int], tuple[float, Callable[[], object]]]
EFFORTS: dict[str, tuple[Load, Prepare]] = {
    load.name: (load, prepare)
    for load, prepare in (
        (Load("matmul", 0.0, "GFLOP/s"), _matmul),
        (Load("memory copy", 0.0, "GB/s"), _copy),
        (Load("GPU matmul", 0.0, "GFLOP/s", "cuda"), _matmul),
        (Load("GPU memory copy", 0.0, "GB/s", "cuda"), _copy),
    )
}
COPY = "memory copy"


def prepare_efforts(device: torch.device, copy_nbytes: int) -> dict[str, Effort]:
    """What a rank on this device can carry: loads of its CPU, and of its GPU.

    copy_nbytes: to copy in the host's memory at a time; below LEAST_COPY_NBYTES that is left out.
    """
    import torch

    found = {}
    for name, (load, prepare) in EFFORTS.items():
        if load.device in ("cpu", device.type) and (
            name != COPY or copy_nbytes >= LEAST_COPY_NBYTES
        ):
            where = device if load.device == device.type else torch.device("cpu")
            amount, call = prepare(where, copy_nbytes)
            timed = _events(call, where) if where.type == "cuda" else _stamps(call)
            found[name] = Effort(replace(load, amount=amount), call, timed)
    return found


def slice_of(effort: Effort, seconds: float) -> float:
    """Seconds of one repetition, the mean over about so many seconds, after one that warms up."""
    effort.once()
    spent, count = 0.0, 0
    until = clock.now_ns() + round(seconds * 1e9)
    while count < FEWEST or clock.now_ns() < until:
        spent += effort.once()
        count += 1
    return spent / count


def _stamps(call: Callable[[], object]) -> Callable[[], float]:
    from ddpbench.measure import loop

    def once() -> float:
        entry, exits = loop.stamped(1, _nothing, call)
        return (exits[0] - entry[0]) * 1e-9

    return once


def _events(call: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """On the stream: what the host does meanwhile is no part of it."""
    import torch

    stream = torch.cuda.current_stream(device)
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)

    def once() -> float:
        begin.record(stream)
        call()
        end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    return once


def _nothing() -> None:
    return None
