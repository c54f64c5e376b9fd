"""A calibration as text: one entry of FORMATS adds an output."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ddpbench.analysis import stats
from ddpbench.analysis.lines import BUSY_SHARE
from ddpbench.records.schema import Run, StepCase
from ddpbench.records.visible import escaped
from ddpbench.render.collective_columns import digits
from ddpbench.render.comparison import label
from ddpbench.render.style import TERMINAL
from ddpbench.verdicts import noise
from ddpbench.verdicts.noise import Noise

SHOWN = (6, 12, 24)  # launches a side


def table(found: Noise, runs: Sequence[Run], wanted: float) -> str:
    """Noise of each case, margins, the launches that the wanted margin needs; then ceilings."""
    heads = ["case", "time", "launches vary by", *(f"margin of {n}" for n in SHOWN),
             f"launches for {wanted * 100:g} %"]  # fmt: skip
    cells = []
    for row in _rows(found, wanted):
        scale, unit = (1e3, "ms") if row["ddp"] else (1e6, "µs")
        margins = [f"±{row[f'margin_{n}'] * 100:.1f} %" if row[f"margin_{n}"] else "-"
                   for n in SHOWN]  # fmt: skip
        needed = row["launches_for_wanted"] or f"more than {noise.STEPS[-1]}"
        cells.append([row["case"], f"{digits(row['seconds'] * scale)} {unit}",
                      f"{row['spread'] * 100:.1f} %", *margins, str(needed)])  # fmt: skip
    counts = sorted({row["launches"] for row in _rows(found, wanted)})
    blocks = [
        f"calibration   {found.name}\n"
        f"identical code, {' or '.join(map(str, counts))} launches; machine: "
        f"{', '.join(part for part in noise.machine(runs[0]) if part != 'None')}",
        "\n".join(_warnings(runs)),
        TERMINAL.table(cells, heads),
        "\n".join(_ceilings(runs)),
        "launches vary by: 1.48 × the median distance of launch medians from theirs\n"
        "margin of R: 95 % of comparisons of identical code with R launches a side find less; no "
        "smaller change is claimed",
    ]
    return "\n\n".join(filter(None, blocks)) + "\n"


def csv(found: Noise, runs: Sequence[Run], wanted: float) -> str:
    """One row a case; seconds, and margins as fractions."""
    import pandas as pd

    return str(pd.DataFrame(_rows(found, wanted)).to_csv(index=False))


def as_json(found: Noise, runs: Sequence[Run], wanted: float) -> str:
    """The same, with the machine and its ceilings."""
    launches = [launch for run in runs for launch in run.launches]
    shown = {
        "calibration": found.name,
        "machine": noise.machine(runs[0]),
        "wanted_margin": wanted,
        "cases": list(_rows(found, wanted)),
        "rates": [launch.facts.get("rates") for launch in launches],
        "clock": [launch.clock for launch in launches],
    }
    return json.dumps(shown, indent=1, allow_nan=False) + "\n"


FORMATS: dict[str, Callable[[Noise, Sequence[Run], float], str]] = {
    "table": escaped(table),
    "csv": escaped(csv),
    "json": as_json,
}


def _rows(found: Noise, wanted: float) -> Iterator[dict[str, Any]]:
    for case, times in found.used.items():
        yield {
            "case": label(case),
            "ddp": isinstance(case, StepCase),
            "launches": len(times),
            "seconds": stats.over_launches(times)[0],
            "spread": noise.spread(times),
            **{f"margin_{n}": noise.margin(times, n) for n in SHOWN},
            "launches_for_wanted": noise.launches_for(times, wanted),
        }


def _warnings(runs: Sequence[Run]) -> Iterator[str]:
    measured = [each for run in runs for each in run.outcomes if each.summary is not None]
    busy = sum((each.others_share or 0) > BUSY_SHARE for each in measured)
    if busy:
        yield (
            f"WARNING: other processes used more than {BUSY_SHARE * 100:g} % of the cores during "
            f"{busy} of {len(measured)} cases: these margins are those of a busy host"
        )


def _ceilings(runs: Sequence[Run]) -> Iterator[str]:
    """What the machine can do at all, as the launches measured it: medians over launches."""
    launches = [launch for run in runs for launch in run.launches]
    for name, words in CEILINGS.items():
        known = [r[name] for one in launches if (r := one.facts.get("rates")) and r.get(name)]
        if known:
            middle, low, high = sorted(known)[len(known) // 2], min(known), max(known)
            yield f"{words}: {middle / 1e9:.2f} GB/s ({low / 1e9:.2f} … {high / 1e9:.2f})"
    clocks = [one.clock for one in launches if one.clock]
    if clocks:
        costs = sorted(each["cost_seconds"] for each in clocks)
        steps = sorted(each["step_seconds"] for each in clocks)
        yield (
            f"timer: {costs[len(costs) // 2] * 1e9:.0f} ns a stamp, "
            f"steps of {steps[len(steps) // 2] * 1e9:.0f} ns"
        )


CEILINGS = {
    "fastest_copy": "memory, fastest copy of any size",
    "both_ways": "sockets, each rank sending and receiving",
    "one_way": "sockets, every second rank sending",
}
