"""Decide which settings of a DDP step are fastest: pure functions of its measurements.

A block measures each setting once, in random order, with a new DistributedDataParallel in the same
processes. The first blocks choose the finalists. Only later blocks judge these: among many
settings, the best of the same blocks would look better than it is.

A setting is identified by the fields of its case that differ from those of the default, which is
measured first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ddpbench.analysis import stats
from ddpbench.records.schema import Figure, Finding, Interval, Run, StepCase, StepResult

# The fields of a case that can differ, and how a script sets them.
FIELDS = {
    "bucket_cap_mb": "DistributedDataParallel(model, bucket_cap_mb={})",
    "gradient_as_bucket_view": "DistributedDataParallel(model, gradient_as_bucket_view={})",
    "static_graph": "DistributedDataParallel(model, static_graph={})",
    "broadcast_buffers": "DistributedDataParallel(model, broadcast_buffers={})",
    "comm_hook": "model.register_comm_hook(None, {}): see ddpbench guide tune",
    "accumulate": "run {} micro-batches per optimizer step, all but the last under no_sync()",
    "threads": "torch.set_num_threads({})",
}
CHANGING = ("comm_hook", "accumulate")  # these change the numbers that a training computes
SCREENING = 3  # blocks that choose the finalists
FINALISTS = 2
CONFIRMING = 8  # blocks that judge them: an interval of 98.3 % needs 7
MARGIN = 0.01  # the least gain that is recommended


@dataclass(frozen=True)
class Setting:
    """One setting of a workload on one backend, with its results, one per block."""

    case: StepCase
    changes: Mapping[str, Any]  # field of the case → value, where it differs from the default
    results: tuple[StepResult, ...]

    @property
    def label(self) -> str:
        """The changes, as keywords."""
        return ", ".join(f"{k}={_format(v)}" for k, v in self.changes.items()) or "default"

    @property
    def times(self) -> dict[tuple[int, int], float]:
        """Return the seconds of a step per micro-batch, by launch and block."""
        return {
            (r.launch, r.block): r.summary.step.value / self.case.accumulate
            for r in self.results
            if r.summary is not None
        }

    @property
    def is_finalist(self) -> bool:
        """Whether a block that judges has measured it."""
        return any(block >= SCREENING for _, block in self.times)

    @property
    def seconds(self) -> float | None:
        """The median over blocks of the seconds per micro-batch; None if it was not measured."""
        times = list(self.times.values())
        return float(np.median(times)) if times else None

    @property
    def reason(self) -> str | None:
        """Why it was not measured."""
        return next((r.reason for r in self.results if r.reason is not None), None)

    @property
    def changes_numbers(self) -> bool:
        """Whether a training with this setting computes other numbers."""
        return any(name in self.changes for name in CHANGING)

    @property
    def lines(self) -> list[str]:
        """Return the lines of Python that choose this setting."""
        keywords = [n for n in self.changes if FIELDS[n].startswith("Distributed")]
        words = ", ".join(f"{name}={_format(self.changes[name])}" for name in keywords)
        first = [f"DistributedDataParallel(model, {words})"] if keywords else []
        others = [n for n in self.changes if n not in keywords]
        return first + [FIELDS[name].format(_format(self.changes[name])) for name in others]


@dataclass(frozen=True)
class Verdict:
    """The decision on one workload and backend.

    best: the recommended setting; None: keep the defaults. most: the largest gain that the
    intervals of the finalists leave open, as a share; None: not enough blocks to tell.
    """

    settings: tuple[Setting, ...]  # the default first
    changes: Mapping[str, Figure]  # label → seconds / those of the default - 1
    best: Setting | None
    most: float | None


def judge_runs(run: Run) -> list[Verdict]:
    """Return the decision on each workload and backend of a run, in the order of measurement."""
    groups: dict[tuple[str, str, str], list[StepResult]] = {}
    for result in run.steps:
        case = result.case
        groups.setdefault((case.workload, case.backend, case.provider), []).append(result)
    return [judge(results) for results in groups.values()]


def judge(results: Sequence[StepResult]) -> Verdict:
    """Decide on the results of one workload and backend; the first is of the default."""
    settings = group_settings(results)
    default, *others = settings
    finalists = [setting for setting in others if setting.is_finalist]
    changes = {s.label: compare(s, default, 1 - 0.05 / max(1, len(finalists))) for s in others}
    known = {label: figure for label, figure in changes.items() if figure is not None}
    bounds = {s.label: known[s.label].interval for s in finalists if s.label in known}
    if not bounds or None in bounds.values():
        return Verdict(settings, known, None, None)
    faster = [s for s in finalists if bounds[s.label].high < -MARGIN]  # type: ignore[union-attr]
    best = min(faster, key=lambda s: known[s.label].value, default=None)
    most = max(0.0, *(-interval.low for interval in bounds.values() if interval is not None))
    return Verdict(settings, known, best, most)


def group_settings(results: Sequence[StepResult]) -> tuple[Setting, ...]:
    """Return the settings in the order of their first measurement; the first is the default."""
    by_case: dict[StepCase, list[StepResult]] = {}
    for result in results:
        by_case.setdefault(result.case, []).append(result)
    default = results[0].case
    return tuple(
        Setting(case, _list_changes(case, default), tuple(own)) for case, own in by_case.items()
    )


def _list_changes(case: StepCase, default: StepCase) -> dict[str, Any]:
    values = {name: getattr(case, name) for name in FIELDS}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def compare(setting: Setting, default: Setting, confidence: float) -> Figure | None:
    """Return how much longer a step takes than with the default, as a share; None if unknown.

    The blocks that confirm count if there are any, else those that screen. The interval is the
    exact one of the median of the blocks' ratios; None without enough blocks.
    """
    own, base = setting.times, default.times
    blocks = own.keys() & base.keys()
    blocks = {place for place in blocks if place[1] >= SCREENING} or blocks
    if not blocks:
        return None
    logs = np.array([math.log(own[place] / base[place]) for place in blocks])
    interval = None
    if (ends := stats.ends_of_median(logs, confidence)) is not None:
        low, high = map(math.expm1, ends)
        interval = Interval(low, high, confidence, f"median of {len(blocks)} blocks")
    return Figure(math.expm1(float(np.median(logs))), interval)


def rank_settings(results: Sequence[StepResult]) -> list[Setting]:
    """Return all measured settings but the default, the fastest first."""
    default, *others = group_settings(results)
    known = [(compare(setting, default, 0.95), setting) for setting in others]
    return [s for figure, s in sorted(((f, s) for f, s in known if f), key=lambda k: k[0].value)]


def keep_default(run: Run) -> Run:
    """Return a run of tune with the breakdown of the default of each backend; others as they are.

    The first block measures the breakdown.
    """
    if run.command != "tune":
        return run
    defaults = [verdict.settings[0].results[:1] for verdict in judge_runs(run)]
    return replace(run, steps=tuple(result for first in defaults for result in first))


def list_findings(run: Run) -> Iterator[Finding]:
    """Yield the decision on each workload and backend."""
    for verdict in judge_runs(run) if run.command == "tune" else ():
        default, case = verdict.settings[0], verdict.settings[0].case
        what = f"{case.workload} on {case.backend}"
        place = {"workload": case.workload, "backend": case.backend}
        if default.seconds is None:
            continue
        if verdict.best is not None:
            yield _recommend(verdict, what, place)
        elif verdict.most is not None:
            sentence = f"{what}: keep the defaults: no setting gains more than {verdict.most:.1%}"
            yield Finding("note", "keep-defaults", sentence, "", place)
        else:
            yield Finding(
                "note",
                "undecided",
                f"{what}: too few blocks to decide which setting is fastest",
                "give it more time with --max-time",
                place,
            )


def _recommend(verdict: Verdict, what: str, place: Mapping[str, Any]) -> Finding:
    best, default = verdict.best, verdict.settings[0]
    assert best is not None
    figure = verdict.changes[best.label]
    assert figure.interval is not None
    low, high = -figure.interval.high, -figure.interval.low
    milliseconds = [f"{(s.seconds or 0.0) * 1e3:.4g} ms" for s in (best, default)]
    numbers = "; it changes the numbers that the training computes" * best.changes_numbers
    sentence = (
        f"{what}: {best.label} makes a step {-figure.value:.1%} [{low:.1%}, {high:.1%}] shorter "
        f"than the default: {milliseconds[0]} instead of {milliseconds[1]}{numbers}"
    )
    changes = {name: best.changes[name] for name in best.changes}
    return Finding("note", "faster-setting", sentence, "; ".join(best.lines), {**place, **changes})


def _format(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
