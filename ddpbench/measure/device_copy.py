"""Measure how fast devices read and write their own memory: no operation on them can be faster."""

from __future__ import annotations

import torch

from ddpbench.measure import clock
from ddpbench.runtime import control, devices
from ddpbench.runtime.devices import elapsed_ns
from ddpbench.runtime.world import World

SIZES_NBYTES = (1 << 24, 1 << 26)  # one fits into the cache of a GPU, one does not
COPIES, ROUNDS = 4, 5
LEAST_NS = 100_000_000  # an idle GPU takes some time to raise its clocks
LAUNCH_SECONDS = 5e-4  # the device waits for so long while the host launches the copies


def measure_device_copy(world: World, device: torch.device) -> float | None:
    """Return the bytes that the fastest rank's device reads and writes per second.

    A copy reads each byte and writes it. None if a device has no memory left for it.
    """
    world.watchdog.rearm()
    rates = [_measure_rate(device, nbytes) for nbytes in SIZES_NBYTES]
    # Ranks that share a GPU measure at once: together they move at most so many bytes.
    sharers = max(1, len(world.gpu_mates))
    best = max((rate for rate in rates if rate is not None), default=None)
    everyone = control.gather_values(world, best and best * sharers)
    return max((rate for rate in everyone if rate is not None), default=None)


def _measure_rate(device: torch.device, nbytes: int) -> float | None:
    kind = devices.of(device)
    free = kind.free_nbytes(device)
    if free is not None and free < 4 * nbytes:
        return None
    source, target = (
        torch.full((nbytes,), one, dtype=torch.uint8, device=device) for one in (1, 0)
    )
    if kind.sleeps:
        kind.sleep(device, 0.0)  # the first sleep measures the speed of the clock
    begin, end = kind.event(device), kind.event(device)
    spans_ns: list[int] = []
    until = clock.now_ns() + LEAST_NS
    while len(spans_ns) < ROUNDS or clock.now_ns() < until:
        if kind.sleeps:
            kind.sleep(device, LAUNCH_SECONDS)
        begin.record()
        for _ in range(COPIES):
            target.copy_(source)
        end.record()
        end.synchronize()
        spans_ns.append(max(1, elapsed_ns(begin, end)))
    return 2 * nbytes * COPIES / (min(spans_ns) * 1e-9)
