"""A run as a suite that pyperf loads: a benchmark a case, a pyperf run a launch.

pyperf holds every value of a suite for an independent one. That are medians of launches, and
nothing within a launch: one launch gives one value, with which pyperf shows a change, but cannot
say whether it is significant.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from ddpbench.records.schema import Case, Result, Run, StepCase, StepResult
from ddpbench.version import VERSION

FORMAT = "1.0"  # of pyperf's files


def suite(run: Run, columns: tuple[str, ...] | None = None, quiet: bool = False) -> str:
    """The JSON of a pyperf suite; no columns. Cases that were not measured, or whose figures must
    not be used, are named in its metadata."""
    from ddpbench.verdicts import matching

    found = matching.find_cases(matching.Source(run.id, (run,)))
    names = _names(list(found))
    benchmarks = [
        _benchmark(names[case], case, [each for each in run.outcomes if each.case == case], run)
        for case, each in found.items()
        if each.side is not None
    ]
    left_out = [
        f"{names[case]}: {each.fault or each.reason}"
        for case, each in found.items()
        if each.side is None
    ]
    metadata = {
        "ddpbench_version": VERSION,
        "ddpbench_run": run.id,
        "ddpbench_state": run.state,
        **({"ddpbench_left_out": "; ".join(left_out)} if left_out else {}),
    }
    whole = {"version": FORMAT, "metadata": metadata, "benchmarks": benchmarks}
    return json.dumps(whole, indent=1) + "\n"


def _names(cases: list[Case | StepCase]) -> dict[Case | StepCase, str]:
    """A name of its own for each: pyperf takes none twice."""
    from ddpbench.render.labels import label

    names: dict[Case | StepCase, str] = {}
    for case in cases:
        same = sum(label(each) == label(case) for each in names)
        names[case] = label(case) + (f" #{same + 1}" if same else "")
    return names


def _benchmark(
    name: str, case: Case | StepCase, outcomes: list[Result | StepResult], run: Run
) -> dict[str, Any]:
    identity = {key: _said(value) for key, value in asdict(case).items()}
    metadata = {f"ddpbench_{key}": value for key, value in identity.items() if value != ""}
    return {
        "metadata": {"name": name, "unit": "second", "loops": 1, **metadata},
        "runs": [_run(each, run) for each in outcomes if each.summary is not None],
    }


def _run(outcome: Result | StepResult, run: Run) -> dict[str, Any]:
    """One launch: its median, and its first call or step as a warm-up."""
    assert outcome.summary is not None
    seconds = (
        outcome.summary.step.value
        if isinstance(outcome, StepResult)
        else outcome.summary.median_seconds
    )
    started = {launch.index: launch.started for launch in run.launches}.get(outcome.launch, "")
    # Only a zone makes it a time that pyperf may order.
    date = {"date": started.replace("Z", "+00:00")} if started.endswith("Z") else {}
    cold = outcome.cold_seconds
    return {
        "values": [seconds],
        **({} if cold is None else {"warmups": [[1, cold]]}),
        "metadata": {"ddpbench_launch": outcome.launch, **date},
    }


def _said(value: Any) -> str | int | float:
    """What pyperf takes as metadata; "": nothing."""
    if value is None or isinstance(value, bool):
        return "" if value is None else str(value).lower()
    if isinstance(value, (list, tuple)):
        return "+".join(map(str, value))
    return value if isinstance(value, (int, float)) else str(value)
