"""What both fuzzers share: a command line run in this process, and what must hold of its end."""

from __future__ import annotations

import argparse
import random
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from command_lines import clean_environment
from in_process import PATIENCE_SECONDS, Outcome

CODES = frozenset({0, 1, 2, 3, 4, 5, 130})
LINES = 3  # that a refusal may have


@dataclass
class Tally:
    """What was tried, and what is wrong with how it ended."""

    tried: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    tracebacks: int = 0
    hangs: int = 0
    faults: list[str] = field(default_factory=list)

    def add(self, about: str, ended: Outcome, fault: str | None) -> None:
        """Count one end, and keep the fault, if it is one, with what led to it."""
        self.tried += 1
        self.ends["started" if ended.code is None else str(ended.code)] += 1
        self.tracebacks += "Traceback" in ended.err
        self.hangs += ended.err == "hung"
        if fault is not None:
            self.faults.append(f"{about}\n  {fault}\n{ended.err[-2000:]}")

    def __str__(self) -> str:
        ends = ", ".join(f"{name}: {count}" for name, count in sorted(self.ends.items()))
        return (
            f"{self.tried} tried (exit codes {ends}), {self.tracebacks} tracebacks, "
            f"{self.hangs} hangs, {len(self.faults)} faults"
        )


def process(words: Sequence[str], cwd: Path) -> Outcome:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "ddpbench", *words]
    try:
        done = subprocess.run(
            command, cwd=cwd, env=clean_environment(), capture_output=True, check=False,
            timeout=PATIENCE_SECONDS, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Outcome(1, "", "hung")
    return Outcome(
        done.returncode, *(o.decode(errors="replace") for o in (done.stdout, done.stderr))
    )


def fault_of(ended: Outcome) -> str | None:
    """What is wrong with an end, if anything is."""
    if ended.err == "hung":
        return f"it did not end within {PATIENCE_SECONDS:g} s"
    if "Traceback" in ended.err:
        return "a traceback"
    if ended.code is not None and ended.code not in CODES:
        return f"exit code {ended.code}"
    if ended.code in (2, 3) and not 0 < ended.err.count("\n") <= LINES and not ended.out:
        return f"exit code {ended.code} with {ended.err.count(chr(10))} lines on stderr"
    strange = {c for c in ended.out + ended.err if not c.isprintable()} - {"\n"}
    return f"not printable: {strange}" if strange else None


def main(description: str, fuzz: Callable[[random.Random, float], Tally]) -> None:
    """Fuzz by hand for as long as asked, and report."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    began = time.monotonic()
    tally = fuzz(random.Random(asked.seed), asked.seconds)
    for fault in tally.faults:
        sys.stdout.write(f"{fault}\n\n")
    sys.stdout.write(f"seed {asked.seed}, {time.monotonic() - began:.0f} s: {tally}\n")
    sys.exit(bool(tally.faults))


def typed(words: Sequence[str]) -> str:
    """The command line, to be run again."""
    return ascii(shlex.join(["ddpbench", *words]))[:1000]
