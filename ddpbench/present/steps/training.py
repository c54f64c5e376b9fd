"""A training: its epochs, and their losses as lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpbench.analysis.step_lines import StepLine
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Lines
from ddpbench.present.columns import format_number
from ddpbench.present.document import Chart, tabulate_rows

EPOCHS = 18  # rows of a text
DECADE = 10.0  # ratio of the largest loss to the least from which their axis is logarithmic
VERDICTS = {None: "-", True: "equal", False: "NOT EQUAL"}
CAPTION = (
    "Mean loss over the samples of all ranks: of the training, over the steps of each epoch, and "
    "of the validation after it. Lines of equal losses cover each other."
)


def build_training(name: str, group: Sequence[StepLine]) -> Iterator[Chart]:
    """Yield the losses of a workload's training."""
    trained = [
        (line, launch, epoch)
        for line in group
        for launch, result in enumerate(line.results, 1)
        for epoch in result.epochs
    ]
    if not trained:
        return
    several = any(launch > 1 for _, launch, _ in trained)
    rows = [
        {
            "backend": line.case.backend,
            "launch": launch if several else None,
            "epoch": epoch.number,
            "train loss": format_number(epoch.train_loss),
            "validation loss": format_number(epoch.validation_loss),
            "seconds": format_number(epoch.seconds),
            "replicas": VERDICTS[epoch.replicas_equal],
        }
        for line, launch, epoch in trained
    ]
    table = tabulate_rows("training", rows, ("replicas",))
    numbers = [epoch.number for *_, epoch in trained]
    x = Axis("epoch", theme.COUNT_LABELS, domain=(min(numbers) - 1, max(numbers)))
    points = [
        {
            "backend": line.case.backend,
            "launch": launch,
            "epoch": epoch.number,
            "loss of": kind,
            "loss": format_number(loss),
            "replicas": VERDICTS[epoch.replicas_equal],
            "_x": epoch.number,
            "_y": loss,
        }
        for line, launch, epoch in trained
        for kind, loss in (("training", epoch.train_loss), ("validation", epoch.validation_loss))
    ]
    each = [loss for *_, e in trained for loss in (e.train_loss, e.validation_loss)]
    losses = [loss for loss in each if loss is not None]
    log = bool(losses) and 0 < DECADE * min(losses) <= max(losses)
    y = Axis("loss", theme.NUMBER_LABELS, log=log)
    drawing = Lines(data=points, x=x, y=y, dash="loss of") if losses else None
    title = f"Loss of {group[0].case.workload}"
    yield Chart(name, title, CAPTION, table, drawing, grouped=True, most=EPOCHS, spread=True)
