"""Hosts, versions, ranks and variables of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ddpbench.catalog.sizes import readable
from ddpbench.present.document import Chart, ReportRun, Section, make_table, tabulate_rows
from ddpbench.records.launched import Launch
from ddpbench.records.wording import spans

# Facts that other tables show, or that identify a process.
NOT_SHOWN = ("rates", "variables", "cpu", "pid", "boot_id", "time_namespace", "gpu_uuid")


def build_sections(run: ReportRun) -> Iterator[Section]:
    """Yield the section on the first launch, if there is one."""
    if not run.run.launches:
        return
    launch = run.run.launches[0]
    machine = make_table("", ("", ""), _format_facts(launch.facts).items(), left=("",))
    variables = make_table("", ("", ""), _list_variables(launch).items(), left=("",))
    ranks = [{"rank": rank, **_format_facts(facts)} for rank, facts in enumerate(launch.ranks)]
    caption = "Those that affect collectives, without secrets; with the ranks, where they differ."
    charts = (
        Chart("machine", "Machine and versions", "As rank 0 sees them.", machine),
        Chart("variables", "Environment variables", caption, variables),
        Chart("ranks", "Ranks", "In the first launch.", tabulate_rows("", ranks)),
    )
    rows = tuple((chart,) for chart in charts if chart.table.rows)
    yield Section("environment", "Environment", rows=rows)


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
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {text}" for key, text in _format_facts(value).items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if name.endswith("_nbytes"):
        return f"{value / 2**30:.1f} GiB" if value >= 2**30 else readable(int(value))
    return str(value)


def _list_variables(launch: Launch) -> dict[str, str]:
    """Return each variable's value; where ranks differ, each value with its ranks."""
    values: dict[str, dict[str, list[int]]] = {}
    for rank, facts in enumerate(launch.ranks):
        for name, value in (facts.get("variables") or {}).items():
            values.setdefault(name, {}).setdefault(str(value), []).append(rank)
    return {
        name: "; ".join(
            value if len(ranks) == len(launch.ranks) else f"{value} (rank {spans(ranks)})"
            for value, ranks in ranks_of.items()
        )
        for name, ranks_of in sorted(values.items())
    }
