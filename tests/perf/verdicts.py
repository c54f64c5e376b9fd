"""Whether verdicts on real launches can be trusted, on this machine: gloo, 2 ranks, all_reduce.

    ./run_bench.sh python tests/perf/verdicts.py [TRIALS [PLANTED [BYTES,…]]]

First this machine is calibrated. Then TRIALS (100) times identical code is measured against itself,
4 KiB and 1 MiB, six launches a side by turns, and judged as `ab` does (pairs) and as `compare`
does, with and without the calibration. Then PLANTED (20) times a delay in each call of 1.5 × the
calibrated margin of six launches is looked for by `ab` until the verdict is settled, and one of
0.3 × for 25 seconds, in 6 to 12 launches a side. Printed: counts. Exits with 1 where more than 5 %
of identical code is called different, less than 90 % of the delays of 1.5 × are SLOWER, or one of
0.3 × is.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddpbench import cli, compare
from ddpbench.analysis import comparison, noise
from ddpbench.analysis.comparison import Rule
from ddpbench.analysis.matching import Source
from ddpbench.analysis.verdict import FASTER, SLOWER
from ddpbench.records import store

MEASURED = (
    "collectives", "--device", "cpu", "--backend", "gloo", "-n", "2", "--op", "all_reduce",
    "--slice", "0.1", "--limit", "100", "--import", "delayed",
)  # fmt: skip
SIZES = "4K,1M"


def said(*words: str) -> Any:
    """What a command prints as JSON; its progress is not shown."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        cli.main(list(words))
    return json.loads(out.getvalue())


def judged(folder: Path, calibrated: bool, paired: bool) -> Iterator[str]:
    """The verdicts on the two sides that lie in a folder."""
    left, right = (Source(name, (store.read(folder / name),)) for name in ("a", "b"))
    known = compare.calibrated(right.runs) if calibrated else None
    rule = Rule(noise=known, paired=paired, confidence=0.968 if paired else 0.95)
    for row in comparison.compare(left, right, rule).rows:
        yield row.verdict


def identical(trials: int) -> bool:
    """Identical code against itself; whether at most 5 % of the verdicts of each kind are wrong."""
    counts = {
        (words, calibrated, paired): Counter[str]()
        for words, paired in (("ab, six pairs", True), ("compare, six a side", False))
        for calibrated in (True, False)
    }
    for number in range(trials):
        said("ab", "--a", "", "--b", "", "--budget", "0.1", "--format", "json",
             "--output", f"identical-{number}", *MEASURED, "--sizes", SIZES)  # fmt: skip
        for (_, calibrated, paired), count in counts.items():
            count.update(judged(Path(f"identical-{number}"), calibrated, paired))
    print(f"identical code, {trials} × {SIZES}:")
    good = True
    for (words, calibrated, _), count in counts.items():
        wrong, total = count[SLOWER] + count[FASTER], sum(count.values())
        good &= wrong <= 0.05 * total
        kind = "calibrated margin" if calibrated else "margin 3 %"
        print(f"  {words}, {kind}: {wrong} of {total} called different; {dict(count)}", flush=True)
    return good


def planted(trials: int, size: str, share: float, budget: float) -> Counter[str]:
    """A delay of so many calibrated margins in each call of b, looked for by ab."""
    (folder,) = store.calibrations()
    known = noise.noise(folder.name, [store.read(folder / side) for side in ("a", "b")])
    case = next(case for case in known.medians if case.key.split("/")[-2] == size)
    margin, usual = noise.margin(known.medians[case], 6), sorted(known.medians[case])
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


def main(trials: int = 100, plants: int = 20, sizes: str = "4096,1048576") -> int:
    """All of it, in a folder that goes afterwards."""
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    with tempfile.TemporaryDirectory(prefix="ddpbench-") as folder:
        os.chdir(folder)
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
        os.chdir("/")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3]), *sys.argv[3:]))
