"""The first lines of a page: what was measured, where and when, the result, and the findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ddpbench.analysis import step_lines
from ddpbench.analysis.lines import Line
from ddpbench.catalog.sizes import readable
from ddpbench.present import examinations, header
from ddpbench.present.case_labels import format_time
from ddpbench.present.columns import format_number, title_parts
from ddpbench.present.document import Chart, ReportRun, Section
from ddpbench.records.schema import SEVERITIES, Finding, Run, StepCase
from ddpbench.records.wording import counted, list_all

MOST_NAMES = 4  # of operations, listed in a sentence
MOST_SENTENCES = 3  # of one kind


def build_section(runs: Sequence[ReportRun]) -> Section:
    """Return the section that begins a page of one or several runs."""
    several = len(runs) > 1
    summaries = [f"{r.label}: {summarise(r)}" if several else summarise(r) for r in runs]
    setup: list[tuple[Chart, ...]] = []
    for number, run in enumerate(runs, 1):
        words = f"facts-{number}", f"How {run.label if several else 'it'} was measured"
        setup += header.build_setup(run.run, "", words).rows
    intro, lines = ("", tuple(summaries)) if several else (summaries[0], ())
    findings = [
        replace(found, sentence=f"{run.label}: {found.sentence}") if several else found
        for run in runs
        for found in (*_list_missing(run.run), *run.run.findings)
    ]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Section("overview", "Summary", intro, lines, tuple(findings), tuple(setup))


def _list_missing(run: Run) -> Iterator[Finding]:
    """Yield findings on a part of the run that is missing."""
    for line in header.explain_partial(run):
        yield Finding("warning", "missing", line)


def summarise(reported: ReportRun) -> str:
    """Return a paragraph on the run."""
    run = reported.run
    if not run.everything:
        return "Nothing was measured."
    sentences = [_describe(reported), *_compare_backends(reported.lines), *_describe_steps(run)]
    if header.of_doctor(run):
        sentences.append(f"{examinations.state_verdict(run)}.")
    else:
        known = [finding.severity for finding in run.findings]
        counts = [counted(known.count(name), name) for name in SEVERITIES if name in known]
        if counts:
            sentences.append(f"{list_all(counts).capitalize()}.")
        elif run.state == "complete":  # else the reason for the end is a finding
            sentences.append("No findings.")
    return " ".join(sentences)


def _describe(reported: ReportRun) -> str:
    """State what was measured, where and when."""
    run = reported.run
    workloads = dict.fromkeys(step.case.workload for step in run.steps)
    if header.of_doctor(run):
        done = f"Examined {list_all(dict.fromkeys(one.name for one in run.examinations))}"
    elif header.of_watch(run):
        done = f"Watched {list_all(workloads)}"
    elif run.steps:
        done = f"Measured a DDP step of {_list_some(workloads, 'model')}"
    else:
        cases = [line.case for line in reported.lines]
        done = f"Measured {_list_some(dict.fromkeys(case.called for case in cases), 'operation')}"
        sizes = [case.nbytes for case in cases]
        if max(sizes) > min(sizes):
            done += f" from {readable(min(sizes))} to {readable(max(sizes))}"
    backends = run.backends or dict.fromkeys(launch.backend for launch in run.launches)
    with_backends = f" with {list_all(backends)}" if any(backends) else ""
    ranks = counted(max(launch.world_size for launch in run.launches), "rank")
    when = f", {run.started[:10]}" if run.started else ""
    return f"{done}{with_backends}: {ranks}{when}."


def _list_some(names: Iterable[str], noun: str) -> str:
    known = list(names)
    return list_all(known) if len(known) <= MOST_NAMES else counted(len(known), noun)


def _compare_backends(lines: Sequence[Line]) -> Iterator[str]:
    """State how often each backend is the fastest, or how fast the only one is."""
    measured = [line for line in lines if line.seconds is not None]
    if len({line.case.backend for line in measured}) > 1:
        compared = {(title_parts(line.case), line.case.nbytes) for line in measured}
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
        first = min(group, key=lambda line: line.case.nbytes)
        size = f" at {readable(first.case.nbytes)}" if first.case.nbytes else ""
        text = f"{name} takes {format_time(first.case, first.seconds or 0.0)}{size}"
        best = max(group, key=lambda line: line.busbw or 0.0)
        if best.busbw and best is not first:
            rate = f"{format_number(best.busbw / 1e9)} GB/s (busbw)"
            text += f" and reaches {rate} at {readable(best.case.nbytes)}"
        yield f"{text}."


def _describe_steps(run: Run) -> Iterator[str]:
    """State the time of a step on each backend, and whether replicas differ."""
    measured = step_lines.lines(run)
    groups: dict[StepCase, list[str]] = {}
    for line in measured:
        if line.seconds is not None:
            time = f"{format_time(line.case, line.seconds)} on {line.case.backend}"
            groups.setdefault(step_lines.same_but_backend(line.case), []).append(time)
    for case, times in [*groups.items()][:MOST_SENTENCES]:
        yield f"A step of {case.workload} takes {list_all(times)}."
    verified = [line.replicas for line in measured if line.replicas is not None]
    if verified and not any(replicas.failed or replicas.unproved for replicas in verified):
        yield "All replicas are equal."
