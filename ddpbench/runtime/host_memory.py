"""How much memory of the host this process can still allocate, and what limits it."""

from __future__ import annotations

from pathlib import Path

import psutil

from ddpbench.runtime.cpu import ROOT, cgroup_levels, or_none, quota_cores, read, search_line


def free_memory_nbytes() -> int | None:
    """Memory that can still be allocated: the host's or the control group's, whichever is less."""
    available = or_none(lambda: int(psutil.virtual_memory().available))
    free = (available, cgroup_limits()["cgroup_free_nbytes"])
    return min((int(nbytes) for nbytes in free if nbytes is not None), default=None)


def reset_peak() -> bool:
    """Let the kernel's peak of resident memory begin anew; return whether it could."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # see proc_pid_clear_refs(5)
    except OSError:
        return False
    return True


def peak_nbytes() -> int:
    """Return the peak of this process's resident memory since `reset_peak`; 0: not known."""
    kilobytes = search_line(r"^VmHWM:\s+(\d+)", read(Path("/proc/self/status")))
    return int(kilobytes or 0) * 1024


def cgroup_limits(root: Path = ROOT) -> dict[str, float | None]:
    """The tightest limits of this process's control group and its ancestors, v1 or v2."""
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
