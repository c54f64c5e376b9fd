"""The fixtures in a user's repository: pytest-benchmark's data, files and comparisons, and verdicts
on launches. One test measures for real; the others make up their launches."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import scipy.stats  # noqa: F401  an inner pytest forgets what it imported, which numpy does not bear
from command_lines import clean_environment
from frozen import Frozen
from patience import PATIENCE_SECONDS
from stored_runs import a_case, a_result, a_run, a_summary, launch_medians
from without_torch import run_without_torch

import ddpbench.present.changes  # noqa: F401  likewise
from ddpbench import pytest_plugin
from ddpbench.nested_runs import one_case
from ddpbench.records.schema import Case, Run

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pytest-benchmark measure: in a worker of xdist, it would not."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


Repository = Callable[..., pytest.RunResult]  # runs pytest with these words
THREE_LINES = """\
def test_all_reduce(collective_benchmark):
    collective_benchmark("all_reduce", "4K", backend="gloo", ranks=2)
"""
QUICK = """\
import pytest

@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_generate_machine_info():
    return {}  # looking at the CPU takes a second
"""
SLOWED = """\
import time
import torch.distributed as dist
real = dist.all_reduce
def slow(*arguments, **settings):
    work = real(*arguments, **settings)
    time.sleep(0.005)
    return work
dist.all_reduce = slow
"""


@dataclass
class Fake:
    """Made-up launches, and the words of each measurement."""

    factor: float = 1.0
    case: Case = field(default_factory=a_case)
    change: Callable[[Run], Run] = lambda run: run
    calls: list[tuple[str, ...]] = field(default_factory=list)

    def measure(self, command: str, words: list[str], folder: Path, deadline: float) -> Run:
        self.calls.append((command, *words))
        launches = [word for word in words if word.startswith("--launches=")][-1]
        count = int(launches.partition("=")[2])
        times = launch_medians(count, 1e-3 * self.factor, 0.002, seed=len(self.calls))
        results = [a_result(self.case, i, a_summary(float(t))) for i, t in enumerate(times)]
        return self.change(a_run(*results))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Replace the measurement."""
    fake = Fake()
    monkeypatch.setattr(one_case, "measure", fake.measure)
    return fake


@pytest.fixture
def repository(pytester: pytest.Pytester, fake: Fake) -> Repository:
    """Make a repository outside the project with a test of three lines; return what runs pytest."""
    pytester.makepyfile(test_mine=THREE_LINES)
    pytester.makeconftest(QUICK)

    def run(*words: str) -> pytest.RunResult:
        return pytester.runpytest_inprocess(
            "-p", "ddpbench.pytest_plugin", "-p", "no:cacheprovider",
            "-W", "ignore::pytest.PytestAssertRewriteWarning",  # it is imported here already
            *words,
        )  # fmt: skip

    return run


def read_benchmarks(path: str | Path = "out.json") -> Any:
    """Return the benchmarks in a file that pytest-benchmark wrote."""
    return json.loads(Path(path).read_text())["benchmarks"]


def verdicts(result: pytest.RunResult) -> list[str]:
    """Return the verdicts in the summary's table."""
    return re.findall(r"^test_.* (SAME|SLOWER|INCOMPARABLE|INCONCLUSIVE)\b",
                      result.stdout.str(), re.M)  # fmt: skip


def read_own_lines(result: pytest.RunResult) -> str:
    """Return ddpbench's own lines in a session's output."""
    lines = [line for line in result.outlines if line.startswith("ddpbench: ")]
    return "\n".join(lines).replace(str(Path.cwd()), "FOLDER")


# --- for real -------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_fresh_repository_sees_a_planted_slowdown(
    pytester: pytest.Pytester, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches of 1 ms are saved. Then two ranks of gloo measure the three lines, with a module of
    the user's that makes all_reduce 5 ms slower, and --benchmark-compare-fail fails."""
    repository("--benchmark-autosave").assert_outcomes(passed=1)
    pytester.makepyfile(
        test_mine=THREE_LINES.replace(
            "ranks=2", 'ranks=2, case_time=0.1, options="--import=slowed"'
        ),
        slowed=SLOWED,
    )
    for name, value in clean_environment().items():
        monkeypatch.setenv(name, value)
    words = ["-p", "ddpbench.pytest_plugin", "--ddpbench-launches=1", "--benchmark-autosave"]
    words += ["--benchmark-compare", "--benchmark-compare-fail=median:100%"]
    slower = pytester.runpytest_subprocess(*words, timeout=PATIENCE_SECONDS)
    assert slower.ret != 0
    assert "PercentageRegressionCheck" in slower.stderr.str()
    (file,) = pytester.path.glob(".benchmarks/*/0002_*.json")
    (saved,) = read_benchmarks(file)
    assert saved["extra_info"]["ddpbench"]["side"]["times"] == [saved["stats"]["median"]]
    assert saved["stats"]["median"] > 0.005


# --- pytest-benchmark's data ----------------------------------------------------------------------


def test_a_round_is_a_launch_to_the_last_bit(
    pytester: pytest.Pytester, repository: Repository, fake: Fake
) -> None:
    """The data are the launch medians; extra_info has every field of the case, the launches and the
    version of torch; the user's own marker is kept."""
    mark = "import pytest\n\n@pytest.mark.benchmark(group='mine')\n"
    pytester.makepyfile(test_mine=mark + THREE_LINES)
    result = repository("--benchmark-json=out.json", "--benchmark-group-by=group")
    result.assert_outcomes(passed=1)
    (saved,) = read_benchmarks()
    assert saved["stats"]["data"] == [float(t) for t in launch_medians(6, 1e-3, 0.002, seed=1)]
    assert (saved["group"], saved["options"]["timer"]) == ("mine", "launch_median")
    extra = saved["extra_info"]["ddpbench"]
    assert extra["case"] == json.loads(json.dumps(asdict(a_case())))
    assert extra["side"]["times"] == saved["stats"]["data"]
    assert extra["torch"] == "2.13.0"
    assert fake.calls == [("collectives", "--launches=6", "--op=all_reduce", "--sizes=4K",
                           "--backend=gloo", "--ranks=2")]  # fmt: skip


def test_keywords_are_the_options_of_a_step(
    pytester: pytest.Pytester, repository: Repository, fake: Fake
) -> None:
    """ddp_benchmark has the options of `ddpbench ddp`, and returns the run."""
    pytester.makepyfile(
        test_mine="def test_step(ddp_benchmark):\n"
        "    run = ddp_benchmark('mlp', width=256, static_graph=True, options=['--amp=bf16'])\n"
        "    assert run.state == 'complete'\n"
    )
    repository("--ddpbench-results=kept").assert_outcomes(passed=1)
    assert fake.calls == [("ddp", "--no-breakdown", "--case-time=5", "--launches=6",
                           "--workload=mlp", "--width=256", "--static-graph",
                           "--amp=bf16")]  # fmt: skip


def test_disabled_it_checks_once_and_times_nothing(repository: Repository, fake: Fake) -> None:
    """With --benchmark-disable there is one short launch, in which a wrong result would still fail.
    A comparison is refused, even with xdist. --benchmark-only and --benchmark-skip select it."""
    repository("--benchmark-disable").assert_outcomes(passed=1)
    assert fake.calls[0][-2:] == ("--case-time=0.05", "--launches=1")
    for words in (["--benchmark-disable"], ["-n", "2"]):
        result = repository(*words, "--ddpbench-compare")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert "--ddpbench-compare: " in result.stderr.str()
    repository("--benchmark-skip").assert_outcomes(skipped=1)
    assert len(fake.calls) == 1
    repository("--benchmark-only").assert_outcomes(passed=1)


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_failed_measurement_fails_with_its_sentence_and_is_not_saved(
    repository: Repository, fake: Fake
) -> None:
    """A wrong result, or a dead rank: one sentence, no traceback, no figure, and no warning of
    pytest-benchmark about an unused fixture."""

    def die(run: Run) -> Run:
        raise one_case.Unmeasured("rank 1 got 4 at index 3, expected 5")

    fake.change = die
    result = repository("--benchmark-json=out.json")
    result.assert_outcomes(failed=1, warnings=0)
    result.stdout.fnmatch_lines(["rank 1 got 4 at index 3, expected 5"])
    assert read_benchmarks() == []


def test_a_case_that_the_backend_lacks_is_skipped_but_fails_a_comparison(
    repository: Repository, fake: Fake
) -> None:
    """The reason is shown. If the test was measured before, the comparison's exit code is 1 unless
    the user accepts it."""
    repository("--benchmark-autosave")
    fake.change = lambda run: a_run(
        replace(a_result(), summary=None, reason="gloo has no float8"), exit_code=2
    )
    result = repository("-rs")
    result.assert_outcomes(skipped=1, warnings=0)
    assert "gloo has no float8" in result.stdout.str()
    result = repository("--ddpbench-compare")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "(skipped: gloo has no float8)" in read_own_lines(result)
    assert repository("--ddpbench-compare", "--ddpbench-allow-missing").ret == 0


USES = {
    "twice": THREE_LINES + THREE_LINES.splitlines()[1] + "\n",
    "by request": (
        "def test_it(request):\n    request.getfixturevalue('collective_benchmark')('barrier', 4)"
    ),
}


@pytest.mark.parametrize("use", USES)
def test_a_wrong_use_is_one_sentence(
    pytester: pytest.Pytester, repository: Repository, frozen: Frozen, use: str
) -> None:
    """Two measurements in a test, or a fixture by request, fail the test."""
    pytester.makepyfile(test_mine=USES[use])
    result = repository()
    result.assert_outcomes(failed=1)
    (start,) = [number for number, line in enumerate(result.outlines) if line[:5] == "_____"]
    frozen.text(result.outlines[start + 1])


def test_without_pytest_benchmark_the_error_names_it(repository: Repository) -> None:
    """A test that uses a fixture fails with the sentence, others run; a comparison is refused."""
    result = repository("-p", "no:benchmark")
    result.assert_outcomes(failed=1)
    assert pytest_plugin.NO_BENCHMARK in result.stdout.str()
    result = repository("-p", "no:benchmark", "--ddpbench-compare")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert pytest_plugin.NO_BENCHMARK in result.stderr.str()


def test_importing_it_costs_nothing() -> None:
    """Every pytest in this environment loads it: without torch, numpy, scipy, or pytest-benchmark,
    and without any other module of ddpbench than its version."""
    heavy = ("torch", "numpy", "scipy", "pandas", "tabulate", "rich", "psutil", "pytest_benchmark")
    loaded = run_without_torch(
        "import ddpbench.pytest_plugin\nprint([n for n in sys.modules if n[:9] == 'ddpbench.'])",
        forbidden=heavy,
    )
    assert loaded == "['ddpbench.version', 'ddpbench.pytest_plugin']\n"


# --- the verdict ----------------------------------------------------------------------------------


def test_a_slower_test_fails_the_session_until_it_is_accepted(
    repository: Repository, fake: Fake
) -> None:
    """The first run fails unless the user accepts that nothing was saved. Equal launches are SAME,
    even for pytest-benchmark's own comparison. 50 % more are SLOWER with exit code 1, and again in
    the next run, although the slow one was saved. Saved without a comparison, they are the base."""
    compare = ("--benchmark-autosave", "--ddpbench-compare")
    first = repository("--ddpbench-compare")
    assert first.ret == pytest.ExitCode.TESTS_FAILED
    assert "not compared: 1 ONLY NEW" in read_own_lines(first)
    accepted = repository(*compare, "--ddpbench-allow-missing")
    assert (accepted.ret, read_own_lines(accepted)) == (0, "")
    same = repository(*compare, "--benchmark-compare", "--benchmark-compare-fail=median:5%")
    assert (same.ret, verdicts(same)) == (0, ["SAME"])
    fake.factor = 1.5
    for _ in range(2):
        slower = repository(*compare)
        slower.assert_outcomes(passed=1)
        assert (slower.ret, verdicts(slower)) == (pytest.ExitCode.TESTS_FAILED, ["SLOWER"])
        slower.stdout.fnmatch_lines(["*test_all_reduce* 0002 *", "1 test measured: 1 SLOWER."])
    assert repository(*compare, "--ddpbench-margin=60").ret == 0
    repository("--benchmark-save=accepted")
    accepted = repository("--ddpbench-compare")
    assert (accepted.ret, verdicts(accepted)) == (0, ["SAME"])
    assert verdicts(repository("--ddpbench-compare=0001")) == ["SLOWER"]


def test_another_identity_fails_the_comparison(repository: Repository, fake: Fake) -> None:
    """The same test of twice the size is INCOMPARABLE, with the fields, and exit code 1. A saved
    file is given by its path."""
    repository("--benchmark-json=out.json")
    fake.case, fake.factor = a_case(nbytes=8192, count=2048), 2.0
    result = repository("--ddpbench-compare=out.json")
    assert (result.ret, verdicts(result)) == (1, ["INCOMPARABLE"])
    assert "nbytes 4096 → 8192, count 1024 → 2048" in result.stdout.str()


@pytest.mark.parametrize(
    "word", ["--ddpbench-compare=0042", "--ddpbench-compare=a/b/c", "--ddpbench-margin=0"]
)
def test_a_wrong_option_is_refused(
    repository: Repository, fake: Fake, frozen: Frozen, word: str
) -> None:
    """An unknown run or an invalid margin ends with pytest's exit code 4 before any measurement."""
    option, _, value = word.partition("=")
    result = repository(word)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert fake.calls == []
    (line,) = [line for line in result.errlines if option in line]
    assert value in line
    if value != "a/b/c":  # pytest-benchmark prints that
        frozen.text(line.partition(option)[2].replace(str(Path.cwd()), "FOLDER"))
