"""Examine this set-up: the options, and one launch of the examinations in one rank."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpbench.catalog import faults
from ddpbench.doctor.capabilities import examine as capabilities
from ddpbench.doctor.context import Context, Outcome
from ddpbench.doctor.links import examine as links
from ddpbench.doctor.preflight import examine as preflight
from ddpbench.doctor.stragglers import examine as stragglers
from ddpbench.launch.placement import Placement
from ddpbench.records.schema import SEVERITIES, Examination, Plan
from ddpbench.render.doctor import FINDING_COLUMNS
from ddpbench.selftest import trials
from ddpbench.session import launch_facts, launch_loop, options
from ddpbench.session.launch_loop import LaunchContext, Measure, Work
from ddpbench.session.run_options import RunOptions

if TYPE_CHECKING:
    from ddpbench.session.progress import Progress
    from ddpbench.session.recorder import Recorder


@dataclass(frozen=True)
class Examiner:
    """An examination that the doctor makes."""

    name: str
    help: str
    examine: Callable[[Context], Outcome]


EXAMINATIONS: dict[str, Examiner] = {
    each.name: each
    for each in (
        Examiner("preflight", "every rank's versions, variables, limits", preflight.examine),
        Examiner("stragglers", "which rank is slow, and why", stragglers.examine),
        Examiner("links", "what each pair carries, which link or host is slow", links.examine),
        Examiner("capabilities", "what the backend can do, really tried", capabilities.examine),
    )
}


@dataclass(frozen=True)
class Options(RunOptions):
    """What was asked for."""

    command = "doctor"

    only: tuple[str, ...]
    seconds: float
    by: str
    max_pairs: int
    fail_on: str
    inject: tuple[str, ...]

    @property
    def subjects(self) -> tuple[str, ...]:
        """The examinations."""
        return self.only

    def plan(self, seed: int) -> Plan:
        """The protocol as it is stored with the run."""
        return Plan(
            slice_seconds=self.seconds,
            timeout_seconds=self.timeout,
            fail_on=self.fail_on,
            seed=seed,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command; imports no torch."""
    add = parser.add_argument_group("what is examined").add_argument
    add(
        "--only",
        type=options.names("examination", EXAMINATIONS),
        default=tuple(EXAMINATIONS),
        metavar="NAME,…",
        help="; ".join(f"{each.name}: {each.help}" for each in EXAMINATIONS.values()),
    )
    add(
        "--seconds",
        type=options.positive,
        default=15.0,
        help="that one examination may take, about; default 15",
    )
    add("--by", choices=("rank", "host"), default="rank", help="between whom links are measured")
    add(
        "--max-pairs",
        type=options.whole(1),
        default=120,
        metavar="N",
        help="links that are measured one by one; of more, groups are halved; default 120",
    )
    add(
        "--fail-on",
        choices=SEVERITIES,
        default="error",
        help="the least severity for which the exit code is 1; default error",
    )
    _add_planted(parser.add_argument_group("what is planted, to see it found"))
    options.add_where(parser)
    options.add_repeats(parser, "of all orders; default: drawn")
    options.add_shown(parser, FINDING_COLUMNS)
    options.add_stored(parser)


def _add_planted(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--inject",
        type=options.fault(faults.IN_SET_UP),
        action="append",
        default=[],
        metavar="FAULT[:setting=value,…]",
        help="plant a fault in the last rank, or :rank=0, before it meets the others. "
        + faults.listed(faults.IN_SET_UP),
    )
    add(
        "--selftest",
        type=options.names("fault", trials.NAMES),
        nargs="?",
        const=trials.NAMES,
        metavar="FAULT,…",
        help="instead of examining: plant faults one by one in ranks of this machine, tell of each "
        f"whether it was found and named rightly. By default all: {', '.join(trials.NAMES)}",
    )
    add(
        "--healthy",
        type=options.whole(0),
        metavar="N",
        help="runs without a fault in the self-test, in which nothing may be found; default 1",
    )


def run(asked: Options, place: Placement) -> int:
    """One rank's part over all backends; the exit code."""
    with contextlib.ExitStack() as planted:
        for text in asked.inject:
            planted.enter_context(faults.parse(text, faults.IN_SET_UP).around(place))
        return launch_loop.run(asked, place, prepare)


def prepare(at: LaunchContext[Options]) -> Work[str]:
    """The examinations of one launch."""
    import torch

    torch.set_num_threads(launch_facts.agree_thread_count(at.world))

    def begin(recorder: Recorder, progress: Progress) -> Measure[str]:
        context = Context(
            at.world, at.backend, at.tested, at.device, recorder.launch, at.plan.seed,
            at.asked.seconds, at.asked.by, at.asked.max_pairs, at.asked.modules, at.asked.timeout,
            progress.describe,
        )  # fmt: skip

        def examine(name: str) -> tuple[Examination, None]:
            progress.describe(name)
            started = time.monotonic()
            found = EXAMINATIONS[name].examine(context)
            return Examination(
                name, at.index, at.backend.name, time.monotonic() - started,
                found.told, found.unchecked, found.findings, found.figures,
            ), None  # fmt: skip

        return examine

    return Work(
        at.asked.only, lambda name: f"the examination of {name} on {at.backend.name}", begin
    )
