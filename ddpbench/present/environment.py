"""Hosts, versions, launches, ranks, variables and clocks, as each run stores them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ddpbench.catalog.sizes import readable
from ddpbench.present.columns import scaled
from ddpbench.present.document import Chart, ReportRun, Section, make_table
from ddpbench.records.launched import Launch
from ddpbench.records.wording import spans

# Facts whose stored name says too little; of the others it is shown with spaces.
NAMES = {
    "python": "Python",
    "git_revision": "ddpbench's revision",
    "git_dirty": "uncommitted changes",
    "cuda": "CUDA",
    "nccl": "NCCL",
    "mpi": "MPI",
    "kernel": "Linux",
    "os": "operating system",
    "cpu_model": "CPU",
    "cores_logical": "logical cores",
    "cores_physical": "physical cores",
    "numa_nodes": "NUMA nodes",
    "driver": "GPU driver",
    "smt": "simultaneous multithreading",
    "memory_nbytes": "memory",
    "default_interface": "interface of the default route",
}
NOT_SHOWN = ("rates",)  # the charts show them as limits
VARIABLES = "Those that affect collectives, without secrets; with the ranks, where they differ."
Row = tuple[Mapping[str, Any], Launch]  # facts of a rank or a clock, and their launch
Read = Callable[[Mapping[str, Any], Launch], Any]
Columns = dict[str, tuple[Read, str]]  # heading → value, and alignment


def build_sections(run: ReportRun) -> Iterator[Section]:
    """Yield the section, if the run has launches."""
    if not run.run.launches:
        return
    lists = (
        ("machine", "Machine and versions", "As rank 0 sees them.", _facts(run)),
        ("variables", "Environment variables", VARIABLES, _variables(run)),
    )
    facts = [
        Chart(name, title, caption, make_table(title, ("", ""), values.items(), left=("",)))
        for name, title, caption, values in lists
        if values
    ]
    rows = tuple((chart,) for chart in (*facts, *_tables(run)))
    yield Section("environment", "Environment", rows=rows)


def _facts(run: ReportRun) -> dict[str, str]:
    facts: dict[str, dict[str, None]] = {}
    for launch in run.run.launches:
        for name, value in launch.facts.items():
            if name not in NOT_SHOWN and (text := _text(name, value)):
                facts.setdefault(NAMES.get(name, name.replace("_", " ")), {})[text] = None
    return {name: "; ".join(texts) for name, texts in facts.items()}


def _text(name: str, value: Any) -> str:
    """Format a fact; "" if it is unknown."""
    if isinstance(value, Mapping):
        return _interface(value) if "name" in value else ""
    if value is None or value == "" or isinstance(value, (list, tuple)):
        return ", ".join(map(str, value or ()))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not name.endswith("_nbytes"):
        return str(value)
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else readable(int(value))


def _interface(facts: Mapping[str, Any]) -> str:
    if not facts.get("name"):
        return ""
    speed = facts.get("nominal_bytes_per_second")
    nominal = f", {speed * 8 / 1e9:g} Gbit/s" if speed else ""
    return f"{facts['name']}, mtu {facts.get('mtu_nbytes')}{nominal}"


def _variables(run: ReportRun) -> dict[str, str]:
    """Return each variable's value; where ranks differ, each value with its ranks."""
    values: dict[str, dict[str, set[int]]] = {}
    world = 0
    for launch in run.run.launches:
        world = max(world, len(launch.ranks))
        for rank, facts in enumerate(launch.ranks):
            for name, value in (facts.get("variables") or {}).items():
                values.setdefault(name, {}).setdefault(str(value), set()).add(rank)
    return {name: _by_ranks(values[name], world) for name in sorted(values)}


def _by_ranks(ranks_of: dict[str, set[int]], world: int) -> str:
    if len(ranks_of) == 1 and all(len(ranks) == world for ranks in ranks_of.values()):
        return next(iter(ranks_of))
    each = [f"{value} (rank {spans(sorted(ranks))})" for value, ranks in ranks_of.items()]
    return "; ".join(each)


def _tables(run: ReportRun) -> Iterator[Chart]:
    launches = run.run.launches
    first = list({launch.backend: launch for launch in reversed(launches)}.values())[::-1]
    caption = "Of the clock: the time of one reading, and its step."
    yield _table("launches", "Launches", caption, LAUNCH, [({}, launch) for launch in launches])
    ranks = [({"rank": i, **facts}, one) for one in first for i, facts in enumerate(one.ranks)]
    yield _table("ranks", "Ranks", "In the first launch of each backend.", RANK, ranks)
    offsets = [
        ({"host": o.host, "ranks": spans(o.ranks), "ahead": o.seconds, "bound": o.bound_seconds}, n)
        for n in launches
        for o in n.offsets
    ]
    if offsets:
        caption = "How far a host's clock is ahead of rank 0's, within ± the bound."
        yield _table("clocks", "Clocks", caption, OFFSET, offsets)


def _table(name: str, title: str, caption: str, columns: Columns, rows: Sequence[Row]) -> Chart:
    """Return a table without the columns in which nothing is known."""
    cells = {head: [read(*row) for row in rows] for head, (read, _) in columns.items()}
    shown = [head for head in columns if any(v not in (None, "") for v in cells[head])]
    left = [head for head in shown if columns[head][1] == "left"]
    table = make_table(title, shown, zip(*(cells[head] for head in shown), strict=True), left)
    return Chart(name, title, caption, table)


def _inner(name: str, key: str) -> Read:
    return lambda facts, launch: (facts.get(name) or {}).get(key)


def _fact(name: str) -> Read:
    return lambda facts, launch: _text(name, facts.get(name))


LAUNCH: Columns = {
    "launch": (lambda _, launch: launch.index, "right"),
    "backend": (lambda _, launch: launch.backend, "left"),
    "library": (lambda _, launch: launch.library, "left"),
    "provider": (lambda _, launch: launch.provider, "left"),
    "launcher": (lambda _, launch: launch.launcher, "left"),
    "ranks": (lambda _, launch: launch.world_size, "right"),
    "started": (lambda _, launch: launch.started, "left"),
    "cases": (lambda _, launch: launch.cases or None, "right"),
    "cases s": (lambda _, launch: launch.sweep_seconds, "right"),
    "measuring s": (lambda _, launch: launch.measuring_seconds or None, "right"),
    "clock ns": (lambda _, launch: scaled(launch.clock.get("cost_seconds"), 1e9), "right"),
    "clock step ns": (lambda _, launch: scaled(launch.clock.get("step_seconds"), 1e9), "right"),
}
RANK: Columns = {
    "rank": (lambda facts, _: facts["rank"], "right"),
    "backend": (lambda _, launch: launch.backend, "left"),
    "host": (_fact("hostname"), "left"),
    "cores": (_fact("cpuset"), "left"),
    "NUMA nodes": (_fact("numa_nodes"), "left"),
    "threads": (lambda facts, _: facts.get("threads"), "right"),
    "GPU": (_fact("gpu_name"), "left"),
    "GPU bus": (_fact("gpu_bus"), "left"),
    "GPU °C after": (_inner("gpu_after", "temperature_celsius"), "right"),
    "interface": (_fact("interface"), "left"),
    "addresses": (_fact("addresses"), "left"),
    "core limit": (lambda facts, _: facts.get("cgroup_cpu_quota_cores"), "right"),
    "memory limit": (_fact("cgroup_memory_limit_nbytes"), "right"),
    "free memory": (_fact("free_memory_nbytes"), "right"),
    "CPU s": (_inner("cpu", "own_seconds"), "right"),
    "stolen s": (_inner("cpu", "steal_seconds"), "right"),
    "throttled s": (_inner("cpu", "throttled_seconds"), "right"),
    "preempted": (_inner("cpu", "involuntary_switches"), "right"),
}
OFFSET: Columns = {
    "launch": (lambda _, launch: launch.index, "right"),
    "backend": (lambda _, launch: launch.backend, "left"),
    "host": (_fact("host"), "left"),
    "ranks": (_fact("ranks"), "left"),
    "ahead µs": (lambda facts, _: scaled(facts["ahead"], 1e6), "right"),
    "± µs": (lambda facts, _: scaled(facts["bound"], 1e6), "right"),
}
