"""A run of DDP steps as text: what stands in each table, and that machines can read theirs."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from stored_steps import (
    a_step_case,
    a_step_result,
    a_step_run,
    a_step_summary,
    some_replicas,
)

from ddpbench.analysis import findings, step_lines
from ddpbench.present import formats
from ddpbench.present.formats import FORMATS
from ddpbench.present.steps.columns import STEP_COLUMNS, format_ms
from ddpbench.records.schema import Run, StepResult


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


DIFFER = some_replicas(
    equal=False, ok=False, verified=7, last_step=7, equal_until=6, first_bad=7, cost=None,
    share=None, text="step 7: replicas DIFFERENT\nerror: it differs\n    next: do this",
)  # fmt: skip


# --- header and title -----------------------------------------------------------------------------


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
    assert format_ms(seconds, like) == text


# --- for machines ---------------------------------------------------------------------------------


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
    bare = replace(a_step_summary(rounds=1), budget=(), buckets=())
    results = [
        a_step_result(),
        a_step_result(a_step_case(batch=1), summary=bare, replicas=None, cold_seconds=None),
        replace(a_step_result(a_step_case(batch=2), replicas=DIFFER), summary=None),
    ]
    for line in step_lines.lines(a_step_run(*results)):
        for name, column in STEP_COLUMNS.items():
            assert re.fullmatch(r"[^\n]{0,40}", column.show(line)), name
            assert isinstance(column.value(line), float | int | str | None), name
