"""`ddpbench.watch()`: switch on a watch in every rank, before or after init_process_group."""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpbench.records.terminal_text import tell

if TYPE_CHECKING:
    from typing_extensions import Self

    from ddpbench.watch.watcher import Watcher

_on: Watch | None = None


class Watch:
    """A watch that is on in this process. Use it in `with`, or call `close()`; or do neither.

    It ends with the process at the latest. An error in it ends the watch with one line, never the
    job.
    """

    def __init__(self, *settings: Any) -> None:
        self._pid = os.getpid()
        self._watcher: Watcher | None = None
        try:
            from ddpbench.watch.outputs import Settings
            from ddpbench.watch.watcher import Watcher

            self._watcher = Watcher(Settings(*settings))
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
        if watcher is None:
            return 0
        try:
            watcher.close(error)
        except Exception as error:
            tell(f"watch could not end properly: {type(error).__name__}: {error}")
        return watcher.exit_code


def watch(
    *,
    verify: int = 0,
    timeout: float = 0.0,
    output: str | Path | None = "results",
    on_report: Callable[[dict[str, Any]], object] | None = None,
    prometheus: int | None = None,
) -> Watch:
    """Watch this job from now on. Call it in every rank, before or after init_process_group.

    verify: compare the replicas bit for bit in every N-th step; 0 never. timeout: report
        a hang after so many seconds and end the job with exit code 5; 0 never.
    output: folder for the stored run; None stores nothing.
    on_report: rank 0 calls it with each report, a dict. prometheus: a port that serves metrics.

    Returns the watch, for use in `with`. If one is on already, as under `python -m ddpbench.watch`,
    returns that one, with its settings. Raises ValueError for an argument that is not allowed.
    """
    global _on
    wrong = ""
    if not verify >= 0:
        wrong = f"verify is {verify!r}: give a number of steps, or 0"
    elif not 0 <= timeout < math.inf:
        wrong = f"timeout is {timeout!r}: give seconds, or 0"
    elif prometheus is not None and not 0 < prometheus < 2**16:
        wrong = f"prometheus is {prometheus!r}: give a port from 1 to 65535"
    if wrong:
        raise ValueError(f"ddpbench.watch: {wrong}")
    if _on is None or _on._pid != os.getpid():
        folder = None if output is None else Path(output).absolute()  # scripts may call os.chdir
        _on = Watch(verify, timeout, folder, on_report, prometheus)
    return _on


def close() -> int:
    """Close the watch that is on, if there is one, and return its exit code."""
    return _on.close() if _on is not None else 0
