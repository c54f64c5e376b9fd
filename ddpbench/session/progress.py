"""Show progress on stderr: a bar with the time left, if somebody watches."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


class Progress:
    """Shows nothing: what every other rank has, and a run without a terminal."""

    def describe(self, text: str) -> None:
        """Show what is measured now, beside the bar."""

    def advance(self, cases: float) -> None:
        """Move the bar by so many cases."""

    def stop(self) -> None:
        """Remove the bar."""


class Bar(Progress):
    """A bar of one launch."""

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
        # No thread refreshes it: that would run inside timed spans.
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
        """Show what is measured now, beside the bar."""
        self._bar.update(self._task, description=f"{self.label}: {text}")
        self._bar.refresh()

    def advance(self, cases: float) -> None:
        """Move the bar by so many cases."""
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
