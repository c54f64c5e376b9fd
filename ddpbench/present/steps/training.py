"""A training: its epochs, their losses as lines, and the load of the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ddpbench.analysis.step_lines import StepLine
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Lines
from ddpbench.present.columns import format_number
from ddpbench.present.document import Chart, tabulate_rows
from ddpbench.present.load import draw_loads
from ddpbench.records.schema import Epoch

EPOCHS = 18  # rows of a text
DECADE = 10.0  # ratio of the largest loss to the least from which their axis is logarithmic
VERDICTS = {None: "-", True: "equal", False: "NOT EQUAL"}
CAPTION = (
    "Mean loss over the samples of all ranks: of the training, over the steps of each epoch, and "
    "of the validation after it. Lines of equal losses cover each other. Circled: the replicas "
    "were not equal."
)


def build_training(name: str, group: Sequence[StepLine], *, loads: bool) -> Iterator[Chart]:
    """Yield the losses of a workload's training, and the load of its ranks.

    loads: draw the load over the epochs.
    """
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
        {"backend": line.case.backend, "launch": launch, "epoch": epoch.number, **point}
        for line, launch, epoch in trained
        for point in _list_points(epoch)
    ]
    losses = [point["_y"] for point in points if point["_y"] is not None]
    log = bool(losses) and 0 < DECADE * min(losses) <= max(losses)
    y = Axis("loss", theme.NUMBER_LABELS, log=log)
    drawing = Lines(data=points, x=x, y=y, dash="loss of") if losses else None
    title = f"Loss of {group[0].case.workload}"
    yield Chart(name, title, CAPTION, table, drawing, grouped=True, most=EPOCHS, spread=True)
    if loads:
        moments = [
            ({"backend": line.case.backend, "launch": n, "epoch": e.number, "_x": e.number}, e.load)
            for line, n, e in trained
        ]
        yield from draw_loads(name, moments, x)


def _list_points(epoch: Epoch) -> Iterator[dict[str, Any]]:
    """Yield the losses of an epoch: of its parts at their middle, of the validation at its end."""
    end, parts = float(epoch.number), epoch.train_losses or (epoch.train_loss,)
    losses = [
        *((end - 1 + (i + 0.5) / len(parts), "training", loss) for i, loss in enumerate(parts)),
        (end, "validation", epoch.validation_loss),
    ]
    verdict = VERDICTS[epoch.replicas_equal]
    for x, kind, loss in losses:
        marked = verdict if kind == "validation" and epoch.replicas_equal is False else ""
        known = {"loss of": kind, "loss": format_number(loss), "replicas": verdict}
        yield {**known, "_x": x, "_y": loss, "_marked": marked}
