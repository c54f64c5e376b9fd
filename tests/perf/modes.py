"""Whether calls with two usual times are found, and calls with one left alone; and which figure of
a launch needs the fewest launches where there are two.

    ./run_bench.sh python tests/perf/modes.py [RUN …]

First simulations: how often `modes` finds two. Then launches drawn from two modes, and the
launches of each RUN (stored, with raw samples): how much each figure varies from launch to launch,
as a standard deviation of its logarithm, and the launches that it needs for the precision that the
median has with 100.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tabulate import tabulate

from ddpbench.analysis import stats
from ddpbench.analysis.lines import modes
from ddpbench.records import store

Floats = npt.NDArray[np.float64]
DRAW = np.random.default_rng(1)
TRIALS, SIZES = 60, (100, 200, 1000, 5000)


def noise(deviation: float, count: int) -> Floats:
    """Factors around 1."""
    return np.exp(deviation * DRAW.standard_normal(count))


def two(ratio: float, share: float, deviation: float) -> Callable[[int], Floats]:
    """Calls of which a share takes `ratio` times as long."""
    return lambda n: np.where(DRAW.random(n) < share, ratio, 1.0) * noise(deviation, n)


SHAPES: dict[str, Callable[[int], Floats]] = {
    "one: narrow": lambda n: noise(0.1, n),
    "one: wide": lambda n: noise(0.5, n),
    "one: a short tail": lambda n: 1 + DRAW.gamma(2, 0.2, n),
    "one: a long tail": lambda n: 1 + DRAW.pareto(1.5, n),
    "one: even": lambda n: 1 + DRAW.random(n),
    "one: steps of a clock": lambda n: np.round(5 * noise(0.05, n), 1),
    "two: 33 % ×10": two(10, 0.33, 0.15),
    "two: 12 % ×10": two(10, 0.12, 0.15),
    "two: 50 % ×2": two(2, 0.5, 0.15),
    "two: 30 % ×1.5": two(1.5, 0.3, 0.1),
    "two: 30 % ×1.3": two(1.3, 0.3, 0.05),
}
FIGURES: dict[str, Callable[[Floats], float]] = {
    "median": lambda t: float(np.median(t)),
    "lower quartile": lambda t: float(np.percentile(t, 25)),
    "10 %": lambda t: float(np.percentile(t, 10)),
    "mean": lambda t: float(t.mean()),
    "mean of the inner half": lambda t: float(np.sort(t)[len(t) // 4 : -(len(t) // 4)].mean()),
    "mean of logarithms": lambda t: float(np.exp(np.log(t).mean())),
}


def found(times: Floats) -> bool:
    """Whether `modes` finds two in one launch."""
    return bool(modes(np.array([stats.quantiles(times)]), len(times)))


def detection() -> None:
    """How often two modes are found."""
    rows = []
    for name, shape in SHAPES.items():
        shares = [np.mean([found(shape(n)) for _ in range(TRIALS)]) for n in SIZES]
        rows.append([name, *(f"{share:.0%}" for share in shares)])
    print(tabulate(rows, ["two modes found in", *(f"of {n} calls" for n in SIZES)]), "\n")


def varied(launches: Sequence[Floats]) -> dict[str, float]:
    """Figure → robust standard deviation of its logarithm over launches."""
    out = {}
    for name, figure in FIGURES.items():
        logs = np.log([figure(each) for each in launches])
        out[name] = float(1.4826 * np.median(abs(logs - np.median(logs))))
    return out


def simulated() -> Iterator[tuple[str, list[Floats]]]:
    """Launches of 200 calls, each with a share of slow calls and a luck of its own."""
    for share in (0.1, 0.33, 0.5, 0.75):
        launches = []
        for _ in range(200):
            its = float(np.clip(share + 0.08 * DRAW.standard_normal(), 0.02, 0.98))
            launches.append(two(10, its, 0.15)(200) * noise(0.05, 1))
        yield f"simulated: {share:.0%} take ×10", launches


def stored(folders: Sequence[str]) -> Iterator[tuple[str, list[Floats]]]:
    """The launches of each case of some runs; seconds of the slowest rank, relative to the run."""
    cases: dict[str, list[Floats]] = {}
    for folder in folders:
        samples = store.read_samples(Path(folder))
        samples = samples[~samples.warm_up]
        spent = (samples.exit_ns - samples.entry_ns).astype(float)
        keys = [samples.case, samples.launch, samples.repetition]
        slowest = spent.groupby(keys, observed=True).max()
        for (case, _), times in slowest.groupby(["case", "launch"], observed=True):
            cases.setdefault(str(case), []).append(times.to_numpy())
    yield from cases.items()


def main(folders: Sequence[str]) -> None:
    """All of it."""
    detection()
    rows = []
    for name, launches in (*simulated(), *stored(folders)):
        spread = varied(launches)
        rows.append([name, len(launches), *(
            f"{s:.3f} ({max(1.0, 100 * (s / spread['median']) ** 2):.0f})" for s in spread.values()
        )])  # fmt: skip
    print("deviation over launches, and the launches needed where the median needs 100")
    print(tabulate(rows, ["calls", "launches", *FIGURES]))


if __name__ == "__main__":
    main(sys.argv[1:])
