"""`baseline save|check`: what is copied, what is refused, and that a check is a comparison."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_lines import ONE_SENTENCE
from frozen import Frozen
from in_process import Call, capture_command
from stored_runs import (
    a_result,
    a_run,
    a_summary,
    base_and_new,
    launch_medians,
    launch_results,
    sample_columns,
    with_facts,
)

from ddpbench.records import store
from ddpbench.records.schema import Run, Wrong
from ddpbench.session import launches

LINE = ("ddpbench", "collectives", "--op", "all_reduce", "--launches=6", "-n", "4", "--output",
        "results/x", "--backend", "gloo")  # fmt: skip


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """The command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: capture_command(capsys, *words, command="baseline")


def stored(name: str, run: Run) -> Path:
    """A run in results/, with tables and raw samples as a command leaves them."""
    folder = Path("results") / name
    folder.mkdir(parents=True)
    store.write(folder, replace(run, id=name))
    for table in ("table.csv", "table.txt"):
        (folder / table).write_text(f"{table} of {name}")
    store.add_samples(folder, 0, sample_columns("a", 0, 400, 1))
    store.join_samples(folder)
    return folder


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# --- save and list --------------------------------------------------------------------------------


def test_a_baseline_is_a_copy_of_the_run(call: Call) -> None:
    """run.json and the tables, byte for byte, of the last run by default; its name finds it."""
    stored("before", base_and_new(1.0)[0])
    code, out, err = call("save", "nightly")
    assert (code, err) == (0, "")
    assert "1 run, 6 launches" in out
    kept = Path("results/baselines/nightly")
    assert files(kept) == ["run.json", "table.csv", "table.txt"]
    for name in files(kept):
        assert (kept / name).read_bytes() == Path("results/before", name).read_bytes()
    assert store.find("nightly") == kept
    assert store.list_runs() == [Path("results/before")]


def test_a_folder_of_runs_is_kept_as_one(call: Call) -> None:
    """Six runs of one launch: six folders, compared as a pool of six launches."""
    for n, seconds in enumerate(launch_medians(6, 1e-3, 0.002, 1)):
        stored(f"pool/{n}", a_run(a_result(None, 0, a_summary(float(seconds)))))
    stored("after", base_and_new(1.2)[1])
    assert "6 runs, 6 launches" in call("save", "pooled", "pool").out
    assert len(files(Path("results/baselines/pooled"))) == 18
    code, out, _ = call("check", "pooled", "after", "--format", "json")
    assert code == 1
    result = json.loads(out)
    assert result["base"]["name"] == "baseline pooled"
    assert (len(result["base"]["runs"]), result["rows"][0]["base_launches"]) == (6, 6)


def test_a_baseline_is_replaced_only_on_demand(call: Call) -> None:
    """The second of a name is refused and changes nothing; with --replace nothing of the first is
    left."""
    stored("one", base_and_new(1.0)[0])
    stored("two", base_and_new(1.0)[1])
    call("save", "mine", "one")
    code, out, err = call("save", "mine", "two")
    assert (code, out) == (2, "")
    assert ONE_SENTENCE.fullmatch(err)
    kept = Path("results/baselines/mine")
    assert store.read(kept).id == "one"
    assert call("save", "mine", "two", "--replace")[0] == 0
    assert store.read(kept).id == "two"
    assert files(kept) == ["run.json", "table.csv", "table.txt"]
    assert files(kept.parent) == [f"mine/{name}" for name in files(kept)]


@pytest.mark.parametrize("name", ["", "a/b", "-x", "last"])
def test_a_name_is_checked(call: Call, name: str) -> None:
    """One word without slashes that begins with a letter or a digit; exit 2, nothing is written."""
    stored("one", base_and_new(1.0)[0])
    code, out, err = call("save", "--", name)
    assert (code, out) == (2, "")
    assert err.startswith(f"ddpbench: invalid baseline name {name!r}: ")
    assert not Path("results/baselines").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"state": "interrupted"},
        {"state": "failed", "launches": ()},
        {"results": tuple(launch_results(1e-3, wrong=(Wrong(1, 3, 7, "3", "nan"),)))},
        {"results": (replace(a_result(), summary=None, reason="none"),)},
    ],
    ids=("interrupted", "failed", "wrong", "nothing"),
)
def test_what_cannot_be_compared_with_is_no_baseline(
    call: Call, change: dict[str, Any], frozen: Frozen
) -> None:
    """A run that did not end, or has a result that is not to be used: exit 3, one sentence, nothing
    written."""
    stored("one", replace(a_run(*launch_results(1e-3), command_line=LINE), **change))
    code, out, err = call("save", "mine")
    assert (code, out) == (3, "")
    assert ONE_SENTENCE.fullmatch(err)
    frozen.text(err)
    assert not Path("results/baselines").exists()


# --- check ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "words", "code"),
    [
        (1.2, (), 1),
        (1.1, ("--margin", "15", "--strict", "--format", "markdown"), 0),
        (1.1, ("--only", "nothing"), 2),
    ],
)
def test_a_check_is_a_comparison(
    call: Call, capsys: pytest.CaptureFixture[str], factor: float, words: tuple[str, ...], code: int
) -> None:
    """With a stored run: the words, the output and the exit code of compare, which finds the
    baseline by its name too."""
    base, new = base_and_new(factor)
    stored("before", base)
    call("save", "mine")
    stored("after", new)
    got = call("check", "mine", "after", *words)
    assert got.code == code
    assert got == capture_command(capsys, "mine", "after", *words)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Sequence[str]]]:
    """Makes `collectives` store these runs, the last one again and again, and end with this code;
    the words it will have got."""

    def plant(code: int, *runs: Run | None) -> list[Sequence[str]]:
        got: list[Sequence[str]] = []

        def fake(kind: Any, measure: Any, namespace: Any, words: Sequence[str]) -> int:
            got.append(words)
            print("a table")
            if (run := runs[min(len(got), len(runs)) - 1]) is not None:
                store.create(Path(namespace.output), run, "")
            return code

        monkeypatch.setattr(launches, "run", fake)
        return got

    return plant


@pytest.mark.parametrize(
    ("facts", "rank", "code"),
    [
        ({"cpu_model": "CPU Y", "cores_logical": 8}, {}, 3),
        ({"kernel": "6.2"}, {"hostname": "other"}, 1),
    ],
    ids=("another CPU", "another kernel and host name"),
)
def test_a_baseline_of_another_machine_decides_nothing(
    call: Call, facts: dict[str, Any], rank: dict[str, Any], code: int
) -> None:
    """Another CPU: one sentence last, and exit code 3 although the case is SLOWER. Another kernel
    is the same machine, and so is a container with a new hostname."""
    base, new = base_and_new(1.2)
    stored("before", base)
    call("save", "mine")
    stored("after", with_facts(new, facts, rank))
    checked = call("check", "mine", "after")
    assert checked.code == code
    assert bool(ONE_SENTENCE.fullmatch(checked.err)) == (code == 3)


def test_without_a_run_it_measures_again_as_then(
    call: Call, measured: Callable[..., list[Sequence[str]]]
) -> None:
    """The words of the baseline, its ranks and launches, into a new folder in results/; stdout is
    the comparison alone, and the exit code is its own."""
    base, new = base_and_new(1.2)
    stored("before", replace(base, command_line=LINE))
    call("save", "mine")
    got = measured(4, new)
    done, out, err = call("check", "mine", "--format", "json")
    assert done == 1
    shown = json.loads(out)
    assert [row["verdict"] for row in shown["rows"]] == ["SLOWER"]
    assert "a table\n" in err
    (words,) = got
    assert words[:-1] == [*LINE[2:4], "--backend", "gloo", "-n", "2", "--launches", "6", "--output"]
    assert re.fullmatch(r"results/\d{8}T\d{6}Z-collectives-check-mine-\S+", words[-1])
    assert f"python -m ddpbench collectives {' '.join(words)}\n" in err
    assert {run.name for run in store.list_runs()} == {"before", Path(words[-1]).name}
    assert shown["new"]["runs"] == [Path(words[-1]).name]


@pytest.mark.parametrize("code", [2, 130])
def test_a_measurement_that_fails_ends_the_check(
    call: Call, measured: Callable[..., list[Sequence[str]]], code: int
) -> None:
    """Its exit code, no comparison, and no empty folder."""
    stored("before", replace(base_and_new(1.0)[0], command_line=LINE))
    call("save", "mine")
    measured(code, None)
    done, out, _ = call("check", "mine")
    assert (done, out) == (code, "")
    assert sorted(path.name for path in Path("results").iterdir()) == ["baselines", "before"]


RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}  # one that a launcher started


@pytest.mark.parametrize("words", ["", "check mien", "check foreign", "check hosts", "check mine"])
def test_bad_input_is_one_sentence(
    call: Call, monkeypatch: pytest.MonkeyPatch, words: str, frozen: Frozen
) -> None:
    """What was given and what to do instead; exit 2, nothing on stdout, nothing measured."""
    run = a_run(*launch_results(1e-3))
    hosts = tuple({"hostname": name} for name in ("a", "b"))
    stored("one", replace(run, command_line=("pytest", "tests")))
    stored("three", replace(run, command_line=LINE))
    stored("two", replace(run, command_line=LINE, launches=tuple(
        replace(each, ranks=hosts) for each in run.launches)))  # fmt: skip
    for name, saved in (("foreign", "one"), ("hosts", "two"), ("mine", "three")):
        call("save", name, saved)
    for name, value in RANK.items() if words == "check mine" else ():
        monkeypatch.setenv(name, value)
    code, out, err = call(*words.split())
    assert (code, out) == (2, "")
    assert ONE_SENTENCE.fullmatch(err)
    frozen.text(err)
