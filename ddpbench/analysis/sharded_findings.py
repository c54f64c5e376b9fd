"""What a sharded step could gain, as findings with a next step."""

from __future__ import annotations

from collections.abc import Iterator

from ddpbench.analysis import steps
from ddpbench.analysis.spans import EXPOSED_OF, WOULD_SAVE
from ddpbench.analysis.step_lines import StepLine
from ddpbench.records.schema import Finding, Part

SHARE = 0.1  # of a step: less is not worth a change


def find(line: StepLine) -> Iterator[Finding]:
    """Yield what exposed communication of a sharded step can be avoided, and how."""
    whole = line.part(steps.EXPOSED)
    if whole is None or not whole.resolved or (whole.share or 0) <= SHARE:
        return
    parts = [line.part(name) for name in EXPOSED_OF.values()]
    known = [part for part in parts if part is not None and part.resolved]
    largest = max(known, key=lambda part: part.figure.value, default=None)
    most = f", most of it {largest.name.removeprefix('exposed ')}" if largest else ""
    case = line.case
    yield Finding(
        "note",
        "exposed-communication",
        f"{case.workload} on {case.backend}, {case.parallel}: {_milliseconds(whole)} of each step "
        f"is exposed communication{most}",
        _advise(line, largest),
        {"workload": case.workload, "backend": case.backend},
    )


def _milliseconds(part: Part) -> str:
    return f"{part.figure.value * 1e3:.3g} ms ({(part.share or 0) * 100:.0f} %)"


def _advise(line: StepLine, largest: Part | None) -> str:
    """Suggest what shortens the largest exposed operation."""
    case, ways = line.case, []
    gathers = largest is not None and largest.name == EXPOSED_OF["all_gather"]
    if gathers and case.prefetch is False:
        saved = line.part(WOULD_SAVE)
        gain = f", which saves {_milliseconds(saved)}" if saved and saved.resolved else ""
        ways.append(f"gather the next layers early (leave out --no-prefetch){gain}")
    backward = sum(
        each.exposed.value
        for each in (line.summary.collectives if line.summary else ())
        if each.operation == "all_gather" and each.phase == "backward"
    )
    if gathers and case.reshard_after_forward and backward > SHARE * (line.seconds or 0.0):
        ways.append(
            "keep the parameters after forward (--reshard-after-forward no): "
            f"{backward * 1e3:.3g} ms less all_gather in backward, for more memory"
        )
    more = "a larger --batch" if case.parallel == "tp" else "--accumulate, a larger --batch"
    ways.append(f"communicate less often ({more})")
    return ", or ".join(ways)
