"""Losses of a training over its epochs, and below them what the ranks' load was meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from ddpbench.analysis import step_lines
from ddpbench.analysis.step_lines import StepLine
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Lines
from ddpbench.present.columns import digits
from ddpbench.present.document import Chart, ReportRun, Section, make_table, side_by_side
from ddpbench.present.load import load_charts
from ddpbench.records.schema import Epoch
from ddpbench.records.table import Table

DECADE = 10.0  # ratio of the largest loss to the least from which their axis is logarithmic
VERDICTS = {None: "not verified", True: "equal", False: "NOT EQUAL"}

Trained = tuple[StepLine, int, tuple[Epoch, ...]]  # a case, its launch from 1, its epochs


def section(runs: Sequence[ReportRun]) -> Section | None:
    rows = side_by_side(runs, _charts)
    if not rows:
        return None
    diverged = [
        f"{line.case.workload} on {line.case.backend}: the loss was NaN or infinite after epoch "
        f"{epoch.number}."
        for run in runs
        for line, _, epochs in _trained(run)
        for epoch in [next((e for e in epochs if e.train_loss is None), None)]
        if epoch is not None
    ]
    return Section("training", "Training", lines=tuple(dict.fromkeys(diverged)), rows=rows)


def _trained(run: ReportRun) -> list[Trained]:
    return [
        (line, number, result.epochs)
        for line in step_lines.lines(run.run)
        for number, result in enumerate(line.results, 1)
        if result.epochs
    ]


def _charts(run: ReportRun) -> Iterator[Chart]:
    """Yield the charts of each workload: its losses, then the load."""
    trained = _trained(run)
    for number, workload in enumerate(dict.fromkeys(line.case.workload for line, *_ in trained)):
        chosen = [each for each in trained if each[0].case.workload == workload]
        name = "training" if number == 0 else f"training-{number + 1}"
        yield _losses(name, workload, chosen)
        x, detail = _epoch_axis(chosen), [*_facts(chosen[0][0], 1, chosen)][1:]
        loads = [
            ({**_facts(line, launch, chosen), "epoch": e.number, "_x": e.number}, e.load)
            for line, launch, epochs in chosen
            for e in epochs
        ]
        yield from load_charts(name, loads, x, "epoch", detail=detail)


def _facts(line: StepLine, launch: int, chosen: Sequence[Trained]) -> dict[str, Any]:
    """Return what tells the lines of a chart apart."""
    several = len({number for _, number, _ in chosen}) > 1
    return {"backend": line.case.backend} | ({"launch": launch} if several else {})


def _epoch_axis(chosen: Sequence[Trained]) -> Axis:
    numbers = [epoch.number for *_, epochs in chosen for epoch in epochs]
    return Axis("epoch", theme.COUNT_LABELS, domain=(min(numbers) - 1, max(numbers)))


def _losses(name: str, workload: str, chosen: Sequence[Trained]) -> Chart:
    rows = [
        _facts(line, launch, chosen) | point
        for line, launch, epochs in chosen
        for epoch in epochs
        for point in _points(epoch)
    ]
    data = pd.DataFrame(rows)
    known = data.dropna(subset="_y")
    least, most = known["_y"].min(), known["_y"].max()
    caption = (
        "Mean loss over the samples of all ranks: of the training, over the steps of each epoch, "
        f"and of the validation after it.{_same(chosen)}"
    )
    if any(known["_marked"]):
        caption += " Circled: the replicas were not equal, or not finite."
    drawing = Lines(
        data=data,
        x=_epoch_axis(chosen),
        y=Axis("loss", theme.NUMBER_LABELS, log=bool(0 < DECADE * least <= most)),
        dash="loss of",
        detail=("launch",) if "launch" in data else (),
    )
    table = _tabulate(chosen)
    return Chart(name, f"Loss of {workload}", caption, drawing if len(known) else None, table)


def _same(chosen: Sequence[Trained]) -> str:
    """Return a sentence if all lines are the same, so that only one can be seen."""
    losses = {tuple((e.train_loss, e.validation_loss) for e in epochs) for *_, epochs in chosen}
    if len(losses) > 1 or len(chosen) < 2:
        return ""
    names = dict.fromkeys(line.case.backend for line, *_ in chosen)
    who = f"{' and '.join(names)} have" if len(names) > 1 else "All launches have"
    return f" {who} the same losses: their lines cover each other."


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


def _tabulate(chosen: Sequence[Trained]) -> Table:
    facts = [*_facts(chosen[0][0], 1, chosen)]
    numbers = ("train loss", "validation loss", "seconds")
    rows = [
        (
            *_facts(line, launch, chosen).values(),
            epoch.number,
            *map(digits, (epoch.train_loss, epoch.validation_loss, epoch.seconds)),
            VERDICTS[epoch.replicas_equal],
        )
        for line, launch, epochs in chosen
        for epoch in epochs
    ]
    headings = [*facts, "epoch", *numbers, "replicas"]
    return make_table("losses", headings, rows, left=("backend", "replicas"))
