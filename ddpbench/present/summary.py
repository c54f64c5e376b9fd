"""The first lines of a page: what was measured, where and when, the result, and the findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from ddpbench.analysis import step_lines, steps
from ddpbench.analysis.lines import Line
from ddpbench.analysis.step_lines import StepLine
from ddpbench.catalog.sizes import readable
from ddpbench.present import examinations, header
from ddpbench.present.columns import digits, title_parts
from ddpbench.present.document import ReportRun, Section, build_for_each
from ddpbench.records.schema import SEVERITIES, Finding, Run
from ddpbench.records.wording import counted, list_all

MOST_NAMES = 4  # of operations, listed in a sentence
MOST_SENTENCES = 3  # of one kind


def build_section(runs: Sequence[ReportRun]) -> Section:
    """Return the section that begins a page of one or several runs."""
    several = len(runs) > 1
    summaries = [f"{r.label}: {summarise(r)}" if several else summarise(r) for r in runs]
    words = "facts", "How it was measured"
    setup = build_for_each(runs, lambda run: [header.build_setup(run.run, "", words)])
    return Section(
        "overview",
        "Summary",
        "" if several else summaries[0],
        tuple(summaries) if several else (),
        tuple(_findings(runs)),
        setup[0].rows,
    )


def _missing(run: ReportRun) -> list[Finding]:
    """Return findings on what is missing: a part of the run, or samples that cannot be read."""
    lines = header.partial(run.run)
    if run.damage:
        lines = [*lines, f"DAMAGED: {run.damage}. Repetitions and skew are missing."]
    return [Finding("warning", "missing", line) for line in lines]


def _findings(runs: Sequence[ReportRun]) -> list[Finding]:
    """Return the findings of all runs, the worst first; of several runs each names its run."""
    findings = [
        replace(found, sentence=f"{run.label}: {found.sentence}") if len(runs) > 1 else found
        for run in runs
        for found in (*_missing(run), *run.run.findings)
    ]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def summarise(reported: ReportRun) -> str:
    """Return a paragraph on the run."""
    run = reported.run
    if not run.everything:
        return "Nothing was measured."
    sentences = [_what(reported), *_collectives(reported.lines), *_steps(run)]
    if header.of_doctor(run):
        sentences.append(f"{examinations.state_verdict(run)}.")
    else:
        known = [finding.severity for finding in run.findings]
        counts = [counted(known.count(name), name) for name in SEVERITIES if name in known]
        if counts:
            sentences.append(f"{list_all(counts).capitalize()}.")
        elif run.state == "complete":  # else the reason for the end is one
            sentences.append("No findings.")
    return " ".join(sentences)


def _what(reported: ReportRun) -> str:
    run = reported.run
    if header.of_doctor(run):
        done = f"Examined {list_all(dict.fromkeys(one.name for one in run.examinations))}"
    elif header.of_watch(run):
        done = f"Watched {list_all(dict.fromkeys(step.case.workload for step in run.steps))}"
    elif run.steps:
        done = f"Measured a DDP step of {_list({s.case.workload: 1 for s in run.steps}, 'model')}"
    else:
        cases = [line.case for line in reported.lines]
        done = f"Measured {_list({case.called: 1 for case in cases}, 'operation')}"
        sizes = [case.nbytes for case in cases]
        if max(sizes) > min(sizes):
            done += f" from {readable(min(sizes))} to {readable(max(sizes))}"
    backends = run.backends or dict.fromkeys(launch.backend for launch in run.launches)
    with_backends = f" with {list_all(backends)}" if any(backends) else ""
    when = f", {run.started[:10]}" if run.started else ""
    return f"{done}{with_backends}: {_where(run)}{when}."


def _where(run: Run) -> str:
    launch = max(run.launches, key=lambda launch: launch.world_size)
    ranks = counted(launch.world_size, "rank")
    hosts = {str(rank["hostname"]) for rank in launch.ranks if rank.get("hostname")}
    if not hosts:
        return ranks
    return f"{ranks} on {hosts.pop() if len(hosts) == 1 else counted(len(hosts), 'host')}"


def _list(names: Iterable[str], noun: str) -> str:
    known = list(names)
    return list_all(known) if len(known) <= MOST_NAMES else counted(len(known), noun)


def _collectives(lines: Sequence[Line]) -> Iterator[str]:
    """State how often each backend is the fastest, or how fast the only one is."""
    measured = [line for line in lines if line.seconds is not None]
    compared = {(title_parts(line.case), line.case.nbytes) for line in measured}
    if len({line.case.backend for line in measured}) > 1:
        wins = Counter(line.case.backend for line in measured if line.faster)
        for backend, count in wins.most_common():
            yield f"{backend} is clearly the fastest in {count} of {len(compared)} cases."
        if not wins:
            yield "No backend is clearly the fastest in any case."
        return
    by_name: dict[str, list[Line]] = {}
    for line in measured:
        by_name.setdefault(line.case.called, []).append(line)
    for name, group in [*by_name.items()][:MOST_SENTENCES]:
        yield _speed(name, group)


def _speed(name: str, group: Sequence[Line]) -> str:
    first = min(group, key=lambda line: line.case.nbytes)
    size = f" at {readable(first.case.nbytes)}" if first.case.nbytes else ""
    text = f"{name} takes {_duration(first.seconds)}{size}"
    best = max(group, key=lambda line: line.busbw or 0.0)
    if best.busbw and best is not first:
        rate = f"{digits(best.busbw / 1e9)} GB/s (busbw)"
        text += f" and reaches {rate} at {readable(best.case.nbytes)}"
    return f"{text}."


def _duration(seconds: float | None) -> str:
    value = seconds or 0.0
    factor, unit = (1.0, "s") if value >= 1 else (1e3, "ms") if value >= 1e-3 else (1e6, "µs")
    return f"{value * factor:.3g} {unit}"


def _steps(run: Run) -> Iterator[str]:
    """State how long a step takes on each backend, its exposed share, and if replicas are equal."""
    measured = step_lines.lines(run)
    timed = [line for line in measured if line.seconds is not None]
    groups = [
        list(group)
        for _, group in groupby(timed, key=lambda line: step_lines.same_but_backend(line.case))
    ]
    for group in groups[:MOST_SENTENCES]:
        name = group[0].case.workload
        yield f"A step of {name} takes {_each(group, [_duration(line.seconds) for line in group])}."
        shares = [_exposed(line) for line in group]
        if any(shares):
            yield f"Of it, {_each(group, shares)} is exposed communication."
    verified = [line.replicas for line in measured if line.replicas is not None]
    if verified and not any(replicas.failed or replicas.unproved for replicas in verified):
        yield "All replicas are equal."


def _each(group: Sequence[StepLine], values: Sequence[str]) -> str:
    """Name the backend of each value that is not empty, if there are several."""
    if len(group) == 1:
        return values[0]
    each = zip(values, group, strict=True)
    return list_all(f"{value} on {line.case.backend}" for value, line in each if value)


def _exposed(line: StepLine) -> str:
    part = line.part(steps.EXPOSED)
    if part is None or not part.resolved or part.share is None:
        return ""
    return f"{part.share * 100:.0f} %"
