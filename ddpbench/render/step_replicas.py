"""Whether replicas were equal, and the epochs of a training, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpbench.analysis.step_lines import StepLine
from ddpbench.records.schema import Epoch, Replicas, Run
from ddpbench.render.collective_columns import digits
from ddpbench.render.step_columns import ms, named, percent
from ddpbench.render.style import Style

EPOCHS, FEW = 18, 3  # so many epochs are shown, else so many of either end and ten between
LOSSES = 8  # ranks
KINDS = {"parameter": "parameters", "gradient": "gradients", "buffer": "buffers",
         "optimizer": "optimizer options and states"}  # fmt: skip


def replicas(group: list[StepLine], run: Run, style: Style) -> str:
    """The verdict of each backend, its cost and the losses; empty where nothing is known."""
    told = []
    width = max(len(line.case.backend) for line in group)
    for line in group:
        words = list(_replicas_of(line, run.plan.verify))
        names = [line.case.backend, *[""] * len(words)]
        told += [f"{name:<{width}}  {each}" for name, each in zip(names, words, strict=False)]
    return style.block("replicas", style.gap.join(told), 1) if told else ""


def _replicas_of(line: StepLine, every: int) -> Iterator[str]:
    found = line.replicas
    if found is None:
        if line.summary is not None:
            yield "not verified"
    elif line.case.world_size == 1:
        yield "one rank: there is no other replica to be equal to"
    elif not found.failed:
        verified = sum(r.replicas.verified for r in line.results if r.replicas)
        when = _when(verified, every, len(line.results))
        if found.not_compared:
            yield "NOT ALL COMPARED"
            yield from (f"  {each}" for each in found.text.splitlines())
        else:
            yield f"replicas equal {when}, bit for bit: {_compared(found)}"
        if found.buffers:
            of = found.compared.get("buffer", 0)
            yield (
                f"but for {found.buffers} of {of} buffers, each rank's own statistics: DDP sends "
                "rank 0's before the next forward"
            )
    else:
        until = found.equal_until
        before = "" if until is None else f"; equal until step {until}"
        verdict = "equal, but NOT FINITE" if found.equal else "NOT EQUAL"
        on = f"; went on: not so after {found.differing} of {found.verified} verified steps"
        went_on = on if found.last_step != found.first_bad else ""
        yield f"{verdict} after step {found.first_bad}{before}{went_on}"
        yield from (f"  {each}" for each in found.text.splitlines())
    if below := [*_cost(line), *_losses(line)]:
        yield "; ".join(below)


def _cost(line: StepLine) -> Iterator[str]:
    found = line.replicas
    if found is not None and found.cost is not None:
        share = "" if found.share is None else f" = {percent(found.share)} % of a step"
        yield f"one verification takes {ms(found.cost.value, line.seconds)} ms{share}"


def _losses(line: StepLine) -> Iterator[str]:
    losses = next((r.losses for r in line.results if r.losses), ())
    if losses:
        shown = "  ".join(digits(loss) for loss in losses[:LOSSES])
        more = " …" if len(losses) > LOSSES else ""
        yield f"loss of each rank's own last batch: {shown}{more}"


def _when(verified: int, every: int, launches: int) -> str:
    steps_ = f"{verified} step{'' if verified == 1 else 's'}"
    when = f"after each of {steps_}" if every == 1 else f"after {steps_}, each {every}th"
    return when + (f" in {launches} launches" if launches > 1 else "")


def _compared(found: Replicas) -> str:
    words = [
        f"{count} {KINDS.get(kind, kind) if count > 1 else KINDS.get(kind, kind).rstrip('s')}"
        for kind, count in found.compared.items()
        if count
    ]
    return f"{', '.join(words)} ({found.nbytes / 1e6:.1f} MB)"


def training(group: list[StepLine], run: Run, style: Style) -> str:
    """The epochs; empty where nothing was trained to its end."""
    cells = [row for line in group for row in named(line, _epoch_rows(line))]
    if not cells:
        return ""
    heads = ["backend", "epoch", "train loss", "validation loss", "seconds", "replicas"]
    several = max(len(line.results) for line in group) > 1
    title = "training" + (", of the first launch" if several else "")
    return style.block(title, style.table(cells, heads), 1)


def _epoch_rows(line: StepLine) -> list[list[str]]:
    epochs = next((r.epochs for r in line.results if r.epochs), ())
    verdicts = {None: "-", True: "equal", False: "NOT EQUAL"}
    return [
        [
            str(epoch.number),
            digits(epoch.train_loss),
            digits(epoch.validation_loss),
            digits(epoch.seconds),
            verdicts[epoch.replicas_equal],
        ]
        for epoch in _some(epochs)
    ]


def _some(epochs: Sequence[Epoch]) -> list[Epoch]:
    """All, or of many the first, the last, ten between, and those where replicas differed."""
    count = len(epochs)
    if count <= EPOCHS:
        return list(epochs)
    between = {FEW + round((count - 2 * FEW - 1) * i / 11) for i in range(1, 11)}
    kept = {*range(FEW), *between, *range(count - FEW, count)}
    bad = [i for i, epoch in enumerate(epochs) if epoch.replicas_equal is False]
    return [epochs[i] for i in sorted(kept | set(bad[:FEW]))]
