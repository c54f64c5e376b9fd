"""The progress bar of a launch, on the terminal."""

from __future__ import annotations

from typing import Any


class Progress:
    """The progress bar of one launch; it shows nothing unless `is_shown`."""

    def __init__(self, label: str, cases: int, is_shown: bool) -> None:
        self._label, self._done = label, 0.0
        self._bar: Any = None
        if is_shown:
            from rich import progress
            from rich.console import Console

            # No thread refreshes the bar: it would run inside timed spans.
            console = Console(stderr=True)
            self._bar = progress.Progress(console=console, auto_refresh=False, transient=True)
            self._task = self._bar.add_task(label, total=cases)
            self._bar.start()

    def describe(self, text: str) -> None:
        """Show what is measured now."""
        self._update(description=f"{self._label}: {text}")

    def show_part(self, share: float) -> None:
        """Show how much of the current case is done, from 0 to 1."""
        self._update(completed=self._done + share)

    def advance(self) -> None:
        """Show that a case is done."""
        self._done += 1
        self._update(completed=self._done)

    def _update(self, **values: object) -> None:
        if self._bar is not None:
            self._bar.update(self._task, **values)
            self._bar.refresh()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
