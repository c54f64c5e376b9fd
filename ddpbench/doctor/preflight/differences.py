"""Settings that all ranks or hosts should share: facts, variables, interfaces, clocks.

One entry of SAME adds a fact.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddpbench.analysis.rank_setup import Setup, folded, merge_settings, odd
from ddpbench.records.schema import Finding

APART_SECONDS = 1.0


@dataclass(frozen=True)
class Same:
    """A fact that all ranks should share."""

    fact: str
    words: str
    severity: str
    code: str
    next_step: str


IMAGE = "use one image, or one module, on all hosts"
UNEVEN = "expect the ranks to differ in speed: the slowest sets the pace of a step"
SAME = (
    Same("library", "the backend is", "warning", "mixed-versions", IMAGE),
    Same("driver", "the GPU driver is", "warning", "mixed-versions", IMAGE),
    Same("nccl_plugins", "the list of NCCL's plug-ins is", "warning", "mixed-versions", IMAGE),
    Same("gpu_name", "the GPU is", "note", "mixed-hardware", UNEVEN),
    Same(
        "gpu_nvlinks_active",
        "the number of active NVLinks is",
        "warning",
        "mixed-links",
        "find the link that is down with nvidia-smi nvlink -s, or expect these ranks to be slower",
    ),
    Same(
        "gpu_ecc",
        "ECC of the GPU is",
        "note",
        "mixed-hardware",
        "set it alike on all GPUs, for example nvidia-smi -e 1, and reset them",
    ),
    Same("cpu_model", "the CPU is", "note", "mixed-hardware", UNEVEN),
    Same("cores_logical", "the number of cores is", "note", "mixed-hardware", UNEVEN),
    Same("smt", "SMT (two threads a core) is", "note", "mixed-hardware", UNEVEN),
    Same("governor", "the CPU governor is", "note", "mixed-systems", UNEVEN),
    Same("kernel", "the kernel is Linux", "note", "mixed-systems", IMAGE),
    Same("container", "the container is", "note", "mixed-systems", IMAGE),
    Same("transparent_huge_pages", "huge pages are", "note", "mixed-systems", UNEVEN),
)


def same_facts(setup: Setup) -> Iterator[Finding]:
    """Compare the facts of SAME."""
    # Reported already; the library follows torch.
    mixed_torch = len(folded(setup.values("torch"))) > 1
    for same in SAME:
        groups = folded(setup.values(same.fact))
        if len(groups) > 1 and not (mixed_torch and same.fact == "library"):
            sentence = _describe(setup, same.words, groups)
            place = setup.place(odd(groups))
            yield Finding(same.severity, same.code, sentence, same.next_step, place)


def _describe(setup: Setup, words: str, groups: Sequence[tuple[Any, list[int]]]) -> str:
    values = [f"{_shown(value)} on {setup.who(ranks)}" for value, ranks in groups[:3]]
    more = f" and {len(groups) - 3} other values elsewhere" if len(groups) > 3 else ""
    return f"{words} {', '.join(values)}{more}"


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "unknown" if value is None else "on" if value else "off"
    return str(value)


# --- variables ------------------------------------------------------------------------------------

COMPARED = re.compile(
    r"(NCCL|RCCL|MSCCL|MSCCLPP|HSA|GLOO|TORCH|PYTORCH|OMP|KMP|MKL|OMPI_MCA|UCX|UCC|FI|MPICH)_|"
    r"(CUDA_DEVICE_MAX_CONNECTIONS|CUDA_MODULE_LOADING|NVIDIA_TF32_OVERRIDE|GPU_MAX_HW_QUEUES)$"
)
# May differ between ranks or hosts: devices, cores, where a rank writes.
OWN = re.compile(
    r".*_(IFNAME|NET_DEVICES|IB_HCA|HOSTID|FILE|DIR|HOME|PATH|AFFINITY|PLACES|LOGS|PREFIX|IFACE)$|"
    r"NCCL_DEBUG|.*_DUMP_|OMPI_MCA_(shmem|rmaps|hwloc)"
)
# These decide how the ranks of NCCL work together.
TOGETHER = re.compile(
    r"NCCL_(ALGO|PROTO|NTHREADS|BUFFSIZE|(MIN|MAX)_N?(CHANNELS|RINGS|CTAS)|NET|.*_(DIS|EN)ABLE|"
    r"CROSS_NIC|LL_THRESHOLD|TREE_THRESHOLD)$"
)


def same_variables(setup: Setup) -> Iterator[Finding]:
    """Compare the variables, and settings in NCCL's files, that change how collectives work."""
    everyone = [merge_settings(facts) for facts in setup.ranks]
    if setup.launcher == "torchrun":  # it sets this itself if there are several ranks on a host
        everyone = [
            {name: text for name, text in own.items() if (name, text) != ("OMP_NUM_THREADS", "1")}
            for own in everyone
        ]
    for name in sorted(set().union(*everyone)):
        groups = folded([own.get(name) or None for own in everyone])  # an empty value is none
        if len(groups) == 1 or not COMPARED.match(name) or OWN.match(name):
            continue
        grave = setup.backend == "nccl" and TOGETHER.match(name)
        shown = [("not set" if value is None else value, ranks) for value, ranks in groups]
        yield Finding(
            "error" if grave else "warning",
            "variable-differs",
            _describe(setup, f"{name} is", shown),
            f"set {name} to the same value on all ranks, or on none (mpirun -x {name}; srun passes "
            "its own environment on; with torchrun set it on every host)"
            + (": NCCL can hang or crash if ranks decide differently" if grave else ""),
            {**setup.place(odd(groups)), "variable": name},
        )


# --- network and clocks ---------------------------------------------------------------------------


def interfaces(setup: Setup) -> Iterator[Finding]:
    """Compare MTU and nominal speed of the interfaces to other hosts, once for each host."""
    used = {
        ranks[0]: setup.ranks[ranks[0]].get("interface") or {}
        for _, ranks, _ in setup.of_hosts()
        if setup.ranks[ranks[0]].get("addresses")
    }
    for fact, words, unit, per in (
        ("mtu_nbytes", "the MTU is", "bytes", 1.0),
        ("nominal_bytes_per_second", "the nominal speed is", "Gbit/s", 8e-9),
    ):
        known = {rank: facts[fact] for rank, facts in used.items() if facts.get(fact)}
        groups: dict[Any, list[int]] = {}
        for rank, value in known.items():
            groups.setdefault(value, []).append(rank)
        if len(groups) > 1:
            values = [
                f"{value * per:g} {unit} on "
                + ", ".join(f"{setup.host(r)} ({used[r].get('name')})" for r in ranks[:4])
                for value, ranks in groups.items()
            ]
            yield Finding(
                "warning",
                "interface-differs",
                f"of the interfaces between hosts {words} {', '.join(values)}",
                "give all interfaces and switches the same MTU (ip link set DEV mtu N)"
                if fact == "mtu_nbytes"
                else "choose equal interfaces (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), or "
                "find out why the link came up slower (ethtool DEV)",
                {"host": setup.host(odd(list(groups.items()))[0]), "fact": fact},
            )


def own_name(setup: Setup) -> Iterator[Finding]:
    """Find a host, of several, that resolves its own name to loopback: Debian's 127.0.1.1."""
    loopback = [
        ranks[0]
        for _, ranks, _ in setup.of_hosts()
        if str(setup.ranks[ranks[0]].get("resolved") or "").startswith("127.")
    ]
    if loopback and len(setup.hosts) > 1:
        first = setup.ranks[loopback[0]]
        yield Finding(
            "note",
            "own-name",
            f"{first.get('hostname')} resolves its own name to {first.get('resolved')}: without "
            "GLOO_SOCKET_IFNAME gloo would listen there, and other hosts could not reach it",
            "set GLOO_SOCKET_IFNAME in every job, or correct /etc/hosts",
            setup.place(loopback),
        )


def clocks(setup: Setup) -> Iterator[Finding]:
    """Compare the time of day of each host with that of rank 0."""
    ahead = {
        ranks[0]: setup.ranks[ranks[0]].get("clock_ahead_seconds")
        for _, ranks, _ in setup.of_hosts()
    }
    far = [rank for rank, s in ahead.items() if s is not None and abs(s) > APART_SECONDS]
    if far:
        offsets = [f"{setup.host(rank)} {ahead[rank]:+.1f} s" for rank in far[:4]]
        more = f" and {len(far) - 4} more" if len(far) > 4 else ""
        yield Finding(
            "warning",
            "clocks-apart",
            f"the clocks of the hosts differ, compared with {setup.host(0)}: {', '.join(offsets)}"
            f"{more}; logs do not line up, and certificates may be refused",
            "let all hosts take the time from one source (chronyc tracking, timedatectl)",
            setup.place(far),
        )
