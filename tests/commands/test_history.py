"""`history CASE`: which cases it finds, what it says of their runs, and where levels change."""

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from in_process import Outcome, capture_command
from stored_runs import a_case, a_result, a_run, a_summary, launch_results, with_facts
from stored_steps import a_step_case, a_step_result, a_step_run
from without_torch import RUN_DDPBENCH, run_without_torch

from ddpbench.commands import history
from ddpbench.records import store
from ddpbench.records.schema import Case, Run, Wrong
from ddpbench.render import history as render
from ddpbench.render.labels import label
from ddpbench.verdicts import trend

Floats = npt.NDArray[np.float64]
Call = Callable[..., Outcome]
OLD, NEW = {"torch": "2.12.0"}, {"torch": "2.13.0", "git_revision": "0123456789abcdef"}


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """The command in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    return lambda *words: capture_command(capsys, *words, command="history")


def put(day: int, run: Run, folder: str = "results") -> None:
    """A run of this day of January."""
    run = replace(run, id=f"run-{day:02}", started=f"2026-01-{day:02}T00:00:00Z")
    place = Path(folder) / run.id
    place.mkdir(parents=True)
    store.write(place, run)


def put_days(seconds: Sequence[float], case: Case | None = None, **other: Any) -> None:
    """A run of two launches a day, from torch 2.12 to 2.13 on the sixth."""
    for day, each in enumerate(seconds, 1):
        run = a_run(*launch_results(each, case, 2, 0.001, seed=day), **other)
        put(day, with_facts(run, OLD if day < 6 else NEW, {}))


def step(height: float = 1.2, runs: int = 10, at: int = 5) -> list[float]:
    """Times about 1 ms, and longer by this factor from a run on."""
    noise = np.exp(np.random.default_rng(5).normal(0, 0.01, runs))
    return [float(1e-3 * noise[i] * (height if i >= at else 1)) for i in range(runs)]


# --- the statistics -------------------------------------------------------------------------------


def changes(logs: Floats) -> list[int]:
    """The change points of runs, as a series has them."""
    pytest.importorskip("ruptures")
    return trend.change_points(trend.steadied(logs, trend.lone_points(logs)))


@pytest.mark.parametrize("noise", [0.001, 0.3])
def test_a_flat_noisy_series_has_no_change_point(noise: float) -> None:
    """Of 150 series of 20 runs each that differ by noise alone, at most 5 % show one, however wide
    the noise is."""
    draw = np.random.default_rng(1)
    false = sum(bool(changes(draw.normal(0, noise, 20))) for _ in range(150))
    assert false <= 0.05 * 150


@pytest.mark.parametrize("noise", [0.001, 0.3])
def test_a_step_of_three_noise_widths_is_found(noise: float) -> None:
    """Planted in the middle of 24 runs: in nine of ten series it is the one change point, at most
    one run off; a step of six is, in nine of ten, exact."""
    draw = np.random.default_rng(2)
    for widths, off in ((3, 1), (6, 0)):
        found = [
            changes(draw.normal(0, noise, 24) + widths * noise * (np.arange(24) >= 12))
            for _ in range(60)
        ]
        assert sum(len(each) == 1 and abs(each[0] - 12) <= off for each in found) >= 54


def test_several_steps_are_found() -> None:
    """A large one does not hide a smaller one: the noise is estimated within the levels."""
    draw = np.random.default_rng(3)
    logs = draw.normal(0, 0.01, 30) + 1.0 * (np.arange(30) >= 10) + 0.06 * (np.arange(30) >= 20)
    assert changes(logs) == [10, 20]


def test_one_run_alone_is_no_level() -> None:
    """A run that is off by far, in the middle or at an end, is told to be alone; two in a row are a
    level of their own."""
    for at in (0, 7, 19):
        logs = np.random.default_rng(4).normal(0, 0.01, 20)
        logs[at] += 1.5
        assert trend.lone_points(logs) == [at]
        assert changes(logs) == []
    logs[10:12] += 1.5
    assert changes(logs) == [10, 12]


def test_equal_runs_have_no_change_point() -> None:
    """Without any noise there is nothing to divide by, and nothing is found."""
    assert changes(np.zeros(12)) == []
    assert changes(np.repeat([0.0, 0.1], 6)) == [6]


def test_runs_differ_by_no_less_than_their_launches_say() -> None:
    """The scatter of launches bounds the noise of runs from below: two spread by a factor make
    runs that agree by chance no quieter."""
    pair = np.exp([-0.1, 0.1])
    assert trend.launch_noise([pair, pair]) == pytest.approx(0.1)
    assert trend.launch_noise([[1.0], [2.0]]) == 0.0
    assert trend.noise_of(np.zeros(8), [], 0.1) == 0.1
    steps = np.array([0.0, 0.1] * 4)
    assert trend.noise_of(steps, [], 0.0) == pytest.approx(0.1 * np.sqrt(np.pi) / 2)


# --- which cases ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "case", "found"),
    [
        ("all_reduce 4 KiB gloo", a_case(), True),
        ("all_reduce,4K,gloo", a_case(), True),
        ("GLOO all_reduce 4KiB", a_case(), True),
        ("reduce", a_case(), False),
        ("2 KiB", a_case(), False),
        ("2 ranks", a_case(), True),
        ("1 MiB", a_case(nbytes=2**24), False),
        ("16M", a_case(nbytes=2**24), True),
        ("1 B", a_case(nbytes=1), True),
        ("root 0 in place", a_case(root=0), True),
        ("in place", a_case(in_place=False), False),
        ("mlp width=1024", a_step_case(), True),
        ("batch 64 mlp", a_step_case(), True),
        ("batch 2", a_step_case(), False),
    ],
)
def test_all_words_must_stand_in_the_name(text: str, case: Any, found: bool) -> None:
    """Whole words, in any order; a number and its unit are one."""
    assert (history.split_words(text) <= history.split_words(label(case))) == found


def test_another_identity_is_another_series(call: Call) -> None:
    """Two ranks and four, isolated and pipelined: three series, each with its runs, and what each
    differs in from the nearest before it."""
    cases = [
        a_case(),
        a_case(world_size=4, ranks_per_host=(4,)),
        a_case(world_size=4, ranks_per_host=(4,), issue="pipelined", depth=20),
    ]
    for day, case in enumerate(cases + cases, 1):
        put(day, a_run(a_result(case)))
    code, out, _ = call("all_reduce", "4", "KiB")
    assert code == 0
    assert re.findall(r"^[123]  .*", out, re.M) == [
        f"{n}  all_reduce 4 KiB float32 sum in place gloo {ranks} ranks"
        for n, ranks in ((1, 2), (2, 4), (3, 4))
    ]
    assert "not comparable with 1: world_size 2 → 4, ranks_per_host 2 → 4\n" in out
    assert "not comparable with 2: issue isolated → pipelined, depth 1 → 20\n" in out
    assert re.findall(r"run-\d\d", out) == ["run-01", "run-04", "run-02", "run-05", "run-03",
                                            "run-06"]  # fmt: skip
    assert out.endswith("3 series, 0 change points\n")
    shown = json.loads(call("4K", "4 ranks", "--format", "json")[1])
    assert [each["identity"]["issue"] for each in shown] == ["isolated", "pipelined"]


# --- which runs -----------------------------------------------------------------------------------


def test_baselines_are_runs_too_and_copies_are_none(call: Call) -> None:
    """A baseline whose run is gone, a pooled one, and one whose run is still there: each run once,
    oldest first; one that cannot be read is told."""
    put(3, a_run(a_result()))
    for day, folder in ((1, "baselines"), (3, "baselines"), (2, "baselines/pool")):
        put(day, a_run(a_result()), f"results/{folder}")
    bad = Path("results/bad")
    bad.mkdir()
    (bad / "run.json").write_text("{")
    code, out, err = call("all_reduce")
    assert code == 0
    assert re.findall(r"run-\d\d", out) == ["run-01", "run-02", "run-03"]
    assert re.fullmatch(r"ddpbench: results/bad/run.json is damaged: [^\n]+\n", err)


def test_another_folder_of_runs(call: Call) -> None:
    """--folder names it; those in results/ are not read then."""
    put(1, a_run(a_result()))
    put(2, a_run(a_result()), "nightly")
    assert re.findall(r"run-\d\d", call("gloo", "--folder", "nightly")[1]) == ["run-02"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "the following arguments are required: CASE"),
        ((",",), "CASE is empty"),
        (("all_redcue",), "no measured case in results has the words all_redcue in its name, as in "
         "'all_reduce 4 KiB float32 sum in place gloo 2 ranks'. Did you mean all_reduce?"),
        (("all_reduce", "--folder", "nowhere"), "nowhere holds no run with results"),
        (("all_reduce", "--format", "html"), "unknown choice 'html'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(call: Call, words: tuple[str, ...], sentence: str) -> None:
    """What was given, what there is; exit 2, nothing on stdout."""
    put(1, a_run(a_result()))
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"ddpbench: [^\n]+\n", err)
    assert sentence in err


# --- what is said ---------------------------------------------------------------------------------


def test_a_change_is_told_with_its_runs_and_their_environments(call: Call) -> None:
    """Between which two runs, from what to what, by how much, and what differs there."""
    pytest.importorskip("ruptures")
    put_days(step())
    code, out, err = call("all_reduce", "gloo")
    assert (code, err) == (0, "")
    change_line = re.search(
        r"^CHANGE \+(\S+) % between run-05 and run-06: (\S+) µs → (\S+) µs, (\S+) noise widths\n"
        r"((?:  differs: .*\n)+)",
        out,
        re.M,
    )
    assert change_line is not None
    change, before, after, widths = map(float, change_line.groups()[:4])
    assert change == pytest.approx(20, abs=2)
    assert after / before == pytest.approx(1 + change / 100, abs=0.001)
    assert widths > 10
    assert change_line[5] == "  differs: torch: 2.12.0 → 2.13.0\n"
    assert re.search(r"^2026-01-06 00:00  run-06 .*  torch 2\.13\.0$", out, re.M)
    assert re.search(
        r"^10 runs, from \S+ µs to \S+ µs \(\+\S+ %\); noise between runs ±\d", out, re.M
    )
    lengths = [len(bar) for bar in re.findall(r"[█▏▎▍▌▋▊▉]+", out)]
    assert max(lengths[:5]) < min(lengths[5:]) <= render.BAR


def test_a_change_without_a_cause_says_so(call: Call) -> None:
    """Nothing that is recorded differs between the two runs."""
    pytest.importorskip("ruptures")
    put_days(step(at=7))
    assert re.search(
        r"between run-07 and run-08: .*\n  the recorded environments do not differ",
        call("all_reduce")[1],
    )


def test_a_flat_series_says_that_there_is_no_change(call: Call) -> None:
    """And is no change point because torch changed."""
    pytest.importorskip("ruptures")
    put_days(step(1.0))
    out = call("all_reduce")[1]
    assert out.endswith("\nno change point\n")
    assert "torch 2.13.0" in out


def test_few_runs_say_so(call: Call) -> None:
    """Five runs are shown, without change points and without noise, with how many it takes."""
    put_days(step(runs=5))
    out = call("all_reduce")[1]
    assert out.endswith("\ndid not search for change points: that needs 6 runs, not 5\n")
    assert "noise" not in out


def test_flags_of_a_run_stand_in_its_row(call: Call) -> None:
    """Wrong results have no figures and no part in the trend; a partial, a busy and a lone run are
    marked, and told what that is; one launch has its own interval."""
    seconds = step(1.0)
    put_days([*seconds[:7], seconds[7] * 3, *seconds[8:]])
    put(11, a_run(a_result(wrong=(Wrong(1, 3, 7, "3", "nan"),))))
    put(12, a_run(a_result(others_share=0.5), state="interrupted"))
    out = call("all_reduce")[1]
    row = {line.split()[2]: line for line in out.splitlines() if line.startswith("2026")}
    assert re.search(r" -  .* INVALID: launch 0: rank 1 got a wrong result", row["run-11"])
    assert re.search(r" 1000 µs  ±1\.0 %\*  .* partial, busy", row["run-12"])
    assert row["run-08"].rstrip().endswith(" alone")
    assert "alone" not in row["run-07"]
    for word in (
        r"\*      interval within one launch",
        "busy   other processes",
        "alone  more than 4 noise",
    ):
        assert re.search(f"^{word}", out, re.M)
    assert "\n11 runs, from" in out


def test_a_ddp_step_has_a_history(call: Call) -> None:
    """In ms, with its own interval."""
    for day in (1, 2):
        put(day, a_step_run(a_step_result(a_step_case(), 0)))
    code, out, _ = call("mlp")
    assert code == 0
    assert re.search(r"^2026-01-01 00:00  run-01 +1  [\d.]+ ms  ±\d\.\d %\*", out, re.M)


def test_csv_and_json_have_the_same_figures(call: Call) -> None:
    """One row a run in seconds, the change as a fraction at the first run after it."""
    pytest.importorskip("ruptures")
    put_days(step())
    rows = list(csv.DictReader(io.StringIO(call("all_reduce", "--format", "csv")[1])))
    (series,) = json.loads(call("all_reduce", "--format", "json")[1])
    (change,) = series["changes"]
    assert [row["run"] for row in rows] == [row["run"] for row in series["runs"]]
    assert [float(row["median_seconds"]) for row in rows] == [
        row["median_seconds"] for row in series["runs"]
    ]
    assert change["between"] == ["run-05", "run-06"]
    assert [row["change"] != "" for row in rows] == [day == 6 for day in range(1, 11)]
    assert float(rows[5]["change"]) == pytest.approx(change["change"])
    assert change["differences"][0] == {"name": "torch", "base": ["2.12.0"], "new": ["2.13.0"]}
    assert series["noise"] == pytest.approx(0.01, abs=0.01)


def test_the_formats_offered_are_those_that_exist() -> None:
    """The command names them without loading what they need."""
    assert tuple(render.FORMATS) == history.FORMATS


# --- without ruptures, without torch --------------------------------------------------------------


def test_without_ruptures_the_trend_is_shown(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the change points, and how to install what finds them."""
    monkeypatch.setitem(sys.modules, "ruptures", None)
    put_days(step())
    code, out, err = call("all_reduce")
    assert (code, err) == (0, "")
    assert len(re.findall(r"run-\d\d", out)) == 10
    assert out.endswith(
        "\ndid not search for change points: that needs ruptures: pip install ruptures\n"
    )


def test_no_torch_is_needed(call: Call) -> None:
    """The command works where importing torch fails."""
    put(1, a_run(a_result(summary=a_summary(2e-3))))
    assert "2000 µs" in run_without_torch(RUN_DDPBENCH, "history", "all_reduce")
