"""Hosts, versions, launches, ranks and variables, as each run stores them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ddpbench.catalog.sizes import readable
from ddpbench.present.columns import scaled
from ddpbench.present.document import Chart, ReportRun, Section, make_table, tabulate_rows
from ddpbench.records.launched import Launch
from ddpbench.records.wording import spans

NOT_SHOWN = ("rates",)  # the charts show them as limits
# Name, title and caption of each table.
MACHINE = "machine", "Machine and versions", "As rank 0 sees them."
VARIABLES = (
    *("variables", "Environment variables"),
    "Those that affect collectives, without secrets; with the ranks, where they differ.",
)
LAUNCHES = "launches", "Launches", "Of the clock: the time of one reading, and its step."
RANKS = "ranks", "Ranks", "In the first launch of each backend."


def build_sections(run: ReportRun) -> Iterator[Section]:
    """Yield the section, if the run has launches."""
    launches = run.run.launches
    lists = ((MACHINE, _list_facts(launches)), (VARIABLES, _list_variables(launches)))
    charts = [
        Chart(*words, make_table(words[1], ("", ""), facts.items(), left=("",)))
        for words, facts in lists
        if facts
    ]
    first = {launch.backend: launch for launch in reversed(launches)}.values()
    tables = (
        (LAUNCHES, [_describe_launch(launch) for launch in launches]),
        (RANKS, [row for launch in reversed(first) for row in _describe_ranks(launch)]),
    )
    charts += [Chart(*words, tabulate_rows(words[1], rows)) for words, rows in tables if rows]
    if launches:
        rows = tuple((chart,) for chart in charts)
        yield Section("environment", "Environment", rows=rows)


def _list_facts(launches: tuple[Launch, ...]) -> dict[str, str]:
    facts: dict[str, dict[str, None]] = {}
    for launch in launches:
        for name, value in launch.facts.items():
            if name not in NOT_SHOWN and (text := _format(launch.facts, name)):
                text = {True: "yes", False: "no"}[value] if isinstance(value, bool) else text
                facts.setdefault(name.removesuffix("_nbytes").replace("_", " "), {})[text] = None
    return {name: "; ".join(texts) for name, texts in facts.items()}


def _format(facts: Mapping[str, Any], name: str) -> str:
    """Format a fact; "" if it is unknown."""
    value = facts.get(name)
    if isinstance(value, Mapping):
        return _format_interface(value) if value.get("name") else ""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if value is None or not name.endswith("_nbytes"):
        return "" if value is None else str(value)
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else readable(int(value))


def _format_interface(facts: Mapping[str, Any]) -> str:
    speed = facts.get("nominal_bytes_per_second")
    nominal = f", {speed * 8 / 1e9:g} Gbit/s" if speed else ""
    return f"{facts['name']}, mtu {facts.get('mtu_nbytes')}{nominal}"


def _list_variables(launches: tuple[Launch, ...]) -> dict[str, str]:
    """Return each variable's value; where ranks differ, each value with its ranks."""
    values: dict[str, dict[str, set[int]]] = {}
    for launch in launches:
        for rank, facts in enumerate(launch.ranks):
            for name, value in (facts.get("variables") or {}).items():
                values.setdefault(name, {}).setdefault(str(value), set()).add(rank)
    world = max((len(launch.ranks) for launch in launches), default=0)
    return {name: _name_ranks(values[name], world) for name in sorted(values)}


def _name_ranks(ranks_of: dict[str, set[int]], world: int) -> str:
    if len(ranks_of) == 1 and all(len(ranks) == world for ranks in ranks_of.values()):
        return next(iter(ranks_of))
    each = [f"{value} (rank {spans(sorted(ranks))})" for value, ranks in ranks_of.items()]
    return "; ".join(each)


def _describe_launch(launch: Launch) -> dict[str, Any]:
    return {
        "launch": launch.index,
        "backend": launch.backend,
        "library": launch.library,
        "provider": launch.provider,
        "launcher": launch.launcher,
        "ranks": launch.world_size,
        "started": launch.started,
        "cases": launch.cases or None,
        "cases s": launch.sweep_seconds,
        "measuring s": launch.measuring_seconds or None,
        "clock ns": scaled(launch.clock.get("cost_seconds"), 1e9),
        "clock step ns": scaled(launch.clock.get("step_seconds"), 1e9),
    }


def _describe_ranks(launch: Launch) -> Iterator[dict[str, Any]]:
    for rank, facts in enumerate(launch.ranks):
        cpu = facts.get("cpu") or {}
        yield {
            "rank": rank,
            "backend": launch.backend,
            "host": _format(facts, "hostname"),
            "cores": _format(facts, "cpuset"),
            "NUMA nodes": _format(facts, "numa_nodes"),
            "threads": facts.get("threads"),
            "GPU": _format(facts, "gpu_name"),
            "GPU bus": _format(facts, "gpu_bus"),
            "GPU °C after": (facts.get("gpu_after") or {}).get("temperature_celsius"),
            "interface": _format(facts, "interface"),
            "addresses": _format(facts, "addresses"),
            "core limit": facts.get("cgroup_cpu_quota_cores"),
            "memory limit": _format(facts, "cgroup_memory_limit_nbytes"),
            "free memory": _format(facts, "free_memory_nbytes"),
            "CPU s": cpu.get("own_seconds"),
            "stolen s": cpu.get("steal_seconds"),
            "throttled s": cpu.get("throttled_seconds"),
            "preempted": cpu.get("involuntary_switches"),
        }
