"""A run of DDP steps as text: what stands in each table, and that machines can read theirs."""

import io
import json
import re
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from frozen import Frozen
from stored_steps import (
    a_step_case,
    a_step_result,
    a_step_run,
    a_step_summary,
    some_epochs,
    some_replicas,
)
from text_tables import read_table

from ddpbench.analysis import findings, step_lines
from ddpbench.present import formats
from ddpbench.present.formats import FORMATS
from ddpbench.present.steps.columns import STEP_COLUMNS, ms
from ddpbench.records import codec
from ddpbench.records.load import Load
from ddpbench.records.schema import Finding, Plan, Run, StepResult

TITLE = (
    "mlp  width=1024 depth=8  8.397 M parameters (33.59 MB)  batch 64 per rank  sgd  2 ranks  cpu"
)


def two_backends(**other: Any) -> Run:
    """Return a run on gloo with a late rank, and on an mpi that hides more and copies nothing."""
    slow = a_step_summary(late=(1, 2.2), noise=0.02, exposed=19)
    fast = a_step_summary(exposed=6.3, copies=0.05, noise=0.02, seed=3)
    run = a_step_run(
        a_step_result(summary=slow), a_step_result(a_step_case(backend="mpi"), 1, fast), **other
    )
    return replace(run, findings=findings.findings(run))


def show(*results: StepResult, **other: Any) -> str:
    """Return the text table of a run of these results."""
    return formats.show("table", a_step_run(*results, **other))


def read_rows(text: str, title: str) -> list[dict[str, str]]:
    """Return the rows of a table by head, without the lines of text below it."""
    text = re.sub(r"\n(without|DDP's|timing|no breakdown) .*", "", text)
    return read_table(text, title)


DIFFER = some_replicas(
    equal=False, ok=False, verified=7, last_step=7, equal_until=6, first_bad=7, cost=None,
    share=None, text="step 7: replicas DIFFERENT\nerror: it differs\n    next: do this",
)  # fmt: skip


# --- header and title -----------------------------------------------------------------------------


def test_the_title_names_what_is_not_default(frozen: Frozen) -> None:
    """The title has workload, settings, size, batch, device, and options that are not DDP's own."""
    case = a_step_case(
        accumulate=4, amp="bf16", comm_hook="fp16", bucket_cap_mb=2.5, static_graph=True,
        gradient_as_bucket_view=True, find_unused_parameters=True, world_size=1, settings=(),
    )  # fmt: skip
    for text in (formats.show("table", two_backends()), show(a_step_result(case))):
        frozen.text("\n".join(line for line in text.splitlines() if line.startswith("mlp ")))


def test_a_partial_run_counts_steps(frozen: Frozen) -> None:
    """A partial run states for each backend how many of its workloads it has."""
    run = two_backends(state="interrupted", state_reason="interrupted by a signal")
    launches = tuple(replace(launch, cases=3) for launch in run.launches)
    text = formats.show("table", replace(run, launches=launches))
    frozen.text("\n".join(line for line in text.splitlines() if line.startswith("PARTIAL")))


def test_no_line_of_the_tables_is_wider_than_a_terminal() -> None:
    """No line has more than 120 columns, even with many buckets of long names and every legend."""
    run = two_backends()
    longer = replace(run.steps[0], summary=a_step_summary(buckets=40), epochs=some_epochs(60))
    table = formats.show("table", replace(run, steps=(longer, run.steps[1]), findings=()))
    assert max(map(len, table.splitlines())) <= 120


def test_a_quiet_table_keeps_what_belongs_to_it() -> None:
    """What could be gained stands below the budget; header, findings and legend are left out."""
    quiet = formats.show("table", two_backends(), quiet=True)
    assert "without communication and bucket copies, at most: " in quiet
    assert quiet.startswith("mlp ")
    assert "step ms: " not in quiet


# --- phases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "like", "text"),
    [
        (0.0012, 0.08, "1.20"), (0.012, 0.8, "12.0"), (1.5, 12.0, "1500"), (None, 1.0, "-"),
        (0.001, None, "1.000"), (0.0000012, 0.0000012, "0.0012"),
    ],
)  # fmt: skip
def test_milliseconds_have_the_places_of_the_step(
    seconds: float | None, like: float | None, text: str
) -> None:
    """A step has four digits, and its parts have as many decimal places."""
    assert ms(seconds, like) == text


# --- budget ---------------------------------------------------------------------------------------


def test_the_budget_shows_parts_and_never_noise_as_a_number() -> None:
    """What is resolved has its value; what is not stands in parentheses, and no rank is accused.
    The faster backend says above how many times."""
    text = formats.show("table", two_backends())
    assert [bool(row["faster ×"]) for row in read_rows(text, TITLE)] == [False, True]
    rows = read_rows(text, "breakdown")
    waiting = [rows[line]["part of a step"] for line in (8, 17)]
    assert ["rank 1" in part for part in waiting] == [True, False]
    assert float(rows[2]["ms"]) == pytest.approx(19.5, abs=0.5)
    for row in (rows[10], rows[17]):
        low, high = re.findall(r"-?\d+\.\d\d", row["95 %"])
        assert float(low) <= 0 < float(high)
        assert re.fullmatch(r"\(-?\d\.\d\d\)", row["ms"])
        assert re.fullmatch(r"\(-?0\.\d\)", row["% of step"])


# --- buckets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [12, 40])
def test_of_many_buckets_twelve_are_shown(count: int) -> None:
    """Spread evenly, up to the last."""
    text = show(a_step_result(summary=a_step_summary(buckets=count)))
    title = "buckets" if count == 12 else "buckets (12 of 40)"
    numbers = [int(row["#"]) for row in read_rows(text, title)]
    assert len(numbers) == 12
    assert numbers == sorted(numbers)
    assert numbers[-1] == count - 1


# --- replicas and training ------------------------------------------------------------------------


def test_too_few_rounds_have_a_note_instead_of_a_budget() -> None:
    """A table without rows is its notes."""
    summary = a_step_summary(rounds=4)
    few = tuple(replace(part, resolved=False) for part in summary.budget)
    few = tuple(replace(p, figure=replace(p.figure, interval=None)) for p in few)
    text = show(a_step_result(summary=replace(summary, budget=few)))
    assert "no breakdown on gloo: it needs six rounds" in text


def replicas_block(text: str) -> str:
    """Return what a text table says about replicas."""
    return text.split("\n\nreplicas\n")[1].split("\n\n")[0]


def test_equal_replicas_are_one_verdict_with_its_cost(frozen: Frozen) -> None:
    """How many steps were verified, what was compared, what it cost, and that the ranks' data
    differed."""
    for text in (
        formats.show("table", two_backends()),
        show(a_step_result(), plan=Plan(verify=10)),
        show(a_step_result(), a_step_result(launch=1)),
        show(a_step_result(replicas=None)),
    ):
        frozen.text(replicas_block(text))


def test_a_difference_is_shown_with_its_whole_report(frozen: Frozen) -> None:
    """The step, until when they were equal, and the report, indented; the row says NO; of several
    launches the bad one is shown."""
    text = show(a_step_result(), a_step_result(launch=1, replicas=DIFFER))
    frozen.text(replicas_block(text))
    (row,) = read_rows(text, TITLE)
    assert (row["equal"], row["flags"].split()[0]) == ("NO", "DIFFER")
    infinite = show(a_step_result(replicas=replace(DIFFER, equal=True)))
    frozen.text(replicas_block(infinite))
    assert read_rows(infinite, TITLE)[0]["equal"] == "NaN"


def test_of_many_tensors_that_differ_two_stand_above_the_tables(frozen: Frozen) -> None:
    """Above the tables stand the cause, two tensors and the number of the others."""
    tensors = [
        Finding("error", "replicas-differ", f"parameter {i} differs", "",
                {"kind": "parameter", "tensor": str(i)}) for i in range(5)
    ]  # fmt: skip
    cause = Finding("error", "bit-flip", "likely cause: a bit", "replace it", {"cause": "bit-flip"})
    bad = a_step_result(replicas=replace(DIFFER, findings=(cause, *tensors)))
    run = a_step_run(bad)
    frozen.text(
        formats.show("table", replace(run, findings=findings.findings(run))).split("\n\n")[1]
    )


def test_a_training_shows_the_load_of_a_rank(frozen: Frozen) -> None:
    """The medians over the epochs, and the most memory; GPUs only where there are some."""
    loads = [Load(0.5, 0.6, 10**9), Load(0.7, 0.9, 2 * 10**9), Load(0.9, 1.0, 10**9)]
    epochs = [replace(e, load=load) for e, load in zip(some_epochs(3), loads, strict=True)]
    on_gpu = replace(loads[0], gpu_share=0.82, gpu_memory_nbytes=3 * 10**9)
    for each in (epochs, [replace(epochs[0], load=on_gpu), *epochs[1:]], some_epochs(3)):
        text = show(a_step_result(epochs=tuple(each)))
        frozen.text("\n".join(line for line in text.splitlines() if line.startswith("load ")))


@pytest.mark.parametrize("count", [18, 500])
def test_of_a_long_training_some_epochs_are_shown(count: int) -> None:
    """Spread evenly, up to the last."""
    text = show(a_step_result(epochs=some_epochs(count)))
    rows = read_rows(text, "training" if count == 18 else "training (18 of 500)")
    numbers = [int(row["epoch"]) for row in rows]
    assert numbers == sorted(set(numbers))
    assert (len(numbers), numbers[-1]) == (18, count)


# --- below the tables -----------------------------------------------------------------------------


def test_a_run_without_steps_says_so(frozen: Frozen) -> None:
    """A run without steps is shown as such in every format, without an error."""
    run = a_step_run()
    frozen.text(formats.show("table", run))
    frozen.text(formats.show("markdown", run))
    assert pd.read_csv(io.StringIO(formats.show("csv", run))).shape == (0, len(STEP_COLUMNS))
    assert codec.decode(Run, json.loads(formats.show("json", run))) == run


# --- for machines ---------------------------------------------------------------------------------


def test_csv_has_every_number_unrounded() -> None:
    """CSV has a row per case and all columns, with unrounded numbers; stored seconds are ms."""
    run = two_backends()
    frame = pd.read_csv(io.StringIO(formats.show("csv", run)), float_precision="round_trip")
    assert list(frame.columns) == list(STEP_COLUMNS)
    assert frame["backend"].tolist() == ["gloo", "mpi"]
    for row, result in enumerate(run.steps):
        summary = result.summary
        assert summary is not None
        assert frame["step"][row] == summary.step.value * 1e3
        names = ("compute", "copies", "exposed", "transfer", "overhead", "hidden", "communication",
                 "waiting")  # fmt: skip
        for name, part in zip(names, summary.budget, strict=True):
            assert frame[name][row] == part.figure.value * 1e3
            assert part.figure.interval is not None
            assert frame[f"{name}_low"][row] == part.figure.interval.low * 1e3
    assert frame["late_rank"].tolist()[0] == 1
    assert frame["late_rank"].isna().tolist() == [False, True]
    assert frame["equal"].tolist() == [True, True]
    assert frame["verified"].tolist() == [136, 136]


@pytest.mark.parametrize("form", FORMATS)
def test_the_chosen_columns_stand_in_their_order(form: str) -> None:
    """--columns gives these columns in every format, and no other table; what is noise stays a
    bound in text."""
    text = FORMATS[form](two_backends(), ("copies", "backend"), True)
    if form == "csv":
        assert text.splitlines()[0] == "copies,backend"
    elif form == "json":
        assert [list(row) for row in json.loads(text)] == [["copies", "backend"]] * 2
    else:
        assert len(text.split("\n\n")) == (1 if form == "table" else 2)
        assert re.search(r"\(0\.\d\d\).*mpi", text)


def test_every_column_can_be_shown_for_every_line() -> None:
    """Each column of each kind of line is a short text, even if nearly all values are missing."""
    bare = replace(a_step_summary(rounds=1), budget=(), buckets=(), observer=None,
                   speed_up=None)  # fmt: skip
    results = [
        a_step_result(),
        a_step_result(a_step_case(batch=1), summary=bare, replicas=None, cold_seconds=None),
        replace(a_step_result(a_step_case(batch=2), replicas=DIFFER), summary=None),
        a_step_result(a_step_case(batch=3), epochs=some_epochs(2)),
    ]
    for line in step_lines.lines(a_step_run(*results)):
        for name, column in STEP_COLUMNS.items():
            assert re.fullmatch(r"[^\n]{0,40}", column.show(line)), name
            assert isinstance(column.value(line), float | int | str | None), name
