"""Launches of a script on mpi and on gloo by turns, and how a figure over launches is shown.

Each backend has launches of its own, for gloo's threads sleep where MPI's ranks poll; which comes
first is drawn for each pair.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scipy.stats import quantile_test

from ddpbench.launch import starters, supervise

LAUNCHERS = {"mpi": "mpirun", "gloo": ""}


def by_turns(
    script: str, ranks: int, launches: int, words: Sequence[str] = ()
) -> dict[str, list[dict[str, Any]]]:
    """Kind -> what each launch of `script --rank KIND FILE WORDS…` has written to its file, JSON.

    Exits with the code of a launch that fails.
    """
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in LAUNCHERS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(launches):
            for kind in random.sample(list(LAUNCHERS), len(LAUNCHERS)):
                out = Path(folder) / f"{kind}-{number}"
                line = [script, "--rank", kind, str(out), *words]
                deadline = supervise.Deadline()
                if code := starters.start(LAUNCHERS[kind], line, None, ranks, deadline):
                    raise SystemExit(code)
                found[kind].append(json.loads(out.read_text()))
    return found


def shown(values: Sequence[float]) -> str:
    """A median over launches and its 95 % interval, which six launches or more have."""
    text = f"{statistics.median(values):.3f}"
    if len(values) < 6:
        return text
    interval = quantile_test(values).confidence_interval()
    return f"{text} [{interval.low:.3f}, {interval.high:.3f}]"
