"""Findings of a run: one function in CHECKS adds a check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ddpbench.analysis import lines, step_lines, steps
from ddpbench.analysis.flags import BUSY_SHARE, AnyLine
from ddpbench.analysis.rank_setup import crowded
from ddpbench.analysis.spans import EXPOSED_OF, WOULD_SAVE
from ddpbench.analysis.step_lines import StepLine
from ddpbench.records.schema import SEVERITIES, Finding, Part, Run, StepResult
from ddpbench.records.wording import counted

EXPOSED_SHARE = 0.10  # of the step: exposed communication above it is reported
FIRST_BUCKET = 2**20  # bytes of DDP's first bucket, at most, by default


def findings(run: Run) -> tuple[Finding, ...]:
    """Return all findings, the worst first."""
    unique = {(f.code, f.sentence): f for check in CHECKS for f in check(run)}
    return tuple(sorted(unique.values(), key=lambda f: SEVERITIES.index(f.severity)))


def exit_code(run: Run) -> int:
    """Return 0 if clean, 1 for a finding as bad as the plan's `fail_on`, 4 for a wrong result."""
    wrong = any(result.wrong for result in run.results)
    wrong |= any(finding.code == "wrong-result" for finding in _examined(run))
    if wrong or any(map(replicas_bad, run.steps)):
        return 4
    bad = SEVERITIES[: SEVERITIES.index(run.plan.fail_on) + 1]
    return int(any(finding.severity in bad for finding in run.findings))


def replicas_bad(result: StepResult) -> bool:
    """Whether a verification found replicas that differ, or are not finite."""
    replicas = result.replicas
    return (replicas is not None and replicas.failed) or _bad_epoch(result) is not None


def _bad_epoch(result: StepResult) -> int | None:
    """Return the first epoch after which the replicas were not equal."""
    return next((e.number for e in result.epochs if e.replicas_equal is False), None)


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
        if summary and hard and lines.impossible(result, summary.median_seconds):
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
        replicas, case, epoch = result.replicas, result.case, _bad_epoch(result)
        place: dict[str, Any] = {"workload": case.workload, "backend": case.backend}
        who = f"{case.workload} on {case.backend}"
        for finding in replicas.findings if replicas is not None and not replicas.ok else ():
            if finding.severity != "note":
                step = finding.place.get("step")
                when = "" if step is None else f", after step {step}"
                sentence = f"{who}{when}: {finding.sentence}"
                yield replace(finding, sentence=sentence, place={**place, **finding.place})
        if epoch is not None:
            yield Finding(
                "error",
                "replicas-differ",
                f"{who}: the replicas were not equal, or not finite, after epoch {epoch}",
                "do not use the trained model; to find the step, the tensors and the ranks: "
                f"ddpbench ddp --workload {case.workload} --verify every",
                {**place, "epoch": epoch},
            )


def _late_rank(run: Run) -> Iterator[Finding]:
    for line in step_lines.lines(run):
        if line.summary is None:
            continue
        waits: dict[int, tuple[float, str]] = {}  # rank → seconds, and why the others wait
        for bucket in line.summary.buckets:
            if bucket.late_rank is not None:
                seconds = max(bucket.wait.value, waits.get(bucket.late_rank, (0.0, ""))[0])
                waits[bucket.late_rank] = seconds, "for one of its buckets"
        part = line.part(steps.WAITING)
        if part is not None and part.resolved and part.rank is not None:
            waits[part.rank] = part.figure.value, "for it"
        case = line.case
        for rank, (seconds, why) in waits.items():
            yield Finding(
                "warning",
                "late-rank",
                f"{case.workload} on {case.backend}: rank {rank} is late: the others wait "
                f"{seconds * 1e3:.3g} ms of each {(line.seconds or 0) * 1e3:.3g} ms step {why}",
                "compare the clock, the load of the host and the data of this rank with those of "
                "the other ranks; to measure the ranks: ddpbench doctor --only stragglers",
                {"workload": case.workload, "backend": case.backend, "rank": rank},
            )


def _exposed(run: Run) -> Iterator[Finding]:
    for line in step_lines.lines(run):
        part, case = line.part(steps.EXPOSED), line.case
        if part is None or not part.resolved or (part.share or 0) <= EXPOSED_SHARE:
            continue
        advise = _advise_sharded if case.mesh else _advise_ddp
        cause, ways = advise(line, part)
        way = f", {case.parallel}" if case.mesh else ""
        yield Finding(
            "note",
            "exposed-communication",
            f"{case.workload} on {case.backend}{way}: {_milliseconds(part)} of each step is "
            f"exposed communication: backward does not hide it{cause}",
            ", or ".join(ways),
            {"workload": case.workload, "backend": case.backend},
        )


def _advise_ddp(line: StepLine, exposed: Part) -> tuple[str, list[str]]:
    """Return what most of the exposed communication is, and what shortens or hides it."""
    case, buckets = line.case, line.summary.buckets if line.summary else ()
    batch = "a larger batch in its own code" if ":" in case.workload else "a larger --batch"
    less_often = batch if case.static_graph else f"--accumulate, {batch}"
    ways = [f"communicate less often ({less_often})"]
    overhead = line.part(steps.OVERHEAD)
    if overhead and overhead.resolved and overhead.figure.value >= exposed.figure.value / 2:
        if len(buckets) > 1 and case.parameter_nbytes < FIRST_BUCKET * len(buckets):
            ways.append("use fewer buckets (a larger --bucket-cap-mb)")
        return ", and most of it is overhead, not transfer", ways
    if case.comm_hook == "none" and case.parameter_nbytes > 2 * case.parameters:
        ways.insert(0, "send fewer bytes (--comm-hook)")
    if len(buckets) > 1:
        ways.append("try another --bucket-cap-mb")
    elif buckets and case.bucket_cap_mb is not None and buckets[0].nbytes > FIRST_BUCKET:
        ways.append("leave out --bucket-cap-mb: a single bucket cannot be hidden")
    return "", ways


def _advise_sharded(line: StepLine, exposed: Part) -> tuple[str, list[str]]:
    """Return the largest exposed operation, and what shortens it."""
    case = line.case
    known = [line.part(name) for name in EXPOSED_OF.values()]
    resolved = [each for each in known if each is not None and each.resolved]
    largest = max(resolved, key=lambda each: each.figure.value, default=None)
    ways = []
    if largest is not None and largest.name == EXPOSED_OF["all_gather"]:
        if case.prefetch is False:
            saved = line.part(WOULD_SAVE)
            gain = f", which saves {_milliseconds(saved)}" if saved and saved.resolved else ""
            ways.append(f"gather the next layers early (leave out --no-prefetch){gain}")
        if case.reshard_after_forward:
            ways.append(
                "keep the parameters after forward (--reshard-after-forward no): no all_gather in "
                "backward, for more memory"
            )
    more = "a larger --batch" if case.parallel == "tp" else "--accumulate, a larger --batch"
    ways.append(f"communicate less often ({more})")
    cause = f", most of it {largest.name.removeprefix('exposed ')}" if largest else ""
    return cause, ways


def _milliseconds(part: Part) -> str:
    return f"{part.figure.value * 1e3:.3g} ms ({(part.share or 0) * 100:.0f} %)"


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
    for rank in (rank for launch in run.launches for rank in launch.ranks):
        if rank.get("variables", {}).get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
            yield Finding(
                "warning",
                "debug-detail",
                "TORCH_DISTRIBUTED_DEBUG=DETAIL is set: torch checks every call first, which makes "
                "small calls many times slower",
                "unset TORCH_DISTRIBUTED_DEBUG",
            )
            return


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


def _busy(run: Run) -> Iterator[Finding]:
    all_lines: list[AnyLine] = [*lines.lines(run), *step_lines.lines(run)]
    rows = [line for line in all_lines if line.seconds is not None]
    busy = [line for line in rows if "busy" in line.flags]
    if busy and len(busy) * 4 >= len(rows):
        yield Finding(
            "warning",
            "busy-host",
            f"other processes used more than {BUSY_SHARE * 100:g} % of the cores during "
            f"{len(busy)} of {len(rows)} cases, so these times do not show the backend alone",
            "stop other programs on this host and measure again",
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
    _busy,
    _late_rank,
    _exposed,
    _one_rank,
]
