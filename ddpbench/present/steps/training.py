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
KINDS = ("training", "validation")

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
        loads = [
            (facts, epoch.load)
            for line, launch, epochs in chosen
            for epoch in epochs
            for facts in [_facts(line, launch, chosen) | {"epoch": epoch.number}]
        ]
        keys = [*_facts(chosen[0][0], 1, chosen)]
        yield from load_charts(
            *(name, loads, _epoch_axis("epoch", chosen), "epoch"),
            shown=[*keys, "epoch"],
            detail=keys[1:],
        )


def _facts(line: StepLine, launch: int, chosen: Sequence[Trained]) -> dict[str, Any]:
    """Return what tells the lines of a chart apart."""
    several = len({number for _, number, _ in chosen}) > 1
    return {"backend": line.case.backend} | ({"launch": launch} if several else {})


def _epoch_axis(field: str, chosen: Sequence[Trained]) -> Axis:
    last = max(epoch.number for *_, epochs in chosen for epoch in epochs)
    first = min(epoch.number for *_, epochs in chosen for epoch in epochs)
    return Axis(field, "epoch", theme.COUNT_LABELS, domain=(first - 1, last))


def _losses(name: str, workload: str, chosen: Sequence[Trained]) -> Chart:
    rows = [
        _facts(line, launch, chosen) | point
        for line, launch, epochs in chosen
        for epoch in epochs
        for point in _points(epoch)
    ]
    data = pd.DataFrame(rows)
    known = data.dropna(subset="loss")
    return Chart(
        name,
        f"Loss of {workload}",
        "Mean loss over the samples of all ranks: of the training, over the steps of each epoch, "
        "and of the validation after it."
        + _same(chosen)
        + (" Circled: the replicas were not equal, or not finite." if any(known["marked"]) else ""),
        _draw(data, _epoch_axis("x", chosen)) if len(known) else None,
        _table(chosen),
    )


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
    at = [number - 1 + (i + 0.5) / len(parts) for i in range(len(parts))]
    kinds = [*((x, KINDS[0], loss) for x, loss in zip(at, parts, strict=True))]
    for x, kind, loss in [*kinds, (float(number), KINDS[1], epoch.validation_loss)]:
        yield {
            "x": x,
            "kind": kind,
            "loss": loss,
            "text": digits(loss),
            "epoch": number,
            "replicas": verdict,
            "marked": verdict if kind == KINDS[1] and epoch.replicas_equal is False else "",
        }


def _draw(data: pd.DataFrame, x: Axis) -> Lines:
    keys = [name for name in ("backend", "launch") if name in data]
    losses = data["loss"].dropna()
    wide = losses.min() > 0 and losses.max() >= DECADE * losses.min()
    return Lines(
        data=data,
        x=x,
        y=Axis("loss", "loss", theme.NUMBER_LABELS, log=bool(wide)),
        tips={
            **{key: key for key in (*keys, "epoch")},
            "kind": "loss of",
            "text": "loss",
            "replicas": "replicas",
        },
        dash="kind",
        detail=tuple(keys[1:]),
    )


def _table(chosen: Sequence[Trained]) -> Table:
    several = len({launch for _, launch, _ in chosen}) > 1
    headings = ["backend", *(["launch"] if several else []), "epoch", "train loss"]
    headings += ["validation loss", "seconds", "replicas"]
    rows = [
        (
            line.case.backend,
            *([launch] if several else []),
            epoch.number,
            digits(epoch.train_loss),
            digits(epoch.validation_loss),
            digits(epoch.seconds),
            VERDICTS[epoch.replicas_equal],
        )
        for line, launch, epochs in chosen
        for epoch in epochs
    ]
    return make_table("losses", headings, rows, left=("backend", "replicas"))
