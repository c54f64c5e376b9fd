"""Use of the cores by this process and by others, and free memory, from /proc and cgroups."""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

ROOT = Path("/")
T = TypeVar("T")


@dataclass(frozen=True)
class CpuUse:
    """Use of the cores between a CpuMeter's start and its stop.

    `own_seconds` counts every thread of this process. `host_busy_seconds` is the
    time of all online cores, less idle time, time stolen by the hypervisor and interrupts (if the
    kernel accounts for them separately). `throttled_seconds` is None without a quota.
    """

    wall_seconds: float
    own_seconds: float
    host_busy_seconds: float | None
    steal_seconds: float | None
    throttled_seconds: float | None


class CpuMeter:
    """A meter that starts when constructed; each `stop()` returns the use since then."""

    def __init__(self) -> None:
        self._quotas = [level for level in cgroup_levels("cpu") if quota_cores(level)]
        self._start = self._counters()

    def stop(self) -> CpuUse:
        pairs = zip(self._start, self._counters(), strict=True)
        used: list[Any] = [None if None in pair else max(0, pair[1] - pair[0]) for pair in pairs]
        return CpuUse(*used)

    def _counters(self) -> list[Any]:
        """Return CpuUse's fields as counters: use their differences only."""
        usage, wall = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        own = usage.ru_utime + usage.ru_stime
        return [wall, own, *_host(wall), _throttled(self._quotas)]


def others_share(
    host_busy_seconds: float | None,
    own_seconds_of_local_ranks: Sequence[float],
    wall_seconds: float,
    cores: int,
    tick_seconds: float = 0.01,
) -> float | None:
    """Return the share of the host's online cores used by other processes than its ranks, 0 to 1.

    /proc/stat counts in ticks, so a difference of two reads may be off by two ticks per core. If
    that is over 5 % of the wall time (below 0.4 s at 100 ticks per second), returns the lower bound
    of the share, or None if it is 0: such a host may be quiet or busy. Returns None if the host's
    time is unknown.
    """
    if host_busy_seconds is None or wall_seconds <= 0:
        return None
    others = host_busy_seconds - sum(own_seconds_of_local_ranks)
    share, doubt = others / (wall_seconds * cores), 2 * tick_seconds / wall_seconds
    if doubt > 0.05:
        return min(1.0, share - doubt) if share > doubt else None
    return min(1.0, max(0.0, share))


def queued_seconds() -> float | None:
    """Return the seconds that this process's main thread has waited for a core so far.

    Use differences only. None if the kernel does not report it.
    """
    fields = (read("/proc/self/schedstat") or "").split()
    return int(fields[1]) / 1e9 if len(fields) > 1 else None


def process_seconds(cores: Container[int]) -> dict[str, float]:
    """Return CPU seconds so far of processes that last ran on these cores: "python3 (pid 7)" → s.

    Includes processes of other users and containers, as far as they are visible.
    """
    seconds = {}
    for process in psutil.process_iter(["pid", "name", "cpu_num", "cpu_times"]):
        info = process.info
        if info["cpu_times"] is not None and info["cpu_num"] in cores:
            seconds[f"{info['name']} (pid {info['pid']})"] = sum(info["cpu_times"][:2])
    return seconds


def _host(wall: float) -> tuple[float | None, float | None]:
    """Busy (plus a constant) and steal seconds of all cores together since boot.

    Busy is all time that was not idle, rather than user + system + …: the kernel samples the latter
    at its tick and misses ranks that sleep and wake between ticks, but stamps idle time exactly.
    Interrupts that the kernel counts are not process time.
    """
    ticks = [int(count) for count in (read("/proc/stat") or "").partition("\n")[0].split()[4:9]]
    if len(ticks) < 5 or not ticks[0]:
        return None, None
    idle, waiting, hard, soft, steal = (count / os.sysconf("SC_CLK_TCK") for count in ticks)
    interrupts = hard + soft if hard else 0.0
    return (psutil.cpu_count() or 1) * wall - idle - waiting - steal - interrupts, steal


def _throttled(levels: Sequence[Path]) -> float | None:
    stat = "\n".join(filter(None, (read(level / "cpu.stat") for level in levels)))
    v1, v2 = (re.findall(rf"^throttled_{unit} (\d+)", stat, re.M) for unit in ("time", "usec"))
    return sum(map(int, v1)) / 1e9 + sum(map(int, v2)) / 1e6 if stat else None


def quota_cores(level: Path) -> float | None:
    """Return the cores that a control group may use by its quota; None without one."""
    v1 = f"{read(level / 'cpu.cfs_quota_us')} {read(level / 'cpu.cfs_period_us')}"
    quota = re.match(r"(\d+) (\d+)", read(level / "cpu.max") or v1)
    return int(quota[1]) / int(quota[2]) if quota else None


def cgroup_levels(controller: str, root: Path = ROOT) -> list[Path]:
    """Return the folders of this process's control group and its ancestors, outermost first."""
    groups = read(root / "proc/self/cgroup")
    v1 = search_line(rf"^\d+:(?:\S+,)?{controller}(?:,\S+)?:/(.*)", groups)
    top = root / "sys/fs/cgroup" / (controller if v1 is not None else "")
    path = v1 if v1 is not None else search_line(r"^0::/(.*)", groups) or ""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [top.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def read(path: str | Path) -> str | None:
    """Return the stripped content of a file; None if it cannot be read."""
    return or_none(lambda: Path(path).read_text(errors="replace").strip())


def search_line(pattern: str, text: str | None) -> str | None:
    """Return the first group of the first match; `^` and `$` are those of a line. None if none."""
    match = re.search(pattern, text or "", re.MULTILINE)
    return match[1].strip() if match else None


def or_none(query: Callable[[], T]) -> T | None:
    """Return the result, or None on any error: a missing fact must not end a benchmark."""
    try:
        return query()
    except Exception:
        return None


def free_memory_nbytes() -> int | None:
    """Return the memory that can still be allocated, of the host or the control group."""
    available = or_none(lambda: int(psutil.virtual_memory().available))
    free = (available, cgroup_limits()["cgroup_free_nbytes"])
    return min((int(nbytes) for nbytes in free if nbytes is not None), default=None)


def reset_peak() -> bool:
    """Reset the kernel's peak of resident memory; return whether that worked."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # see proc_pid_clear_refs(5)
    except OSError:
        return False
    return True


def peak_nbytes() -> int:
    """Return the peak of this process's resident memory since `reset_peak`; 0: unknown."""
    kilobytes = search_line(r"^VmHWM:\s+(\d+)", read(Path("/proc/self/status")))
    return int(kilobytes or 0) * 1024


def cgroup_limits(root: Path = ROOT) -> dict[str, float | None]:
    """Return the tightest limits of this process's control group and its ancestors, v1 or v2."""
    limits, free = [], []
    for level in cgroup_levels("memory", root):
        limit = read(level / "memory.max") or read(level / "memory.limit_in_bytes") or "max"
        used = read(level / "memory.current") or read(level / "memory.usage_in_bytes") or 0
        cache = search_line(r"^inactive_file (\d+)", read(level / "memory.stat")) or 0
        if limit != "max" and int(limit) < 2**60:  # v1 writes "no limit" as a huge number
            limits.append(int(limit))
            free.append(max(0, int(limit) - int(used) + int(cache)))
    quotas = [cores for level in cgroup_levels("cpu", root) if (cores := quota_cores(level))]
    return {
        "cgroup_cpu_quota_cores": min(quotas, default=None),
        "cgroup_memory_limit_nbytes": min(limits, default=None),
        "cgroup_free_nbytes": min(free, default=None),
    }
