"""Verdicts on the replicas: the steps after which they differed, and the cost of verifying."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpbench.analysis.step_lines import StepLine
from ddpbench.present.document import Chart, make_table
from ddpbench.present.steps.columns import format_ms, format_percent
from ddpbench.records.schema import Replicas
from ddpbench.records.wording import counted

KINDS = {"optimizer": "optimizer options and states"}  # kind → plural


def build_replicas(name: str, group: Sequence[StepLine], every: int) -> Iterator[Chart]:
    """Yield the verdict on each backend and its cost.

    every: steps from one verification to the next.
    """
    rows = []
    for line in group:
        texts = _state_verdict(line, every)
        rows += [["" if i else line.case.backend, text] for i, text in enumerate(texts)]
    if rows:
        table = make_table("replicas", ("", ""), rows, ("",))
        yield Chart(name, f"Replicas of {group[0].case.workload}", "", table)


def _state_verdict(line: StepLine, every: int) -> Iterator[str]:
    replicas = line.replicas
    if replicas is None:
        if line.summary is not None:
            yield "not verified"
        return
    if line.case.world_size == 1:
        yield "one rank: there is no other replica to compare with"
        return
    if replicas.failed or replicas.unproved:
        yield _describe_failure(replicas) if replicas.failed else replicas.unproved
        yield from (f"  {text}" for text in replicas.text.splitlines())
    else:
        yield _describe_equality(line, replicas, every)
    if replicas.buffers and not replicas.failed:
        yield (
            f"except {replicas.buffers} of {replicas.compared.get('buffer', 0)} buffers, each "
            "rank's own statistics: DDP sends rank 0's before the next forward"
        )
    if replicas.cost is not None:
        share = "" if replicas.share is None else f" = {format_percent(replicas.share)} % of a step"
        yield f"one verification takes {format_ms(replicas.cost.value, line.seconds)} ms{share}"


def _describe_failure(replicas: Replicas) -> str:
    until, count = replicas.equal_until, replicas.differing
    verdict = "equal, but NOT FINITE" if replicas.equal else "NOT EQUAL"
    before = "" if until is None else f"; equal until step {until}"
    after = ""
    if replicas.last_step != replicas.first_bad:
        after = f"; the run went on, and {count} of {replicas.verified} verifications failed"
    return f"{verdict} after step {replicas.first_bad}{before}{after}"


def _describe_equality(line: StepLine, replicas: Replicas, every: int) -> str:
    count = counted(sum(r.replicas.verified for r in line.results if r.replicas), "step")
    when = f"after each of {count}" if every == 1 else f"after {count}, one in every {every}"
    launches = f" in {len(line.results)} launches" if len(line.results) > 1 else ""
    compared = ", ".join(
        f"{number} {KINDS[kind]}" if kind in KINDS else counted(number, kind)
        for kind, number in replicas.compared.items()
        if number
    )
    size = f"({replicas.nbytes / 1e6:.1f} MB)"
    return f"replicas equal {when}{launches}, bit for bit: {compared} {size}"
