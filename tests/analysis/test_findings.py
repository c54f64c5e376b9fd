"""What a run says beyond its rows: each check finds what it is for, and nothing in a clean run."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from frozen import Frozen
from stored_runs import a_case, a_launch, a_result, a_run, a_summary
from stored_steps import (
    a_step_result,
    a_step_run,
    a_step_summary,
    some_replicas,
)

from ddpbench.analysis import findings, step_lines
from ddpbench.present import formats
from ddpbench.present.steps.columns import STEP_COLUMNS
from ddpbench.records.launched import Launch
from ddpbench.records.schema import Finding, Limit, Run, Wrong


def codes(run: Run) -> list[str]:
    """The codes of a run's findings, in order."""
    return [finding.code for finding in findings.findings(run)]


def with_ranks(*ranks: dict[str, Any], **other: Any) -> Run:
    """A run of one launch whose ranks tell these facts."""
    known = {"hostname": "node", "threads": 1, "cpuset": "0-7", "torch": "2.13.0"}
    everyone = tuple({**known, **rank} for rank in ranks)
    launch = a_launch(ranks=everyone, world_size=len(everyone), **other)
    return a_run(a_result(), launches=(launch,))


def test_a_clean_run_has_no_findings_and_exits_with_0() -> None:
    """Right results in possible times, hidden communication and equal replicas. Notes on replicas,
    such as random states, are no findings of the run."""
    notes = some_replicas(findings=(Finding("note", "rng-differs", "x"),))
    step = a_step_result(summary=a_step_summary(exposed=3), replicas=notes)
    for run in (a_run(a_result(), a_result(a_case(nbytes=8))), a_step_run(step)):
        assert findings.findings(run) == ()
        assert findings.exit_code(run) == 0


# --- wrong results and impossible times -----------------------------------------------------------


def test_a_wrong_result_is_named_and_makes_exit_code_4(frozen: Frozen) -> None:
    """Operation, backend, size, type, rank, repetition, index, got and expected stand in one
    sentence, each wrong rank in its own."""
    wrong = (Wrong(0, -1, 3, "5", "nan"), Wrong(1, 17, 1020, "6", "7"))
    run = a_run(a_result(wrong=wrong))
    found = findings.findings(run)
    frozen.findings(found)
    assert findings.exit_code(run) == 4
    assert findings.exit_code(replace(run, findings=found)) == 4


def test_an_impossible_time_is_told_with_the_launch_that_had_it(frozen: Frozen) -> None:
    """Of six launches one was faster than its bytes can move: the sentence has that launch's time
    and limit, not the median over launches."""
    slow = [a_result(launch=n, summary=a_summary(1e-3)) for n in range(5)]
    limit = Limit(1e9, "nominal")
    quick = a_result(launch=5, summary=a_summary(2e-6), hard_limit=limit)
    fitting = a_result(a_case(nbytes=8), 5, summary=a_summary(2e-6), hard_limit=limit)
    frozen.findings(findings.findings(a_run(*slow, quick, fitting)))


# --- the environment ------------------------------------------------------------------------------


def test_debug_detail_is_warned_about_once() -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL in any rank and case of letters warns, once; INFO does not."""
    detail = {"variables": {"TORCH_DISTRIBUTED_DEBUG": "detail"}}
    assert codes(with_ranks({}, detail, detail)) == ["debug-detail"]
    assert codes(with_ranks({}, {"variables": {"TORCH_DISTRIBUTED_DEBUG": "INFO"}})) == []


# Which cores ranks may use → their facts
CORES: dict[str, list[dict[str, Any]]] = {
    "enough": [{"threads": 4, "cpuset": "0-7"}] * 2,
    "too few": [{"threads": 5, "cpuset": "0-7"}] * 2,
    "a set with a gap": [{"threads": 1, "cpuset": "0,2-3"}] * 4,
    "a quota of 1.5": [{"threads": 1, "cpuset": "0-7", "cgroup_cpu_quota_cores": 1.5}] * 2,
    "unknown": [{"threads": 99, "cpuset": None}] * 2,
    "of two hosts": [{"threads": 8, "hostname": "a"}, {"threads": 8, "hostname": "b"}],
}


@pytest.mark.parametrize("name", CORES)
def test_more_threads_than_cores_are_warned_about(name: str, frozen: Frozen) -> None:
    """The threads of all ranks of one host against the cores that they may use: the union of their
    cpusets, or less by a cgroup's quota, of which a part of a core is still one; unknown cores
    accuse nobody."""
    frozen.findings(findings.findings(with_ranks(*CORES[name])))


@pytest.mark.parametrize("name", ["torch", "python"])
def test_mixed_versions_name_the_first_rank_that_differs(name: str, frozen: Frozen) -> None:
    """A version that is not rank 0's is an error, with both versions and the rank."""
    run = with_ranks({name: "1.0"}, {name: "1.0"}, {name: "2.0"}, {name: "3.0"})
    found = findings.findings(run)
    frozen.findings(found)
    assert findings.exit_code(replace(run, findings=found)) == 1


# --- DDP steps ------------------------------------------------------------------------------------

QUIET = a_step_summary(exposed=3)
BIT_FLIP = (
    Finding("error", "bit-flip", "likely cause: one bit", "replace it", {"step": 7, "cause": "x"}),
    Finding("error", "replicas-differ", "parameter 0.weight differs", "",
            {"step": 7, "kind": "parameter", "tensor": "0.weight", "ranks": [1]}),
    Finding("warning", "replicas-differ", "buffer 1.mean differs", "", {"kind": "buffer"}),
    Finding("note", "rng-differs", "the ranks' generators differ"),
)  # fmt: skip


@pytest.mark.parametrize("equal", [False, True])
def test_replicas_that_differ_are_told_with_workload_backend_and_step(
    equal: bool, frozen: Frozen
) -> None:
    """What the verification found stands in the run's findings with its severity and place, and
    makes exit code 4; so do replicas that are equal and not finite."""
    bad = some_replicas(equal=equal, ok=False, findings=BIT_FLIP)
    run = a_step_run(a_step_result(summary=QUIET, replicas=bad))
    found = findings.findings(run)
    frozen.findings(found)
    assert findings.exit_code(run) == 4
    assert findings.exit_code(replace(run, findings=found)) == 4


def test_replicas_that_were_not_all_compared_are_a_warning() -> None:
    """Neither proved nor refuted: exit code 0, or 1 with --fail-on warning, and never "yes"."""
    told = Finding("warning", "not-compared", "not compared: 1 parameter (a DTensor): w", "x")
    partly = some_replicas(ok=False, not_compared=("parameter w",), findings=(told,))
    run = a_step_run(a_step_result(summary=QUIET, replicas=partly))
    found = findings.findings(run)
    assert [(f.severity, f.code) for f in found] == [("warning", "not-compared")]
    run = replace(run, findings=found)
    assert findings.exit_code(run) == 0
    assert findings.exit_code(replace(run, plan=replace(run.plan, fail_on="warning"))) == 1
    (line,) = step_lines.lines(run)
    assert STEP_COLUMNS["equal"].show(line) == "unknown"
    assert "NOT ALL COMPARED" in formats.show("table", run)


def test_a_late_rank_is_warned_about_once(frozen: Frozen) -> None:
    """The rank, what the others wait for it and the step; its buckets do not repeat it, nor does
    each launch. Where the buckets alone show it, they do."""
    late = a_step_summary(late=(1, 8.0), exposed=3)
    for results in (
        [a_step_result(summary=late)],
        [a_step_result(launch=n, summary=late) for n in range(3)],
    ):
        frozen.findings(findings.findings(a_step_run(*results)))
    buckets = replace(late, budget=QUIET.budget)
    frozen.findings(findings.findings(a_step_run(a_step_result(summary=buckets))))


def test_exposed_communication_is_noted_above_ten_percent(frozen: Frozen) -> None:
    """Its milliseconds and share of the step with what to do; below, or unresolved, nothing."""
    assert codes(a_step_run(a_step_result(summary=a_step_summary(exposed=6)))) == []
    run = a_step_run(a_step_result(summary=a_step_summary(exposed=20)))
    frozen.findings(findings.findings(run))
    few = a_step_summary(exposed=20, rounds=5)
    assert codes(a_step_run(a_step_result(summary=few))) == []


# --- the table of checks --------------------------------------------------------------------------


def test_findings_stand_worst_first_and_once() -> None:
    """Errors before warnings before notes; the same sentence from two launches is said once."""
    detail = {"variables": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "hostname": "h"}
    crowded = {**detail, "threads": 99, "cpuset": "0-1"}
    launch: Launch = a_launch(ranks=(crowded,), world_size=1)
    run = a_run(
        a_result(wrong=(Wrong(0, 1, 2, "3", "4"),)),
        launches=(launch, replace(launch, index=1)),
    )
    assert codes(run) == ["wrong-result", "debug-detail", "oversubscribed", "one-rank"]


def test_a_check_that_is_added_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One function in CHECKS adds a check of a run."""

    def check(run: Run) -> Iterator[Finding]:
        yield Finding("warning", "my-check", f"seen {len(run.results)}")

    monkeypatch.setattr(findings, "CHECKS", [*findings.CHECKS, check])
    assert codes(a_run(a_result())) == ["my-check"]
