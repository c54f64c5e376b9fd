"""The options of `ddpbench tune`, and one launch of it in one rank."""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ddpbench.catalog import workloads
from ddpbench.catalog.hooks import HOOKS
from ddpbench.launch.placement import Refused
from ddpbench.records.schema import Plan, StepResult
from ddpbench.runtime import control
from ddpbench.session import options, step_options
from ddpbench.session.launches import LaunchContext
from ddpbench.session.recorder import Recorder
from ddpbench.tune.settings import KINDS, Base, Changes, list_settings
from ddpbench.verdicts.tuning import (
    CONFIRMING,
    FINALISTS,
    SCREENING,
    compare,
    group_settings,
    rank_settings,
)

CASE_SECONDS = 1.0  # of a setting in a block
FEWEST_ROUNDS, MOST_ROUNDS = 6, 200
VISITS = 2 * 8 + CONFIRMING * (FINALISTS + 2)  # about as many as a workload needs, for the progress
SURVEY_ROUNDS = 6  # of the first block, which also measures the breakdown of the step
USUAL = "buckets,options"


@dataclass(frozen=True)
class Options(step_options.Options):
    """The options of a DDP step, and which settings to try."""

    command = "tune"

    what: tuple[str, ...]
    max_time: float

    def plan(self, seed: int) -> Plan:
        return replace(super().plan(seed), slice_seconds=self.case_time or CASE_SECONDS)

    def check(self) -> None:
        super().check()
        if self.parallel != "ddp":
            raise Refused(f"tune tries settings of DDP: leave out --parallel {self.parallel}")
        for name in ("rounds", "steps_per_round", "no_breakdown"):
            if getattr(self, name):
                option = name.replace("_", "-")
                raise Refused(f"--{option} does not apply to tune: use --case-time or --max-time")


TUNED = """
--what      kinds of settings to try (default: {usual}). {kinds}
--max-time  longest time for each workload on each backend; what is measured until then is judged
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command. Imports no torch."""
    known = "; ".join(f"{name}: {kind.help}" for name, kind in KINDS.items())
    add = options.add_group(parser, "settings to try", TUNED.format(usual=USUAL, kinds=known))
    names = options.names("kind of settings", KINDS)
    add("--what", kind=names, default=tuple(USUAL.split(",")), metavar="KIND,…")
    add("--max-time", kind=options.positive, default=900.0, metavar="SECONDS")
    step_options.add_arguments(parser)


def measure_launch(context: LaunchContext[Options]) -> Recorder:
    """Try the settings of each workload in one launch, in all ranks together."""
    import torch

    options = context.options
    threads = context.world.agree_thread_count()
    torch.set_num_threads(threads)
    recorder = context.gather_recorder(len(options.subjects) * VISITS, threads=threads)
    tunings = [Tuning(context, name, threads) for name in options.subjects]
    visits = (visit for tuning in tunings for visit in tuning.agree_visits())

    def describe(visit: Visit) -> str:
        return f"block {visit.block + 1} of {visit.tuning.name} on {context.backend.name}"

    for visit in recorder.agree_cases(visits, describe):
        recorder.add(visit.tuning.measure(visit, recorder))
    return recorder


class Visit(NamedTuple):
    """One measurement of a setting."""

    tuning: Tuning
    block: int
    changes: Changes


class Tuning:
    """The measurements of one workload on one backend, in all ranks together."""

    def __init__(self, context: LaunchContext[Options], name: str, threads: int) -> None:
        self.name, self._context, self._threads = name, context, threads
        self._results: list[StepResult] = []  # with figures in rank 0 only
        self._began = 0.0
        self._step_counts: tuple[int, int] | None = None  # rounds, and steps in each, of a visit
        self._finalists: list[Changes] = []

    def agree_visits(self) -> Iterator[Visit]:
        """Yield the visits, the default first: its time decides how many steps each visit takes.

        Measure each before the next one.
        """
        self._began = time.monotonic()
        yield Visit(self, 0, {})
        self._step_counts = self._agree_step_counts()
        if self._step_counts is None:  # the default could not be measured
            return
        order = random.Random(f"{self._context.plan.seed}/{self.name}")
        block, settings = 0, self._list_settings()[1:]
        while settings:
            order.shuffle(settings)
            for changes in settings:
                yield Visit(self, block, changes)
            block, settings = control.broadcast_value(self._context.world, self._choose_next(block))

    def measure(self, visit: Visit, recorder: Recorder) -> StepResult:
        """Measure the step with a setting, once. If torch refuses the setting, give the reason."""
        import torch

        from ddpbench.session.trial import Trial

        context, world = self._context, self._context.world
        hook = HOOKS[visit.changes.get("comm_hook", "none")]
        if why := hook.fails.get(context.backend.name):
            return self._skip(visit, f"on {context.backend.name} it {why}")
        changes = dict(visit.changes)
        threads = changes.pop("threads", self._threads)
        options = replace(context.options, **changes, **self._protocol(visit))
        torch.set_num_threads(threads)
        torch.manual_seed(context.plan.seed)
        trial = Trial(replace(context, options=options), threads, None)
        objection, result = None, None
        try:
            result, _ = trial.measure(workloads.get(self.name), recorder.progress)
        except RuntimeError as error:
            objection = control.first_line(error, 300)
            if not self._results:  # the default
                raise
        objection = control.agree_objection(world, objection)
        if result is None or objection is not None:
            return self._skip(visit, f"torch refuses it: {objection}")
        self._results.append(replace(result, block=visit.block))
        return self._results[-1]

    def _skip(self, visit: Visit, reason: str) -> StepResult:
        case = replace(self._results[0].case, **visit.changes)
        return StepResult(case=case, launch=self._context.index, reason=reason, block=visit.block)

    def _protocol(self, visit: Visit) -> dict[str, Any]:
        """Return the options that decide how many steps a visit takes; the last is verified."""
        from ddpbench.measure.rounds import WARM_UP

        if self._step_counts is None:
            return {}
        rounds, count = self._step_counts
        if visit.block == 0:
            rounds = SURVEY_ROUNDS
        return {
            "rounds": rounds,
            "steps_per_round": count,
            "verify": (WARM_UP + rounds * count) * bool(self._context.options.verify),
            "no_breakdown": visit.block > 0,
        }

    def _agree_step_counts(self) -> tuple[int, int] | None:
        """Return rounds and steps per round of a visit; None if the default was not measured."""
        counts = None
        summary = self._results[0].summary
        if summary is not None:
            seconds = self._context.plan.slice_seconds / (summary.in_a_row * summary.step.value)
            counts = round(min(max(seconds, FEWEST_ROUNDS), MOST_ROUNDS)), summary.in_a_row
        agreed = control.broadcast_value(self._context.world, counts)
        return tuple(agreed) if agreed else None

    def _list_settings(self) -> list[Changes]:
        from ddpbench.session.trial import Trial

        options, case = self._context.options, self._results[0].case
        trial = Trial(self._context, self._threads, None)
        workload = workloads.get(self.name)
        task = workload.build(options.settings_of(workload), trial.rank_setup(case.batch))
        cores = control.gather_values(self._context.world, len(os.sched_getaffinity(0)))
        base = Base(
            options=options,
            parameter_nbytes=case.parameter_nbytes,
            has_buffers=any(True for _ in task.model.buffers()),
            threads=self._threads,
            cores=min(cores),
        )
        return list_settings(options.what, base)

    def _choose_next(self, block: int) -> tuple[int, list[Changes]]:
        """Return the next block and its settings, in rank 0; no settings: the end."""
        spent = time.monotonic() - self._began
        seconds = spent / len(self._results)  # of a visit; those of the first block take longer
        left = self._context.options.max_time - spent
        if not self._finalists:
            ranked = [dict(setting.changes) for setting in rank_settings(self._results)]
            ranked = ranked[: max(FINALISTS, -(-len(ranked) // 2))]
            confirming = CONFIRMING * (FINALISTS + 2)
            if block + 1 < SCREENING and left > seconds * (len(ranked) + 1 + confirming):
                return block + 1, [{}, *ranked]
            self._finalists, block = self._choose_finalists(), max(block, SCREENING - 1)
        settings = [{}, *self._finalists]
        is_over = block + 1 == SCREENING + CONFIRMING or left < seconds * len(settings)
        return block + 1, [] if is_over or not self._finalists else settings

    def _choose_finalists(self) -> list[Changes]:
        """Return the fastest settings, and their combination if each of them is a gain."""
        default, *_ = group_settings(self._results)
        ranked = rank_settings(self._results)[:FINALISTS]
        finalists = [dict(setting.changes) for setting in ranked]
        changes = [compare(setting, default, 0.95) for setting in ranked]
        both = {name: value for each in finalists for name, value in each.items()}
        combines = len(both) == sum(map(len, finalists)) and not {"accumulate", "static_graph"} <= {
            *both
        }
        if len(ranked) > 1 and combines and all(f is not None and f.value < 0 for f in changes):
            finalists.append(both)
        return finalists
