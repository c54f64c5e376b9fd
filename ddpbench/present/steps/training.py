"""A training: its epochs, their losses as lines, and what the ranks' load was meanwhile."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ddpbench.analysis.step_lines import StepLine
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Lines
from ddpbench.present.columns import digits
from ddpbench.present.document import Chart, tabulate_rows
from ddpbench.present.load import load_charts
from ddpbench.present.steps.columns import percent
from ddpbench.records.schema import Epoch

EPOCHS = 18  # rows of a text
DECADE = 10.0  # ratio of the largest loss to the least from which their axis is logarithmic
VERDICTS = {None: "-", True: "equal", False: "NOT EQUAL"}
CAPTION = (
    "Mean loss over the samples of all ranks: of the training, over the steps of each epoch, and "
    "of the validation after it. Lines of equal losses cover each other. Circled: the replicas "
    "were not equal."
)

Trained = tuple[StepLine, int, Epoch]  # a case, its launch from 1, an epoch


def build_training(name: str, group: Sequence[StepLine], *, loads: bool) -> Iterator[Chart]:
    """Yield the losses of a workload's training, and the load of its ranks.

    loads: whether the load over the epochs is drawn; it is summed up below the table in any case.
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
            "train loss": digits(epoch.train_loss),
            "validation loss": digits(epoch.validation_loss),
            "seconds": digits(epoch.seconds),
            "replicas": VERDICTS[epoch.replicas_equal],
        }
        for line, launch, epoch in trained
    ]
    notes = [f"load of a rank on {x.case.backend}: {load}" for x in group for load in _load(x)]
    table = replace(tabulate_rows("training", rows, ("replicas",)), legend=tuple(notes))
    title = f"Loss of {group[0].case.workload}"
    drawing = _draw(trained)
    yield Chart(name, title, CAPTION, table, drawing, grouped=True, most=EPOCHS, spread=True)
    if loads:
        yield from _draw_loads(name, trained)


def _load(line: StepLine) -> Iterator[str]:
    """Yield how busy the ranks were over the epochs: medians, and the most memory."""
    epochs = next((r.epochs for r in line.results if r.epochs), ())
    loads = [epoch.load for epoch in epochs if epoch.load is not None]
    if not loads:
        return
    cores = statistics.median(load.cpu_cores for load in loads)
    nbytes = max(load.memory_nbytes for load in loads)
    texts = [f"{digits(cores)} cores", f"{nbytes / 1e6:.0f} MB of memory"]
    if shares := [load.gpu_share for load in loads if load.gpu_share is not None]:
        texts.append(f"GPU busy for {percent(statistics.median(shares))} %")
    if held := [load.gpu_memory_nbytes for load in loads if load.gpu_memory_nbytes is not None]:
        texts.append(f"{max(held) / 1e6:.0f} MB of GPU memory")
    yield ", ".join(texts)


def _axis(trained: Sequence[Trained]) -> Axis:
    numbers = [epoch.number for *_, epoch in trained]
    return Axis("epoch", theme.COUNT_LABELS, domain=(min(numbers) - 1, max(numbers)))


def _draw_loads(name: str, trained: Sequence[Trained]) -> Iterator[Chart]:
    loads = [
        (
            {"backend": line.case.backend, "launch": launch, "epoch": e.number, "_x": e.number},
            e.load,
        )
        for line, launch, e in trained
    ]
    yield from load_charts(name, loads, _axis(trained), "epoch")


def _draw(trained: Sequence[Trained]) -> Lines | None:
    rows = [
        {"backend": line.case.backend, "launch": launch, **point}
        for line, launch, epoch in trained
        for point in _points(epoch)
    ]
    losses = [row["_y"] for row in rows if row["_y"] is not None]
    if not losses:
        return None
    y = Axis("loss", theme.NUMBER_LABELS, log=0 < DECADE * min(losses) <= max(losses))
    return Lines(data=rows, x=_axis(trained), y=y, dash="loss of")


def _points(epoch: Epoch) -> Iterator[dict[str, Any]]:
    """Yield the losses of an epoch: those of its parts at their middle, the others at its end."""
    number, parts = epoch.number, epoch.train_losses or (epoch.train_loss,)
    verdict = VERDICTS[epoch.replicas_equal]
    points = [
        (number - 1 + (i + 0.5) / len(parts), "training", loss) for i, loss in enumerate(parts)
    ]
    for x, kind, loss in [*points, (float(number), "validation", epoch.validation_loss)]:
        wrong = kind == "validation" and epoch.replicas_equal is False
        yield {
            "epoch": number,
            "loss of": kind,
            "loss": digits(loss),
            "replicas": verdict,
            "_x": x,
            "_y": loss,
            "_marked": verdict if wrong else "",
        }
