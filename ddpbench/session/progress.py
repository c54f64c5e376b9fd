"""Progress on stderr: a bar with the remaining time, in rank 0 if stderr is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


class Progress:
    """The progress bar of one launch; it shows nothing in other ranks and without a terminal."""

    _bar: Any = None

    def __init__(self, label: str, cases: int, is_shown: bool) -> None:
        self.label = label
        if not is_shown:
            return
        from rich import progress
        from rich.console import Console

        # No thread refreshes the bar: it would run inside timed spans.
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            "left",
            progress.TimeRemainingColumn(),
            console=Console(stderr=True, force_terminal=True),
            auto_refresh=False,
            transient=True,
        )
        self._task = self._bar.add_task(label, total=cases)
        self._bar.start()

    def describe(self, text: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self.label}: {text}")
            self._bar.refresh()

    def advance(self, cases: float) -> None:
        """Move the bar by a number of cases."""
        if self._bar is not None:
            self._bar.advance(self._task, cases)
            self._bar.refresh()

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextlib.contextmanager
def open_progress(label: str, cases: int) -> Iterator[Progress]:
    """Show a bar while the block runs if stderr is a terminal."""
    progress = Progress(label, cases, sys.stderr.isatty())
    try:
        yield progress
    finally:
        progress.stop()
