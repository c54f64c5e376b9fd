"""Which ranks are late: in which phase, how much, in which steps, and since when. No torch.

A rank is late if its own time is larger than the other ranks' and it is blocked less than they are:
they wait for it. A rank that only waits has more blocked time, and no more time of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ddpbench.analysis import stats
from ddpbench.records.schema import Finding, Interval
from ddpbench.records.watched import PHASES
from ddpbench.watch.judging.history import OWN, Floats, History, Integers, format_time
from ddpbench.watch.judging.series import find_parts, find_period, find_standard_error
from ddpbench.watch.window import ALL, BLOCKED

LEAST_SHARE = 0.03  # of a step, from which a rank is a straggler
FEWEST = 16  # steps that a verdict needs
RECENT = 512  # steps in which a rank that is late in some of them is sought
CLEAR = 5.0  # standard errors of a median
CLEAR_OF_PART = 7.0  # because there are many parts to choose from
ALSO = 0.25  # of the largest phase: a phase that is named beside it
WAITED_FOR = 0.4  # of its lateness, that a late rank is blocked less
TRACKED_SHARE = 0.8  # of the latest steps
PERIODIC_COST = 0.008  # of a step, the average over all steps
ALLOWED = 0.75 * PERIODIC_COST  # with noise
LASTING = 0.2  # of the steps: a rank that was late for less is worth a note
MOST = 8  # findings on ranks
LINE_SHARE = 0.25  # of the lateness, that a line must explain
COMPARE = "to compare devices and hosts: ddpbench doctor --only stragglers"


@dataclass(frozen=True)
class Late:
    """A rank that is late.

    phases: which take longer, by most first; seconds: how much longer a late step takes in them;
    since, until: numbers of its first late step, None from the start, and of its last one, None if
    it is still late; every: a step in so many is late.
    """

    rank: int
    phases: tuple[str, ...]
    seconds: float
    interval: Interval | None
    since: int | None = None
    until: int | None = None
    every: int = 1

    @property
    def cost(self) -> float:
        """Seconds of an average step while the rank is late."""
        return self.seconds / self.every


@dataclass(frozen=True)
class _Steps:
    """Steps of one rank, and how much longer than in the other ranks their parts are.

    excess: float64[steps, COLUMNS + 1], as in RANK; least: seconds from which a difference counts;
    step_seconds: of the job.
    """

    rank: int
    number: Integers
    excess: Floats
    least: float
    step_seconds: float

    def __getitem__(self, chosen: slice | npt.NDArray[np.bool_]) -> _Steps:
        return replace(self, number=self.number[chosen], excess=self.excess[chosen])

    def __len__(self) -> int:
        return len(self.number)

    @property
    def phases(self) -> Floats:
        """The excess of each phase: [steps, phase]."""
        return self.excess[:, :BLOCKED]

    @property
    def medians(self) -> Floats:
        """The medians over these steps: [COLUMNS + 1]."""
        return np.asarray(np.median(self.excess, axis=0))


def find_late(history: History) -> list[Late]:
    """Return the ranks that are late now, or were, the worst first."""
    recent = history.job.number[-RECENT:]
    step_seconds = float(np.median(history.job.values["seconds"][-RECENT:]))
    # So much is the slowest of so many ranks usually slower than the median one.
    usual = float(np.median(history.spreads)) * (1 + math.sqrt(2 * math.log(history.world_size)))
    least = max(LEAST_SHARE * step_seconds, usual)
    late = []
    for rank, kept in history.ranks.items():
        is_tracked = np.isin(recent, kept.number).mean() > TRACKED_SHARE
        excess = kept.values["excess"].astype(np.float64)
        steps = _Steps(rank, kept.number, excess, least, step_seconds)
        if is_tracked and (one := _judge_rank(steps)):
            late.append(one)
    return sorted(late, key=lambda one: -one.cost)


def _judge_rank(steps: _Steps) -> Late | None:
    """Return what holds now; if the rank is not late now, the longest time in which it was."""
    parts = _divide(steps)
    clear = CLEAR if len(parts) == 1 else CLEAR_OF_PART
    levels = [_judge_part(part, clear) for part in parts]
    first = last = len(parts) - 1
    if levels[last] is None:
        first = last = max(range(len(parts)), key=lambda i: len(parts[i]) if levels[i] else 0)
    while first and levels[last] and levels[first - 1]:
        first -= 1
    if (late := levels[last]) is None:
        return None
    until = None if last == len(parts) - 1 else int(parts[last].number[-1])
    return replace(late, since=int(parts[first].number[0]) if first else None, until=until)


def _divide(steps: _Steps) -> list[_Steps]:
    """Divide the steps of a rank where its level changes, by the phase that shows it best."""
    best, slices = 0.0, [slice(0, len(steps))]
    for series in (*steps.phases.T, steps.excess[:, OWN]):
        parts = find_parts(series, steps.least)
        levels = [float(np.median(series[part])) for part in parts]
        rest = series - np.repeat(levels, [part.stop - part.start for part in parts])
        change = max(np.abs(np.diff(levels)), default=0.0)
        clear = change / (find_standard_error(rest) or 1e-9)
        if clear > best:
            best, slices = clear, parts
    return [steps[part] for part in slices]


def _judge_part(part: _Steps, clear: float) -> Late | None:
    """Judge steps of one level. clear: standard errors from which a difference is one."""
    if len(part) < FEWEST:
        return None
    gaps = np.flatnonzero(np.diff(part.number) != 1)
    consecutive = part[int(gaps[-1]) + 1 if len(gaps) else 0 :][-RECENT:]
    return _find_periodic(consecutive) or _find_constant(part, clear)


def _find_constant(part: _Steps, clear: float) -> Late | None:
    """Judge a rank that is late in all steps: in single phases, or in all of them together."""
    level = sum(_find_clear_level(series, part.least, clear) for series in part.phases.T)
    level = level or _find_clear_level(part.excess[:, OWN], 1.5 * part.least, clear)
    is_waited_for = min(part.medians[OWN], -part.medians[BLOCKED]) >= WAITED_FOR * level
    return _measure(part, part.phases) if level and is_waited_for else None


def _find_clear_level(series: Floats, least: float, clear: float) -> float:
    """Return the median of a series if it is at least this and more than noise, else 0."""
    level, error = float(np.median(series)), find_standard_error(series)
    return level if level >= max(least + 2 * error, clear * error) else 0.0


def _find_periodic(part: _Steps) -> Late | None:
    """Judge a rank that is late in every so many steps. part: steps that follow one another."""
    phases = [s for s in part.phases.T if s.mean() > ALLOWED * part.step_seconds]
    periods = [period for series in phases if (period := find_period(series))]
    if not periods:
        return None
    best = max(periods, key=lambda period: period.clear)
    is_late = np.arange(len(part)) % best.every == best.first
    after = np.roll(is_late, 1)
    after[0] = False
    steps, usual = part[is_late], part[~is_late].medians
    late = _measure(steps, steps.phases - usual[:BLOCKED])
    # The other ranks wait for a late optimizer in the backward of the next step.
    less_blocked = max(
        part[~each].medians[BLOCKED] - part[each].medians[BLOCKED] for each in (is_late, after)
    )
    is_seldom = usual[OWN] < part.least  # else it is always late, and in some steps more so
    is_large = late.seconds >= max(part.least, PERIODIC_COST * part.step_seconds * best.every)
    if is_seldom and is_large and less_blocked >= WAITED_FOR * late.seconds:
        return replace(late, every=best.every)
    return None


def _measure(steps: _Steps, excess: Floats) -> Late:
    """Return how late a rank is in these steps, and in which phases. excess: [steps, phase]."""
    longer = np.median(excess, axis=0)
    clear = [CLEAR * find_standard_error(series) for series in excess.T]
    named = [i for i in range(BLOCKED) if longer[i] >= max(ALSO * longer.max(), clear[i])]
    named = sorted(named or [int(longer.argmax())], key=lambda i: -longer[i])
    series = excess[:, named].sum(axis=1)
    phases = tuple(PHASES[i] for i in named)
    return Late(steps.rank, phases, float(np.median(series)), stats.median_interval(series))


def describe_late(history: History, late: Sequence[Late]) -> Iterator[Finding]:
    """Yield a finding for each host whose ranks are all late, and for the latest other ranks."""
    always = [one for one in late if one.every == 1 and one.until is None]
    hosts = history.hosts
    for ranks in hosts.values():
        members = [one for one in always if one.rank in ranks]
        phases = {one.phases[0] for one in members}
        if len(members) == len(ranks) > 1 and len(phases) == 1 < len(hosts):
            yield _describe(history, members[len(members) // 2], ranks)
            late = [one for one in late if one not in members]
    yield from (_describe(history, one) for one in late[:MOST])


def _describe(history: History, late: Late, ranks: Sequence[int] = ()) -> Finding:
    """Return the finding on a rank. ranks: all of its host, if it is the median of late ones."""
    host, last = history.host_of.get(late.rank, ""), history.last_step
    until = last if late.until is None else late.until
    lasted = (until + 1 - (late.since or 0)) / (last + 1)  # of the job's steps
    cost = late.cost * lasted
    line = _find_line(history, late) if late.until is None else ""  # those of the latest rounds
    place = {
        **({"ranks": [*ranks]} if ranks else {"rank": late.rank, "every": late.every}),
        "host": host,
        "phase": late.phases[0],
        "seconds": late.seconds,
        "share": cost / history.mean_seconds,
        "line": line or None,
        "since_step": late.since,
        "since": None if late.since is None else history.find_end(late.since),
        "until_step": late.until,
    }
    size = f"{late.seconds * 1e3:.3g} ms"
    if late.interval is not None:
        size += f" [{late.interval.low * 1e3:.3g}, {late.interval.high * 1e3:.3g}]"
    code = "straggler" if late.every == 1 else "intermittent-straggler"
    who = host if ranks else f"rank {late.rank} on {host}"
    return Finding(
        "warning" if late.until is None or lasted >= LASTING else "note",
        "slow-host" if ranks else code,
        f"{who} {_describe_steps(history, late)}: its {' and '.join(late.phases)} takes {size} "
        f"longer than the other ranks'{f', at {line}' if line else ''}: "
        f"{history.describe_cost(cost)}",
        f"look for what only {who} does there: larger batches, slower files, logging; {COMPARE}",
        {name: value for name, value in place.items() if value is not None},
    )


def _describe_steps(history: History, late: Late) -> str:
    """Return "is late in one of 5 steps from step 3 (14:32:10 UTC)"."""
    text = "is late" if late.until is None else "was late"
    if late.every > 1:
        text += f" in one of {late.every} steps"
    for word, step in (("from", late.since), ("until", late.until)):
        if step is not None:
            text += f" {word} step {step} ({format_time(history.find_end(step))})"
    return text


def _find_line(history: History, late: Late) -> str:
    """Return the line of the program where a late rank spends more time than others; "" unknown."""
    own, usual = history.lines.get(late.rank, {}), history.lines.get(ALL, {})
    longer = {line: seconds - usual.get(line, 0.0) for line, seconds in own.items()}
    line = max(longer, key=longer.__getitem__, default="")
    # The means over all ranks contain the late one.
    least = LINE_SHARE * late.cost * (1 - 1 / history.world_size)
    return line if line and longer[line] >= least else ""
