"""Latency and bandwidth of an operation: Hockney's T(n) = α + βn, in one to three segments.

n is the message size of the tables: S of nccl-tests, the total buffer, in bytes. For send_recv, α
is the time of an empty message and 1/β the asymptotic bandwidth. For a collective, α is the sum of
the latencies of all messages that follow one another, and 1/β the asymptotic algbw. At n½ = α/β
half the time is latency, and half of 1/β is reached. For calls in flight (pipelined), α is the time
from one call to the next rather than a latency.

The fit is least squares of log T = log(exp(a) + exp(b) n): relative errors count alike at all
sizes. For a known n½ the best b is a mean, so a scan over n½ finds the global optimum, for all
resamples at once. scipy's curve_fit finds the same, but takes a second to import and a millisecond
for each fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ddpbench.analysis.flags import UNUSABLE, group_by
from ddpbench.analysis.lines import Line
from ddpbench.analysis.stats import Floats
from ddpbench.records.schema import Case

FEWEST_SIZES = 4  # of a segment
RESAMPLES = 200
WIDEST = 3.0  # a figure whose interval has a larger ratio of high to low is not identifiable
OFF = 0.25  # by which the curve may miss a size beyond all launches
ERROR = 0.05  # no segment is added to explain smaller relative errors
EDGE, STEP = math.log(1e3), 0.02  # of the scan over log n½: beyond the sizes, and from step to step


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval, in seconds, bytes per second, or bytes."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Segment:
    """A straight line over neighbouring sizes. None: these sizes do not identify the figure."""

    first: int  # sizes in bytes
    last: int
    latency: Estimate | None  # α in seconds
    rate: Estimate | None  # 1/β in bytes per second
    half: Estimate | None  # n½ in bytes


@dataclass(frozen=True)
class Fit:
    """The fit of one operation on one backend, over the sizes that a line describes."""

    case: Case  # without size: nbytes, count and depth are 0
    launches: int  # that the intervals are over
    segments: tuple[Segment, ...]


def fits(lines: Sequence[Line]) -> list[Fit]:
    """Return one fit for each operation, backend and form of the lines, in their order.

    A fit needs at least four sizes, two launches that measured them all, and times that follow a
    line and identify a figure.
    """
    usable = [line for line in lines if line.algbw and not UNUSABLE & set(line.flags)]
    series = group_by(usable, lambda line: replace(line.case, nbytes=0, count=0, depth=0))
    return [one for case, group in series.items() if (one := _fit(case, group))]


def _fit(case: Case, lines: list[Line]) -> Fit | None:
    from scipy.special import stdtrit

    lines = sorted(lines, key=lambda line: line.case.nbytes)
    logs = _launch_logs(lines)
    launches = len(logs)
    if len(lines) < FEWEST_SIZES or launches < 2:
        return None
    chosen = np.random.default_rng(0).integers(0, launches, (RESAMPLES, launches))
    resampled = np.median(logs[chosen], axis=1)
    # A bootstrap of few launches is too narrow: Student's t, and the variance corrected.
    factor = float(stdtrit(launches - 1, 0.975)) * math.sqrt(launches / (launches - 1))
    ends = _choose_ends(logs, np.array([float(line.case.nbytes) for line in lines]))
    found = [
        _fit_segment(lines[i:j], logs[:, i:j], resampled[:, i:j], factor) for i, j in pairwise(ends)
    ]
    segments = tuple(segment for segment in found if segment is not None)
    return Fit(case, launches, segments) if segments else None


def _launch_logs(lines: Sequence[Line]) -> Floats:
    """Return log seconds [launch, size] of the launches that measured all sizes."""
    times = [
        {r.launch: r.summary.median_seconds for r in line.results if r.summary} for line in lines
    ]
    launches = sorted(set.intersection(*map(set, times)))
    seconds = np.array([[each[launch] for each in times] for launch in launches])
    seconds = seconds.reshape(-1, len(lines))
    return np.asarray(np.log(seconds[(seconds > 0).all(axis=1)]), dtype=np.float64)


def _scan(logs: Floats, sizes: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Fit each row of log seconds [row, size].

    Returns per row: log α, log β, the sum of squared residuals, and -1 or 1 if n½ is beyond the
    scan's lower or upper edge, else 0.
    """
    halves = np.arange(math.log(sizes[0]) - EDGE, math.log(sizes[-1]) + EDGE, STEP)
    shapes = np.logaddexp(halves[:, None], np.log(sizes))
    flat = shapes - shapes.mean(axis=1, keepdims=True)
    centred = logs - logs.mean(axis=1, keepdims=True)
    squares = (centred**2).sum(axis=1)[:, None] - 2 * centred @ flat.T + (flat**2).sum(axis=1)
    best = squares.argmin(axis=1)
    edge = np.where(best == 0, -1.0, np.where(best == len(halves) - 1, 1.0, 0.0))
    slope = (logs - shapes[best]).mean(axis=1)
    return slope + halves[best], slope, squares.min(axis=1), edge


def _choose_ends(logs: Floats, sizes: Floats) -> tuple[int, ...]:
    """Return where segments begin and end, by BIC of the medians: (0, …, number of sizes)."""
    middle, count = np.median(logs, axis=0), len(sizes)

    def criterion(ends: tuple[int, ...]) -> float:
        squares = sum(_scan(middle[None, i:j], sizes[i:j])[2].item() for i, j in pairwise(ends))
        parameters = 3 * len(ends) - 4  # α and β of each segment, and where they meet
        return count * math.log(max(squares / count, ERROR**2)) + parameters * math.log(count)

    inner = range(FEWEST_SIZES, count - FEWEST_SIZES + 1)
    divisions: list[tuple[int, ...]] = [(0, count)]
    divisions += [(0, i, count) for i in inner]
    divisions += [(0, i, j, count) for i in inner for j in inner if j - i >= FEWEST_SIZES]
    return min(divisions, key=criterion)


def _fit_segment(
    lines: Sequence[Line], logs: Floats, resampled: Floats, factor: float
) -> Segment | None:
    """Return the line through these sizes; None if it misses one, or identifies no figure.

    It misses a size if it is off by OFF beyond all launches.
    """
    sizes = np.array([float(line.case.nbytes) for line in lines])
    (a,), (b,), _, (edge,) = _scan(np.median(logs, axis=0)[None], sizes)
    curve = np.logaddexp(a, b + np.log(sizes))
    beyond = np.maximum(curve - logs.max(axis=0), logs.min(axis=0) - curve)
    if beyond.max() > math.log1p(OFF):
        return None
    drawn_a, drawn_b, _, edges = _scan(resampled, sizes)

    def estimate(value: float, drawn: Floats, sides: tuple[int, ...]) -> Estimate | None:
        """Return the figure unless n½ is beyond these edges, or the interval is too wide."""
        half = factor * float(drawn.std())
        if edge in sides or np.isin(edges, sides).mean() > 0.025 or 2 * half > math.log(WIDEST):
            return None
        return Estimate(math.exp(value), math.exp(value - half), math.exp(value + half))

    latency, rate = estimate(a, drawn_a, (-1,)), estimate(-b, -drawn_b, (1,))
    if latency is None and rate is None:
        return None
    return Segment(
        first=lines[0].case.nbytes,
        last=lines[-1].case.nbytes,
        latency=latency,
        rate=rate,
        half=estimate(a - b, drawn_a - drawn_b, (-1, 1)) if latency and rate else None,
    )
