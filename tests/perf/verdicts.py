"""Check whether verdicts can be trusted: on simulated launches, and on real runs of this machine.

    ./run_bench.sh python tests/perf/verdicts.py simulated [TRIALS]
    ./run_bench.sh python tests/perf/verdicts.py noticed [TRIALS]
    ./run_bench.sh python tests/perf/verdicts.py pool FOLDER [RUNS [SECONDS [LAUNCHES]]]
    ./run_bench.sh python tests/perf/verdicts.py table FOLDER

simulated: how often intervals contain the truth, and what identical code and a slowdown are called.
A launch is 200 autocorrelated repetitions (lag 1: 0.3) that vary by 10 % around its own level.
noticed: how often a change of 1.5 times the noticeable one is decided.
pool: RUNS (12) runs of identical code per backend, gloo and mpi, an all_reduce of 64 KiB and 4 MiB
in 2 ranks, with SECONDS (0.25) per size and six LAUNCHES.
table: compares every two of these runs as `compare` and the pytest plugin do, with and without four
earlier runs. To inject a slowdown, the times of one side are multiplied.

Exits with 1 if more than 5 % of the comparisons of equal sides are wrong, or less than 95 % of the
noticeable changes are decided.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter
from scipy.stats import mannwhitneyu
from tabulate import tabulate

from ddpbench import cli
from ddpbench.analysis import stats
from ddpbench.commands.ab import LOOKS
from ddpbench.commands.compare import MARGIN_PERCENT
from ddpbench.records import store
from ddpbench.records.schema import Result, Run, StepCase
from ddpbench.verdicts import comparison, matching, regression, verdict
from ddpbench.verdicts.comparison import Row, Rule
from ddpbench.verdicts.matching import Side, Source
from ddpbench.verdicts.verdict import FASTER, INCONCLUSIVE, MARGIN, SAME, SLOWER

Floats = npt.NDArray[np.float64]
Judge = Callable[[np.random.Generator, int], str]  # draws launches → their verdict

REPETITIONS, LAG1, WITHIN, BETWEEN = 200, 0.3, 0.10, 0.015
DRIFT = 0.12  # of all launches of both sides, from the first to the last
CASES = 20  # of a sweep
MOST_PAIRS = LOOKS[-1][0]
BACKENDS = ("gloo", "mpi")
PLANTED = (0.0, 0.05, 0.1, 0.2, 0.5)
FALSE, DECIDED = 0.05, 0.95
STORED_MARGIN = MARGIN_PERCENT / 100  # of `compare` and the pytest plugin


# --- simulated launches ---------------------------------------------------------------------------


def draw_repetitions(draw: np.random.Generator, launches: int, between: float = BETWEEN) -> Floats:
    """Return float64[launch, repetition] in seconds; the true median is 1."""
    noise = draw.normal(0, math.sqrt(1 - LAG1**2), (launches, REPETITIONS + 20))
    correlated = lfilter([1], [1, -LAG1], noise, axis=1)[:, 20:]
    levels = draw.normal(0, between, (launches, 1))
    return np.asarray(np.exp(levels + WITHIN * correlated), dtype=np.float64)


def draw_medians(draw: np.random.Generator, launches: int, between: float = BETWEEN) -> Floats:
    """Return float64[launch] in seconds."""
    repetitions = draw_repetitions(draw, launches, between)
    return np.asarray(np.median(repetitions, axis=1), dtype=np.float64)


def print_intervals(trials: int) -> None:
    """Print how often 95 % intervals contain the true value."""
    counts: dict[tuple[str, int], int] = defaultdict(int)
    for seed, launches in itertools.product(range(trials), (6, 10, 20)):
        draw = np.random.default_rng((seed, launches))
        base, new = draw_medians(draw, launches), draw_medians(draw, launches) * 1.1
        intervals: dict[str, tuple[float, Any]] = {
            "the median within one launch": (
                1.0,
                stats.median_interval(draw_repetitions(draw, 1)[0]),
            ),
            "the median over launches": (1.0, stats.over_launches(base)[1]),
            "the shift between launches": (math.log(1.1), verdict.shift(base, new)),
            "the shift between pairs": (math.log(1.1), verdict.paired_shift(base, new)),
        }
        for name, (true, interval) in intervals.items():
            counts[name, launches] += interval is not None and interval.low <= true <= interval.high
    table = [[name, *(counts[name, n] / trials for n in (6, 10, 20))] for name in intervals]
    print(tabulate(table, ["95 % intervals of", "6 launches", "10", "20"], floatfmt=".1%"))


def judge_fresh(
    draw: np.random.Generator, launches: int, between: float = BETWEEN, factor: float = 1.0
) -> str:
    """Judge two sides, the second of which takes `factor` times as long."""
    base, new = (draw_medians(draw, launches, between) for _ in range(2))
    return verdict.judge(verdict.shift(base, new * factor), MARGIN)


def judge_pooled(draw: np.random.Generator, launches: int) -> str:
    """Judge by a test of all repetitions, as if they were independent."""
    base, new = (draw_repetitions(draw, launches).ravel() for _ in range(2))
    return SLOWER if mannwhitneyu(base, new).pvalue < 0.05 else SAME


def judge_sweep(draw: np.random.Generator, launches: int) -> str:
    """Judge several cases together; return a verdict other than SAME if there is one."""
    sides = [(draw_medians(draw, launches), draw_medians(draw, launches)) for _ in range(CASES)]
    chances = verdict.adjust_chances([verdict.chance(a, b, MARGIN) for a, b in sides])
    shifts = [verdict.shift(a, b) for a, b in sides]
    names = set(map(verdict.judge, shifts, [MARGIN] * CASES, chances))
    return next((name for name in (SLOWER, FASTER) if name in names), SAME)


def judge_drifting(draw: np.random.Generator, launches: int, way: str) -> str:
    """Judge identical code on a machine that slows down steadily."""
    slope = np.exp(np.linspace(0, DRIFT, 2 * launches))
    times = draw_medians(draw, 2 * launches, 0.005) * slope
    if way == "in a row":
        return verdict.judge(verdict.shift(times[:launches], times[launches:]), MARGIN)
    base, new = draw.permuted(times.reshape(launches, 2), axis=1).T
    shift = verdict.paired_shift if way == "in pairs" else verdict.shift
    return verdict.judge(shift(base, new), MARGIN)


def judge_looks(draw: np.random.Generator, _: int, slow: float = 0.0, factor: float = 1.0) -> str:
    """Judge as `ab`, which looks several times. slow: share of launches that take 1.5 as long."""
    base, new = (
        draw_medians(draw, MOST_PAIRS) * np.where(draw.random(MOST_PAIRS) < slow, 1.5, 1.0)
        for _ in range(2)
    )
    for pairs, confidence in LOOKS:
        shift = verdict.paired_shift(base[:pairs], new[:pairs] * factor, confidence)
        if (name := verdict.judge(shift, MARGIN)) != INCONCLUSIVE:
            return name
    return INCONCLUSIVE


# Identical code: title → the judge, and whether at most 5 % may be called different.
IDENTICAL: dict[str, tuple[Judge, bool]] = {
    "launches that vary by 1.5 %": (judge_fresh, True),
    "launches that vary by 10 %": (partial(judge_fresh, between=0.10), True),
    f"any of {CASES} cases": (judge_sweep, True),
    "ab": (judge_looks, True),
    "ab, a tenth of the launches slow": (partial(judge_looks, slow=0.1), True),
    "all repetitions pooled": (judge_pooled, False),
    "machine slows down, BASE then NEW": (partial(judge_drifting, way="in a row"), False),
    "machine slows down, in turns": (partial(judge_drifting, way="in turns"), False),
    "machine slows down, in pairs": (partial(judge_drifting, way="in pairs"), True),
}
SLOWED: dict[str, Judge] = {
    "slowdown of 10 %": partial(judge_fresh, factor=1.1),
    "slowdown of 10 %, ab": partial(judge_looks, factor=1.1),
    "slowdown of 10 %, ab, a tenth slow": partial(judge_looks, slow=0.1, factor=1.1),
}


def print_simulated(trials: int) -> bool:
    """Print intervals and verdicts; return whether identical code is rarely called different."""
    print_intervals(trials)
    judges = {name: judge for name, (judge, _) in IDENTICAL.items()} | SLOWED
    table, worst = [], 0.0
    for (title, judge), launches in itertools.product(judges.items(), (6, 10)):
        names = [judge(np.random.default_rng(seed), launches) for seed in range(trials)]
        shares = {name: names.count(name) / trials for name in (SLOWER, FASTER, INCONCLUSIVE)}
        table.append([title, launches, *shares.values()])
        if title in IDENTICAL and IDENTICAL[title][1]:
            worst = max(worst, shares[SLOWER] + shares[FASTER])
    formats = ("", "", ".1%", ".1%", ".1%")
    print(tabulate(table, ["", "launches", SLOWER, FASTER, INCONCLUSIVE], floatfmt=formats))
    print(f"worst share of false verdicts: {worst:.1%} (at most {FALSE:.0%})")
    return worst <= FALSE


CASE = StepCase(
    workload="simulated", settings=(), backend="gloo", provider="native", device="cpu", threads=1,
    world_size=1, ranks_per_host=(1,),
)  # fmt: skip


class Setting(NamedTuple):
    """Simulated sides: standard deviations of log times, cases, earlier runs."""

    turns: bool
    run: float
    launch: float
    cases: int
    earlier: int

    def draw(self, random: np.random.Generator) -> Any:
        """Return six launch times per case: log-normal, with a drift of each run."""
        drifts = random.normal(0, self.run, (self.cases, 1))
        return np.exp(drifts + random.normal(0, self.launch, (self.cases, 6)))

    def judge(self, random: np.random.Generator, drifts: Sequence[float], factor: float) -> Any:
        """Return the judgement on the first case, whose NEW takes `factor` times as long."""
        base, new = self.draw(random), self.draw(random)
        new[0] *= factor
        margin = MARGIN if self.turns else STORED_MARGIN

        def make_side(times: Any) -> Side:
            return Side(float(np.median(times)), None, tuple(times), tuple(range(len(times))))

        compared = [
            Row(CASE, make_side(a), make_side(b), margin, drift=each, earlier=self.earlier)
            for a, b, each in zip(base, new, drifts, strict=True)
        ]
        confidence = 0.968 if self.turns else 0.95
        rows = comparison.judge_rows(compared, None, self.turns, confidence)
        return next(row for row in rows if row.base is compared[0].base)


def print_noticed(trials: int) -> bool:
    """Inject 1.5 times the change that a simulated comparison would have noticed."""
    good, random = True, np.random.default_rng(0)
    settings = [Setting(True, 0, launch, 1, 0) for launch in (0.03, 0.1)]
    settings += [
        Setting(False, run, launch, cases, earlier)
        for cases, launch, run, earlier in itertools.product(
            (1, 4), (0.03, 0.1), (0.02, 0.05, 0.08), (0, 5, 10)
        )
    ]
    for setting in settings:
        decided = total = 0
        for _ in range(trials // setting.cases):
            drifts = [0.0 if setting.turns else comparison.ASSUMED] * setting.cases
            if setting.earlier:
                runs = [np.log(setting.draw(random)) for _ in range(setting.earlier)]
                logs = np.transpose([np.median(each, axis=1) for each in runs])
                drifts = [comparison.drift_margin(list(each), setting.cases) for each in logs]
            change = setting.judge(random, drifts, 1.0).noticeable
            if change is not None:
                total += 1
                decided += setting.judge(random, drifts, 1 + 1.5 * change).verdict == SLOWER
        print(f"{setting}: {decided} of {total} decided", flush=True)
        good &= decided >= DECIDED * total
    return good


# --- stored runs ----------------------------------------------------------------------------------


def measure_pool(folder: Path, count: int, seconds: str, launches: str) -> bool:
    """Measure runs of identical code, the backends in turns."""
    words = ["collectives", "--device", "cpu", "-n", "2", "--op", "all_reduce", "--sizes", "64K,4M"]
    words += ["--peak-bandwidth", "100", "--launches", launches, "--case-time", seconds, "--quiet"]
    for number, backend in itertools.product(range(count), BACKENDS):
        output = str(folder / f"{backend}-{number:02}")
        with contextlib.redirect_stdout(io.StringIO()):
            cli.main([*words, "--backend", backend, "--output", output])
    return True


def multiply_times(run: Run, factor: float) -> Run:
    """Return the run as if each sample had taken `factor` times as long."""

    def multiply(result: Result) -> Result:
        if result.summary is None:
            return result
        median = result.summary.median_seconds * factor
        quantiles = tuple(each * factor for each in result.summary.quantiles_seconds)
        summary = replace(result.summary, median_seconds=median, quantiles_seconds=quantiles)
        return replace(result, summary=summary)

    return replace(run, results=tuple(map(multiply, run.results)))


def compare_stored(base: Run, new: Run, earlier: Sequence[Run]) -> list[str]:
    """Return the verdicts of `compare`."""
    sides = Source(base.id, (base,)), Source(new.id, (new,))
    rule = Rule(STORED_MARGIN, comparison.estimate_drift(*sides, earlier))
    return [row.verdict for row in comparison.compare(*sides, rule).rows]


def judge_tests(base: Run, new: Run, earlier: Sequence[Run]) -> list[str]:
    """Return the verdicts of the pytest plugin: each case is a test."""

    def read_cases(run: Run) -> Iterator[tuple[str, regression.Measured]]:
        for case, source in matching.find_cases(Source(run.id, (run,))).items():
            assert source.side is not None
            yield case.key, regression.Measured(case, source.side)

    saved: dict[str, list[regression.Measured]] = {}
    for run in (*earlier, base):
        for name, measured in read_cases(run):
            saved.setdefault(name, []).append(measured)
    judged = regression.judge_tests(saved, dict(read_cases(new)), STORED_MARGIN)
    return [row.verdict for row in judged]


def print_table(folder: Path) -> bool:
    """Compare every two runs of a pool; return whether equal sides rarely differ."""
    good, draw, table = True, random.Random(0), []
    for backend, judge, earlier in itertools.product(
        BACKENDS, (compare_stored, judge_tests), (4, 0)
    ):
        runs = [store.read(path) for path in sorted(folder.glob(f"{backend}-*"))]
        runs = [run for run in runs if run.state == "complete"]
        pairs = []
        for base, new in itertools.combinations(runs, 2):
            others = [run for run in runs if run not in (base, new)]
            pairs.append((base, new, draw.sample(others, min(earlier, len(others)))))
        for planted in PLANTED:
            judged = [judge(a, multiply_times(b, 1 + planted), others) for a, b, others in pairs]
            names = [name for verdicts in judged for name in verdicts]
            wrong = {FASTER} if planted else {FASTER, SLOWER}
            false = sum(bool(wrong & set(verdicts)) for verdicts in judged)
            shares = [names.count(each) / len(names) for each in (SLOWER, FASTER, SAME)]
            table.append([judge.__name__, backend, earlier, planted, *shares, false, len(judged)])
            good &= planted > 0 or false <= FALSE * len(judged)
    heads = ["", "backend", "earlier", "planted", SLOWER, FASTER, SAME, "false", "of"]
    print(tabulate(table, heads, floatfmt=("", "", "", *[".0%"] * 4, "", "")))
    return good


def main(kind: str, *words: str) -> int:
    """Run one of the kinds; return 1 if a promise is broken."""
    if kind == "pool":
        folder, count, seconds, launches = (*words, *("", "12", "0.25", "6")[len(words) :])
        good = measure_pool(Path(folder), int(count), seconds, launches)
    elif kind == "table":
        good = print_table(Path(words[0]))
    elif kind == "noticed":
        good = print_noticed(int((*words, "200")[0]))
    else:
        good = print_simulated(int((*words, "400")[0]))
    return int(not good)


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or ["simulated"])))
