"""A set-up: the facts of all ranks on their hosts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpbench.analysis.flags import group_by
from ddpbench.records.wording import name_ranks

Facts = Mapping[str, Any]
FEW = 4  # hosts, or values, that a sentence names
OF_HOST = ("free_memory_nbytes", "shm_free_nbytes", "shm_nbytes")  # read once for each host


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

    def everyone(self) -> list[Facts]:
        """Return the facts of each rank together with those of its host."""
        everyone: list[Facts] = list(self.ranks)
        for ranks in self.hosts:
            first = self.ranks[ranks[0]]
            once = {name: first[name] for name in OF_HOST if name in first}
            for rank in ranks:
                everyone[rank] = {**(first.get("host") or {}), **self.ranks[rank], **once}
        return everyone

    def values(self, fact: str) -> list[Any]:
        """Return a fact of each rank, or of its host."""
        return [facts.get(fact) for facts in self.everyone()]

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

    def list_values(self, groups: Sequence[tuple[object, list[int]]]) -> str:
        """Return "1 on rank 0 (a), off on ranks 1-3 (b)"; no more than three values."""
        values = [f"{_name_value(value)} on {self.who(ranks)}" for value, ranks in groups[:3]]
        more = f" and {len(groups) - 3} other values elsewhere" if len(groups) > 3 else ""
        return f"{', '.join(values)}{more}"


def _name_value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "unknown" if value is None else str(value)


def merge_settings(facts: Facts) -> dict[str, str]:
    """Return the variables of a rank, and the settings that only NCCL's files make."""
    merged = dict(facts.get("variables") or {})
    for settings in (facts.get("nccl_conf") or {}).values():
        merged = {**settings, **merged}
    return merged


def folded(values: Sequence[Any]) -> list[tuple[Any, list[int]]]:
    """Return each value with the ranks that have it, in order of their first ranks."""
    groups = group_by(range(len(values)), lambda rank: json.dumps(values[rank], sort_keys=True))
    return [(values[ranks[0]], ranks) for ranks in groups.values()]


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


def crowded(ranks: Sequence[Facts]) -> Iterator[Crowd]:
    """Yield the hosts where ranks are crowded, except hosts whose cores are unknown."""
    for host, those in group_by(ranks, lambda rank: str(rank.get("hostname"))).items():
        bound = frozenset().union(*(cpus(rank.get("cpuset")) for rank in those))
        quota = those[0].get("cgroup_cpu_quota_cores") or len(bound)
        cores = max(1, int(min(len(bound), quota)))
        threads = sum(rank.get("threads") or 1 for rank in those)
        if bound and threads > cores:
            yield Crowd(host, len(those), threads, cores)
