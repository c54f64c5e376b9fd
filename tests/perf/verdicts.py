"""Whether verdicts on real launches can be trusted, on this machine: all_reduce, 2 ranks.

    ./run_bench.sh python tests/perf/verdicts.py apart [RUNS [PAUSE]]
    ./run_bench.sh python tests/perf/verdicts.py stored FOLDER
    ./run_bench.sh python tests/perf/verdicts.py turns [TRIALS [PLANTED [BYTES,…]]]

apart: RUNS (15) runs of identical code on gloo and mpi, 4 KiB, 64 KiB and 1 MiB, PAUSE (120)
seconds from one to the next, and every two that are at most an hour apart compared as `compare`
does: with what is known of drift before anything is stored, and with what the other runs tell of
it. stored: the same of the runs in a folder. Counted are comparisons, by exit code: 1 must come of
at most 5 %.

turns: TRIALS (100) times identical code is measured against itself, six launches a side by turns,
and judged as `ab` does (pairs) and as `compare` does. The noise is the change that 95 % of these
comparisons stay within. Then PLANTED (20) times a delay in each call of 1.5 × the noise is looked
for by `ab` until the verdict is settled, and one of 0.3 × for 25 seconds, in 6 to 12 launches a
side.
Exits with 1 where more than 5 % of comparisons of identical code end with exit code 1, less than
90 % of the delays of 1.5 × are SLOWER, or one of 0.3 × is.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ddpbench import cli
from ddpbench.records import store
from ddpbench.verdicts import comparison, drift
from ddpbench.verdicts.comparison import Rule
from ddpbench.verdicts.matching import Source
from ddpbench.verdicts.verdict import SLOWER

MEASURED = (
    "collectives", "--device", "cpu", "--backend", "gloo", "-n", "2", "--op", "all_reduce",
    "--slice", "0.1", "--limit", "100", "--import", "delayed",
)  # fmt: skip
SIZES = "4K,1M"
ALONE = "launches alone, without drift"  # not what `compare` does


class Noise(NamedTuple):
    """The usual time of a size, and the change that 95 % of its comparisons stay within."""

    seconds: float
    change: float


def said(*words: str) -> Any:
    """What a command prints as JSON; its progress is not shown."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        cli.main(list(words))
    return json.loads(out.getvalue())


def exit_codes(folder: Path) -> dict[str, int]:
    """What the comparison of the two sides in a folder ends with, judged in several ways."""
    left, right = (Source(name, (store.read(folder / name),)) for name in ("a", "b"))
    out = {}
    pairs = Rule(paired=True, confidence=0.968)
    for words, rule in (("ab, six pairs", pairs), ("compare, six a side", Rule())):
        found = comparison.compare(left, right, rule)
        out[words] = comparison.exit_code(found, strict=False)
    return out


def told(title: str, counts: Mapping[str, Counter[int]]) -> bool:
    """Print exit codes; whether of each kind, but what is judged otherwise for comparison, at most
    5 % are 1."""
    print(title)
    for words, count in counts.items():
        print(f"  {words}: exit code 1 in {count[1]} of {sum(count.values())}", flush=True)
    judged = [count for words, count in counts.items() if words != ALONE]
    return all(count[1] <= 0.05 * sum(count.values()) for count in judged)


def identical(trials: int) -> tuple[bool, dict[str, Noise]]:
    """Identical code against itself by turns; whether it is told so, and the noise of each size."""
    counts: dict[str, Counter[int]] = {}
    rows: dict[str, list[dict[str, Any]]] = {}
    for number in range(trials):
        found = said("ab", "--a", "", "--b", "", "--budget", "0.1", "--format", "json",
                     "--output", f"identical-{number}", *MEASURED, "--sizes", SIZES)  # fmt: skip
        for row in found["rows"]:
            rows.setdefault(str(row["identity"]["nbytes"]), []).append(row)
        for words, code in exit_codes(Path(f"identical-{number}")).items():
            counts.setdefault(words, Counter())[code] += 1
    noise = {
        size: Noise(
            float(np.median([row["base_seconds"] for row in every])),
            float(np.percentile([abs(row["change"]) for row in every], 95)),
        )
        for size, every in rows.items()
    }
    for size, known in noise.items():
        print(f"{size} B: {known.seconds * 1e6:.0f} µs, 95 % of changes within {known.change:.1%}")
    return told(f"identical code by turns, {trials} comparisons of {SIZES}:", counts), noise


def stored(results: Path) -> bool:
    """Runs of identical code in a folder, every two within an hour; whether they are told so."""
    runs = [store.read(folder) for folder in store.list_runs(results)]
    runs = [run for run in runs if run.state == "complete"]
    counts: dict[str, Counter[int]] = {
        ALONE: Counter(),
        "drift assumed": Counter(),
        "drift as the other runs tell it": Counter(),
    }
    spans, changes = [], []
    for older, newer in itertools.combinations(runs, 2):
        left, right = (Source(run.id, (run,)) for run in (older, newer))
        seconds = drift.apart(left, right)
        if seconds is None or seconds > 3600:
            continue
        spans.append(seconds)
        others = [run for run in runs if run not in (older, newer)]
        known = (None, *(drift.estimate_drift(left, right, stored) for stored in ((), others)))
        for count, each in zip(counts.values(), known, strict=True):
            found = comparison.compare(left, right, Rule(drift=each))
            count[comparison.exit_code(found, strict=False)] += 1
        changes += [abs(row.shift.estimate) for row in found.rows if row.shift]
    most = np.expm1(np.percentile(changes, 95))
    return told(
        f"{len(runs)} runs of identical code, {len(spans)} comparisons of {len(found.rows)} cases, "
        f"{min(spans):.0f} to {max(spans):.0f} s apart; 95 % of changes within {most:.1%}:",
        {words: count for words, count in counts.items() if sum(count.values())},
    )


def apart(count: int, pause: float) -> bool:
    """The same of runs that are made now."""
    for number in range(count):
        time.sleep(pause if number else 0)
        said("collectives", "--device", "cpu", "--backend", "gloo,mpi", "-n", "2", "--op",
             "all_reduce", "--sizes", "4K,64K,1M", "--format", "json")  # fmt: skip
    return stored(Path("results"))


def planted(trials: int, size: str, noise: Noise, share: float, budget: float) -> Counter[str]:
    """A delay of this share of the noise in each call of b, looked for by ab."""
    delay = share * noise.change * noise.seconds
    count, launches = Counter[str](), []
    for number in range(trials):
        (row,) = said(
            "ab", "--a", "", "--b", f"DELAYED_SECONDS={delay:.9f}", "--budget", str(budget),
            "--format", "json", "--output", f"planted-{size}-{share}-{number}", *MEASURED,
            "--sizes", size,
        )["rows"]  # fmt: skip
        count[row["verdict"]] += 1
        launches.append(row["base_launches"])
    print(
        f"delay of {share} × the noise of {noise.change:.1%} = {delay * 1e6:.1f} µs, {size} B: "
        f"{count[SLOWER]} of {trials} SLOWER; {dict(count)}; launches a side: "
        f"{dict(sorted(Counter(launches).items()))}",
        flush=True,
    )
    return count


def turns(trials: int = 100, plants: int = 20, sizes: str = "4096,1048576") -> bool:
    """Identical code and planted delays by turns; whether they are told so."""
    good, noise = identical(trials)
    for size in sizes.split(","):
        good &= planted(plants, size, noise[size], 1.5, 1e6)[SLOWER] >= 0.9 * plants
        good &= planted(plants, size, noise[size], 0.3, 25)[SLOWER] == 0
    return good


def main(kind: str, *words: str) -> int:
    """One of the kinds, in a folder that goes afterwards."""
    if kind == "stored":
        return int(not stored(Path(words[0])))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    with tempfile.TemporaryDirectory(prefix="ddpbench-") as folder:
        os.chdir(folder)
        if kind == "apart":
            count, pause, *_ = (*words, *("15", "120")[len(words) :])
            good = apart(int(count), float(pause))
        else:
            good = turns(*map(int, words[:2]), *words[2:])
        os.chdir("/")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or ["apart"])))
