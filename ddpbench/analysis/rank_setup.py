"""A set-up: the facts of all ranks on their hosts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpbench.records.wording import name_ranks

Facts = Mapping[str, Any]
FEW = 4  # hosts, or values, that a sentence names


@dataclass(frozen=True)
class Setup:
    """The facts that the ranks report about themselves.

    Each rank's facts are `rank_facts` and `setup_facts` of runtime/environment.py with what
    doctor/preflight adds; under "host" the first rank of each host has `host_facts`.
    """

    ranks: Sequence[Facts]
    hosts: Sequence[Sequence[int]]  # the ranks of each, first ranks in order
    backend: str = "gloo"
    device: str = "cpu"
    launcher: str = "torchrun"

    def of_hosts(self) -> Iterator[tuple[str, Sequence[int], Facts]]:
        """Name, ranks, and facts of each host."""
        for ranks in self.hosts:
            facts = self.ranks[ranks[0]]
            yield str(facts.get("hostname")), ranks, facts.get("host") or {}

    def values(self, fact: str) -> list[Any]:
        """A fact in each rank; one of the host, in all of its ranks."""
        found = [its.get(fact) for its in self.ranks]
        for _, ranks, facts in self.of_hosts():
            for rank in ranks if fact in facts else ():
                found[rank] = facts[fact]
        return found

    def host(self, rank: int) -> str:
        return str(self.ranks[rank].get("hostname"))

    def who(self, ranks: Sequence[int]) -> str:
        """Return "rank 2 (node7)" or "ranks 0-7 (node1)", with FEW hosts at most."""
        names = list(dict.fromkeys(map(self.host, ranks)))
        more = f", and {len(names) - FEW} more" if len(names) > FEW else ""
        return f"{name_ranks(ranks)} ({', '.join(names[:FEW])}{more})"

    def place(self, ranks: Sequence[int]) -> dict[str, Any]:
        """For a finding: the first of the ranks and its host, all ranks where there are several."""
        place = {"rank": ranks[0], "host": self.host(ranks[0])}
        return place if len(ranks) == 1 else {**place, "ranks": list(ranks)}

    def where(self, holds: Callable[[Facts], bool]) -> list[int]:
        """Return the ranks whose facts meet this condition."""
        return [rank for rank, its in enumerate(self.ranks) if holds(its)]


def merge_settings(facts: Facts) -> dict[str, str]:
    """Return the variables of a rank, and the settings that only NCCL's files make."""
    merged = dict(facts.get("variables") or {})
    for settings in (facts.get("nccl_conf") or {}).values():
        merged = {**settings, **merged}
    return merged


def folded(values: Sequence[Any]) -> list[tuple[Any, list[int]]]:
    """Return each value with the ranks that have it, in order of their first ranks."""
    groups: dict[str, tuple[Any, list[int]]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(json.dumps(value, sort_keys=True), (value, []))[1].append(rank)
    return list(groups.values())


def odd(groups: Sequence[tuple[object, list[int]]]) -> list[int]:
    """Return the ranks with the rarest value; of equally rare values, those with the last one."""
    _, ranks = min(reversed(groups), key=lambda group: len(group[1]))
    return ranks


def cpus(text: object) -> frozenset[int]:
    """Return the cores of "0-3,8"; none without a text."""
    found: set[int] = set()
    for span in filter(None, str(text or "").split(",")):
        first, _, last = span.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


@dataclass(frozen=True)
class Crowd:
    """The ranks of a host that has more compute threads than cores for them."""

    host: str
    ranks: int
    threads: int
    cores: int  # that they may use, by their cpusets and a control group's quota
    spare: int  # that their control group allows, but their cpusets do not


def crowded(ranks: Sequence[Facts]) -> Iterator[Crowd]:
    """Yield the hosts where ranks are crowded, except hosts whose cores are unknown."""
    hosts: dict[str, list[Facts]] = {}
    for rank in ranks:
        hosts.setdefault(str(rank.get("hostname")), []).append(rank)
    for host, those in hosts.items():
        bound = frozenset().union(*(cpus(rank.get("cpuset")) for rank in those))
        quota = those[0].get("cgroup_cpu_quota_cores") or len(bound)
        cores = max(1, int(min(len(bound), quota)))
        threads = sum(rank.get("threads") or 1 for rank in those)
        spare = max(0, len(cpus(those[0].get("allowed_cpus")) - bound))
        if bound and threads > cores:
            yield Crowd(host, len(those), threads, cores, 0 if quota < len(bound) else spare)
