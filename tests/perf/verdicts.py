"""Whether verdicts on real launches can be trusted, on this machine: all_reduce, 2 ranks.

    ./run_bench.sh python tests/perf/verdicts.py pool FOLDER [RUNS [SLICE [LAUNCHES]]]
    ./run_bench.sh python tests/perf/verdicts.py table FOLDER
    ./run_bench.sh python tests/perf/verdicts.py noticed [TRIALS]

pool: RUNS (12) runs of identical code per backend, gloo and mpi, 64 KiB and 4 MiB, with a SLICE of
0.25 s per size and six LAUNCHES.
table: compares every two of these runs as `compare` and the pytest plugin do, with and without five
earlier runs. The slow-downs are planted in the samples: the times of one side are scaled.
noticed: simulated launches with drift: how often a change of 1.5 times the one that a comparison
says it could have noticed is decided.

Exits with 1 if more than 5 % of comparisons of equal sides are false, or less than 95 % of the
noticeable changes are decided.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ddpbench import cli
from ddpbench.commands.compare import MARGIN_PERCENT
from ddpbench.records import store
from ddpbench.records.schema import Result, Run, StepCase
from ddpbench.verdicts import comparison, drift, matching, regression, rows
from ddpbench.verdicts.comparison import Rule
from ddpbench.verdicts.matching import Side, Source
from ddpbench.verdicts.rows import Row
from ddpbench.verdicts.verdict import FASTER, INCONCLUSIVE, MARGIN, SAME, SLOWER

MEASURED = (
    "collectives",
    "--device",
    "cpu",
    "-n",
    "2",
    "--op",
    "all_reduce",
    "--peak-bandwidth",
    "100",
)
BACKENDS = ("gloo", "mpi")
PLANTED = (0.0, 0.05, 0.1, 0.2, 0.5)
FALSE, DECIDED = 0.05, 0.95
STORED_MARGIN = MARGIN_PERCENT / 100  # of `compare` and the pytest plugin


class Case(NamedTuple):
    """The verdict on one case of a comparison."""

    verdict: str
    noticeable: float | None


def read_json(*words: str) -> Any:
    """Return what a command prints as JSON; its progress is not shown."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        cli.main([words[0], "--format", "json", *words[1:]])
    return json.loads(out.getvalue())


def print_row(title: str, planted: float, comparisons: Sequence[Sequence[Case]]) -> bool:
    """Print how comparisons ended; whether at most 5 % of equal sides are told apart."""
    cases = [case.verdict for each in comparisons for case in each]
    wrong = {FASTER, SLOWER} if not planted else {FASTER}
    false = sum(any(case.verdict in wrong for case in each) for each in comparisons)
    counts = "  ".join(f"{name} {cases.count(name) / len(cases):4.0%}"
                       for name in (SLOWER, FASTER, SAME, INCONCLUSIVE))  # fmt: skip
    print(f"{title:34} {planted:4.0%}  {counts}  false {false} of {len(comparisons)}", flush=True)
    return planted > 0 or false <= FALSE * len(comparisons)


# --- stored runs ----------------------------------------------------------------------------------


def measure_pool(folder: Path, count: int, slice_seconds: str, launches: str) -> bool:
    """Measure runs of identical code, the backends in turns."""
    words = (*MEASURED, "--sizes", "64K,4M", "--launches", launches, "--case-time", slice_seconds)
    for number, backend in itertools.product(range(count), BACKENDS):
        output = str(folder / f"{backend}-{number:02}")
        read_json(*words, "--backend", backend, "--output", output)
    return True


def read_pool(folder: Path, backend: str) -> list[Run]:
    """Return the complete runs of a backend, the oldest first."""
    runs = [store.read(each) for each in sorted(folder.glob(f"{backend}-*"))]
    return [run for run in runs if run.state == "complete"]


def scale(run: Run, factor: float) -> Run:
    """Return the run with every time multiplied, as if its samples were."""

    def slower(result: Result) -> Result:
        if result.summary is None:
            return result
        median = result.summary.median_seconds * factor
        quantiles = tuple(each * factor for each in result.summary.quantiles_seconds)
        summary = replace(result.summary, median_seconds=median, quantiles_seconds=quantiles)
        return replace(result, summary=summary)

    return replace(run, results=tuple(map(slower, run.results)))


def compare_stored(base: Run, new: Run, earlier: Sequence[Run]) -> list[Case]:
    """Judge as `compare` does."""
    sides = Source(base.id, (base,)), Source(new.id, (new,))
    known = drift.estimate_drift(*sides, earlier)
    compared = comparison.compare(*sides, Rule(STORED_MARGIN, known)).rows
    return [Case(row.verdict, row.noticeable) for row in compared]


def judge_tests(base: Run, new: Run, earlier: Sequence[Run]) -> list[Case]:
    """Judge as the pytest plugin does: each case is a test."""

    def measured(run: Run) -> Iterator[tuple[str, regression.Measured]]:
        for case, found in matching.find_cases(Source(run.id, (run,))).items():
            assert found.side is not None
            yield case.key, regression.Measured(case, found.side)

    saved: dict[str, list[regression.Measured]] = {}
    for run in (*earlier, base):
        for name, each in measured(run):
            saved.setdefault(name, []).append(each)
    judged = regression.judge_tests(saved, dict(measured(new)), STORED_MARGIN)
    return [Case(row.verdict, row.noticeable) for row in judged]


def print_table(folder: Path) -> bool:
    """Compare every two runs of a pool; whether verdicts and promises hold."""
    good, draw = True, random.Random(0)
    for backend, judge, earlier in itertools.product(
        BACKENDS, (compare_stored, judge_tests), (4, 0)
    ):
        runs = read_pool(folder, backend)
        pairs = []
        for base, new in itertools.combinations(runs, 2):
            others = [run for run in runs if run not in (base, new)]
            pairs.append((base, new, draw.sample(others, min(earlier, len(others)))))
        title = f"{judge.__name__} {backend}, {'five' if earlier else 'no'} earlier"
        for planted in PLANTED:
            found = [judge(a, scale(b, 1 + planted), others) for a, b, others in pairs]
            good &= print_row(title, planted, found)
        good &= print_noticed(title, [
            [case.noticeable for case in judge(a, b, others)] for a, b, others in pairs
        ], lambda n, f, p=pairs, j=judge: j(p[n][0], scale(p[n][1], f), p[n][2]))  # fmt: skip
    return good


def print_noticed(title: str, changes: Sequence[Sequence[float | None]], plant: Any) -> bool:
    """Plant 1.5 times the largest noticeable change of another comparison; print how many end."""
    decided = total = 0
    for number in range(len(changes)):
        known = [change for change in changes[number - 1] if change is not None]
        if known:
            cases = [
                case for case in plant(number, 1 + 1.5 * max(known)) if case.noticeable is not None
            ]  # the others promise nothing: the ranks' cores have moved
            total += len(cases)
            decided += sum(case.verdict == SLOWER for case in cases)
    print(f"{title:34} 1.5 × the noticeable change: {decided} of {total} decided", flush=True)
    return decided >= DECIDED * total


# --- simulated launches ---------------------------------------------------------------------------


CASE = StepCase(
    workload="simulated", settings=(), backend="gloo", provider="native", device="cpu", threads=1,
    world_size=1, ranks_per_host=(1,),
)  # fmt: skip


def side_of(times: Any) -> Side:
    """Return a side with these times of its launches."""
    return Side(float(np.median(times)), None, tuple(times), tuple(range(len(times))))


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
        compared = [
            Row(CASE, side_of(a), side_of(b), margin, drift=each, earlier=self.earlier)
            for a, b, each in zip(base, new, drifts, strict=True)
        ]
        return rows.judge_rows(compared, self.turns, 0.968 if self.turns else 0.95)[0]


def print_simulated(trials: int) -> bool:
    """Plant 1.5 times the change that a simulated comparison says it could have noticed."""
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
            drifts = [0.0 if setting.turns else drift.ASSUMED] * setting.cases
            if setting.earlier:
                runs = [np.log(setting.draw(random)) for _ in range(setting.earlier)]
                logs = np.transpose([np.median(each, axis=1) for each in runs])
                drifts = [drift.drift_margin(list(each), setting.cases) for each in logs]
            change = setting.judge(random, drifts, 1.0).noticeable
            if change is not None:
                total += 1
                decided += setting.judge(random, drifts, 1 + 1.5 * change).verdict == SLOWER
        print(f"{setting}: {decided} of {total} decided", flush=True)
        good &= decided >= DECIDED * total
    return good


def main(kind: str, *words: str) -> int:
    """Run one of the kinds."""
    if kind == "pool":
        folder, count, *how = (*words, *("", "12", "0.25", "6")[len(words) :])
        fine = measure_pool(Path(folder), int(count), *how)
    elif kind == "table":
        fine = print_table(Path(words[0]))
    else:
        fine = print_simulated(int((*words, "200")[0]))
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or ["noticed"])))
