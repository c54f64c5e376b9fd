"""The verdicts of a watch on its job. No torch."""

from __future__ import annotations

import numpy as np

from ddpbench.records.schema import SEVERITIES, Finding
from ddpbench.records.wording import name_ranks
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


def judge(history: History, world_size: int) -> tuple[Finding, ...]:
    """Return what is wrong with the job, the worst first; empty while too little is known.

    Nothing is an error: a watch does not change the exit code of its job. If reports of ranks are
    missing, nothing is said of all ranks: those that are missing may be the reason.
    """
    missing = history.find_missing(world_size)
    links = slow_links.find_slow_links(history.links.values(), history.hosts, history.link_seconds)
    findings = [slow_links.describe_slow_link(link) for link in links]
    if missing and (history.job or history.calls):
        findings.append(_describe_missing(missing, world_size))
    pauses = list(sentences.describe_pauses(history, missing))
    findings += pauses
    if len(history.job) >= FEWEST:
        step_seconds = float(np.median(history.job.values[-stragglers.RECENT :, columns.SECONDS]))
        late = stragglers.find_late(history, step_seconds)
        pausing = {finding.place.get("rank") for finding in pauses}
        late = [one for one in late if one.every == 1 or one.rank not in pausing]
        findings.extend(sentences.describe_late(history, late))
        if not missing:
            since = [one.since for one in late if one.since is not None]
            findings.extend(speed.judge_speed(history, since))
            findings.extend(shares.judge_shares(history))
        findings.extend(shares.judge_hosts(history))
    elif not history.call_steps:
        findings.extend(late_arrivals.judge_arrivals(history))
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def _describe_missing(missing: list[int], world_size: int) -> Finding:
    """Return the note on what the other findings rest on."""
    return Finding(
        "note",
        "missing-ranks",
        f"the findings rest on {world_size - len(missing)} of {world_size} ranks, so none is about "
        f"all ranks: no comparable report comes from {name_ranks(missing)}",
        "start all ranks under the watch; look in the job's output for why a watch has failed",
        {"ranks": missing},
    )
