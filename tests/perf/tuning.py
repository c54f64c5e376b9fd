"""Whether `ddpbench tune` recommends what separate launches confirm.

    ./run_bench.sh python tests/perf/tuning.py host [RUNS]
    sudo ./run_bench.sh python tests/perf/tuning.py link [LAUNCHES]

host: RUNS (10) runs of tune on this host. Each must keep the defaults, or `ddpbench ab` must not
call the recommended setting slower. With a bad default, buckets of 0.1 MB for many small layers, a
setting must be recommended. link: one run between two hosts (simulated_hosts.py) on a link
of 1 Gbit/s, then LAUNCHES (6) pairs of launches of `ddpbench ddp` with the default and with the
recommended setting. With rank 1 late by 20 ms, the wait for it must be that within 10 %. The time
of each bucket that is not explained must be within 15 % of its wire. Exits with 1 if not.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from links import MLP, measure

from ddpbench.records import store
from ddpbench.records.schema import Bucket, Run
from ddpbench.verdicts import tuning
from ddpbench.verdicts.tuning import Verdict
from ddpbench.verdicts.verdict import paired_shift

from simulated_hosts import Hosts, missing  # isort: skip  (links has put their folder on the path)

SMALL = (*MLP, "--backend", "gloo", "-n", "2")
# Many layers of 66 KB, so that buckets of 0.1 MB need many reductions.
BAD = ("--width", "128", "--depth", "32", "--batch", "16", "--bucket-cap-mb", "0.1")
RATE = 1e9  # bit/s
LATE_MS = 20
UNEXPLAINED, OFF = 0.15, 0.10


def words(verdict: Verdict) -> list[str]:
    """Return the options of the recommended setting."""
    options = []
    for name, value in verdict.best.changes.items() if verdict.best else ():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            options.append(f"--{option}={value}")
    return options


def tune_here(folder: Path, *options: str) -> Verdict:
    command = [sys.executable, "-m", "ddpbench", "tune", *SMALL, *options, "--output", str(folder)]
    subprocess.run([*command, "--quiet"], check=True, stdout=subprocess.DEVNULL)
    (verdict,) = tuning.judge_runs(store.read(folder))
    return verdict


def check_host(runs: int) -> int:
    """Return how many runs recommended a setting that is slower than the default."""
    with tempfile.TemporaryDirectory() as scratch:
        best = tune_here(Path(scratch, "bad"), *BAD).best
        print(f"buckets of 0.1 MB: {best.label if best else 'keep the defaults'}", flush=True)
        wrong = int(best is None)
        for number in range(runs):
            verdict = tune_here(Path(scratch, str(number)))
            if verdict.best is None:
                open_gain = "unknown" if verdict.most is None else f"{verdict.most:.1%}"
                print(f"run {number}: keep the defaults; most {open_gain}", flush=True)
                continue
            sides = ["--a", "", "--b", " ".join(words(verdict))]
            ab = [sys.executable, "-m", "ddpbench", "ab", *sides]
            ab += ["--output", str(Path(scratch, f"ab-{number}")), "ddp", *SMALL, "--no-breakdown"]
            code = subprocess.run(ab, check=False, stdout=subprocess.DEVNULL).returncode
            wrong += code == 1
            print(f"run {number}: {verdict.best.label}; ab: exit code {code}", flush=True)
    return wrong


def report(name: str, run: Run) -> Verdict:
    (verdict,) = tuning.judge_runs(run)
    print(name, *(f.sentence for f in tuning.list_findings(run)), sep="\n  ", flush=True)
    return verdict


def list_buckets(run: Run) -> list[Bucket]:
    first = next(r.summary for r in run.steps if r.summary is not None and r.summary.buckets)
    return list(first.buckets)


def check_buckets(run: Run) -> int:
    """Print the parts of each bucket; return how many are not explained."""
    wrong = 0
    for bucket in list_buckets(run):
        names = ("wire", "alone", "queue", "contention", "unexplained")
        parts = {name: getattr(bucket, name).value * 1e3 for name in names}
        off = abs(parts["unexplained"]) > UNEXPLAINED * parts["wire"]
        wrong += off
        texts = "  ".join(f"{name} {ms:.2f}" for name, ms in parts.items())
        print(f"  bucket {bucket.index}, ms: {texts}{'  OFF' * off}", flush=True)
    return wrong


def confirm(bench: Hosts, best: list[str], launches: int) -> int:
    """Return 1 if launches with the recommended setting are slower than with the default."""
    seconds: list[list[float]] = [[], []]
    for number in range(launches):
        for side in np.random.default_rng(number).permutation(2).tolist():
            own = best if side else []
            run = measure(bench, "ddp", *MLP, *own, "--no-breakdown", "--rounds", "10")
            seconds[side] += [r.summary.step.value for r in run.steps if r.summary is not None]
    shift = paired_shift(np.array(seconds[0]), np.array(seconds[1]))
    assert shift is not None
    change, low, high = (math.expm1(value) for value in (shift.estimate, shift.low, shift.high))
    print(f"  separate launches: {change:+.1%} [{low:+.1%}, {high:+.1%}]", flush=True)
    return int(low > 0)


def check_link(launches: int) -> int:
    """Return how many of the promises do not hold on a link of 1 Gbit/s."""
    if (why := missing()) is not None:
        sys.exit(f"no hosts to measure between: {why}")
    wrong = 0
    with Hosts(2, rate=RATE) as bench:
        run = measure(bench, "tune", *MLP)
        verdict = report("default", run)
        wrong += check_buckets(run)
        if verdict.best is not None:
            wrong += confirm(bench, words(verdict), launches)
        late = f"slow-rank:rank=1,ms={LATE_MS}"
        run = measure(bench, "ddp", *MLP, "--rounds", "20", "--inject", late)
        wait = max(bucket.wait.value for bucket in list_buckets(run))
        off = abs(wait * 1e3 / LATE_MS - 1) > OFF
        print(f"  rank 1 late by {LATE_MS} ms: wait {wait * 1e3:.1f} ms{'  OFF' * off}")
        return wrong + off


if __name__ == "__main__":
    kind, *rest = sys.argv[1:] or ["host"]
    count = int(rest[0]) if rest else None
    sys.exit(bool(check_link(count or 6) if kind == "link" else check_host(count or 10)))
