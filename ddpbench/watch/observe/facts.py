"""Numbers that show what takes a rank's time, since the last read.

| name              | of a rank                                                                   |
| ----------------- | --------------------------------------------------------------------------- |
| seconds           | since the last read                                                         |
| cores             | of the host                                                                 |
| cpu_seconds       | of all threads of the process                                               |
| worker_seconds    | of the processes that it started, such as those of a DataLoader             |
| host_busy_seconds | of all cores of the host together, for any process; 0 if unknown            |
| gc_seconds        | of Python's garbage collection, which stops all threads                     |
| compile_seconds   | of torch.compile; the rank does nothing else meanwhile                      |
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Mapping

import psutil

from ddpbench.runtime import cpu


class Facts:
    """The facts of this rank; `close` ends counting garbage collections."""

    def __init__(self) -> None:
        self._meter, self._process = cpu.CpuMeter(), psutil.Process()
        self._gc_began_ns = self._gc_ns = 0
        self._totals = self._read_totals()
        gc.callbacks.append(self._count_gc)

    def close(self) -> None:
        """Stop counting garbage collections."""
        gc.callbacks.remove(self._count_gc)

    def read(self) -> dict[str, float]:
        """Return the facts since the last read, or since the start."""
        before, self._totals = self._totals, self._read_totals()
        facts = {name: total - before[name] for name, total in self._totals.items()}
        return facts | {"cores": float(psutil.cpu_count() or 1)}

    def _count_gc(self, phase: str, _info: Mapping[str, int]) -> None:
        now_ns = time.perf_counter_ns()
        if phase == "start":
            self._gc_began_ns = now_ns
        elif self._gc_began_ns:
            self._gc_ns += now_ns - self._gc_began_ns

    def _read_totals(self) -> dict[str, float]:
        use = self._meter.stop()
        return {
            "seconds": use.wall_seconds,
            "cpu_seconds": use.own_seconds,
            "worker_seconds": _read_worker_seconds(self._process),
            "host_busy_seconds": use.host_busy_seconds or 0.0,
            "gc_seconds": self._gc_ns * 1e-9,
            "compile_seconds": _read_compile_seconds(),
        }


def _read_worker_seconds(process: psutil.Process) -> float:
    """Return the CPU time of the processes that the main thread started, even if they ended."""
    ended = process.cpu_times()
    seconds = ended.children_user + ended.children_system
    for pid in (cpu.read(f"/proc/self/task/{process.pid}/children") or "").split():
        with contextlib.suppress(psutil.Error):
            seconds += sum(psutil.Process(int(pid)).cpu_times()[:2])
    return float(seconds)


def _read_compile_seconds() -> float:
    """Return the time of all compilations by torch.compile, which need not be imported."""
    module = sys.modules.get("torch._dynamo.utils")
    times: dict[str, list[float]] = getattr(module, "compilation_time_metrics", {})
    return next((sum(times[name]) for name in [*times] if name.endswith("compile_inner")), 0.0)
