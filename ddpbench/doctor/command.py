"""The options of the doctor, and one launch of the examinations in one rank."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ddpbench.catalog import faults
from ddpbench.catalog.planting import IN_SET_UP
from ddpbench.doctor.context import Context
from ddpbench.doctor.examinations import EXAMINATIONS
from ddpbench.launch.placement import Placement
from ddpbench.present.examinations import FINDING_COLUMNS
from ddpbench.records.schema import SEVERITIES, Examination, Plan
from ddpbench.session import options
from ddpbench.session.launches import LaunchContext
from ddpbench.session.options import RunOptions
from ddpbench.session.recorder import Recorder


@dataclass(frozen=True)
class Options(RunOptions):
    """The options of the doctor."""

    command = "doctor"

    only: tuple[str, ...]
    case_time: float
    by: str
    max_pairs: int
    fail_on: str
    inject: tuple[str, ...]

    @property
    def subjects(self) -> tuple[str, ...]:
        return self.only

    def plan(self, seed: int) -> Plan:
        return Plan(
            slice_seconds=self.case_time,
            timeout_seconds=self.timeout,
            fail_on=self.fail_on,
            seed=seed,
        )

    @contextlib.contextmanager
    def inject_faults(self, placement: Placement) -> Iterator[None]:
        with contextlib.ExitStack() as injected:
            for text in self.inject:
                injected.enter_context(faults.parse(text, IN_SET_UP).around(placement))
            yield


EXAMINED = """
--only       run only these examinations (default: all). {examinations}
--case-time  approximate time for each examination
--by         measure links between ranks or between hosts (default: rank)
--max-pairs  measure up to N pairs one by one; with more, one rank per host, or only all at once
--fail-on    lowest severity that makes the exit code 1
"""
INJECTED = """
--inject  inject a fault before the ranks meet, in the last rank or in the one that :rank=N names
          (default: none). """


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command. Imports no torch."""
    known = "; ".join(f"{name}: {examiner.help}" for name, examiner in EXAMINATIONS.items())
    add = options.add_group(parser, "examinations", EXAMINED.format(examinations=known))
    names = options.names("examination", EXAMINATIONS)
    add("--only", kind=names, default=tuple(EXAMINATIONS), metavar="NAME,…")
    add("--case-time", kind=options.positive, default=15.0, metavar="SECONDS")
    add("--by", choices=("rank", "host"), default="rank")
    add("--max-pairs", kind=options.whole(1), default=120, metavar="N")
    add("--fail-on", choices=SEVERITIES, default="error")
    known = faults.list_faults(IN_SET_UP)
    add = options.add_group(parser, "faults, to check that the doctor finds them", INJECTED + known)
    kind, metavar = options.fault(IN_SET_UP), "FAULT[:setting=value,…]"
    add("--inject", kind=kind, action="append", default=[], metavar=metavar)
    options.add_measuring(parser, FINDING_COLUMNS, "all random orders")


def measure_launch(launch: LaunchContext[Options]) -> Recorder:
    """Run the examinations of one launch, in all ranks together."""
    import torch

    torch.set_num_threads(launch.world.agree_thread_count())
    options, backend = launch.options, launch.backend
    recorder = launch.gather_recorder(len(options.only))
    context = Context(
        world=launch.world,
        backend=backend,
        process_group=launch.tested,
        device=launch.device,
        launch=recorder.launch,
        seed=launch.plan.seed,
        seconds=options.case_time,
        by=options.by,
        max_pairs=options.max_pairs,
        modules=options.modules,
        report_progress=recorder.progress.describe,
    )

    def describe(name: str) -> str:
        return f"the examination of {name} on {backend.name}"

    for name in recorder.agree_cases(options.only, describe):
        recorder.add(_examine(name, context))
    return recorder


def _examine(name: str, context: Context) -> Examination:
    context.report_progress(name)
    started = time.monotonic()
    outcome = EXAMINATIONS[name].examine(context)
    return Examination(
        name=name,
        launch=context.launch.index,
        backend=context.backend.name,
        seconds=time.monotonic() - started,
        told=outcome.lines,
        unchecked=outcome.unchecked,
        findings=outcome.findings,
        figures=outcome.figures,
        tables=outcome.tables,
    )
