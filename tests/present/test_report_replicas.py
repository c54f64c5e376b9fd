"""Verdicts on replicas on a page."""

from typing import Any

from drawn import values
from frozen import Frozen
from stored_steps import a_step_result, a_step_run, some_replicas

from ddpbench.analysis import step_lines
from ddpbench.present.document import Chart
from ddpbench.present.steps.replicas import build_replicas
from ddpbench.records.schema import Replicas


def the_chart(found: Replicas) -> Chart:
    """The only chart of a run of one launch."""
    lines = step_lines.lines(a_step_run(a_step_result(replicas=found)))
    (chart,) = build_replicas("replicas", lines, 1)
    return chart


def bars(chart: Chart) -> list[tuple[Any, ...]]:
    """What is drawn over the steps."""
    return [(row["case"], row["found"], row["_begin"], row["_end"]) for row in values(chart)]


BAD = some_replicas(
    equal=False, ok=False, differing=38, verified=54, last_step=54, equal_until=16, first_bad=20,
    tensors=("parameter 0.weight", "optimizer 0.momentum"), ranks=(1,), text="step 20: different",
)  # fmt: skip


def test_a_fault_is_drawn_since_when(frozen: Frozen) -> None:
    """Equal until step 16, then three steps that were not verified, then different from 20 on."""
    chart = the_chart(BAD)
    assert bars(chart) == [
        ("gloo, launch 1", "equal", 0, 16),
        ("gloo, launch 1", "not known", 16, 19),
        ("gloo, launch 1", "NOT EQUAL", 19, 54),
    ]
    frozen.text(chart.caption)
    last = values(chart)[-1]
    assert last["tensors"] == "parameter 0.weight, optimizer 0.momentum"
    assert last["ranks"] == "1"
