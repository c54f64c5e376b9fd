"""Formats of a calibration: one entry of FORMATS adds an output."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ddpbench.analysis import stats
from ddpbench.analysis.flags import BUSY_SHARE
from ddpbench.records.schema import Run, StepCase
from ddpbench.records.terminal_text import escaped
from ddpbench.render.column import Column, text_column
from ddpbench.render.labels import format_time, label
from ddpbench.render.style import TERMINAL
from ddpbench.verdicts import noise
from ddpbench.verdicts.noise import Noise

LAUNCHES = (6, 12, 24)  # per side, whose margins are shown
CEILINGS = {
    "fastest_copy": "memory, fastest copy of any size",
    "both_ways": "sockets, each rank sends and receives",
    "one_way": "sockets, every second rank sends",
}


def table(calibration: Noise, runs: Sequence[Run], wanted: float) -> str:
    """Format the noise of each case, its margins, the launches for the wanted margin; ceilings."""
    columns: list[Column[dict[str, Any]]] = [
        text_column("case", lambda row: row["case"]),
        Column("time", lambda row: row["time"]),
        Column("launches vary by", lambda row: f"{row['spread'] * 100:.1f} %"),
        *(_margin_column(launches) for launches in LAUNCHES),
        Column(
            f"launches for {wanted * 100:g} %",
            lambda row: str(row["launches_for_wanted"] or f"more than {noise.STEPS[-1]}"),
        ),
    ]
    times = calibration.used
    rows = [
        {**row, "time": format_time(case, row["seconds"])}
        for case, row in zip(times, _rows(calibration, wanted), strict=True)
    ]
    counts = sorted({len(launches) for launches in times.values()})
    blocks = [
        f"calibration   {calibration.name}\n"
        f"identical code, {' or '.join(map(str, counts))} launches; machine: "
        f"{', '.join(part for part in noise.machine(runs[0]) if part != 'None')}",
        "\n".join(_warnings(runs)),
        TERMINAL.rows(rows, columns),
        "\n".join(_ceilings(runs)),
        "launches vary by: 1.48 × the median distance of launch medians from their median\n"
        "margin of R: 95 % of comparisons of identical code with R launches per side find a "
        "smaller change; compare claims no change below it",
    ]
    return "\n\n".join(filter(None, blocks)) + "\n"


def _margin_column(launches: int) -> Column[dict[str, Any]]:
    name = f"margin_{launches}"
    return Column(
        f"margin of {launches}", lambda row: f"±{row[name] * 100:.1f} %" if row[name] else "-"
    )


def csv(calibration: Noise, runs: Sequence[Run], wanted: float) -> str:
    """Format one row per case: seconds, and margins as fractions."""
    import pandas as pd

    return str(pd.DataFrame(_rows(calibration, wanted)).to_csv(index=False))


def as_json(calibration: Noise, runs: Sequence[Run], wanted: float) -> str:
    """Format the cases with the machine and its ceilings."""
    launches = [launch for run in runs for launch in run.launches]
    document = {
        "calibration": calibration.name,
        "machine": noise.machine(runs[0]),
        "wanted_margin": wanted,
        "cases": list(_rows(calibration, wanted)),
        "rates": [launch.facts.get("rates") for launch in launches],
        "clock": [launch.clock for launch in launches],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


FORMATS: dict[str, Callable[[Noise, Sequence[Run], float], str]] = {
    "table": escaped(table),
    "csv": escaped(csv),
    "json": as_json,
}


def _rows(calibration: Noise, wanted: float) -> Iterator[dict[str, Any]]:
    for case, times in calibration.used.items():
        yield {
            "case": label(case),
            "ddp": isinstance(case, StepCase),
            "launches": len(times),
            "seconds": stats.over_launches(times)[0],
            "spread": noise.spread(times),
            **{f"margin_{n}": noise.margin(times, n) for n in LAUNCHES},
            "launches_for_wanted": noise.launches_for(times, wanted),
        }


def _warnings(runs: Sequence[Run]) -> Iterator[str]:
    measured = [outcome for run in runs for outcome in run.outcomes if outcome.summary is not None]
    busy = sum((outcome.others_share or 0) > BUSY_SHARE for outcome in measured)
    if busy:
        yield (
            f"WARNING (busy-host): other processes used more than {BUSY_SHARE * 100:g} % of the "
            f"cores during {busy} of {len(measured)} cases: these margins were measured on a busy "
            "host"
        )


def _ceilings(runs: Sequence[Run]) -> Iterator[str]:
    """Format the highest rates that the launches measured, and the timer: medians over launches."""
    launches = [launch for run in runs for launch in run.launches]
    for name, text in CEILINGS.items():
        rates = [launch.facts.get("rates") or {} for launch in launches]
        known = sorted(rate[name] / 1e9 for rate in rates if rate.get(name))
        if known:
            median = known[len(known) // 2]
            yield f"{text}: {median:.2f} GB/s ({known[0]:.2f} … {known[-1]:.2f})"
    clocks = [launch.clock for launch in launches if launch.clock]
    if clocks:
        costs = sorted(clock["cost_seconds"] for clock in clocks)
        steps = sorted(clock["step_seconds"] for clock in clocks)
        yield (
            f"timer: {costs[len(costs) // 2] * 1e9:.0f} ns per stamp, "
            f"steps of {steps[len(steps) // 2] * 1e9:.0f} ns"
        )
