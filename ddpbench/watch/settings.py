"""What the user asked of a watch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOTE = "DDPBENCH_WATCH_NOTE"  # names a file in which rank 0 notes the folder of the stored run


@dataclass(frozen=True)
class Settings:
    """The arguments of `ddpbench.watch`, which explains them; they are also options of the command.

    output is absolute, because the script may change its folder.
    """

    verify: int = 0
    timeout: float = 0.0
    output: Path | None = None
    on_report: Callable[[dict[str, Any]], object] | None = None
    prometheus: int | None = None


def make_settings(
    verify: int,
    timeout: float,
    output: str | Path | None,
    on_report: Callable[[dict[str, Any]], object] | None,
    prometheus: int | None,
) -> Settings:
    """Return the settings. Raises ValueError for an argument that is not allowed."""
    folder = None if output is None else Path(output).absolute()
    if not verify >= 0:
        raise ValueError(f"verify is {verify!r}: give a number of steps, or 0")
    if not 0 <= timeout < math.inf:
        raise ValueError(f"timeout is {timeout!r}: give seconds, or 0")
    if prometheus is not None and not 0 < prometheus < 2**16:
        raise ValueError(f"prometheus is {prometheus!r}: give a port from 1 to 65535")
    return Settings(verify, timeout, folder, on_report, prometheus)
