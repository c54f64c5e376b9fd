"""Whether verdicts on real launches can be trusted, on this machine: all_reduce, 2 ranks.

    ./run_bench.sh python tests/perf/verdicts.py apart [RUNS [PAUSE]]
    ./run_bench.sh python tests/perf/verdicts.py stored FOLDER
    ./run_bench.sh python tests/perf/verdicts.py turns [TRIALS [PLANTED [BYTES,…]]]

apart: RUNS (15) runs of identical code on gloo and mpi, 4 KiB, 64 KiB and 1 MiB, PAUSE (120)
seconds from one to the next, and every two that are at most an hour apart compared as `compare`
does: with what is known of drift before anything is stored, and with what the other runs tell of
it. stored: the same of the runs in a folder. Counted are comparisons, by exit code: 1 must come of
at most 5 %.

turns: this machine is calibrated; then TRIALS (100) times identical code is measured against
itself, six launches a side by turns, and judged as `ab` does (pairs) and as `compare` does. Then
PLANTED (20) times a delay in each call of 1.5 × the calibrated margin of six launches is looked for
by `ab` until the verdict is settled, and one of 0.3 × for 25 seconds, in 6 to 12 launches a side.
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
from typing import Any

import numpy as np

from ddpbench import cli
from ddpbench.commands import compare
from ddpbench.records import store
from ddpbench.verdicts import comparison, drift, noise
from ddpbench.verdicts.comparison import Rule
from ddpbench.verdicts.matching import Source
from ddpbench.verdicts.verdict import SLOWER

MEASURED = (
    "collectives", "--device", "cpu", "--backend", "gloo", "-n", "2", "--op", "all_reduce",
    "--slice", "0.1", "--limit", "100", "--import", "delayed",
)  # fmt: skip
SIZES = "4K,1M"
ALONE = "launches alone, without drift"  # not what `compare` does


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
    for margin, known in (("3 %", None), ("calibrated", compare.calibrated(right.runs))):
        pairs = Rule(noise=known, paired=True, confidence=0.968)
        for words, rule in (("ab, six pairs", pairs), ("compare, six a side", Rule(noise=known))):
            found = comparison.compare(left, right, rule)
            out[f"{words}, margin {margin}"] = comparison.exit_code(found, strict=False)
    return out


def told(title: str, counts: Mapping[str, Counter[int]]) -> bool:
    """Print exit codes; whether of each kind, but what is judged otherwise for comparison, at most
    5 % are 1."""
    print(title)
    for words, count in counts.items():
        print(f"  {words}: exit code 1 in {count[1]} of {sum(count.values())}", flush=True)
    judged = [count for words, count in counts.items() if words != ALONE]
    return all(count[1] <= 0.05 * sum(count.values()) for count in judged)


def identical(trials: int) -> bool:
    """Identical code against itself by turns; whether it is told so."""
    counts: dict[str, Counter[int]] = {}
    for number in range(trials):
        said("ab", "--a", "", "--b", "", "--budget", "0.1", "--format", "json",
             "--output", f"identical-{number}", *MEASURED, "--sizes", SIZES)  # fmt: skip
        for words, code in exit_codes(Path(f"identical-{number}")).items():
            counts.setdefault(words, Counter())[code] += 1
    return told(f"identical code by turns, {trials} comparisons of {SIZES}:", counts)


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


def planted(trials: int, size: str, share: float, budget: float) -> Counter[str]:
    """A delay of so many calibrated margins in each call of b, looked for by ab."""
    (folder,) = store.list_calibrations()
    known = noise.pool_launches(folder.name, [store.read(folder / side) for side in ("a", "b")])
    case = next(case for case in known.used if case.key.split("/")[-2] == size)
    margin, usual = noise.margin(known.used[case], 6), sorted(known.used[case])
    delay = share * margin * usual[len(usual) // 2]
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
        f"delay of {share} × the margin of {margin:.1%} = {delay * 1e6:.1f} µs, {size} B: "
        f"{count[SLOWER]} of {trials} SLOWER; {dict(count)}; launches a side: "
        f"{dict(sorted(Counter(launches).items()))}",
        flush=True,
    )
    return count


def turns(trials: int = 100, plants: int = 20, sizes: str = "4096,1048576") -> bool:
    """Identical code and planted delays by turns; whether they are told so."""
    found = said("calibrate", "--launches", "12", "--format", "json", *MEASURED,
                 "--sizes", SIZES)  # fmt: skip
    for case in found["cases"]:
        print(
            f"{case['case']}: {case['seconds'] * 1e6:.0f} µs, launches vary by "
            f"{case['spread']:.1%}, margin of 6 launches {case['margin_6']:.1%}",
            flush=True,
        )
    good = not trials or identical(trials)
    for size in sizes.split(","):
        good &= planted(plants, size, 1.5, 1e6)[SLOWER] >= 0.9 * plants
        good &= planted(plants, size, 0.3, 25)[SLOWER] == 0
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
