"""Findings of a run: one function in CHECKS adds a check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from ddpbench.analysis import lines, step_lines, steps
from ddpbench.analysis.rank_setup import crowded
from ddpbench.records.schema import SEVERITIES, Finding, Run
from ddpbench.records.wording import counted

EXPOSED_SHARE = 0.10  # of the step: exposed communication above it is reported
LESS_DDP = (
    "communicate less often (--accumulate, a larger batch), send fewer bytes (--comm-hook), or try "
    "another --bucket-cap-mb"
)
LESS_SHARDED = (
    "communicate less often (--accumulate, a larger batch), or keep the parameters after forward "
    "(--reshard-after-forward no), for more memory"
)


def findings(run: Run, decisions: Iterable[Finding] = ()) -> tuple[Finding, ...]:
    """Return all findings, the worst first. decisions: of `tune`, on the settings that it tried."""
    default = step_lines.keep_default(run)
    found = [f for check in CHECKS for f in check(run)]
    found += [*decisions, *(f for check in STEP_CHECKS for f in check(default))]
    unique = {(f.code, f.sentence): f for f in found}
    return tuple(sorted(unique.values(), key=lambda f: SEVERITIES.index(f.severity)))


def exit_code(run: Run) -> int:
    """Return 0 if clean, 1 for a finding as bad as the plan's `fail_on`, 4 for a wrong result."""
    wrong = any(result.wrong for result in run.results)
    wrong |= any(finding.code == "wrong-result" for finding in _examined(run))
    if wrong or any(result.replicas and result.replicas.failed for result in run.steps):
        return 4
    bad = SEVERITIES[: SEVERITIES.index(run.plan.fail_on) + 1]
    return int(any(finding.severity in bad for finding in run.findings))


def _wrong_results(run: Run) -> Iterator[Finding]:
    for result in run.results:
        for wrong in result.wrong:
            case = result.case
            when = "the check" if wrong.repetition < 0 else f"repetition {wrong.repetition}"
            yield Finding(
                "error",
                "wrong-result",
                f"{case.called} on {case.backend}, {case.nbytes} bytes of {case.dtype}: "
                f"rank {wrong.rank} got {wrong.got} at index {wrong.index} in {when}, "
                f"expected {wrong.expected}",
                "do not train on this set-up; measure this case alone: ddpbench collectives "
                f"--op {case.operation} --backend {case.backend} --sizes {case.nbytes} "
                f"--dtype {case.dtype}",
                {"operation": case.operation, "nbytes": case.nbytes, **vars(wrong)},
            )


def _invalid(run: Run) -> Iterator[Finding]:
    for result in run.results:
        summary, hard, case = result.summary, result.hard_limit, result.case
        if summary and hard and lines.impossible(result):
            yield Finding(
                "error",
                "impossible-speed",
                f"{case.called} on {case.backend}, {case.nbytes} bytes, took "
                f"{summary.median_seconds * 1e6:.1f} µs, faster than the limit of "
                f"{hard.bytes_per_second / 1e9:.1f} GB/s allows ({hard.source})",
                "report to the developers of the backend that the call returns before it is done",
            )


def _replicas(run: Run) -> Iterator[Finding]:
    """Report differing replicas. Notes are left out: random states, buffers that DDP resends."""
    for result in run.steps:
        replicas, case = result.replicas, result.case
        place: dict[str, Any] = {"workload": case.workload, "backend": case.backend}
        who = f"{case.workload} on {case.backend}"
        for finding in replicas.findings if replicas is not None and not replicas.ok else ():
            if finding.severity != "note":
                step = finding.place.get("step")
                when = "" if step is None else f", after step {step}"
                sentence = f"{who}{when}: {finding.sentence}"
                yield replace(finding, sentence=sentence, place={**place, **finding.place})


def _late_rank(run: Run) -> Iterator[Finding]:
    for line in step_lines.lines(run):
        part, case = line.part(steps.WAITING), line.case
        buckets = line.summary.buckets if line.summary else ()
        waits = {bucket.late_rank: bucket.wait.value for bucket in buckets}
        if part is not None and part.resolved:
            waits[part.rank] = part.figure.value
        for rank, seconds in waits.items():
            if rank is not None:
                yield Finding(
                    "warning",
                    "late-rank",
                    f"{case.workload} on {case.backend}: rank {rank} is late: of each step of "
                    f"{(line.seconds or 0) * 1e3:.3g} ms the others wait {seconds * 1e3:.3g} ms",
                    "compare the clock, the load of the host and the data of this rank with those "
                    "of the other ranks; to measure the ranks: ddpbench doctor --only stragglers",
                    {"workload": case.workload, "backend": case.backend, "rank": rank},
                )


def _exposed(run: Run) -> Iterator[Finding]:
    for line in step_lines.lines(run):
        part, case = line.part(steps.EXPOSED), line.case
        share = (part.share if part and part.resolved else None) or 0.0
        if part is None or share <= EXPOSED_SHARE:
            continue
        way = f", {case.parallel}" if case.mesh else ""
        yield Finding(
            "note",
            "exposed-communication",
            f"{case.workload} on {case.backend}{way}: {part.figure.value * 1e3:.3g} ms "
            f"({share * 100:.0f} %) of each step is exposed communication, not hidden by backward",
            LESS_SHARDED if case.mesh else LESS_DDP,
            {"workload": case.workload, "backend": case.backend},
        )


def _one_rank(run: Run) -> Iterator[Finding]:
    if any(launch.world_size == 1 for launch in run.launches):
        yield Finding(
            "note",
            "one-rank",
            "one rank: nothing is communicated, and there is no other replica to compare with"
            if run.steps
            else "one rank: nothing crosses a link, so the bus bandwidth is 0 or meaningless",
            "start two or more ranks: add -n 2",
        )


def _debug(run: Run) -> Iterator[Finding]:
    variables = [rank.get("variables", {}) for launch in run.launches for rank in launch.ranks]
    if any(each.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL" for each in variables):
        yield Finding(
            "warning",
            "debug-detail",
            "TORCH_DISTRIBUTED_DEBUG=DETAIL is set: torch checks every call first, which makes "
            "small calls many times slower",
            "unset TORCH_DISTRIBUTED_DEBUG",
        )


def _oversubscribed(run: Run) -> Iterator[Finding]:
    for host in (host for launch in run.launches for host in crowded(launch.ranks)):
        ways = f"use -n {host.cores} or fewer"
        if host.ranks <= host.cores:
            ways += f", or OMP_NUM_THREADS={host.cores // host.ranks}"
        yield Finding(
            "warning",
            "oversubscribed",
            f"{host.host}: {host.threads} compute threads of {counted(host.ranks, 'rank')} share "
            f"{counted(host.cores, 'core')}: times include scheduling delays",
            ways,
            {"host": host.host},
        )


def _mixed_versions(run: Run) -> Iterator[Finding]:
    for launch in run.launches:
        for name in ("torch", "ddpbench", "python"):
            values = [rank.get(name) for rank in launch.ranks]
            odd = [rank for rank, value in enumerate(values) if value != values[0]]
            if odd:
                yield Finding(
                    "error",
                    "mixed-versions",
                    f"rank {odd[0]} runs {name} {values[odd[0]]}, rank 0 {values[0]}",
                    "use one environment on all hosts",
                    {"rank": odd[0]},
                )


def _examined(run: Run) -> Iterator[Finding]:
    for examination in run.examinations:
        yield from examination.findings


CHECKS: list[Callable[[Run], Iterator[Finding]]] = [
    _examined,
    _wrong_results,
    _replicas,
    _invalid,
    _mixed_versions,
    _debug,
    _oversubscribed,
    _one_rank,
]
STEP_CHECKS = (_late_rank, _exposed)  # of several settings, these check the default only
