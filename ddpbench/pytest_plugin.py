"""pytest fixtures that measure real ranks and pass the launches to pytest-benchmark.

def test_all_reduce(collective_benchmark):
    collective_benchmark("all_reduce", "1M", backend="gloo", ranks=2)

def test_step(ddp_benchmark):
    ddp_benchmark("mlp", width=256, depth=2, backend="gloo", ranks=2)

pytest --benchmark-autosave                       each test: 6 launches of fresh processes
pytest --benchmark-autosave --ddpbench-compare    exit code 1 if a test has become slower

Keywords are the options of `ddpbench collectives` and `ddpbench ddp`; put other options into
options=("--async", "--import=mine"). If ddpbench is installed, every pytest loads this module, so
it imports nothing slow, and does nothing until a test uses one of its fixtures.
A test that was SLOWER does not become the base of the next run. To accept it, save once without
--ddpbench-compare.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ddpbench.records.schema import Run
    from ddpbench.verdicts.regression import JudgedTest, Measured

KEY = "ddpbench"  # in a benchmark's extra_info, and at the top level of a saved file
NO_BENCHMARK = "ddpbench's fixtures need pytest-benchmark: pip install pytest-benchmark"
# fixture → command, default options, options for a short run that only checks the result
COMMANDS = {
    "collective_benchmark": ("collectives", "", "--case-time=0.05"),
    "ddp_benchmark": ("ddp", "--no-breakdown --case-time=5", "--rounds=1 --steps-per-round=1"),
}


class LaunchClock:
    """The timer of a test: it returns the duration of a launch instead of the time of day."""

    __name__ = "launch_median"  # pytest-benchmark stores it

    def __init__(self) -> None:
        self.seconds = 0.0
        self.taken = False  # a test measures one case

    def __call__(self) -> float:
        return self.seconds


@dataclass
class Suite:
    """The measurements of this session, and their bases."""

    # test → saved measurements, the newest last; None: no comparison was requested
    saved: dict[str, list[Measured]] | None = None
    measured: dict[str, Measured] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)  # test that was saved before → the reason
    rows: tuple[JudgedTest, ...] = ()
    shortfall: str = ""  # tests that should be compared and were not


LEARNT_FROM = 20  # newest saved runs, from which the drift of a machine is computed
CLOCK = pytest.StashKey[LaunchClock]()
SUITE = pytest.StashKey[Suite]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this plugin."""
    add = parser.getgroup("ddpbench", "ddpbench: collectives and DDP steps").addoption
    add(
        "--ddpbench-launches",
        type=int,
        default=6,
        metavar="R",
        help="launches of fresh processes per test; a verdict needs 5 (default: 6)",
    )
    add(
        "--ddpbench-results",
        metavar="FOLDER",
        help="folder for the runs (default: pytest's temporary folder)",
    )
    add(
        "--ddpbench-deadline",
        type=_above_zero,
        default=1800.0,
        metavar="SECONDS",
        help="time limit of one test (default: 1800)",
    )
    add(
        "--ddpbench-compare",
        nargs="?",
        const="",
        metavar="NUM|PATH",
        help="compare each test with a run saved by --benchmark-save or -autosave; exit with 1 if "
        "a test is SLOWER or cannot be compared; choose the run with =NUM or =PATH (default: the "
        "newest in which the test was not SLOWER)",
    )
    add(
        "--ddpbench-allow-missing",
        action="store_true",
        help="accept tests that only this session or only the saved one measured (default: exit "
        "with 1)",
    )
    add(
        "--ddpbench-margin",
        type=_above_zero,
        default=10.0,
        metavar="PERCENT",
        help="smallest change that counts (default: 10)",
    )


def _above_zero(text: str) -> float:
    from ddpbench.session.options import positive  # only if the option is given

    return positive(text)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Read the saved runs to compare with, before this session saves anything."""
    suite = session.config.stash[SUITE] = Suite()
    requested = session.config.getoption("--ddpbench-compare")
    if requested is None:
        return
    benchmarks = session.config.pluginmanager.get_plugin("pytest-benchmark")
    if benchmarks is None:
        raise pytest.UsageError(f"--ddpbench-compare: {NO_BENCHMARK}")
    if benchmarks.disabled:
        raise pytest.UsageError(
            "--ddpbench-compare: pytest-benchmark is disabled (--benchmark-disable, or tests in "
            "parallel with -n), so nothing would be compared: leave out one of the two"
        )
    try:
        files = list(benchmarks.storage.load(*([requested] if requested else [])))
        suite.saved = _read_saved(files, accepted_only=not requested)
    except ValueError as error:
        raise pytest.UsageError(f"--ddpbench-compare: {error}") from None
    if requested and not files:
        raise pytest.UsageError(
            f"--ddpbench-compare={requested}: {benchmarks.storage} contains no such run: give its "
            "number as =0001, the path of a file, or no value for the newest"
        )


def _read_saved(
    files: Sequence[tuple[Path, Any]], accepted_only: bool
) -> dict[str, list[Measured]]:
    """Return the measurements of each test in these files, the newest last.

    accepted_only: exclude those that were SLOWER when saved, so that no slow run becomes a base.
    """
    saved: dict[str, list[tuple[str, Any]]] = {}
    for path, content in files:
        slower = content.get(KEY, {}).get("slower", []) if accepted_only else []
        number = Path(path).stem.split("_")[0]
        for benchmark in content["benchmarks"]:
            test, info = benchmark["fullname"], benchmark["extra_info"]
            if KEY in info and test not in slower:
                saved.setdefault(test, []).append((number, info[KEY]))
    if not saved:
        return {}
    from ddpbench.nested_runs import one_case

    return {
        test: [one_case.decode(figures, number) for number, figures in runs[-LEARNT_FROM:]]
        for test, runs in saved.items()
    }


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add pytest-benchmark's fixture, with its own clock, to each test that uses a fixture here."""
    if not config.pluginmanager.hasplugin("pytest-benchmark"):
        return
    for item in items:
        names: list[str] = getattr(item, "fixturenames", [])
        if COMMANDS.keys() & set(names):
            clock = item.stash[CLOCK] = LaunchClock()
            marker = item.get_closest_marker("benchmark")
            settings = {**(marker.kwargs if marker else {}), "timer": clock}
            item.add_marker(pytest.mark.benchmark(**settings), append=False)
            if "benchmark" not in names:
                names.append("benchmark")  # --benchmark-only and --benchmark-skip look for it


@pytest.fixture
def collective_benchmark(request: pytest.FixtureRequest) -> Callable[..., Run]:
    """Measure one case: collective_benchmark("all_reduce", "1M", backend="gloo", ranks=2).

    Further keywords are options of `ddpbench collectives`. Returns the run. Fails the test if a
    result is wrong or a rank dies; skips it if the backend does not support the case.
    """

    def call(operation: str, size: str | int, **settings: Any) -> Run:
        return _benchmark(request, {"op": operation, "sizes": size, **settings})

    return call


@pytest.fixture
def ddp_benchmark(request: pytest.FixtureRequest) -> Callable[..., Run]:
    """Measure a workload's step: ddp_benchmark("mlp", width=256, backend="gloo", ranks=2).

    pytest --benchmark-autosave --ddpbench-compare    exit code 1 if a test has become slower
    """

    def call(workload: str, **settings: Any) -> Run:
        return _benchmark(request, {"workload": workload, **settings})

    return call


def _benchmark(request: pytest.FixtureRequest, settings: dict[str, Any]) -> Run:
    benchmark, clock = _pytest_benchmark(request)
    from ddpbench.nested_runs import one_case
    from ddpbench.records import codec

    option = request.config.getoption
    command, defaults, short = COMMANDS[str(request.fixturename)]
    launches = f"--launches={option('--ddpbench-launches')}"
    arguments = [*defaults.split(), launches, *one_case.words(settings)]
    if benchmark.disabled:  # checked, not timed
        arguments += [*short.split(), "--launches=1"]
    suite, test = request.config.stash[SUITE], request.node.nodeid
    try:
        run = one_case.measure(command, arguments, _folder(request), option("--ddpbench-deadline"))
        found = one_case.only_case(run)
    except one_case.Unmeasured as problem:
        _give_up(benchmark, problem)
        raise pytest.fail.Exception(str(problem), pytrace=False) from None
    if found.side is None:
        if test in (suite.saved or {}):
            suite.skipped[test] = found.reason
        pytest.skip(found.reason)
    measured = one_case.summarise(run, found)
    benchmark.extra_info[KEY] = codec.to_plain(measured)
    if not benchmark.disabled:
        suite.measured[test] = measured
    _feed(benchmark, clock, measured.side.times)
    return run


def _pytest_benchmark(request: pytest.FixtureRequest) -> tuple[Any, LaunchClock]:
    if not request.config.pluginmanager.hasplugin("pytest-benchmark"):
        pytest.fail(NO_BENCHMARK, pytrace=False)
    clock = request.node.stash.get(CLOCK, None)
    if clock is None:
        pytest.fail(
            f"{request.fixturename} must be an argument of the test or of one of its fixtures: "
            "pytest-benchmark needs its clock before the test starts",
            pytrace=False,
        )
    if clock.taken:
        pytest.fail(
            "a test measures one case: parametrize it, or write another test", pytrace=False
        )
    clock.taken = True
    return request.getfixturevalue("benchmark"), clock


def _folder(request: pytest.FixtureRequest) -> Path:
    name = re.sub(r"[^\w.-]+", "-", request.node.name)[:100].strip("-")
    results = request.config.getoption("--ddpbench-results")
    if results is None:
        factory: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
        return factory.mktemp(KEY) / name
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
    return Path(results).absolute() / f"{stamp}-{name}"


def _feed(benchmark: Any, clock: LaunchClock, medians: Sequence[float]) -> None:
    """Feed one round per launch, each exactly as long as the launch's median."""
    seconds = itertools.cycle(medians)

    def start_at_zero() -> None:
        clock.seconds = 0.0

    def launch() -> None:
        clock.seconds = next(seconds)

    benchmark.pedantic(launch, setup=start_at_zero, rounds=len(medians), iterations=1)


def _give_up(benchmark: Any, problem: Exception) -> None:
    """End pytest-benchmark's fixture, which warns if it was never used."""

    def fail() -> None:
        raise problem

    with contextlib.suppress(type(problem)):
        benchmark.pedantic(fail)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    """Judge before pytest-benchmark saves, so that SLOWER tests are marked in the saved file."""
    suite = session.config.stash.get(SUITE, Suite())
    if suite.saved is not None and not session.config.option.collectonly:
        from ddpbench.verdicts import regression, rows, verdict

        option = session.config.getoption
        margin, allow = option("--ddpbench-margin") / 100, option("--ddpbench-allow-missing")
        suite.rows = regression.judge_tests(suite.saved, suite.measured, margin)
        suite.shortfall = regression.explain_shortfall(suite.rows, suite.skipped, allow)
        failed = verdict.SLOWER in rows.count_verdicts(suite.rows) or suite.shortfall
        if session.exitstatus == 0 and failed:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Mark in the saved file the tests that were SLOWER."""
    if rows := config.stash[SUITE].rows:
        from ddpbench.verdicts import verdict

        slower = [row.test for row in rows if row.verdict == verdict.SLOWER]
        output_json[KEY] = {"slower": slower}


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Generator[None, None, None]:
    """Print the verdicts below pytest-benchmark's tables, even if printing those fails."""
    try:
        return (yield)
    finally:
        suite = config.stash.get(SUITE, Suite())
        if suite.saved is not None and suite.measured:
            from ddpbench.present import changes
            from ddpbench.present.document import Document
            from ddpbench.present.writers import text

            terminalreporter.section("ddpbench: compared with saved runs, by launches")
            tests = changes.build_tests(suite.measured, suite.rows)
            terminalreporter.write_line(text.write(Document("", (tests,))).rstrip())
        if suite.shortfall:
            terminalreporter.write_line(f"ddpbench: {suite.shortfall}")
