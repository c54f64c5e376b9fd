"""Run a measuring command: in a rank its part; elsewhere start the ranks of every launch."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from ddpbench.catalog import backends
from ddpbench.launch import starters
from ddpbench.launch.placement import (
    Placement,
    Refused,
    read_placement,
    require_free,
    require_limits,
    require_world_size,
)
from ddpbench.launch.supervise import Deadline
from ddpbench.records import store
from ddpbench.records.terminal_text import divert_libraries, tell
from ddpbench.runtime import devices
from ddpbench.session import page, run_folder
from ddpbench.session.errors import WAIT_FOR_SPEAKER_SECONDS, report_errors
from ddpbench.session.run_options import RunOptions

T = TypeVar("T", bound=RunOptions)
RunRank = Callable[[T, Placement], int]  # one rank's part of a launch; returns the exit code


def run_or_start(
    kind: type[T], run_rank: RunRank[T], namespace: argparse.Namespace, words: Sequence[str]
) -> int:
    """Run this rank's part of a measuring command, or start its ranks; return the exit code.

    kind: the command's options. namespace: these, parsed. words: these, as typed. Raises Refused.
    """
    options = kind.of(namespace)
    placement = read_placement()
    require_world_size(options.ranks, placement)
    require_limits(placement.world_size if placement else options.ranks or 2, placement)
    options = resolve(options, placement)
    options.check()
    options.check_world(placement.world_size if placement else count_ranks(options))
    if options.join is None and not options.quiet and (placement is None or placement.rank == 0):
        for note in options.notes():
            tell(note)
    if placement is not None:
        divert_libraries()
        return run_rank(options, placement)
    options = replace(options, ranks=count_ranks(options))
    if options.report:
        page.require()
    return _start(options, run_rank, words)


def resolve(options: T, placement: Placement | None) -> T:
    """Return the options with device, backends and launches decided.

    Raises Refused if this host lacks one of them. GPUs may be broken or hidden on one host of
    several, or in one rank. So each host reports it.
    """
    device = options.device
    warn = tell if placement is None or placement.local_rank == 0 else lambda sentence: None
    try:
        device = backends.choose_device(options.backend, device, warn)
        launcher = placement.launcher if placement else None
        names = backends.choose(options.backend, device, launcher)
    except Refused as refused:
        if placement is None or device == "cpu":
            raise
        rank = f", rank {placement.rank}" if placement.local_rank else ""
        sentence = f"host {socket.gethostname()}{rank}: {refused}"
        raise Refused(sentence, _wait_to_speak(placement)) from None
    launches = options.launches or (options.usual_launches if placement is None else 1)
    if placement is not None and launches > 1:
        raise Refused(
            "--launches needs ddpbench to start the ranks: leave out the launcher and type python "
            f"-m ddpbench {options.command} -n {placement.world_size} --launches {launches} …"
        )
    return replace(options, device=device, backend=names, launches=launches)


def _wait_to_speak(placement: Placement) -> int:
    """Return the rank that reports a refusal of this host.

    It is the first rank, at once. If that has a GPU and does not refuse, another one reports it:
    the one that holds a name of the host meanwhile.
    """
    if placement.local_rank:
        with socket.socket(socket.AF_UNIX) as name, contextlib.suppress(OSError):
            name.bind(f"\0ddpbench-refused-{os.getppid()}")
            time.sleep(WAIT_FOR_SPEAKER_SECONDS / 2)  # a launcher ends all ranks with the first
            return placement.rank
    return placement.rank - placement.local_rank


def count_ranks(options: RunOptions) -> int:
    """Return how many ranks to start: as requested, else as many as are usual for the device."""
    return options.ranks or devices.get(options.device).usual_ranks()


def _start(options: T, run_rank: RunRank[T], words: Sequence[str]) -> int:
    """Start the ranks of every launch, each backend's by its launcher; then show the run."""
    from ddpbench.session import run_end

    if options.master_port is not None:
        require_free(options.master_port)
    assert options.ranks is not None
    try:
        folder, plan = run_folder.create_run(options, options.ranks, words)
    except OSError as error:
        raise Refused(run_folder.explain_unwritable(error)) from None
    end, refusals = None, 0
    turn = options.open_turn()
    failed = set[str]()  # backends; what ends or refuses one launch does so to the next
    for number, name in _order_launches(options, plan.seed):
        if name in failed:
            continue
        if turn:
            if not sys.stdin.readline():
                tell("stdin closed before the last launch")
                break
            turn.take()
        launch = replace(options, backend=(name,), join=str(folder), launch=number, launches=1)
        code, verdict = _launch(launch, run_rank, words)
        if turn:
            turn.end()
            sys.stdout.write(f"{code}\n")
            sys.stdout.flush()
        refusals += code == 2
        if code == 130:
            end = run_end.interrupted("a signal")  # unless the ranks have reported which
            break
        if code != 0:
            failed.add(name)
            what = "were refused" if code == 2 else f"ended with exit code {code}"
            if end is None or (end.code == 2 and code != 2):  # a rank died: worse than a refusal
                reason = verdict or f"the ranks on {name} {what}"
                end = store.End("failed", reason, 2 if code == 2 else 5)
    nothing = refusals or not store.read(folder).launches
    if nothing and run_end.discard(folder):
        return 2 if refusals or end is None else end.code
    return run_end.finish(folder, options, end)


def _order_launches(options: RunOptions, seed: int) -> Iterator[tuple[int, str]]:
    """Yield number and backend of each launch, in randomised blocks of one launch per backend.

    So the backends share whatever drifts on the machine.
    """
    order, launches = random.Random(seed), options.launches or 1
    for block in range(launches):
        names = list(options.backend)
        if launches > 1:
            order.shuffle(names)
        for name in names:
            yield block * len(names) + options.backend.index(name), name


def _launch(launch: T, run_rank: RunRank[T], words: Sequence[str]) -> tuple[int, str]:
    """Start the ranks of one launch, with one backend, and wait for them.

    Returns the exit code, and the message about a rank that was killed or stopped, "" if none was.
    """
    messages: list[str] = []

    def report(message: str) -> None:
        tell(message)
        messages.append(message)

    deadline = Deadline(launch.timeout, launch.watchdog == "end", report)
    (name,), nproc = launch.backend, launch.ranks or 1
    line = ["-m", f"ddpbench.{launch.command}", *words, "--backend", name]
    line += ["--device", launch.device, "--join", str(launch.join)]
    line += ["--launch", str(launch.launch), "--launches", "1"]
    line += ["--progress"] if launch.shows_progress else []

    def run_forked() -> int:
        placement = read_placement()
        assert placement is not None
        return report_errors(lambda: run_rank(launch, placement))

    forked = run_forked if devices.get(launch.device).forks else None
    code = starters.start(backends.get(name).launcher, line, forked, nproc, deadline)
    return code, next(iter(messages), "")
