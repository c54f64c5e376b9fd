"""Hosts, versions, ranks and variables of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ddpbench.catalog.sizes import readable
from ddpbench.present.document import Chart, ReportRun, Section, make_table, tabulate_rows
from ddpbench.records.launched import Launch
from ddpbench.records.wording import spans

# Facts that charts or other tables show, or that identify a process.
NOT_SHOWN = ("rates", "variables", "cpu", "pid", "boot_id", "time_namespace", "gpu_uuid")


def build_sections(run: ReportRun) -> Iterator[Section]:
    """Yield the section, if the run has launches."""
    launches = run.run.launches
    if not launches:
        return
    machine = make_table("", ("", ""), _list_facts(launches).items(), left=("",))
    variables = make_table("", ("", ""), _list_variables(launches).items(), left=("",))
    first = {launch.backend: launch for launch in reversed(launches)}.values()
    ranks = [row for launch in reversed(first) for row in _describe_ranks(launch)]
    caption = "Those that affect collectives, without secrets; with the ranks, where they differ."
    charts = (
        Chart("machine", "Machine and versions", "As rank 0 sees them.", machine),
        Chart("variables", "Environment variables", caption, variables),
        Chart("ranks", "Ranks", "In the first launch of each backend.", tabulate_rows("", ranks)),
    )
    rows = tuple((chart,) for chart in charts if chart.table.rows)
    yield Section("environment", "Environment", rows=rows)


def _list_facts(launches: tuple[Launch, ...]) -> dict[str, str]:
    facts: dict[str, dict[str, None]] = {}
    for launch in launches:
        for name, text in _format_facts(launch.facts).items():
            facts.setdefault(name, {})[text] = None
    return {name: "; ".join(texts) for name, texts in facts.items()}


def _format_facts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the known facts under names for people."""
    texts = {name: _format(name, value) for name, value in facts.items() if name not in NOT_SHOWN}
    return {
        name.removesuffix("_nbytes").replace("_", " "): text for name, text in texts.items() if text
    }


def _format(name: str, value: Any) -> str:
    """Format a fact; "" if it is unknown."""
    if value is None or value == {}:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping) and "mtu_nbytes" in value:  # an interface
        speed = value.get("nominal_bytes_per_second")
        nominal = f", {speed * 8 / 1e9:g} Gbit/s" if speed else ""
        return f"{value.get('name')}, mtu {value['mtu_nbytes']}{nominal}"
    if isinstance(value, Mapping):
        known = ((key, _format(key, each)) for key, each in value.items())
        return ", ".join(f"{key.replace('_', ' ')} {text}" for key, text in known if text)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if name.endswith("_nbytes"):
        return f"{value / 2**30:.1f} GiB" if value >= 2**30 else readable(int(value))
    return str(value)


def _list_variables(launches: tuple[Launch, ...]) -> dict[str, str]:
    """Return each variable's value; where ranks differ, each value with its ranks."""
    values: dict[str, dict[str, set[int]]] = {}
    for launch in launches:
        for rank, facts in enumerate(launch.ranks):
            for name, value in (facts.get("variables") or {}).items():
                values.setdefault(name, {}).setdefault(str(value), set()).add(rank)
    world = max(len(launch.ranks) for launch in launches)
    texts = {}
    for name, ranks_of in sorted(values.items()):
        texts[name] = "; ".join(
            value if len(ranks) == world else f"{value} (rank {spans(sorted(ranks))})"
            for value, ranks in ranks_of.items()
        )
    return texts


def _describe_ranks(launch: Launch) -> Iterator[dict[str, Any]]:
    for rank, facts in enumerate(launch.ranks):
        cpu = facts.get("cpu") or {}
        yield {
            "rank": rank,
            "backend": launch.backend,
            **_format_facts(facts),
            "CPU s": cpu.get("own_seconds"),
            "stolen s": cpu.get("steal_seconds"),
            "throttled s": cpu.get("throttled_seconds"),
            "preempted": cpu.get("involuntary_switches"),
        }
