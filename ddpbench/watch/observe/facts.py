"""Numbers that may explain lost time, since the last read.

| name                   | of a rank                                                              |
| ---------------------- | ---------------------------------------------------------------------- |
| seconds                | since the last read                                                    |
| gc_seconds             | of Python's garbage collection, which stops all threads                |
| compile_seconds        | of torch.compile; the rank does nothing else meanwhile                 |
| cpu_seconds            | of all threads of the process                                          |
| worker_seconds         | of the processes that it started, such as those of a DataLoader        |
| host_busy_seconds      | of all cores of the host together, for any process                     |
| cores                  | of the host                                                            |
| messages               | sent and received in the training thread                               |

What the system does not report is missing.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import time
from collections.abc import Mapping

import psutil

from ddpbench.runtime import cpu


class Facts:
    """The facts of this rank and `counts` by others; `close` ends counting garbage collections."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts
        self._meter = cpu.CpuMeter()
        self._began_ns = 0  # the last garbage collection
        self._gc_seconds = 0.0  # since the last read
        self._compiled = len(_list_compilations())
        self._counters = self._read_counters()
        gc.callbacks.append(self._count_gc)

    def close(self) -> None:
        """Stop counting garbage collections."""
        if self._count_gc in gc.callbacks:
            gc.callbacks.remove(self._count_gc)

    def read(self) -> dict[str, float]:
        """Return the facts since the last read, or since the start."""
        before, self._counters = self._counters, self._read_counters()
        facts = {
            name: max(0.0, value - before[name])
            for name, value in self._counters.items()
            if name in before
        }
        gc_seconds, self._gc_seconds = self._gc_seconds, 0.0
        compilations = _list_compilations()[self._compiled :]
        self._compiled += len(compilations)
        return facts | {
            "gc_seconds": gc_seconds,
            "compile_seconds": sum(compilations),
            "cores": float(psutil.cpu_count() or 1),
        }

    def _count_gc(self, phase: str, _info: Mapping[str, int]) -> None:
        if phase == "start":
            self._began_ns = time.perf_counter_ns()
        elif self._began_ns:
            self._gc_seconds += (time.perf_counter_ns() - self._began_ns) * 1e-9

    def _read_counters(self) -> dict[str, float]:
        use = self._meter.stop()
        counters = {
            "seconds": use.wall_seconds,
            "cpu_seconds": use.own_seconds,
            "worker_seconds": _read_worker_seconds(),
            "host_busy_seconds": use.host_busy_seconds,
            **self._counts,
        }
        return {name: value for name, value in counters.items() if value is not None}


def _read_worker_seconds() -> float:
    """Return the CPU time of the processes that the main thread started, even if they ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = ended.ru_utime + ended.ru_stime
    for pid in (cpu.read(f"/proc/self/task/{os.getpid()}/children") or "").split():
        fields = (cpu.read(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
        if len(fields) > 12:
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def _list_compilations() -> list[float]:
    """Return the seconds of each compilation by torch.compile, which need not be imported."""
    times: dict[str, list[float]] = getattr(
        sys.modules.get("torch._dynamo.utils"), "compilation_time_metrics", {}
    )
    return next((times[name] for name in list(times) if name.endswith("compile_inner")), [])
