"""Count and judge the outcomes of random command lines, for both fuzzers."""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from in_process import Outcome

CODES = frozenset({0, 1, 2, 3, 4, 5, 130})
MAX_LINES = 3  # of a refusal


@dataclass
class Tally:
    """Counts of outcomes, and a text on each faulty one."""

    tried: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    tracebacks: int = 0
    faults: list[str] = field(default_factory=list)

    def add(self, about: str, outcome: Outcome, fault: str | None) -> None:
        """Count one outcome; keep the fault, if there is one, with what led to it."""
        self.tried += 1
        self.ends["started" if outcome.code is None else str(outcome.code)] += 1
        self.tracebacks += "Traceback" in outcome.err
        if fault is not None:
            self.faults.append(f"{about}\n  {fault}\n{outcome.err[-2000:]}")

    def __str__(self) -> str:
        ends = ", ".join(f"{name}: {count}" for name, count in sorted(self.ends.items()))
        return (
            f"{self.tried} tried (exit codes {ends}), {self.tracebacks} tracebacks, "
            f"{len(self.faults)} faults"
        )


def fault_of(outcome: Outcome) -> str | None:
    """Return a sentence on what is wrong with an outcome, or None."""
    if outcome.err == "hung":
        return "it did not end in time"
    if "Traceback" in outcome.err:
        return "a traceback"
    if outcome.code is not None and outcome.code not in CODES:
        return f"exit code {outcome.code}"
    if outcome.code in (2, 3) and not 0 < outcome.err.count("\n") <= MAX_LINES and not outcome.out:
        return f"exit code {outcome.code} with {outcome.err.count(chr(10))} lines on stderr"
    page = outcome.out.startswith("<!doctype html>")  # its scripts are indented with tabs
    texts = outcome.err + ("" if page else outcome.out)
    strange = {c for c in texts if not c.isprintable()} - {"\n"}
    return f"not printable: {strange}" if strange else None


def main(description: str, fuzz: Callable[[random.Random, int], Tally]) -> None:
    """Try --cases from --seed, print each fault, and exit with 1 if there was any."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    started = time.monotonic()
    tally = fuzz(random.Random(arguments.seed), arguments.cases)
    for fault in tally.faults:
        sys.stdout.write(f"{fault}\n\n")
    sys.stdout.write(f"seed {arguments.seed}, {time.monotonic() - started:.0f} s: {tally}\n")
    sys.exit(bool(tally.faults))


def typed(words: Sequence[str]) -> str:
    """Return the command line in a form that can be typed again."""
    return ascii(shlex.join(["ddpbench", *words]))[:1000]
