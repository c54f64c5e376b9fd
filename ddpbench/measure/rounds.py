"""Measure the arms of a step in turn: a warm-up, then rounds in which every arm steps.

An arm is the step as it is ("ddp"), or a variant without or with timed communication. Rank 0
decides after each round whether another follows.

Arms can be compared only if they wait for the device at the same places: a GPU idles after a wait,
until the host has enqueued work again. Therefore every arm pauses after the same steps, with its
clock stopped, and only "ddp" is verified there.
"""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ddpbench.analysis.steps import Samples
from ddpbench.catalog.planting import Planted
from ddpbench.measure import clock
from ddpbench.measure.step import Marks, Replica, sum_phases
from ddpbench.records.store import SAMPLE_COLUMNS
from ddpbench.runtime import control, devices
from ddpbench.runtime.devices import Cpu
from ddpbench.runtime.world import World

WARM_UP = 4  # steps: DDP's buckets are final after one, powersgd compresses after two
FEWEST, MOST = 10, 1000  # rounds: enough for intervals, even corrected for 16 ranks
IN_A_ROW, STRETCH_SECONDS = 5, 1.0  # steps in a row, unless they take longer
STOPS = ("", "time slice", "rounds", "replicas differ", "interrupted")


@dataclass
class Measured:
    """The measurement of one case in this rank. Only rank 0 has `samples`, after a round."""

    cold_seconds: float = 0.0
    warm_up: int = 0
    stop_reason: str = ""
    samples: Samples | None = None


# Called after each step with its number. Returns whether to continue.
Verify = Callable[[int], bool]


@dataclass
class Rounds:
    """The arms of one case in one rank.

    main trains as the case defines it. probe is a second replica whose communication can be
    switched, for the arms whose replicas diverge or communicate differently; None: only `main` is
    measured.
    """

    world: World
    main: Replica
    probe: Replica | None
    arms: tuple[str, ...]
    seconds: float  # how long to measure
    rounds: int | None  # None: no fixed number
    in_a_row: int | None  # steps
    seed: int
    verify: Verify | None
    every: int  # steps of main between two verifications
    faults: tuple[Planted, ...] = ()
    progress: Callable[[float], None] = lambda share: None
    verify_ns: list[int] = field(default_factory=list)
    stopped: bool = False  # by a verification
    _stamps: dict[str, list[Any]] = field(default_factory=dict)
    _walls: dict[str, list[int]] = field(default_factory=dict)
    _steps: Counter[str] = field(default_factory=Counter)  # taken so far in each arm
    _watches_peak: bool = False
    _peak_nbytes: int = 0  # of the last step of the warm-up; 0: unknown
    _timed: list[Any] = field(default_factory=list)  # what the last timed step of a round recorded

    def run(self) -> Measured:
        """Warm up, then run rounds until rank 0 stops."""
        measured = Measured()
        began = time.monotonic()
        enabled = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            seconds = self._warm_up(measured)
            if not self.stopped:
                self._measure(measured, began + self.seconds, seconds)
        finally:
            if enabled:
                gc.enable()
        if self.stopped:
            measured.stop_reason = "replicas differ"
        if self._done:
            measured.samples = self._gather()
        return measured

    def _warm_up(self, measured: Measured) -> float:
        """Take a few steps of every arm. Return the seconds of the last step of main."""
        _, wall = self._stretch("ddp", 1)
        measured.cold_seconds = wall * 1e-9
        for _ in range(WARM_UP - 1):
            if not self.stopped:
                self._watches_peak = self._kind.reset_peak(self.main.device)
                _, wall = self._stretch("ddp", 1)
        measured.warm_up = self.main.steps
        for arm in self.arms[1:]:
            if not self.stopped:
                self._stretch(arm, WARM_UP)
        self.verify_ns.clear()  # the first verification also creates tables and connections
        return wall * 1e-9

    def _measure(self, measured: Measured, until: float, seconds: float) -> None:
        count = self.in_a_row or (IN_A_ROW if IN_A_ROW * seconds < STRETCH_SECONDS else 1)
        count = control.broadcast_decision(self.world, count)
        order = random.Random(self.seed)  # the same in every rank
        began = time.monotonic()
        while not self.stopped:
            reason = control.broadcast_decision(self.world, self._find_stop(until))
            if reason:
                measured.stop_reason = STOPS[reason]
                return
            arms = list(self.arms)
            order.shuffle(arms)
            for arm in arms:
                if not self.stopped:
                    self._take_round(arm, count)
            if self.rounds:
                share = self._done / self.rounds
            else:
                late = (time.monotonic() - began) / max(until - began, 1e-9)
                share = min(self._done / FEWEST, late)
            self.progress(min(1.0, share))

    @property
    def _done(self) -> int:
        """The number of rounds of "ddp" so far."""
        return len(self._walls.get("ddp", ()))

    def _find_stop(self, until: float) -> int:
        """Return rank 0's reason to stop, an index of STOPS; 0: continue."""
        if self.world.watchdog.signal is not None:
            return STOPS.index("interrupted")
        if self.rounds is not None:
            return STOPS.index("rounds") if self._done >= self.rounds else 0
        late = self._done >= FEWEST and time.monotonic() > until
        return STOPS.index("time slice") if late or self._done >= MOST else 0

    def _take_round(self, arm: str, count: int) -> None:
        stamps, wall = self._stretch(arm, count)
        if self.stopped:  # cut short
            return
        self._walls.setdefault(arm, []).append(wall)
        self._stamps.setdefault(arm, []).append(stamps)
        if arm == "timed":
            assert self.probe is not None
            self._timed.append(self.probe.read_timed_step())

    def _stretch(self, arm: str, count: int) -> tuple[list[list[int]], int]:
        """Take `count` steps of an arm after a common start. Return their stamps, and total ns.

        The total is between synchronisations and excludes the pauses for verifications.
        """
        replica = self.main if arm == "ddp" else self.probe
        assert replica is not None
        replica.choose_arm(arm)
        marks, wall = Marks(replica.device), 0
        ready = [replica.batches(ahead) for ahead in range(count)]
        self.world.watchdog.rearm()
        began = self._meet()
        for number, batches in enumerate(ready, 1):
            self._plant(replica, before=True)
            replica.step(batches, marks.mark)
            self._steps[arm] += 1
            verifies = self.verify is not None and self._steps[arm] % self.every == 0
            planted = any(fault.settings["step"] == replica.steps for fault in self.faults)
            if number < count and not verifies and not planted:
                continue
            self._kind.synchronize(self.main.device)
            wall += clock.now_ns() - began
            if self._watches_peak:  # before a verification, which needs more memory
                self._peak_nbytes = self._kind.peak_nbytes(self.main.device)
                self._watches_peak = False
            self._plant(replica, before=False)
            if verifies and arm == "ddp":
                self._verify()
            if self.stopped or number == count:
                break
            began = self._meet() if self._kind.clock == "device" else clock.now_ns()
        return sum_phases(marks.ns(), number), wall

    def _verify(self) -> None:
        assert self.verify is not None
        began = clock.now_ns()
        self.stopped = not self.verify(self.main.steps)
        self.verify_ns.append(clock.now_ns() - began)

    @property
    def _kind(self) -> Cpu:
        return devices.of(self.main.device)

    def _meet(self) -> int:
        """Wait for all ranks and for the device. Return the time then."""
        control.barrier_all()
        self._kind.synchronize(self.main.device)
        return clock.now_ns()

    def _plant(self, replica: Replica, before: bool) -> None:
        """Plant the faults that are due before the replica's next step, or after its last."""
        if not self.faults:
            return
        replica.steps += before  # the number of the next step
        for fault in self.faults:
            # Only main is verified, so faults that make replicas differ belong there.
            if replica is self.main or fault.fault.in_all_arms:
                fault.act(replica, self.world.rank, self.world.world_size, before)
        replica.steps -= before

    def _gather(self) -> Samples | None:
        """Gather all ranks' samples in rank 0. All ranks have the same number of samples."""
        rounds = self._done  # other arms may have one stretch more
        stamps = {arm: self._gather_ns(ns[:rounds]) for arm, ns in sorted(self._stamps.items())}
        walls = {arm: self._gather_ns(ns[:rounds]) for arm, ns in sorted(self._walls.items())}
        verify = self._gather_ns(self.verify_ns) if self.verify_ns else None
        peak = self._gather_ns([self._peak_nbytes])
        timed = (self.probe or self.main).gather_timed_steps(self.world, self._timed[:rounds])
        if peak is None:
            return None
        return Samples(
            stamps={arm: ns for arm, ns in stamps.items() if ns is not None},
            walls={arm: ns for arm, ns in walls.items() if ns is not None},
            verify=np.empty((self.world.world_size, 0), np.int64) if verify is None else verify,
            peak_nbytes=peak[:, 0],
            **timed,
        )

    def _gather_ns(self, ns: Any) -> npt.NDArray[np.int64] | None:
        return control.gather_to_rank_0(self.world, np.array(ns, np.int64))


def step_columns(case: str, launch: int, samples: Samples) -> dict[str, Any]:
    """Return the SAMPLE_COLUMNS of a DDP step, with entry and exit in ns.

    "CASE/ARM/PHASE" counts from the first step of the round, "CASE/bucket/INDEX" from the begin of
    backward, "CASE/verify" from the begin of the verification. Of the collectives of a sharded
    step, in the order of the calls, "CASE/collective/INDEX/OPERATION/LAYERS/PHASE" counts from the
    begin of the step, and "CASE/exposed/INDEX" is how long the compute waited.
    """
    spans: dict[str, npt.NDArray[np.int64]] = {}  # name → [world, repetition, (entry, exit)]
    for arm, stamps in samples.stamps.items():
        flat = stamps.reshape(stamps.shape[0], -1, 4)
        for i, phase in enumerate(("forward", "backward", "optimizer")):
            spans[f"{case}/{arm}/{phase}"] = flat[:, :, i : i + 2]
    if samples.bucket_stamps is not None:
        for i in range(samples.bucket_stamps.shape[2]):
            spans[f"{case}/bucket/{i}"] = samples.bucket_stamps[:, :, i]
    if samples.timed is not None:
        for i, call in enumerate(samples.timed.spans):
            begin, exposed, end = (samples.timed.ns[:, :, i, column] for column in range(3))
            place = f"{call.operation}/{call.layers}/{call.phase}"
            spans[f"{case}/collective/{i}/{place}"] = np.stack([begin, end], axis=2)
            spans[f"{case}/exposed/{i}"] = np.stack([np.zeros_like(exposed), exposed], axis=2)
    if samples.verify.size:
        spans[f"{case}/verify"] = np.stack([np.zeros_like(samples.verify), samples.verify], axis=2)
    parts = []
    for name, span in spans.items():
        world, count, _ = span.shape
        part = {
            "case": np.full(world * count, name, dtype=object),
            "launch": np.full(world * count, launch, dtype=np.int32),
            "repetition": np.tile(np.arange(count, dtype=np.int32), world),
            "rank": np.repeat(np.arange(world, dtype=np.int32), count),
            "entry_ns": span[:, :, 0].ravel(),
            "exit_ns": span[:, :, 1].ravel(),
            "device_ns": np.full(world * count, -1, dtype=np.int64),
            "warm_up": np.zeros(world * count, dtype=bool),
        }
        parts.append(part)
    return {name: np.concatenate([part[name] for part in parts]) for name in SAMPLE_COLUMNS}
