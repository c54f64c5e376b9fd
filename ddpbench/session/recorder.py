"""The record of a launch. Rank 0 stores it after every case; the other ranks store nothing."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpbench.records import codec, redact, store
from ddpbench.records.launched import Launch
from ddpbench.records.schema import Examination, Result, StepResult

if TYPE_CHECKING:
    from ddpbench.measure.offsets import Clocks

Outcome = Result | StepResult | Examination
# The part of a run that holds each kind of outcome.
PARTS = {Result: "results", StepResult: "steps", Examination: "examinations"}


class Recorder:
    """Appends each outcome to the run's folder at once; stores nothing without a folder."""

    failure: str | None = None  # why nothing more can be stored

    def __init__(self, launch: Launch, folder: Path | None) -> None:
        self.launch, self.folder = launch, folder
        if folder is None:
            return
        self.part = len(store.read(folder).everything)
        self.measuring_seconds = 0.0
        hosts = {str(rank.get("hostname") or "") for rank in launch.ranks} - {""}
        owner = redact.owner()
        self._owner = replace(owner, hosts=(*owner.hosts, *sorted(hosts)))
        self._add_launch(launch)

    def add_clocks(self, clocks: Clocks) -> None:
        """Store the latest comparison of the clocks."""
        objection = {"clocks": clocks.objection} if clocks.objection else {}
        facts = {**self.launch.facts, **objection}
        launch = replace(self.launch, offsets=clocks.offsets, facts=facts)
        if self.folder is not None and launch != self.launch:
            self._add_launch(launch)

    def add(self, outcome: Outcome, columns: dict[str, Any] | None = None) -> None:
        """Store one case, and its raw samples (`step_columns`, `operation_columns`) if any."""
        if self.folder is None:
            return
        try:
            if columns is not None:
                store.add_samples(self.folder, self.part, columns)
            self._append(PARTS[type(outcome)], outcome, number=self.part)
        except OSError as error:
            self.failure = (
                f"cannot write more results to {self.folder} ({error.strerror}): "
                f"{self.part} cases are kept"
            )
        self.part += 1
        if isinstance(outcome, Result):
            self.measuring_seconds += outcome.measuring_seconds

    def close(self, seconds: float, used: list[dict[str, Any]]) -> None:
        """Store the times of the launch and what each rank used."""
        if self.folder is None or self.failure is not None:
            return
        launch = replace(
            self.launch,
            ended=store.format_now(),
            sweep_seconds=seconds,
            measuring_seconds=self.measuring_seconds,
            ranks=tuple(
                {**facts, **own} for facts, own in zip(self.launch.ranks, used, strict=True)
            ),
        )
        self._add_launch(launch)

    def _add_launch(self, launch: Launch) -> None:
        self.launch = launch
        with contextlib.suppress(OSError):  # a full disk is reported with the next outcome
            self._append("launches", launch)

    def _append(self, part: str, record: Any, **more: int) -> None:
        assert self.folder is not None
        line = {**more, part: codec.to_plain(record)}
        store.append(self.folder, redact.record(line, self._owner))
