"""Numbers that may explain a rank's lost time, since the last read.

| name                   | of a rank                                                              |
| ---------------------- | ---------------------------------------------------------------------- |
| seconds                | since the last read                                                    |
| gc_seconds, gc_pauses  | of Python's garbage collection, which stops all threads; how many      |
| gc_longest_seconds     | of one pause                                                           |
| compile_seconds        | of torch.compile; the rank does nothing else meanwhile                 |
| compiles               | of torch.compile: recompilations, after the first steps                |
| cpu_seconds            | of all threads of the process                                          |
| worker_seconds         | of the processes that it started, such as those of a DataLoader        |
| queued_seconds         | in which the main thread was ready and had no core                     |
| throttled_seconds      | in which a quota stopped the processes of its control group            |
| major_faults           | pages that were read from a disk, as from swap                         |
| host_busy_seconds      | of all cores of the host together, for any process                     |
| steal_seconds          | of all cores together, in which the hypervisor ran something else      |
| cores                  | of the host                                                            |
| gpu_slowed_by_NAME     | 1 if NVML gives this reason for a lower clock now, such as SwPowerCap  |
| rdma_sent_nbytes       | by all ports of the host's RDMA adapters; this and the next two were   |
| rdma_received_nbytes   | only tested on files that imitate an adapter                           |
| rdma_wait_ticks        | in which a port had data to send and no credit                         |

What the system does not report is missing.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ddpbench.runtime import cpu, gpu_facts
from ddpbench.runtime.cpu import ROOT

HARMLESS = {"GpuIdle", "ApplicationsClocksSetting"}  # of NVML's reasons for a lower clock
RDMA = {
    "rdma_sent_nbytes": ("port_xmit_data", 4),  # counted in words of 4 bytes
    "rdma_received_nbytes": ("port_rcv_data", 4),
    "rdma_wait_ticks": ("port_xmit_wait", 1),
}


@dataclass
class Pauses:
    """Garbage collections so far, and when the last one began."""

    began_ns: int = 0
    count: int = 0
    total_ns: int = 0
    longest_ns: int = 0


class Facts:
    """The facts of this rank; `close` ends the count of garbage collections."""

    def __init__(self) -> None:
        self._meter = cpu.CpuMeter()
        self._pauses = Pauses()
        self._compiled = len(_compile_seconds())
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
        pauses, self._pauses = self._pauses, Pauses(self._pauses.began_ns)
        facts |= {"gc_seconds": pauses.total_ns / 1e9, "gc_pauses": float(pauses.count)}
        facts["gc_longest_seconds"] = pauses.longest_ns / 1e9
        compiled = _compile_seconds()
        new = compiled[min(self._compiled, len(compiled)) :]
        self._compiled = len(compiled)
        facts |= {"compile_seconds": sum(new), "compiles": float(len(new))}
        facts["cores"] = float(psutil.cpu_count() or 1)
        reasons: Any = (gpu_facts.gpu_state() or {}).get("throttle_reasons")
        return facts | {f"gpu_slowed_by_{name}": 1.0 for name in set(reasons or ()) - HARMLESS}

    def _count_gc(self, phase: str, _info: Mapping[str, int]) -> None:
        now, pauses = time.perf_counter_ns(), self._pauses
        if phase == "start":
            pauses.began_ns = now
        elif pauses.began_ns:
            pauses.count += 1
            pauses.total_ns += now - pauses.began_ns
            pauses.longest_ns = max(pauses.longest_ns, now - pauses.began_ns)

    def _read_counters(self) -> dict[str, float]:
        """Return what only grows, by name."""
        use = self._meter.stop()
        counters = {
            "seconds": use.wall_seconds,
            "cpu_seconds": use.own_seconds,
            "worker_seconds": _worker_seconds(),
            "queued_seconds": cpu.queued_seconds(),
            "throttled_seconds": use.throttled_seconds,
            "major_faults": float(resource.getrusage(resource.RUSAGE_SELF).ru_majflt),
            "host_busy_seconds": use.host_busy_seconds,
            "steal_seconds": use.steal_seconds,
            **read_rdma(),
        }
        return {name: value for name, value in counters.items() if value is not None}


def read_rdma(root: Path = ROOT) -> dict[str, float]:
    """Return the counters of all ports of the host's RDMA adapters together; none without any."""
    ports = list((root / "sys/class/infiniband").glob("*/ports/*/counters"))
    texts = {name: [cpu.read(port / file) for port in ports] for name, (file, _) in RDMA.items()}
    return {
        name: float(sum(int(text) for text in found if text) * RDMA[name][1])
        for name, found in texts.items()
        if any(found)
    }


def _worker_seconds() -> float:
    """CPU seconds so far of the processes that the main thread started, also if they have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = ended.ru_utime + ended.ru_stime
    for pid in (cpu.read(f"/proc/self/task/{os.getpid()}/children") or "").split():
        fields = (cpu.read(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
        if len(fields) > 12:
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def _compile_seconds() -> list[float]:
    """Seconds of each compilation so far by torch.compile, which need not be imported."""
    times: dict[str, list[float]] = getattr(
        sys.modules.get("torch._dynamo.utils"), "compilation_time_metrics", {}
    )
    return next((times[name] for name in list(times) if name.endswith("compile_inner")), [])
