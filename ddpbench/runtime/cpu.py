"""Where the cores' time went: own, others', stolen, throttled; from /proc and control groups."""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

ROOT = Path("/")
T = TypeVar("T")


@dataclass(frozen=True)
class CpuUse:
    """Where the cores' time went between a CpuMeter's start and its stop.

    `own_seconds` and the switches count every thread of this process. `host_busy_seconds` is what
    all online cores spent neither idle nor stolen by the hypervisor nor, where the kernel accounts
    for them apart from the processes, in interrupts. `throttled_seconds` is None without a quota.
    """

    wall_seconds: float
    own_seconds: float
    voluntary_switches: int
    involuntary_switches: int
    host_busy_seconds: float | None
    interrupt_seconds: float | None
    steal_seconds: float | None
    throttled_seconds: float | None


class CpuMeter:
    """Starts when constructed; each `stop()` says what was used since then."""

    def __init__(self) -> None:
        self._quotas = [level for level in cgroup_levels("cpu") if quota_cores(level)]
        self._start = self._counters()

    def stop(self) -> CpuUse:
        pairs = zip(self._start, self._counters(), strict=True)
        used: list[Any] = [None if None in pair else max(0, pair[1] - pair[0]) for pair in pairs]
        return CpuUse(*used)

    def _counters(self) -> list[Any]:
        """CpuUse's fields as counters, of which only differences mean something."""
        usage, wall = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        own = usage.ru_utime + usage.ru_stime
        return [wall, own, usage.ru_nvcsw, usage.ru_nivcsw, *_host(wall), _throttled(self._quotas)]


def others_share(
    host_busy_seconds: float | None,
    own_seconds_of_local_ranks: Sequence[float],
    wall_seconds: float,
    cores: int,
    tick_seconds: float = 0.01,
) -> float | None:
    """The share of the host's online cores that processes other than its ranks used, 0 to 1.

    /proc/stat counts in ticks: a difference of two reads may be off by two ticks a core. Where that
    is over 5 % of the wall time (below 0.4 s at 100 ticks a second), a busy host could not be told
    from a quiet one: None, as where the host's time is unknown.
    """
    if host_busy_seconds is None or 2 * tick_seconds > 0.05 * wall_seconds:
        return None
    others = host_busy_seconds - sum(own_seconds_of_local_ranks)
    return min(1.0, max(0.0, others / (wall_seconds * cores)))


def queued_seconds() -> float | None:
    """Seconds that this process's main thread has been ready to run without having a core, so far:
    only differences mean something. None where the kernel does not tell."""
    told = (read("/proc/self/schedstat") or "").split()
    return int(told[1]) / 1e9 if len(told) > 1 else None


def core_hertz(cores: Iterable[int]) -> float | None:
    """What these cores run at just now, the mean; None where the kernel does not tell."""
    told = [read(f"/sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq") for core in cores]
    known = [int(text) * 1e3 for text in told if text]
    return sum(known) / len(known) if known else None


def thermal_events(cores: Iterable[int]) -> int | None:
    """How often these cores have been slowed for their heat so far; None: it is not told."""
    folder = "/sys/devices/system/cpu/cpu{}/thermal_throttle/core_throttle_count"
    known = [int(text) for core in cores if (text := read(folder.format(core)))]
    return sum(known) if known else None


def process_seconds(cores: Container[int]) -> dict[str, float]:
    """CPU seconds so far of the processes that were seen on one of these cores last, those of other
    users and containers as far as they can be seen: "python3 (pid 7)" → seconds."""
    found = {}
    for each in psutil.process_iter(["pid", "name", "cpu_num", "cpu_times"]):
        its = each.info
        if its["cpu_times"] is not None and its["cpu_num"] in cores:
            found[f"{its['name']} (pid {its['pid']})"] = sum(its["cpu_times"][:2])
    return found


def _host(wall: float) -> tuple[float | None, float | None, float | None]:
    """Busy (plus a constant), interrupt and steal seconds of all cores together since boot.

    Busy is what was not idle, rather than user + system + …: the kernel samples those at its tick
    and misses ranks that sleep and wake between ticks. With two gloo ranks on two cores the sum
    fell short by 3–6 % of the cores, which hid a busy host; idle time is stamped exactly (1–3 %
    over, the cost of waking). Interrupts counted at all are interrupts taken off the processes.
    """
    ticks = [int(count) for count in (read("/proc/stat") or "").partition("\n")[0].split()[4:9]]
    if len(ticks) < 5 or not ticks[0]:
        return None, None, None
    idle, waiting, hard, soft, steal = (count / os.sysconf("SC_CLK_TCK") for count in ticks)
    interrupts = hard + soft if hard else 0.0
    return (psutil.cpu_count() or 1) * wall - idle - waiting - steal - interrupts, interrupts, steal


def _throttled(levels: Sequence[Path]) -> float | None:
    """Seconds that these control groups held their processes back."""
    stat = "\n".join(filter(None, (read(level / "cpu.stat") for level in levels)))
    v1, v2 = (re.findall(rf"^throttled_{unit} (\d+)", stat, re.M) for unit in ("time", "usec"))
    return sum(map(int, v1)) / 1e9 + sum(map(int, v2)) / 1e6 if stat else None


def quota_cores(level: Path) -> float | None:
    v1 = f"{read(level / 'cpu.cfs_quota_us')} {read(level / 'cpu.cfs_period_us')}"
    quota = re.match(r"(\d+) (\d+)", read(level / "cpu.max") or v1)
    return int(quota[1]) / int(quota[2]) if quota else None


def cgroup_levels(controller: str, root: Path = ROOT) -> list[Path]:
    """The folders of the control group that holds this process, outermost first."""
    groups = read(root / "proc/self/cgroup")
    v1 = found(rf"^\d+:(?:\S+,)?{controller}(?:,\S+)?:/(.*)", groups)
    top = root / "sys/fs/cgroup" / (controller if v1 is not None else "")
    path = v1 if v1 is not None else found(r"^0::/(.*)", groups) or ""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [top.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def read(path: str | Path) -> str | None:
    return or_none(lambda: Path(path).read_text(errors="replace").strip())


def found(pattern: str, text: str | None) -> str | None:
    match = re.search(pattern, text or "", re.MULTILINE)
    return match[1].strip() if match else None


def or_none(ask: Callable[[], T]) -> T | None:
    """The answer, or None: no fact about the machine is worth a benchmark's failure."""
    try:
        return ask()
    except Exception:
        return None
