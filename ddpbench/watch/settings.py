"""What the user asked of a watch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOTE = "DDPBENCH_WATCH_NOTE"  # names a file in which rank 0 notes the folder of the stored run


@dataclass(frozen=True)
class Settings:
    """The arguments of `ddpbench.watch`, which explains them; they are also options of the command.

    output: absolute, because the script may change its folder; script: for titles.
    """

    verify: int = 0
    timeout: float = 0.0
    every: float = 30.0
    output: Path | None = Path("results")
    on_report: Callable[[dict[str, Any]], object] | None = None
    prometheus: str | None = None
    format: str = "table"
    script: str = ""


def explain_wrong_port(prometheus: str) -> str:
    """Return a sentence on a number that is no port; empty for a port or a file."""
    if prometheus.isdecimal() and not 0 < int(prometheus) < 2**16:
        return f"{prometheus} is no port for Prometheus: give 1 to 65535, or a file"
    return ""
