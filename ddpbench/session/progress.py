"""Progress on stderr: a bar with the remaining time, in rank 0 if stderr is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


class Progress:
    """Shows nothing, in other ranks and without a terminal."""

    def describe(self, text: str) -> None:
        """Show the current case beside the bar."""

    def advance(self, cases: float) -> None:
        """Move the bar by a number of cases."""

    def stop(self) -> None:
        """Remove the bar."""


class Bar(Progress):
    """The progress bar of one launch."""

    def __init__(self, label: str, cases: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        self.label = label
        # No thread refreshes the bar: it would run inside timed spans.
        self._bar: Any = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            "left",
            TimeRemainingColumn(),
            console=Console(stderr=True, force_terminal=True),
            auto_refresh=False,
            transient=True,
        )
        self._task = self._bar.add_task(label, total=cases)
        self._bar.start()

    def describe(self, text: str) -> None:
        """Show the current case beside the bar."""
        self._bar.update(self._task, description=f"{self.label}: {text}")
        self._bar.refresh()

    def advance(self, cases: float) -> None:
        """Move the bar by a number of cases."""
        self._bar.advance(self._task, cases)
        self._bar.refresh()

    def stop(self) -> None:
        """Remove the bar."""
        self._bar.stop()


@contextlib.contextmanager
def open_progress(label: str, cases: int) -> Iterator[Progress]:
    """Show a bar while the block runs if stderr is a terminal."""
    progress = Bar(label, cases) if sys.stderr.isatty() else Progress()
    try:
        yield progress
    finally:
        progress.stop()
