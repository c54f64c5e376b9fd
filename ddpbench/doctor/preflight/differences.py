"""What all ranks, or all hosts, should have alike: facts, variables, interfaces, clocks.

One entry of SAME adds a fact.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddpbench.analysis.setup import Setup, folded, odd
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
    Same("gpu_name", "the GPU is", "note", "mixed-hardware", UNEVEN),
    Same("cpu_model", "the CPU is", "note", "mixed-hardware", UNEVEN),
    Same("cores_logical", "the number of cores is", "note", "mixed-hardware", UNEVEN),
    Same("smt", "SMT (two threads a core) is", "note", "mixed-hardware", UNEVEN),
    Same("governor", "the CPU governor is", "note", "mixed-systems", UNEVEN),
    Same("kernel", "the kernel is Linux", "note", "mixed-systems", IMAGE),
    Same("container", "the container is", "note", "mixed-systems", IMAGE),
    Same("transparent_huge_pages", "huge pages are", "note", "mixed-systems", UNEVEN),
)  # fmt: skip


def same_facts(setup: Setup) -> Iterator[Finding]:
    """The facts of SAME."""
    mixed_torch = len(folded(setup.values("torch"))) > 1  # told already; the library follows it
    for each in SAME:
        groups = folded(setup.values(each.fact))
        if len(groups) > 1 and not (mixed_torch and each.fact == "library"):
            yield _differing(setup, each.words, groups, each.severity, each.code, each.next_step)


def _differing(
    setup: Setup, words: str, groups: Sequence[tuple[Any, list[int]]], severity: str, code: str,
    next_step: str, **place: Any,
) -> Finding:  # fmt: skip
    told = [f"{_shown(value)} on {setup.who(ranks)}" for value, ranks in groups[:3]]
    more = f" and {len(groups) - 3} other values elsewhere" if len(groups) > 3 else ""
    where = {**setup.place(odd(groups)), **place}
    return Finding(severity, code, f"{words} {', '.join(told)}{more}", next_step, where)


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "unknown" if value is None else "on" if value else "off"
    return str(value)


# --- variables ------------------------------------------------------------------------------------

COMPARED = re.compile(r"(NCCL|GLOO|TORCH|PYTORCH|OMP|KMP|MKL|OMPI_MCA|UCX|UCC|FI|MPICH)_")
# A rank or a host may have its own: its devices, its cores, where it writes.
OWN = re.compile(
    r".*_(IFNAME|NET_DEVICES|IB_HCA|HOSTID|FILE|DIR|HOME|PATH|AFFINITY|PLACES|LOGS|PREFIX|IFACE)$|"
    r"NCCL_DEBUG|.*_DUMP_|OMPI_MCA_(shmem|rmaps|hwloc)"
)
# By these NCCL decides how ranks work together.
TOGETHER = re.compile(
    r"NCCL_(ALGO|PROTO|NTHREADS|BUFFSIZE|(MIN|MAX)_N?(CHANNELS|RINGS|CTAS)|NET|.*_(DIS|EN)ABLE|"
    r"CROSS_NIC|LL_THRESHOLD|TREE_THRESHOLD)$"
)


def same_variables(setup: Setup) -> Iterator[Finding]:
    """Variables that steer collectives."""
    every = [its.get("variables") or {} for its in setup.ranks]
    for name in sorted(set().union(*every)):
        values = [_set_by_user(setup, name, its.get(name)) for its in every]
        groups = folded(values)
        if len(groups) == 1 or not COMPARED.match(name) or OWN.match(name):
            continue
        grave = setup.backend == "nccl" and TOGETHER.match(name)
        yield _differing(
            setup,
            f"{name} is",
            [("not set" if value is None else value, ranks) for value, ranks in groups],
            "error" if grave else "warning",
            "variable-differs",
            f"set {name} alike for all ranks, or for none (mpirun -x {name}; srun hands its own "
            "environment to all; with torchrun set it on every host)"
            + (": NCCL can hang or crash where ranks decide differently" if grave else ""),
            variable=name,
        )


def _set_by_user(setup: Setup, name: str, value: str | None) -> str | None:
    """torchrun sets OMP_NUM_THREADS to 1 where there are several ranks on a host; an empty value is
    none."""
    torchruns = (name, value, setup.launcher) == ("OMP_NUM_THREADS", "1", "torchrun")
    return None if torchruns else value or None


# --- network and clocks ---------------------------------------------------------------------------


def interfaces(setup: Setup) -> Iterator[Finding]:
    """MTU and nominal speed where traffic leaves for other hosts, of each host once."""
    used = {
        ranks[0]: setup.ranks[ranks[0]].get("interface") or {}
        for _, ranks, _ in setup.of_hosts()
        if setup.ranks[ranks[0]].get("addresses")
    }
    for fact, words, unit, per in (
        ("mtu_nbytes", "the MTU is", "bytes", 1.0),
        ("nominal_bytes_per_second", "the nominal speed is", "Gbit/s", 8e-9),
    ):
        known = {rank: its[fact] for rank, its in used.items() if its.get(fact)}
        groups: dict[Any, list[int]] = {}
        for rank, value in known.items():
            groups.setdefault(value, []).append(rank)
        if len(groups) > 1:
            told = [
                f"{value * per:g} {unit} on "
                + ", ".join(f"{setup.host(r)} ({used[r].get('name')})" for r in ranks[:4])
                for value, ranks in groups.items()
            ]
            yield Finding(
                "warning",
                "interface-differs",
                f"of the interfaces between hosts {words} {', '.join(told)}",
                "give all the same MTU (ip link set DEV mtu N), switches included"
                if fact == "mtu_nbytes"
                else "choose like interfaces (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), or see why "
                "the link has come up slower (ethtool DEV)",
                {"host": setup.host(odd(list(groups.items()))[0]), "fact": fact},
            )


def own_name(setup: Setup) -> Iterator[Finding]:
    """With several hosts, a host whose name is loopback to itself: Debian's 127.0.1.1."""
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
    """Times of day, of each host once, held against rank 0's."""
    ahead = {
        ranks[0]: setup.ranks[ranks[0]].get("clock_ahead_seconds")
        for _, ranks, _ in setup.of_hosts()
    }
    far = [rank for rank, its in ahead.items() if its is not None and abs(its) > APART_SECONDS]
    if far:
        told = [f"{setup.host(rank)}'s {ahead[rank]:+.1f} s" for rank in far[:4]]
        more = f" and {len(far) - 4} more" if len(far) > 4 else ""
        yield Finding(
            "warning",
            "clocks-apart",
            f"the clocks of hosts are apart: ahead of {setup.host(0)}'s is {', '.join(told)}"
            f"{more}; logs do not line up, and certificates may be refused",
            "let all hosts keep time from one source (chronyc tracking, timedatectl)",
            setup.place(far),
        )
