"""`ddpbench.watch()`: switch on a watch in every rank, before or after init_process_group."""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpbench.present.formats import FORMATS
from ddpbench.records.terminal_text import tell
from ddpbench.records.wording import explain_unknown
from ddpbench.watch.settings import Settings, explain_wrong_port

if TYPE_CHECKING:
    from typing_extensions import Self

    from ddpbench.watch.watcher import Watcher

_on: Watch | None = None


class Watch:
    """A watch that is on in this process. Use it in `with`, or call `close()`; or do neither.

    It ends with the process at the latest. An error in it ends the watch with one line, never the
    job.
    """

    def __init__(self, settings: Settings) -> None:
        self._pid = os.getpid()
        self._watcher: Watcher | None = None
        try:
            from ddpbench.watch.watcher import Watcher

            self._watcher = Watcher(settings)
        except Exception as error:
            tell(f"watch could not start, the job continues: {type(error).__name__}: {error}")
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> int:
        """Stop watching; rank 0 prints the final table. A second call does nothing.

        error: that ends the job, for the stored run.
        Returns the exit code for a script that ended well: 4 in rank 0 if replicas differed, 1 if
        they were never compared although `verify` asked for it; else 0.
        """
        global _on
        if os.getpid() != self._pid:  # a child by os.fork is not watched
            return 0
        atexit.unregister(self.close)
        watcher, self._watcher = self._watcher, None
        if _on is self:
            _on = None
        if watcher is not None:
            try:
                watcher.close(error)
            except Exception as error:
                tell(f"watch could not end properly: {type(error).__name__}: {error}")
        return watcher.exit_code if watcher is not None else 0


def close() -> int:
    """Close the watch that is on, if there is one, and return its exit code."""
    return _on.close() if _on is not None else 0


def watch(
    *,
    verify: int = 0,
    timeout: float = 0.0,
    every: float = 30.0,
    output: str | Path | None = "results",
    on_report: Callable[[dict[str, Any]], object] | None = None,
    prometheus: str | int | None = None,
    format: str = "table",  # noqa: A002
) -> Watch:
    """Watch this job from now on. Call it in every rank, before or after init_process_group.

    verify: compare the replicas bit for bit in every N-th step; 0 never. timeout: report
        a hang after so many seconds and end the job with exit code 5; 0 never.
    every: seconds between two lines on the terminal. output: folder for the stored run; None stores
        nothing. format: of the table at the end.
    on_report: rank 0 calls it with each report, a dict. prometheus: a file, or a port, for metrics.

    Returns the watch, for use in `with`. If one is on already, as under `python -m ddpbench.watch`,
    returns that one, with its settings. Raises ValueError for an argument that is not allowed.
    """
    return start(
        Settings(
            verify=verify,
            timeout=timeout,
            every=every,
            output=None if output is None else Path(output).absolute(),
            on_report=on_report,
            prometheus=None if prometheus is None else str(prometheus),
            format=format,
            script=sys.argv[0] if sys.argv else "",
        )
    )


def start(settings: Settings) -> Watch:
    """Start a watch with these settings, or return the one that is on. Raises ValueError."""
    global _on
    _check(settings)
    if _on is None or _on._pid != os.getpid():
        _on = Watch(settings)
    return _on


def _check(settings: Settings) -> None:
    wrong = ""
    if not settings.verify >= 0:
        wrong = f"verify is {settings.verify!r}: give a number of steps, or 0"
    elif not 0 <= settings.timeout < math.inf:
        wrong = f"timeout is {settings.timeout!r}: give seconds, or 0"
    elif not 0 < settings.every < math.inf:
        wrong = f"every is {settings.every!r}: give seconds above 0"
    elif settings.format not in FORMATS:
        wrong = explain_unknown("format", settings.format, FORMATS)
    elif settings.prometheus is not None:
        wrong = explain_wrong_port(settings.prometheus)
    if wrong:
        raise ValueError(f"ddpbench.watch: {wrong}")
