"""Losses of a training on a page, from stored runs."""

from drawn import values
from stored_steps import a_step_case, a_step_result, a_step_run, some_epochs

from ddpbench.present.document import Chart, ReportRun
from ddpbench.present.steps.sections import build_sections
from ddpbench.records.schema import Epoch, Run


def charts(run: Run) -> list[Chart]:
    """The charts of the run's training."""
    return next(s for s in build_sections(ReportRun("a", run)) if s.name == "training").charts


def a_run(*epochs: tuple[Epoch, ...], backends: tuple[str, ...] = ("gloo",)) -> Run:
    """A launch for each tuple of epochs, on each backend."""
    cases = [a_step_case(workload="regression", backend=backend) for backend in backends]
    return a_step_run(
        *(a_step_result(c, n, epochs=each) for c in cases for n, each in enumerate(epochs))
    )


def test_an_epoch_has_two_losses() -> None:
    """Those of its training and of the validation after it."""
    loss = charts(a_run(some_epochs(2)))[0]
    points = [(row["_x"], row["loss of"]) for row in values(loss)]
    assert points == [(n, kind) for n in (1, 2) for kind in ("training", "validation")]
    assert [row[1:] for row in loss.table.rows] == [
        (1, "0.4500", "0.4950", "0.3120", "equal"), (2, "0.4050", "0.4455", "0.3120", "equal"),
    ]  # fmt: skip


def test_a_training_that_diverged_has_only_the_table() -> None:
    """There is no loss to draw."""
    (loss,) = charts(a_run(some_epochs(1, train_loss=None, validation_loss=None)))
    assert loss.spec is None
    assert loss.table.rows[0][:3] == ("gloo", 1, "-")
