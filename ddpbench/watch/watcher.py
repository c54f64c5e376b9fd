"""The watch of one rank, from its start to its end: a thread that reports every few seconds.

    hooks ─▶ marks ─▶ steps ──┐
    recorder ─▶ calls ────────┴▶ window ─▶ rank 0 ─▶ history ─▶ findings

An error in it ends the watching, is reported once, and never reaches the job.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from itertools import chain
from pathlib import Path

import numpy as np

from ddpbench.hang import guard
from ddpbench.records import store
from ddpbench.records.schema import Finding
from ddpbench.records.store import End
from ddpbench.records.terminal_text import tell
from ddpbench.session.recorder import interrupted
from ddpbench.watch.judging.history import History
from ddpbench.watch.judging.judge import judge
from ddpbench.watch.observe.arrivals import Arrivals
from ddpbench.watch.observe.facts import Facts
from ddpbench.watch.observe.links import Links
from ddpbench.watch.observe.long_steps import LongSteps, Stacks
from ddpbench.watch.observe.phases import Observer
from ddpbench.watch.observe.steps import Marks, Step, StepBuilder
from ddpbench.watch.outputs import Outputs, Settings
from ddpbench.watch.proof import NOT_COMPARED, Proof
from ddpbench.watch.stored import identify_job, store_end
from ddpbench.watch.transport import Transport
from ddpbench.watch.window import CALLS, MOST_CALLS, ROWS, STEPS, Round, Window, join

POLL_SECONDS = 0.2  # between two looks for a process group
CLOSE_SECONDS = 60.0  # for a disk; the waits for other ranks have limits of their own, 7 s in all
OUTPUT_SHARE = 2e-3  # of the time that rank 0 may spend on findings and outputs
OUTPUT_SECONDS = 30.0  # from one output to the next at the latest
REMEMBERED_STEPS = 8192  # to place calls, which may be read long after

_times = 0  # how often a watch was begun, equal in all ranks


class Watcher:
    """Watches this rank until it is closed."""

    def __init__(self, settings: Settings) -> None:
        global _times
        _times += 1
        self._settings, self.prefix = settings, f"ddpbench/watch/{_times}"
        self.began_ns = time.time_ns()
        self.marks = Marks()
        self._over = False
        self.observer = Observer(self.marks, on_error=self._fail)
        self.proof = Proof(settings.verify, self.observer, self.prefix)
        self._guard: guard.Guard | None = None
        self._rank = int(os.environ.get("RANK", "0"))
        self._closing, self._end = threading.Event(), End("complete", None, 0)
        guard.before_end.append(self._finish)
        self.exit_code = 0  # of a script that ends well, once this is closed; 0 in all but rank 0
        self._thread = threading.Thread(target=self._watch, name="ddpbench-watch", daemon=True)
        self._thread.start()

    def close(self, error: BaseException | None = None) -> None:
        """Report a last time, then end the watching. Call it in the thread that trains.

        error: that ends what is watched.
        """
        try:
            self.marks.resolve()
        except Exception as problem:  # as after an error of the device
            self._fail(problem)
        self._finish(self._describe_end(error))
        guard.before_end.remove(self._finish)
        self.observer.close()
        if self._guard is not None:
            self._guard.close()

    def _finish(self, end: End) -> None:
        """Report a last time how this rank ends."""
        if not self._closing.is_set():
            self._end = end
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)

    def _describe_end(self, error: BaseException | None) -> End:
        """Return how this rank ends. Python does not report a `raise SystemExit(3)`."""
        error = error or getattr(sys, "last_value", None)
        if error is None or (isinstance(error, SystemExit) and not error.code):
            return End("complete", None, 0)
        if isinstance(error, KeyboardInterrupt):
            return interrupted("SIGINT")
        text = "".join(traceback.format_exception_only(error)).splitlines()[0]
        reason = f"rank {self._rank} ended with {text:.300}"
        status = error.code if isinstance(error, SystemExit) else 1
        return End("failed", reason, status if isinstance(status, int) else 1)

    def _watch(self) -> None:
        try:
            while not _has_group():
                if self._closing.wait(POLL_SECONDS):
                    return
            import torch.distributed as dist

            self._rank = dist.get_rank()
            if self._settings.timeout and self._guard is None:
                # The script may have one on, or may have destroyed its groups just now.
                with contextlib.suppress(RuntimeError, ValueError):
                    self._guard = guard.watchdog(self._settings.timeout)
            with contextlib.closing(_Rank(self)) as rank:
                rank.open_outputs(self._settings)
                while not self._closing.wait(rank.transport.seconds_to_round()):
                    rank.send(rank.read_window(rank.transport.begin_round()))
                rank.end(self._end)
                number = rank.transport.begin_round().number
                rank.send(rank.read_window(Round(number, time.time_ns()), last=True))
            self.exit_code = rank.exit_code
        except Exception as error:
            if not isinstance(error, ValueError) or _has_group():  # a short script has ended it
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End the watching because of an error in it, and report that once."""
        self._closing.set()
        self.observer.stop()
        if not self._over:
            self._over = True
            what = f"{type(error).__name__}: {error}"
            tell(f"watch of rank {self._rank} failed, the job continues: {what}")


class _Rank:
    """What this rank observes of itself and sends, and what rank 0 makes of all reports."""

    def __init__(self, watcher: Watcher) -> None:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        self._number, self._world_size = dist.get_rank(), dist.get_world_size()
        self._backend = str(dist.get_backend())
        # First of all: a short script may end its group while the other parts are made.
        self.transport = Transport(
            _get_default_store(), watcher.prefix, self._number, self._world_size
        )
        self._began_ns = watcher.began_ns
        self._marks, self._observer, self._proof = watcher.marks, watcher.observer, watcher.proof
        self._builder = StepBuilder()
        self._steps = deque[Step](maxlen=REMEMBERED_STEPS)
        self._arrivals = Arrivals(self._number, time.time_ns())
        self._facts, self._links = Facts(), Links()
        self._long_steps = LongSteps(self._number)
        self._stacks = Stacks(self._marks, self._observer)
        self._history, self._findings = History(), tuple[Finding, ...]()
        self._sent: dict[int, list[Finding]] = {}  # findings of the ranks themselves
        self._outputs: Outputs | None = None
        self._output_at = 0.0  # when rank 0 judges again
        self._end, self.exit_code = End("complete", None, 0), 0

    def open_outputs(self, settings: Settings) -> None:
        """In rank 0, begin to store the run and to serve other outputs."""
        if self._number == 0:
            import scipy.special  # noqa: F401  # else analysis.stats does, in a watched step

            job = identify_job(settings.verify, self._backend, self._world_size)
            self._outputs = Outputs(settings, job)
            self.transport.publish_folder(f"{self._outputs.folder or ''}")

    def read_window(self, round_: Round, last: bool = False) -> Window:
        """Return the latest steps, and the calls since the last round, up to this round.

        So all ranks report the same ones.
        """
        new = self._builder.add(self._marks.take())
        self._steps.extend(new)
        self._long_steps.add(new, self._stacks.take())
        self._stacks.overdue_seconds = self._long_steps.limit_seconds
        until_ns = round_.began_ns
        most_steps = max(1, min(STEPS, ROWS // self._world_size))
        most_calls = max(1, min(CALLS, MOST_CALLS // self._world_size))
        ended = [step for step in self._steps if step.ended_ns <= until_ns][-most_steps:]
        calls = self._arrivals.read(self._steps, round_, last)[-most_calls:]
        number = self._number
        findings = [*self._proof.list_findings(number, last)]
        if number == 0 and self._arrivals.unavailable:  # of all ranks
            findings.append(Finding("note", "unseen-collectives", self._arrivals.unavailable))
        return Window(
            number=round_.number,
            hosts={socket.gethostname(): [number]},
            first_step=ended[0].number if ended else 0,
            rows={number: np.array([step.row for step in ended], np.float32)} if ended else {},
            ended_ns=ended[-1].ended_ns if ended else until_ns,
            calls=calls,
            facts={number: {**self._facts.read(), "messages": self._observer.messages}},
            links=self._links.read(),
            addresses=self._links.addresses,
            findings={number: findings},
            long_steps=self._long_steps.take(until_ns),
            lines={number: self._long_steps.usual_lines()},
            last=last,
        )

    def send(self, window: Window) -> None:
        """Send this rank's window of a round; in rank 0, judge what all ranks sent."""
        windows = self.transport.exchange(window)
        if self._outputs is None or not windows:
            return
        joined = join(windows)
        self._sent |= joined.findings
        self._history.add(joined)
        self._history.balance = self._long_steps.make_balance(self._began_ns)
        if time.monotonic() < self._output_at and not window.last:
            return
        began = time.thread_time()
        sent = [*chain.from_iterable(self._sent.values())]
        if window.last:
            sent += self._proof.conclude(sent)
            errors = {finding.code for finding in sent if finding.severity == "error"}
            self.exit_code = 4 if errors - {NOT_COMPARED} else len(errors)
        judged = judge(self._history, self._world_size)
        self._findings = (*sent, *judged)
        self._outputs.update(self._history, self._findings)
        pause = (time.thread_time() - began) / OUTPUT_SHARE
        self._output_at = time.monotonic() + min(pause, OUTPUT_SECONDS)

    def end(self, end: End) -> None:
        """Store how this rank ends if it failed before any other: its peers fail because of it."""
        self._end = end
        if end.state == "complete":
            return
        folder = self._outputs.folder if self._outputs is not None else self.transport.find_folder()
        with contextlib.suppress(OSError, store.InvalidRun):  # as on another host
            if folder and store.read(Path(folder)).state in ("running", "complete"):
                store_end(Path(folder), end)

    def close(self) -> None:
        """Observe and send nothing more; in rank 0, show the final table."""
        self._stacks.close()
        self._facts.close()
        try:
            if self._outputs is not None:
                end = self._end._replace(code=self._end.code or self.exit_code)
                self._outputs.finish(self._history, self._findings, end)
        finally:
            self.transport.close()


def _has_group() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()
