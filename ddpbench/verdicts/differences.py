"""Differences between the environments of two sets of runs, which may explain a change."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ddpbench.analysis.rank_setup import merge_settings
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
# Facts that distinguish machines. A hostname does not: a container may have a new one each time.
MACHINE = ("cpu_model", "cores_logical", "cores_physical", "gpu_name")
# Variables that every job sets anew.
PASSING = re.compile(r"SLURM_.*(ID|PORTS?|TIME|ADDR|IPADDR|NODELIST)$")
UNSET = "unset"


@dataclass(frozen=True)
class Difference:
    """One fact, with the values of the launches and ranks of each side, as text."""

    name: str
    base: tuple[str, ...]
    new: tuple[str, ...]


def differences(base: Sequence[Run], new: Sequence[Run]) -> tuple[Difference, ...]:
    """Compare the launches of backends that both sides have.

    A fact that one side did not record is no difference.
    """
    backends = {launch.backend for run in base for launch in run.launches}
    backends &= {launch.backend for run in new for launch in run.launches}
    sides = [
        [replace(r, launches=tuple(x for x in r.launches if x.backend in backends)) for r in side]
        for side in (base, new)
    ]
    variables = sorted({name for side in sides for run in side for name in _variables(run)})
    left, right = (_environment(side, variables) for side in sides)
    return tuple(
        Difference(name, tuple(sorted(left[name])), tuple(sorted(right[name])))
        for name in left
        if name in right and left[name] != right[name]
    )


def _environment(runs: Sequence[Run], variables: Iterable[str]) -> dict[str, set[str]]:
    facts_by_name: dict[str, set[str]] = {}

    def note(name: str, value: Any) -> None:
        facts_by_name.setdefault(name, set()).add(_format_value(value))

    for launch in (launch for run in runs for launch in run.launches):
        facts = dict(launch.facts)
        if (revision := facts.get("git_revision")) is not None:
            facts["git"] = str(revision)[:12] + (" and changes" if facts.get("git_dirty") else "")
        for name in FACTS:
            if name in facts:
                note(name, facts[name])
        note(f"library of {launch.backend}", launch.library)
        note(f"launcher of {launch.backend}", launch.launcher)
        for rank in launch.ranks:
            for name in RANK_FACTS:
                if name in rank:
                    note(f"{name} of ranks" if name in FACTS else name, rank[name])
            if "variables" in rank:
                known = merge_settings(rank)
                for name in variables:
                    note(name, known.get(name, UNSET))
    for run in runs:
        for field in fields(Plan):
            if field.name != "seed":
                note(f"plan: {field.name}", getattr(run.plan, field.name))
    return facts_by_name


def _variables(run: Run) -> set[str]:
    ranks = (rank for launch in run.launches for rank in launch.ranks)
    names = {name for rank in ranks for name in merge_settings(rank)}
    return {name for name in names if not PASSING.match(name)}


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(_format_value(each) for each in value.values() if each is not None)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
