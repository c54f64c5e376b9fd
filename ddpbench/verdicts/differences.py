"""Find explanations of a change other than the code: differing environments, and drift.

The drift of a machine is how much runs of identical code differ if they are apart in time. The
intervals of one run do not show it. Pure functions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any

import numpy as np

from ddpbench.analysis.lines import DISAGREEING
from ddpbench.analysis.rank_setup import merge_settings
from ddpbench.records.schema import Plan, Run
from ddpbench.verdicts import matching
from ddpbench.verdicts.matching import AnyCase, Side, Source
from ddpbench.verdicts.verdict import FALSE_SHARE

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

    A fact that only one side recorded does not count as a difference.
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
        for each in fields(Plan):
            if each.name != "seed":
                note(f"plan: {each.name}", getattr(run.plan, each.name))
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


ASSUMED = 0.35  # drift, while there are too few runs to measure it
FEWEST_RUNS = 5  # earlier runs that measure it
# A run that differs only in these counts for the drift. All other differences may change times.
HARMLESS = ("git", "commit", "plan: ")


@dataclass(frozen=True)
class Drift:
    """How far apart in time two sides are, and log times of earlier runs like them."""

    seconds: float  # from the end of the earlier side to the beginning of the later one
    # case → log times of stored runs in BASE's environment, one per run
    known: Mapping[AnyCase, tuple[float, ...]] = field(default_factory=dict)


def drift_margin(logs: Sequence[float], cases: int) -> float:
    """Return the change, a fraction, that two runs of identical code seldom exceed.

    It is the 95th percentile of the changes among earlier runs. If these are few, or if the
    comparison has many cases, the quantile of Student's t is larger: at most 5 % of comparisons
    then show a larger change in any case (Bonferroni).
    """
    if len(logs) < FEWEST_RUNS:
        return ASSUMED
    from scipy.stats import t

    first, second = np.triu_indices(len(logs), 1)
    changes = np.abs(np.take(logs, first) - np.take(logs, second))
    reach = t.ppf(1 - FALSE_SHARE / cases, len(logs) - 1) * np.std(logs, ddof=1) * math.sqrt(2)
    return math.expm1(max(float(np.percentile(changes, 95)), float(reach)))


def explain_drift(change: float, earlier: int) -> str:
    """Return why a change is not claimed, and how many earlier runs are stored if too few."""
    known = f"two runs of identical code may differ by ±{change * 100:.1f} %"
    if earlier >= FEWEST_RUNS:
        return known
    return f"{known} (assumed: {earlier} of the {FEWEST_RUNS} earlier runs needed are stored)"


def find_moved_cores(base: Side, new: Side) -> tuple[float, str]:
    """Return how many times longer NEW's handoffs take, and a sentence on the ranks' cores.

    Returns 1 and "" if the hypervisor and the kernel placed the cores alike, or if that is unknown.
    A handoff takes 0.4 µs between two cores, and 6.5 or 18 µs between others, for minutes. Small
    messages over shared memory follow: such runs of identical code differ by half or more.
    """
    if not base.handoffs or not new.handoffs:
        return 1.0, ""
    before, after = float(np.median(base.handoffs)), float(np.median(new.handoffs))
    if abs(math.log(after / before)) < math.log(DISAGREEING):
        return 1.0, ""
    return after / before, (
        f"the ranks ran on other cores: the round trip of a cache line between them takes "
        f"{before * 1e6:.2g} µs in BASE, {after * 1e6:.2g} µs in NEW"
    )


def estimate_drift(base: Source, new: Source, stored: Iterable[Run]) -> Drift | None:
    """Estimate the drift between two sides; None if launches took turns or have no time stamps.

    stored: runs to learn from; runs in another environment than BASE, and NEW's own, are left out.
    """
    seconds = apart(base, new)
    if seconds is None:
        return None
    others = {run.id: run for run in (*stored, *base.runs)}
    for run in new.runs:
        others.pop(run.id, None)
    known: dict[AnyCase, tuple[float, ...]] = {}
    for run in others.values():
        changed = [each.name for each in differences(base.runs, [run])]
        if run.state != "complete" or not all(name.startswith(HARMLESS) for name in changed):
            continue
        for case, found in matching.find_cases(Source(run.id, (run,))).items():
            if found.side is not None:
                side = found.side.of_quartiles() or found.side
                known[case] = (*known.get(case, ()), math.log(side.seconds))
    return Drift(seconds, known)


def apart(base: Source, new: Source) -> float | None:
    """Return the seconds from the end of the earlier side to the beginning of the later one.

    Returns None if launches took turns or have no time stamps.
    """
    spans = []
    for source in (base, new):
        launches = [launch for run in source.runs for launch in run.launches]
        if not launches or not all(launch.started for launch in launches):
            return None
        ends = [launch.ended or launch.started for launch in launches]
        spans.append((min(_at(launch.started) for launch in launches), max(map(_at, ends))))
    first, second = sorted(spans)
    return second[0] - first[1] if second[0] >= first[1] and first[0] < second[0] else None


def _at(stamp: str) -> float:
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
