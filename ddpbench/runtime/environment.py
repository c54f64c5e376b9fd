"""Facts about the environment of a run, ready for JSON.

A fact that the machine does not report is None, never an exception. A missing limit is None, too.
"""

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil

from ddpbench.launch.cleanup import is_private
from ddpbench.mpi_backend import library as mpi_library
from ddpbench.records import redact
from ddpbench.records.wording import spans
from ddpbench.runtime import gpu_facts, nccl_library
from ddpbench.runtime.cpu import (
    cgroup_limits,
    free_memory_nbytes,
    or_none,
    read,
    search_line,
)
from ddpbench.version import VERSION

CPUS = Path("/sys/devices/system/cpu")
# Set explicitly, because git would search parent folders. `ab` imports this through a link.
CHECKOUT = Path(__file__).resolve().parents[2]
GIT = ("git", f"--git-dir={CHECKOUT}/.git", f"--work-tree={CHECKOUT}", "--no-optional-locks")
ALLOWED = re.compile(
    r"(NCCL|RCCL|MSCCL|MSCCLPP|GLOO|TORCH|PYTORCH|OMP|GOMP|KMP|MKL|OMPI|UCX|UCC|FI|MPICH|SLURM|HSA)_|"
    r"(CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|LAUNCH_BLOCKING|DEVICE_MAX_CONNECTIONS|MODULE_LOADING)|"
    r"NVIDIA_TF32_OVERRIDE|(HIP|ROCR)_VISIBLE_DEVICES|HIP_LAUNCH_BLOCKING|GPU_MAX_HW_QUEUES|"
    r"PYTHON(DEVMODE|MALLOC|TRACEMALLOC))$"
)
# Open MPI sets many variables for its ranks; a user sets OMPI_MCA_*.
NOISE = re.compile(r"OMPI_(?!MCA_)|OMPI_MCA_(orte|prte|rmaps|pmix|ess|initial|PREFIXES|cpu_|num_)")
DRIVERS = ("/sys/module/nvidia/version", "/sys/module/amdgpu/version")
IPC_LOCK = 14  # the capability that lifts RLIMIT_MEMLOCK
COMMAND_DEADLINE_SECONDS = 5.0
MARKS = {"/.dockerenv": "docker", "/run/.containerenv": "podman", "/.singularity.d": "apptainer"}


def run_facts() -> dict[str, object]:
    """Return facts about the whole run, as rank 0 sees it; takes some 50 ms."""
    import torch

    changes = _output(*GIT, "status", "--short", ":/ddpbench")
    route = search_line(r"^(\S+)\s+00000000\s", read("/proc/net/route"))
    cuda, hip = torch.version.cuda, torch.version.hip
    return {
        **_versions(),
        "git_revision": _output(*GIT, "rev-parse", "HEAD"),
        "git_dirty": None if changes is None else changes != "",
        # Of the user's repository, which contains the current folder.
        "commit": _output(
            "git", "--no-optional-locks", "describe", "--always", "--dirty", "--exclude=*"
        ),
        "torch_build": f"cuda {cuda}" if cuda else f"hip {hip}" if hip else "cpu",
        "cuda": cuda,
        "nccl": or_none(nccl_library.describe_version),
        "mpi": or_none(mpi_library.library) if "mpi4py.MPI" in sys.modules else None,
        **host_facts(),
        "default_interface": _interface(route),
    }


def host_facts() -> dict[str, object]:
    """Return facts about this host; takes some 20 ms."""
    cpu_info = read("/proc/cpuinfo")
    hypervisor = search_line(r"^flags\s*:.*\b(hypervisor)\b", cpu_info)
    governors = filter(None, map(read, CPUS.glob("cpufreq/policy*/scaling_governor")))
    huge_pages = read("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "driver": next(filter(None, map(read, DRIVERS)), None),
        "kernel": platform.release(),
        "os": or_none(lambda: platform.freedesktop_os_release()["PRETTY_NAME"]),
        "container": _output("systemd-detect-virt", "--container")
        or next((name for mark, name in MARKS.items() if Path(mark).exists()), None),
        "virtual_machine": _output("systemd-detect-virt", "--vm")
        or (hypervisor and (read("/sys/class/dmi/id/sys_vendor") or "unknown")),
        "cpu_model": _cpu_model(cpu_info),
        "cores_logical": psutil.cpu_count(),
        "cores_physical": psutil.cpu_count(logical=False),
        "smt": {"0": False, "1": True}.get(read(CPUS / "smt/active") or ""),
        "governor": ",".join(sorted(set(governors))) or None,
        "memory_nbytes": or_none(lambda: int(psutil.virtual_memory().total)),
        "transparent_huge_pages": search_line(r"\[(\w+)\]", huge_pages),
        "numa_nodes": len(list(CPUS.parent.glob("node/node[0-9]*"))) or None,
    }


def rank_facts() -> dict[str, object]:
    """Return facts about this rank, once it has chosen its GPU and its threads.

    Two ranks share a clock if boot_id and time_namespace are known and equal. NUMA nodes are those
    of the cpuset. The ulimits are the soft ones; -1: unlimited.
    """
    import torch

    cpus = os.sched_getaffinity(0)
    nodes = (int(path.name[4:]) for cpu in cpus for path in CPUS.glob(f"cpu{cpu}/node[0-9]*"))
    return {
        **_versions(),
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "boot_id": read("/proc/sys/kernel/random/boot_id"),
        "time_namespace": or_none(lambda: Path("/proc/self/ns/time").stat().st_ino),
        "cpuset": compact(cpus),
        "numa_nodes": compact(nodes) or None,
        "cpu_model": _cpu_model(read("/proc/cpuinfo")),
        "threads": torch.get_num_threads(),
        **gpu_facts.gpu(),
        **gpu_facts.gpu_links(),
        "rdma_ports": gpu_facts.rdma_ports(),
        "variables": allowed_variables(os.environ),
        "nccl_conf": {
            redact.text(file): allowed_variables(settings)
            for file, settings in nccl_library.read_conf_files().items()
        },
        "nccl_plugins": nccl_library.plugins(),
        **cgroup_limits(),
        "free_memory_nbytes": free_memory_nbytes(),
        "shm_free_nbytes": or_none(lambda: shutil.disk_usage("/dev/shm").free),
        "ulimit_memlock_nbytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "ulimit_open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def setup_facts() -> dict[str, object]:
    """Return facts about this rank that only the doctor needs, once the rank has chosen its GPU.

    `variables` exclude secrets.
    """
    capabilities = search_line(r"^CapEff:\s*(\w+)", read("/proc/self/status"))
    return {
        "variables": allowed_variables(os.environ),
        "may_lock_memory": bool(int(capabilities or "0", 16) >> IPC_LOCK & 1),
        "rdma_devices": sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),
        "shm_nbytes": or_none(lambda: shutil.disk_usage("/dev/shm").total),
        **gpu_facts.gpu_health(),
    }


def compact(numbers: Iterable[int]) -> str:
    """Return 0, 1, 2, 3, 8 as "0-3,8"."""
    return spans(list(set(numbers))).replace(" ", "")


def allowed_variables(variables: Mapping[str, str], length: int = 200) -> dict[str, str]:
    """Return variables that affect collectives, except secrets and those of the launcher."""
    return {
        name: redact.text(value)[:length]
        for name, value in sorted(variables.items())
        if ALLOWED.match(name)
        and not (redact.is_secret_name(name) or NOISE.match(name) or is_private(name, value))
    }


def interface_of(address: str) -> dict[str, object]:
    """Return name, MTU and nominal speed of the interface that has this local IP address."""
    target = or_none(lambda: ip_address(address.partition("%")[0]))
    for name, entries in (or_none(psutil.net_if_addrs) or {}).items():
        listed = {entry.address.partition("%")[0] for entry in entries}
        # All of 127.0.0.0/8 is local, though only 127.0.0.1 is listed.
        if target and (str(target) in listed or (target.is_loopback and "127.0.0.1" in listed)):
            return _interface(name)
    return _interface(None)


def _interface(name: str | None) -> dict[str, object]:
    stats = (or_none(psutil.net_if_stats) or {}).get(name or "")
    speed = stats.speed * 125_000 if stats and stats.speed > 0 else None  # from Mbit/s
    mtu = stats.mtu if stats else None
    return {"name": name, "mtu_nbytes": mtu, "nominal_bytes_per_second": speed}


def _cpu_model(cpu_info: str | None) -> str:
    return search_line(r"^model name\s*:(.+)", cpu_info) or platform.machine()


def _versions() -> dict[str, object]:
    import torch

    return {
        "ddpbench": VERSION,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def _output(*command: str) -> str | None:
    """Return the output of a command; None if it fails, is missing or takes too long."""
    options: dict[str, Any] = {"stderr": subprocess.DEVNULL, "timeout": COMMAND_DEADLINE_SECONDS}
    return or_none(lambda: subprocess.check_output(command, text=True, **options).strip())
