"""Losses of a training over its epochs, and below them what the ranks' load was meanwhile."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt
import pandas as pd

from ddpbench.analysis import step_lines
from ddpbench.analysis.step_lines import StepLine
from ddpbench.present import theme
from ddpbench.present.columns import digits
from ddpbench.present.document import Chart, ReportRun, Section, make_table, side_by_side
from ddpbench.present.load import EXTENT, load_charts
from ddpbench.records.schema import Epoch
from ddpbench.records.table import Table

DECADE = 10.0  # ratio of the largest loss to the least from which their axis is logarithmic
VERDICTS = {None: "not verified", True: "equal", False: "NOT EQUAL"}
KINDS = ("training", "validation")
NUMBERS = "format(datum.value, '~g')"
STROKES = alt.Legend(title=None, symbolType="stroke", symbolSize=220)

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
        yield from load_charts(name, loads, _epoch_axis("epoch", chosen), "epoch")


def _facts(line: StepLine, launch: int, chosen: Sequence[Trained]) -> dict[str, Any]:
    """Return what tells the lines of a chart apart."""
    several = len({number for _, number, _ in chosen}) > 1
    return {"backend": line.case.backend} | ({"launch": launch} if several else {})


def _epoch_axis(field: str, chosen: Sequence[Trained]) -> alt.X:
    last = max(epoch.number for *_, epochs in chosen for epoch in epochs)
    first = min(epoch.number for *_, epochs in chosen for epoch in epochs)
    return alt.X(
        f"{field}:Q",
        title="epoch",
        scale=alt.Scale(domain=[first - 1, last], nice=False),
        axis=alt.Axis(format="d", tickMinStep=1),
    )


def _losses(name: str, workload: str, chosen: Sequence[Trained]) -> Chart:
    rows = [
        _facts(line, launch, chosen) | point
        for line, launch, epochs in chosen
        for epoch in epochs
        for point in _points(epoch)
    ]
    data = pd.DataFrame(rows)
    bad = _is_wrong(data).any()
    return Chart(
        name,
        f"Loss of {workload}",
        "Mean loss over the samples of all ranks: of the training, over the steps of each epoch, "
        "and of the validation after it."
        + _same(chosen)
        + (" Circled: the replicas were not equal, or not finite." if bad else ""),
        _draw(data, _epoch_axis("x", chosen)) if data["loss"].notna().any() else None,
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
        }


def _is_wrong(data: pd.DataFrame) -> pd.Series[bool]:
    """Return which points are circled: validations of replicas that differ."""
    validations = (data["kind"] == KINDS[1]) & data["loss"].notna()
    return validations & (data["replicas"] == VERDICTS[False])


def _draw(data: pd.DataFrame, x: alt.X) -> dict[str, Any]:
    keys = ["backend", *(["launch"] if "launch" in data else [])]
    dashes = alt.Scale(domain=list(KINDS), range=[[1, 0], [5, 3]])
    shown = theme.choose_backends(alt.Chart(data), list(data["backend"]))
    base = shown.encode(
        x=x,
        y=_loss_axis([loss for loss in data["loss"] if loss is not None and math.isfinite(loss)]),
        color=theme.backend_color(data["backend"]),
        strokeDash=alt.StrokeDash("kind:N", scale=dashes, legend=STROKES),
        detail=keys[1:],
        tooltip=[
            *theme.tips(*keys, "epoch", kind="loss of", text="loss"),
            *theme.tips("replicas"),
        ],
    )
    layers = [base.mark_line(strokeWidth=1.5)]
    if data[data["kind"] == KINDS[1]]["loss"].notna().any():
        layers.append(base.mark_point().transform_filter(f"datum.kind == '{KINDS[1]}'"))
    if _is_wrong(data).any():
        ring = shown.mark_point(style="marked", size=220).encode(x=x, y="loss:Q")
        wrong = f"datum.kind == '{KINDS[1]}' && datum.replicas == '{VERDICTS[False]}'"
        layers.append(ring.transform_filter(wrong))
    return theme.layered(layers, 260)


def _loss_axis(losses: Sequence[float]) -> alt.Y:
    if min(losses) > 0 and max(losses) >= DECADE * min(losses):
        y = theme.log_axis("loss:Q", "loss", losses, NUMBERS)
        y["scale"]["nice"] = False
    else:
        y = alt.Y("loss:Q", title="loss", scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=6))
    y["axis"]["minExtent"] = EXTENT
    return y


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
