"""Losses and load of a training on a page, from stored runs."""

from dataclasses import replace

import pytest
from drawn import values
from stored_steps import a_step_case, a_step_result, a_step_run, some_epochs

from ddpbench.analysis import step_lines
from ddpbench.present.document import Chart
from ddpbench.present.steps.training import build_training
from ddpbench.records.load import Load
from ddpbench.records.schema import Epoch, Run

GIB = 1 << 30


def charts(run: Run) -> list[Chart]:
    """The charts of the run's training."""
    return list(build_training("training", step_lines.lines(run), loads=True))


def a_run(*epochs: tuple[Epoch, ...], backends: tuple[str, ...] = ("gloo",)) -> Run:
    """A launch for each tuple of epochs, on each backend."""
    cases = [a_step_case(workload="regression", backend=backend) for backend in backends]
    return a_step_run(
        *(a_step_result(c, n, epochs=each) for c in cases for n, each in enumerate(epochs))
    )


def loaded(count: int, *, gpu: bool = False) -> tuple[Epoch, ...]:
    """Epochs with a load, and with a loss for each quarter."""
    more = {"gpu_share": 0.75, "gpu_memory_nbytes": 3 * GIB} if gpu else {}
    return tuple(
        replace(
            epoch,
            train_losses=tuple((epoch.train_loss or 0) * factor for factor in (1.3, 1.1, 0.9, 0.7)),
            load=Load(0.9, 1.2 + epoch.number, 2 * GIB, **more),
        )
        for epoch in some_epochs(count)
    )


def test_losses_lie_where_their_steps_were() -> None:
    """A quarter of epoch 2 is drawn in its middle, the validation at the epoch's end."""
    loss = charts(a_run(loaded(2)))[0]
    points = [(row["_x"], row["loss of"]) for row in values(loss) if row["epoch"] == 2]
    quarters = [(1 + part, "training") for part in (0.125, 0.375, 0.625, 0.875)]
    assert points == [*quarters, (2.0, "validation")]
    assert [row[1:] for row in loss.table.rows] == [
        (1, "0.4500", "0.4950", "0.3120", "equal"), (2, "0.4050", "0.4455", "0.3120", "equal"),
    ]  # fmt: skip


@pytest.mark.parametrize("losses", [(None, None), (7.0, None)], ids=["all", "half"])
def test_a_training_that_diverged_has_a_gap(losses: tuple[float | None, float | None]) -> None:
    """With no loss at all there is only the table."""
    epochs = some_epochs(1, train_loss=None, validation_loss=None, train_losses=losses)
    loss, *_ = charts(a_run(epochs))
    assert (loss.spec is None) == (losses[0] is None)
    assert loss.table.rows[0][:3] == ("gloo", 1, "-")
