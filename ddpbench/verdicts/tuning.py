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
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from ddpbench.analysis import stats, step_lines
from ddpbench.analysis.flags import group_by
from ddpbench.records.schema import Figure, Finding, Interval, Run, StepCase, StepResult

# The fields of a case that can differ: keywords of DistributedDataParallel, and what a script does.
KEYWORDS = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "broadcast_buffers")
CALLS = {
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
        texts = {name: _format(value) for name, value in self.changes.items()}
        words = ", ".join(f"{name}={text}" for name, text in texts.items() if name in KEYWORDS)
        first = [f"DistributedDataParallel(model, {words})"] if words else []
        return first + [CALLS[name].format(texts[name]) for name in texts if name in CALLS]


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
    return [_judge(group_settings(results)) for results in step_lines.group_by_backend(run)]


def _judge(settings: tuple[Setting, ...]) -> Verdict:
    """Decide on the settings of one workload and backend, the default first."""
    default, *others = settings
    finalists = [s for s in others if any(block >= SCREENING for _, block in s.times)]
    confidence = 1 - 0.05 / max(1, len(finalists))
    compared = {s.label: compare(s, default, confidence) for s in others}
    changes = {label: figure for label, figure in compared.items() if figure is not None}
    judged = [s for s in finalists if s.label in changes]
    intervals = {s.label: interval for s in judged if (interval := changes[s.label].interval)}
    if not judged or len(intervals) < len(judged):
        return Verdict(settings, changes, None, None)
    faster = [s for s in judged if intervals[s.label].high < -MARGIN]
    best = min(faster, key=lambda s: changes[s.label].value, default=None)
    most = max(0.0, *(-interval.low for interval in intervals.values()))
    return Verdict(settings, changes, best, most)


def group_settings(results: Sequence[StepResult]) -> tuple[Setting, ...]:
    """Return the settings in the order of their first measurement; the first is the default."""
    default = results[0].case
    settings = []
    for case, own in group_by(results, lambda result: result.case).items():
        values = {name: getattr(case, name) for name in (*KEYWORDS, *CALLS)}
        changes = {k: value for k, value in values.items() if value != getattr(default, k)}
        settings.append(Setting(case, changes, tuple(own)))
    return tuple(settings)


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
    compared = [(compare(setting, default, 0.95), setting) for setting in others]
    known = [(figure.value, setting) for figure, setting in compared if figure is not None]
    return [setting for _, setting in sorted(known, key=itemgetter(0))]


def list_findings(run: Run) -> Iterator[Finding]:
    """Yield the decision on each workload and backend."""
    for verdict in judge_runs(run) if run.command == "tune" else ():
        default, case = verdict.settings[0], verdict.settings[0].case
        what = f"{case.workload} on {case.backend}"
        place = {"workload": case.workload, "backend": case.backend}
        if default.seconds is None:
            continue
        if verdict.best is not None:
            yield _recommend(verdict.best, verdict, what, place)
        elif verdict.most is not None:
            sentence = f"{what}: keep the defaults: no setting gains more than {verdict.most:.1%}"
            yield Finding("note", "keep-defaults", sentence, "", place)
        else:
            sentence = f"{what}: too few blocks to decide which setting is fastest"
            advice = "give it more time with --max-time"
            yield Finding("note", "undecided", sentence, advice, place)


def _recommend(best: Setting, verdict: Verdict, what: str, place: Mapping[str, Any]) -> Finding:
    change = verdict.changes[best.label]
    assert change.interval is not None
    shorter = f"{-change.value:.1%} [{-change.interval.high:.1%}, {-change.interval.low:.1%}]"
    own, usual = (f"{(s.seconds or 0) * 1e3:.4g} ms" for s in (best, verdict.settings[0]))
    numbers = "; it changes the numbers that the training computes" * best.changes_numbers
    sentence = (
        f"{what}: {best.label} makes a step {shorter} shorter than the default: {own} instead of "
        f"{usual}{numbers}"
    )
    place = {**place, **best.changes}
    return Finding("note", "faster-setting", sentence, "; ".join(best.lines), place)


def _format(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
