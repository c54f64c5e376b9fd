"""The launches of a measuring command, in order; in a rank of a launch, its part of the launch."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ddpbench.catalog import backends
from ddpbench.launch import starters
from ddpbench.launch.placement import read_placement, require_world_size
from ddpbench.launch.supervise import Deadline
from ddpbench.records.store import End
from ddpbench.records.terminal_text import divert_libraries, tell
from ddpbench.runtime import devices
from ddpbench.session import launch_loop, run_folder
from ddpbench.session.errors import report_errors
from ddpbench.session.launch_loop import Measure
from ddpbench.session.options import RunOptions, T, resolve


def run(
    kind: type[T], measure: Measure[T], namespace: argparse.Namespace, words: Sequence[str]
) -> int:
    """Run this rank's part of a measuring command, or all launches; return the exit code.

    kind: the command's options. namespace: these, parsed. words: these, as typed. Raises Refused.
    """
    options = kind.of(namespace)
    placement = read_placement()
    require_world_size(options.ranks, placement)
    if placement is not None:
        divert_libraries()
        return launch_loop.run(options, placement, measure)
    options = resolve(options, None)
    folder, plan = run_folder.create(options, words)
    options = replace(options, join=str(folder), seed=plan.seed)
    end = _run_launches(options, measure, words)
    return run_folder.finish(folder, options, end)


def _run_launches(options: T, measure: Measure[T], words: Sequence[str]) -> End | None:
    """Run the launches, each backend's ranks by its launcher; return an early end."""
    end = None
    failed = set[str]()  # backends; what ends or refuses one launch does so to the next
    for number, name in _order_launches(options):
        if name in failed:
            continue
        if options.paced and not sys.stdin.readline():  # no other launch is wanted
            break
        code, verdict = _launch(replace(options, backend=(name,), launch=number), measure, words)
        if options.paced:
            sys.stdout.write(f"{code}\n")
            sys.stdout.flush()
        if code == 130:
            return run_folder.interrupted("a signal")  # unless the ranks have reported which
        if code != 0:
            failed.add(name)
            result = "were refused" if code == 2 else f"ended with exit code {code}"
            if end is None or (end.code == 2 and code != 2):  # a rank died: worse than a refusal
                reason = verdict or f"the ranks on {name} {result}"
                end = End("failed", reason, 2 if code == 2 else 5)
    return end


def _order_launches(options: RunOptions) -> Iterator[tuple[int, str]]:
    """Yield number and backend of each launch, in randomised blocks of one launch per backend.

    The backends share whatever drifts on the machine.
    """
    order, launches = random.Random(options.seed), options.launches or 1
    for block in range(launches):
        names = list(options.backend)
        if launches > 1:
            order.shuffle(names)
        for name in names:
            yield block * len(names) + options.backend.index(name), name


def _launch(options: T, measure: Measure[T], words: Sequence[str]) -> tuple[int, str]:
    """Start the ranks of one launch, on one backend, and wait for them.

    Returns the exit code, and the message about a rank that was killed or stopped, "" if none was.
    """
    messages: list[str] = []

    def report(message: str) -> None:
        tell(message)
        messages.append(message)

    def run_rank() -> int:
        placement = read_placement()
        assert placement is not None
        return report_errors(lambda: launch_loop.run(options, placement, measure))

    settings = ("device", "launches", "seed", "join", "launch")
    line = ["-m", f"ddpbench.{options.command}", *words, "--backend", options.backend[0]]
    line += [word for name in settings for word in (f"--{name}", str(getattr(options, name)))]
    code = starters.start(
        backends.get(options.backend[0]).launcher,
        line,
        run_rank if devices.get(options.device).forks else None,
        options.ranks or 1,
        Deadline(options.timeout, options.watchdog == "end", report),
    )
    return code, next(iter(messages), "")
