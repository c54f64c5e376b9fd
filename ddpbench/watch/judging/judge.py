"""The verdicts of a watch on its job. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ddpbench.records.schema import SEVERITIES, Finding
from ddpbench.watch.judging import history as columns
from ddpbench.watch.judging import (
    late_arrivals,
    sentences,
    shares,
    slow_links,
    speed,
    stragglers,
)
from ddpbench.watch.judging.history import History

FEWEST = stragglers.FEWEST  # steps that any verdict on steps needs


def judge(history: History) -> tuple[Finding, ...]:
    """Return what is wrong with the job, the worst first; empty while too little is known.

    Nothing is an error: a watch does not change the exit code of its job.
    """
    links = slow_links.find_slow_links(history.links.values(), history.hosts, history.link_seconds)
    findings = [slow_links.describe_slow_link(link) for link in links]
    if len(history.job) >= FEWEST:
        step_seconds = float(np.median(history.job.values[-stragglers.RECENT :, columns.SECONDS]))
        late = stragglers.find_late(history, step_seconds)
        findings.extend(sentences.describe_late(history, late, step_seconds))
        since = [one.since for one in late if one.since is not None]
        findings.extend(speed.judge_speed(history, since))
        for check in CHECKS:
            findings.extend(check(history))
    elif not history.call_steps:
        findings.extend(late_arrivals.judge_arrivals(history))
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


CHECKS: tuple[Callable[[History], Iterator[Finding]], ...] = (
    shares.judge_input,
    shares.judge_communication,
    shares.judge_pauses,
    shares.judge_compilation,
    shares.judge_hosts,
)
