"""`compare BASE NEW`: which cases it compares, what it says of them, and the exit codes."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_lines import ONE_SENTENCE
from frozen import Frozen
from in_process import Outcome, capture_command
from stored_runs import (
    a_case,
    a_result,
    a_run,
    a_summary,
    base_and_new,
    launch_medians,
    launch_results,
    with_facts,
)
from stored_steps import (
    a_step_case,
    a_step_result,
    a_step_run,
    some_replicas,
)
from without_torch import RUN_AND_PRINT_CODE, RUN_DDPBENCH, run_without_torch

from ddpbench.records import codec, store
from ddpbench.records.schema import SCHEMA, Case, Limit, Result, Run, StepCase, Wrong
from ddpbench.verdicts.environments import compare_environments

Compare = Callable[..., Outcome]


@pytest.fixture
def compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Compare:
    """The command on runs that are stored first: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def call(base: Run, new: Run, *words: str) -> Outcome:
        for name, run in (("before", base), ("after", new)):
            put(name, run)
        return capture_command(capsys, "before", "after", *words)

    return call


def put(name: str, run: Run) -> None:
    """Store a run in results/."""
    folder = Path("results") / name
    folder.mkdir(parents=True, exist_ok=True)
    store.write(folder, replace(run, id=folder.name))


def sized(nbytes: int, **other: Any) -> Case:
    """all_reduce of this size."""
    return a_case(nbytes=nbytes, count=nbytes // 4, **other)


def runs_of(*sides: Iterable[Result]) -> tuple[Run, ...]:
    """A run a side, of all these results."""
    return tuple(a_run(*side) for side in sides)


def judged(outcome: Outcome) -> dict[str, Any]:
    """A comparison as JSON, and `wording`: why each row has its verdict, and the notes.

    What was not compared is said last, on stderr, and the exit code is not 0 then.
    """
    document: dict[str, Any] = json.loads(outcome.out)
    reasons = [row["why"] for row in document["rows"] if row["why"]]
    assert outcome.code == document["exit_code"]
    failed = {"INVALID", "INCOMPARABLE", "ONLY BASE", "ONLY NEW"} & document["counts"].keys()
    assert bool(ONE_SENTENCE.fullmatch(outcome.err)) == bool(failed)
    assert not failed or outcome.code in (1, 3)
    return {**document, "wording": "\n".join([*reasons, *document["notes"]])}


# --- verdicts and exit codes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "noise", "words", "name", "code"),
    [
        (1.2, 0.002, (), "SLOWER", 1),
        (1.2, 0.002, ("--strict",), "SLOWER", 1),
        (1 / 1.2, 0.002, (), "FASTER", 0),
        (1.0, 0.002, ("--strict",), "SAME", 0),
        (1.1, 0.002, ("--margin", "15"), "SAME", 0),
        (1.2, 0.2, (), "INCONCLUSIVE", 0),
        (1.2, 0.2, ("--strict",), "INCONCLUSIVE", 2),
    ],
)
def test_each_verdict_has_its_exit_code(
    compared: Compare, factor: float, noise: float, words: tuple[str, ...], name: str, code: int
) -> None:
    """The same case times a factor, with little noise and with much."""
    got, out, err = compared(*base_and_new(factor, noise), *words, "--format", "json")
    document = json.loads(out)
    assert (got, err, document["counts"]) == (code, "", {name: 1})
    assert document["margin"] == (0.15 if "15" in words else 0.1)


def test_too_few_launches_are_told_with_what_is_needed(compared: Compare, frozen: Frozen) -> None:
    """Below five a side a change of 50 % is INCONCLUSIVE; from five on it is SLOWER."""
    for launches in (1, 4, 5, 6):
        result = judged(compared(*base_and_new(1.5, launches=launches), "--format", "json"))
        (row,) = result["rows"]
        assert row["verdict"] == ("SLOWER" if launches >= 5 else "INCONCLUSIVE")
        assert row["launches_needed"] == (None if launches >= 5 else 6)
        if launches == 1:
            frozen.text(result["wording"])


def test_a_sweep_is_corrected_for_its_cases(compared: Compare, frozen: Frozen) -> None:
    """Five launches a side: one clear change alone is SLOWER, among 30 cases INCONCLUSIVE, with the
    launches that a sweep of 30 needs; and alone again with --only."""
    sizes = [4 << n for n in range(30)]
    base = [r for n, s in enumerate(sizes) for r in launch_results(1e-3, sized(s), 5, seed=n)]
    new = [
        r for n, s in enumerate(sizes)
        for r in launch_results(1e-3 * (1.5 if s == 64 else 1), sized(s), 5, seed=n + 99)
    ]  # fmt: skip
    result = judged(compared(*runs_of(base, new), "--format", "json"))
    assert (result["exit_code"], result["counts"]) == (0, {"INCONCLUSIVE": 1, "SAME": 29})
    assert result["rows"][0]["launches_needed"] == 6
    frozen.text(result["wording"])
    result = judged(compared(*runs_of(base, new), "--only", " 64 B", "--format", "json"))
    assert (result["exit_code"], result["counts"]) == (1, {"SLOWER": 1})


# --- what cannot be compared ----------------------------------------------------------------------


def steps(case: StepCase) -> Run:
    """A run of six launches of a step."""
    return a_step_run(*(a_step_result(case, n) for n in range(6)))


GATHERED = {"operation": "all_gather", "reduce_op": None}
ROUNDED = a_case(**GATHERED, nbytes=1020, count=85, world_size=3, ranks_per_host=(3,))
OTHERS = {
    **{
        "+".join(other): runs_of(launch_results(1e-3), launch_results(2e-3, a_case(**other)))
        for other in (
            {"dtype": "bfloat16", "count": 2048},
            {"world_size": 4, "ranks_per_host": (2, 2)},
            {"issue": "pipelined", "depth": 20},
        )
    },
    "a rounded size": runs_of(
        launch_results(1e-3, a_case(**GATHERED, nbytes=1024, count=128)),
        launch_results(1e-3, ROUNDED, requested_nbytes=1024),
    ),
    "settings+hook": (
        steps(a_step_case()),
        steps(a_step_case(settings=("width=512", "depth=8"), comm_hook="fp16")),
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_identity_is_incomparable(compared: Compare, other: str, frozen: Frozen) -> None:
    """The same row asked for with another identity: exit 3, the fields with both values, and no
    ratio of the two."""
    result = judged(compared(*OTHERS[other], "--format", "json"))
    (row,) = result["rows"]
    assert (result["exit_code"], row["verdict"], row["change"]) == (3, "INCOMPARABLE", None)
    frozen.text(row["why"])


def test_cases_of_one_side_are_listed(compared: Compare, frozen: Frozen) -> None:
    """Sizes that one run alone has are named, and what was skipped with the reason; they fail the
    comparison unless --allow-missing accepts them, which never accepts that nothing is compared."""
    skipped = replace(a_result(sized(64)), summary=None, reason="no memory")
    base = [r for size in (4096, 64, 8) for r in launch_results(1e-3, sized(size))]
    new = [*launch_results(1e-3), skipped, *launch_results(1e-3, sized(16))]
    runs = runs_of(base, new)
    code, out, err = compared(*runs)
    assert code == 3
    frozen.text("\n".join(line for line in out.splitlines() if "(not-compared)" in line))
    frozen.text(err)
    counts = judged(compared(*runs, "--format", "json"))["counts"]
    assert counts == {"SAME": 1, "ONLY BASE": 2, "ONLY NEW": 1}
    for words, code in (((), 0), (("--only", "16 B"), 3)):
        got = compared(*runs, "--allow-missing", *words)
        assert (got.code, bool(got.err)) == (code, code != 0)
    assert compared(*runs, "--only", "4 KiB")[0] == 0


@pytest.mark.parametrize(
    "fault",
    [
        {"wrong": (Wrong(1, 3, 7, "3", "nan"),)},
        {"hard_limit": Limit(1e3, "copy")},
        {"summary": a_summary(0.0)},
    ],
    ids=lambda fault: "".join(fault),
)
def test_a_fault_in_one_launch_makes_the_case_invalid(
    compared: Compare, fault: dict[str, Any], frozen: Frozen
) -> None:
    """A wrong result, an impossible speed, a time that is none: exit 3, the reason, no figure; and
    no other case suffers."""
    bad = launch_results(1e-3)
    bad[0] = replace(bad[0], **fault)
    good = launch_results(1e-3, sized(64))
    runs = runs_of([*launch_results(1e-3), *good], [*bad, *good])
    result = judged(compared(*runs, "--format", "json"))
    assert (result["exit_code"], result["counts"]) == (3, {"INVALID": 1, "SAME": 1})
    assert result["rows"][0]["change"] is None
    frozen.text(result["wording"])
    good, bad = (launch_results(s, sized(64)) for s in (1e-3, 2e-3))
    assert compared(*runs_of(good, bad))[0] == 1


def test_a_step_whose_replicas_are_not_ok_is_invalid(compared: Compare) -> None:
    """Replicas that differ after a step, or hold NaN: there is no time to compare."""
    good = [a_step_result(launch=n) for n in range(6)]
    bad = [*good[:5], replace(good[5], replicas=some_replicas(ok=False))]
    result = judged(compared(a_step_run(*bad), a_step_run(*good), "--format", "json"))
    assert (result["exit_code"], result["counts"]) == (3, {"INVALID": 1})
    assert result["wording"].startswith("BASE: launch 5: ")


# --- pools ----------------------------------------------------------------------------------------


def pool(name: str, runs: int, factor: float, **other: Any) -> None:
    """A folder of runs of one launch each."""
    for n, seconds in enumerate(launch_medians(runs, 1e-3 * factor, 0.002, seed=int(factor * 100))):
        put(f"{name}/{n}", a_run(a_result(a_case(**other), 0, a_summary(float(seconds)))))


def test_a_folder_of_runs_is_pooled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six runs of one launch are six replicates, by path and by name in results/; and may meet one
    run of six launches."""
    monkeypatch.chdir(tmp_path)
    pool("base", 6, 1)
    pool("slow", 7, 1.2)
    put("one", base_and_new(1.2)[1])
    for words in (("base", "slow"), ("results/base/", str(tmp_path / "results/slow"))):
        result = judged(capture_command(capsys, *words, "--format", "json"))
        assert (result["exit_code"], result["counts"]) == (1, {"SLOWER": 1})
        assert [len(result[side]["runs"]) for side in ("base", "new")] == [6, 7]
        assert [result["rows"][0][f"{side}_launches"] for side in ("base", "new")] == [6, 7]
    for name in ("one", "results/one/run.json", "last"):
        assert capture_command(capsys, "base", name).code == 1


def test_pooled_runs_must_have_measured_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder in which one run has another protocol is refused, the field named: exit 3."""
    monkeypatch.chdir(tmp_path)
    pool("base", 6, 1)
    pool("mixed", 6, 1.2)
    pool("mixed/..", 1, 1)
    put("mixed/9", a_run(a_result(a_case(start="none"))))
    code, out, err = capture_command(capsys, "base", "mixed")
    assert (code, out) == (3, "")
    assert ONE_SENTENCE.fullmatch(err)
    assert "mixed" in err
    assert "start barrier → none" in err


# --- what differs beside --------------------------------------------------------------------------


def test_only_what_differs_in_the_environments_is_told() -> None:
    """Versions, revision, host, threads, library, launcher, plan and variables: those that differ,
    with both values; what passes (loads, seeds, job numbers) and what one side did not record do
    not."""
    run = a_run(*launch_results(1e-3))
    base = with_facts(
        run,
        {"git_revision": "a" * 40, "git_dirty": False, "rates": {"x": 1}},
        {"variables": {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "1"},
         "pid": 1, "threads": 1},
    )  # fmt: skip
    new = with_facts(
        run,
        {"git_revision": "a" * 40, "git_dirty": True, "torch": "2.14.0", "rates": {"x": 2},
         "driver": "999"},
        {"variables": {"OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "2"}, "pid": 2, "threads": 2},
        library="gloo of torch 2.14", launcher="srun",
    )  # fmt: skip
    new = replace(new, plan=replace(run.plan, seed=9, slice_seconds=0.5))
    assert compare_environments([base], [base]) == ()
    assert {d.name: (d.base, d.new) for d in compare_environments([base], [new])} == {
        "git": (("a" * 12,), ("a" * 12 + " and changes",)),
        "torch": (("2.13.0",), ("2.14.0",)),
        "threads": (("1",), ("2",)),
        "library of gloo": (("libgloo 1.2",), ("gloo of torch 2.14",)),
        "launcher of gloo": (("torchrun",), ("srun",)),
        "NCCL_DEBUG": (("INFO",), ("unset",)),
        "plan: slice_seconds": (("2.0",), ("0.5",)),
    }


def test_what_weakens_a_verdict_is_noted(compared: Compare, frozen: Frozen) -> None:
    """A run that is not complete, and a change between launches that were not taken by turns."""
    base, new = base_and_new(1.2)
    new = replace(new, state="interrupted")

    def timed(run: Run, hours: Iterable[int]) -> Run:
        stamps = (f"2026-01-01T{hour:02}:00:00Z" for hour in hours)
        pairs = zip(run.launches, stamps, strict=True)
        return replace(run, launches=tuple(replace(one, started=at) for one, at in pairs))

    result = judged(compared(timed(base, range(6)), timed(new, range(6, 12)), "--format", "json"))
    assert result["rows"][0]["drift"] > 0
    frozen.text(result["wording"])
    turns = timed(base, range(0, 12, 2)), timed(new, range(1, 12, 2))
    result = judged(compared(*turns, "--format", "json"))
    assert result["rows"][0]["drift"] is None
    frozen.text(result["wording"])


def at(run: Run, minute: int, name: str) -> Run:
    """The run as if it had been made then, one launch every 10 seconds."""

    def stamp(number: int) -> str:
        return f"2026-01-01T{minute // 60:02}:{minute % 60:02}:{10 * number:02}Z"

    launches = tuple(
        replace(one, started=stamp(i), ended=stamp(i)) for i, one in enumerate(run.launches)
    )
    return replace(run, launches=launches, started=stamp(0), id=name)


def later(compared: Compare, base: Run, new: Run) -> dict[str, Any]:
    """The comparison with NEW measured half an hour after BASE; it has one row."""
    result = judged(compared(at(base, 0, "base"), at(new, 37, "new"), "--format", "json"))
    (result["row"],) = result["rows"]
    return result


def test_what_drift_may_be_is_no_change(compared: Compare, frozen: Frozen) -> None:
    """Sides that are apart in time differ by drift too: below what is assumed, nothing is claimed;
    a larger change, or the same one by turns, is."""
    base, new = base_and_new(1.15)
    assert compared(base, new)[0] == 1  # nobody knows when they were
    result = later(compared, base, new)
    assert result["row"]["verdict"] == "INCONCLUSIVE"
    assert result["row"]["drift"] == 0.35
    frozen.text(result["wording"])
    for factor, name in ((1.4, "SLOWER"), (1.0, "SAME")):
        assert later(compared, *base_and_new(factor))["row"]["verdict"] == name


def test_stored_runs_tell_how_a_machine_drifts(compared: Compare, frozen: Frozen) -> None:
    """Of the same environment, NEW left out: on a quiet machine 15 % is a change then."""
    for number in range(6):
        one = a_run(*launch_results(1e-3, seed=number))
        put(f"earlier-{number}", at(one, 2 * number, f"earlier-{number}"))
    other = at(a_run(*launch_results(2e-3)), 20, "elsewhere")
    facts = tuple(replace(each, facts={**each.facts, "torch": "1.0"}) for each in other.launches)
    put("elsewhere", replace(other, launches=facts))
    base, new = base_and_new(1.15)
    result = judged(compared(at(base, 30, "base"), at(new, 37, "new"), "--format", "json"))
    assert result["counts"] == {"SLOWER": 1}
    frozen.text(result["wording"])


# --- bad input ------------------------------------------------------------------------------------


def raw(run: Run, **other: Any) -> bytes:
    """run.json with other values at its top."""
    return json.dumps({**json.loads(codec.encode(run)), **other}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        codec.encode(a_run(a_result()))[:-700],
        b'{"benchmarks": []}',
        raw(a_run(), schema=SCHEMA + 1),
        raw(a_run(), plan=3),
    ],
    ids=["empty", "truncated", "another's JSON", "newer", "mistyped"],
)
def test_stored_data_that_cannot_be_read_end_with_3(
    compared: Compare, capsys: pytest.CaptureFixture[str], data: bytes
) -> None:
    """On either side, alone or in a folder of runs: one sentence that names the file."""
    compared(*base_and_new(1.0))
    for name in ("good", "bad"):
        put(f"pool/{name}", base_and_new(1.0)[0])
    Path("results/pool/bad/run.json").write_bytes(data)
    for words in (("pool/bad", "after"), ("before", "pool/bad"), ("before", "results/pool")):
        code, out, err = capture_command(capsys, *words)
        assert (code, out) == (3, "")
        assert ONE_SENTENCE.fullmatch(err)
        assert f"pool{os.sep}bad" in err


# --- without torch --------------------------------------------------------------------------------


def test_runs_are_compared_without_torch(tmp_path: Path) -> None:
    """On a machine that has no torch; and the help loads nothing heavy."""
    for name, run in zip(("before", "after"), base_and_new(1.0), strict=True):
        store.create(tmp_path / name, run, "x")
    output = run_without_torch(
        RUN_AND_PRINT_CODE,
        "compare", str(tmp_path / "before"), str(tmp_path / "after"),
    )  # fmt: skip
    assert "1 SAME" in output
    assert output.endswith("\n0\n")
    heavy = ("torch", "numpy", "pandas", "scipy", "pyarrow", "mpi4py")
    assert "--margin" in run_without_torch(RUN_DDPBENCH, "compare", "--help", forbidden=heavy)
