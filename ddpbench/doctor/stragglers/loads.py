"""What one rank computes and copies by itself, and how long a repetition takes.

One entry of LOADS adds a load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ddpbench.measure import clock
from ddpbench.runtime import devices

if TYPE_CHECKING:
    import torch

# When a rank is measured: while the other ranks of its machine rest, or with all ranks.
ALONE, TOGETHER = "alone", "together"


@dataclass(frozen=True)
class Load:
    """Work that a rank repeats."""

    name: str
    amount: float  # of one repetition, in FLOP or bytes
    unit: str  # of the rate, in 10⁹ a second: "GFLOP/s", "GB/s"
    memory: str = "host"  # of its device: whose memory that uses

    def rate(self, seconds: float) -> float:
        """Return the rate, in the unit of the load, of a repetition that takes so many seconds."""
        return self.amount / seconds / 1e9


@dataclass(frozen=True)
class Shown:
    """What one rank showed in one pass. `when` is ALONE or, unless it would mean nothing, TOGETHER.

    kept: share of the time in which the rank did not run, by reason: "throttled", "stolen" or
    "queued"; None is unknown.
    """

    seconds: dict[str, dict[str, list[float]]]  # when → load → of a repetition, a value a round
    kept: dict[str, dict[str, float | None]]  # when → reason → share
    waited_ns: list[int] = field(default_factory=list)  # in each all_reduce after equal work
    hertz: float | None = None  # of its cores
    thermal: int | None = None  # how often heat slowed its cores down
    gpu: dict[str, object] | None = None  # state of its GPU at work
    neighbours: list[str] = field(default_factory=list)  # processes on its cores, busiest first


Pass = Sequence[Shown]  # one a rank


# By `defaults` of the kind of device:
SIDE = {"cpu": 512, "cuda": 4096}  # of the square matrices: some ms on a core, or on a GPU
COPY_NBYTES = {"cpu": 2**26, "cuda": 2**28}  # beyond all caches that one rank can use
COPIES = {"cpu": 1, "cuda": 4}  # in a repetition
LEAST_COPY_NBYTES = 2**23
LEAST_REPETITIONS = 2  # of a slice


@dataclass(frozen=True)
class Effort:
    """A load with its buffers, ready to be carried."""

    load: Load
    call: Callable[[], object]  # one repetition; on a GPU it may return before the end
    once: Callable[[], float]  # one repetition to its end; returns its seconds


def _matmul(device: torch.device, nbytes: int) -> tuple[float, Callable[[], object]]:
    """Return the FLOP of a repetition, and the call."""
    import torch

    side = SIDE[devices.of(device).defaults]
    one, other = (torch.rand(side, side, device=device) for _ in range(2))
    out = torch.empty(side, side, device=device)
    return 2.0 * side**3, lambda: torch.mm(one, other, out=out)


def _copy(device: torch.device, nbytes: int) -> tuple[float, Callable[[], object]]:
    """Return the bytes that a repetition copies, and the call."""
    import torch

    kind = devices.of(device)
    size = nbytes if kind.memory == "host" else COPY_NBYTES[kind.defaults]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target, count = torch.zeros_like(source), COPIES[kind.defaults]

    def call() -> None:
        for _ in range(count):
            target.copy_(source)

    return float(size * count), call


Prepare = Callable[["torch.device", int], tuple[float, Callable[[], object]]]
LOADS: dict[str, tuple[Load, Prepare]] = {
    load.name: (load, prepare)
    for load, prepare in (
        (Load("matmul", 0.0, "GFLOP/s"), _matmul),
        (Load("memory copy", 0.0, "GB/s"), _copy),
        (Load("GPU matmul", 0.0, "GFLOP/s", "GPU"), _matmul),
        (Load("GPU memory copy", 0.0, "GB/s", "GPU"), _copy),
    )
}
COPY = "memory copy"


def prepare_efforts(device: torch.device, copy_nbytes: int) -> dict[str, Effort]:
    """Return the loads of this rank's CPU and, if it has one, of its GPU.

    copy_nbytes: how much a repetition copies in the memory of the host; below LEAST_COPY_NBYTES
    that load is left out.
    """
    import torch

    efforts = {}
    own = devices.of(device).memory
    for name, (load, prepare) in LOADS.items():
        if load.memory not in ("host", own):
            continue
        if name == COPY and copy_nbytes < LEAST_COPY_NBYTES:
            continue
        where = device if load.memory == own else torch.device("cpu")
        amount, call = prepare(where, copy_nbytes)
        efforts[name] = Effort(replace(load, amount=amount), call, _timed(call, where))
    return efforts


def mean_seconds(effort: Effort, seconds: float) -> float:
    """Repeat a load for about so many seconds after a warm-up; return the mean of a repetition."""
    effort.once()
    spent, count = 0.0, 0
    until = clock.now_ns() + round(seconds * 1e9)
    while count < LEAST_REPETITIONS or clock.now_ns() < until:
        spent += effort.once()
        count += 1
    return spent / count


def _timed(call: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Time a call on the clock of its device: a GPU's leaves out what the host does meanwhile."""
    from ddpbench.measure import loop

    def once() -> float:
        entry, exits = loop.stamped(1, lambda: None, call)
        return (exits[0] - entry[0]) * 1e-9

    kind = devices.of(device)
    begin, end = kind.event(device), kind.event(device)

    def once_by_events() -> float:
        begin.record()
        call()
        end.record()
        end.synchronize()
        return devices.elapsed_ns(begin, end) * 1e-9

    return once if kind.clock == "host" else once_by_events
