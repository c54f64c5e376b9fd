"""Differences of the environments of two sides, one of which may be the cause of a change."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ddpbench.analysis.rank_setup import merge_settings
from ddpbench.records.launched import Launch
from ddpbench.records.schema import Plan, Run

# Facts of launches and ranks. Load and free memory are left out: they change every minute.
FACTS = (
    *("ddpbench", "git", "commit", "python", "torch", "torch_build", "cuda", "nccl", "driver"),
    *("kernel", "os", "container", "virtual_machine", "cpu_model", "cores_logical"),
    *("cores_physical", "smt", "governor", "memory_nbytes", "transparent_huge_pages"),
    *("numa_nodes", "default_interface"),
)
RANK_FACTS = (
    *("hostname", "cpuset", "numa_nodes", "threads", "gpu_name", "cgroup_cpu_quota_cores"),
    *("cgroup_memory_limit_nbytes", "ulimit_memlock_nbytes", "interface", "gpu_nvlinks_active"),
    "nccl_plugins",
)
# Variables that every job sets anew.
PASSING = re.compile(r"SLURM_.*(ID|PORTS?|TIME|ADDR|IPADDR|NODELIST)$")
UNSET = "unset"


@dataclass(frozen=True)
class Difference:
    """One fact, with the values of the launches and ranks of each side, as text."""

    name: str
    base: tuple[str, ...]
    new: tuple[str, ...]


def compare_environments(base: Sequence[Run], new: Sequence[Run]) -> tuple[Difference, ...]:
    """Compare the plans of two sides, and the launches of backends that both sides have.

    A fact that only one side recorded does not count as a difference.
    """
    measured = [{launch.backend for run in runs for launch in run.launches} for runs in (base, new)]
    left, right = (_collect(runs, set.intersection(*measured)) for runs in (base, new))
    for name in {**left, **right}:
        if name.isupper():  # a variable, which one side has not set
            left.setdefault(name, {UNSET})
            right.setdefault(name, {UNSET})
    return tuple(
        Difference(name, tuple(sorted(left[name])), tuple(sorted(right[name])))
        for name in left
        if name in right and left[name] != right[name]
    )


def _collect(runs: Sequence[Run], backends: Collection[str]) -> dict[str, set[str]]:
    """Return the values of each fact in the launches of these backends."""
    facts: dict[str, set[str]] = {}
    for launch in (launch for run in runs for launch in run.launches):
        for name, value in _list_facts(launch) if launch.backend in backends else ():
            facts.setdefault(name, set()).add(_format_value(value))
    for name in (field.name for field in fields(Plan) if field.name != "seed"):
        facts[f"plan: {name}"] = {_format_value(getattr(run.plan, name)) for run in runs}
    return facts


def _list_facts(launch: Launch) -> Iterator[tuple[str, Any]]:
    facts = dict(launch.facts)
    if (revision := facts.get("git_revision")) is not None:
        facts["git"] = str(revision)[:12] + (" and changes" if facts.get("git_dirty") else "")
    yield from ((name, facts[name]) for name in FACTS if name in facts)
    yield f"library of {launch.backend}", launch.library
    yield f"launcher of {launch.backend}", launch.launcher
    for rank in launch.ranks:
        for name in RANK_FACTS:
            if name in rank:
                yield f"{name} of ranks" if name in FACTS else name, rank[name]
        yield from (each for each in merge_settings(rank).items() if not PASSING.match(each[0]))


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(_format_value(each) for each in value.values() if each is not None)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
