"""Tables of the replicas' verdicts, and of the epochs of a training."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from ddpbench.analysis.step_lines import StepLine
from ddpbench.present.columns import digits
from ddpbench.present.document import make_table
from ddpbench.present.steps.columns import ms, percent, with_backend
from ddpbench.records.schema import Epoch, Replicas
from ddpbench.records.table import Table

EPOCHS, ENDS = 18, 3  # up to EPOCHS are shown, else ENDS at either end and ten between
LOSSES = 8  # ranks
KINDS = {
    "parameter": "parameters",
    "gradient": "gradients",
    "buffer": "buffers",
    "optimizer": "optimizer options and states",
}


def replicas(group: Sequence[StepLine], every: int) -> Table | None:
    """Return the verdict of each backend, its cost and the losses; None if nothing is known.

    every: steps from one verification to the next.
    """
    rows = []
    for line in group:
        texts = [*verdict(line, every)]
        if below := [*_verification_cost(line), *_losses(line)]:
            texts.append("; ".join(below))
        rows += with_backend(line, [[text] for text in texts])
    return make_table("replicas", ("", ""), rows, ("",)) if rows else None


def verdict(line: StepLine, every: int) -> Iterator[str]:
    replicas = line.replicas
    if replicas is None:
        if line.summary is not None:
            yield "not verified"
    elif line.case.world_size == 1:
        yield "one rank: there is no other replica to compare with"
    elif replicas.failed:
        yield _failure(replicas)
        yield from (f"  {text}" for text in replicas.text.splitlines())
    else:
        if replicas.unproved:
            yield replicas.unproved
            yield from (f"  {text}" for text in replicas.text.splitlines())
        else:
            yield f"replicas equal {_when(line, every)}, bit for bit: {_compared(replicas)}"
        if replicas.buffers:
            yield (
                f"except {replicas.buffers} of {replicas.compared.get('buffer', 0)} buffers, each "
                "rank's own statistics: DDP sends rank 0's before the next forward"
            )


def _failure(replicas: Replicas) -> str:
    until, count = replicas.equal_until, replicas.differing
    verdict = "equal, but NOT FINITE" if replicas.equal else "NOT EQUAL"
    before = "" if until is None else f"; equal until step {until}"
    after = ""
    if replicas.last_step != replicas.first_bad:
        after = f"; the run went on, and {count} of {replicas.verified} verifications failed"
    return f"{verdict} after step {replicas.first_bad}{before}{after}"


def _verification_cost(line: StepLine) -> Iterator[str]:
    replicas = line.replicas
    if replicas is not None and replicas.cost is not None:
        share = "" if replicas.share is None else f" = {percent(replicas.share)} % of a step"
        yield f"one verification takes {ms(replicas.cost.value, line.seconds)} ms{share}"


def _losses(line: StepLine) -> Iterator[str]:
    losses = next((r.losses for r in line.results if r.losses), ())
    if losses:
        shown = "  ".join(digits(loss) for loss in losses[:LOSSES])
        yield f"loss of each rank's last batch: {shown}{' …' if len(losses) > LOSSES else ''}"


def _when(line: StepLine, every: int) -> str:
    verified = sum(r.replicas.verified for r in line.results if r.replicas)
    count = f"{verified} step{'' if verified == 1 else 's'}"
    when = f"after each of {count}" if every == 1 else f"after {count}, one in every {every}"
    return when + (f" in {len(line.results)} launches" if len(line.results) > 1 else "")


def _compared(replicas: Replicas) -> str:
    counts = [
        f"{count} {KINDS.get(kind, kind) if count > 1 else KINDS.get(kind, kind).rstrip('s')}"
        for kind, count in replicas.compared.items()
        if count
    ]
    return f"{', '.join(counts)} ({replicas.nbytes / 1e6:.1f} MB)"


def training(group: Sequence[StepLine]) -> Table | None:
    """Return the epochs; None if nothing was trained to its end."""
    cells = [row for line in group for row in with_backend(line, _epoch_rows(line))]
    headings = ["backend", "epoch", "train loss", "validation loss", "seconds", "replicas"]
    several = max(len(line.results) for line in group) > 1
    title = "training" + (", of the first launch" if several else "")
    loads = [
        f"load of a rank on {line.case.backend}: {load}" for line in group for load in _load(line)
    ]
    return make_table(title, headings, cells, ("backend", "replicas"), loads) if cells else None


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


def _epoch_rows(line: StepLine) -> list[list[str]]:
    epochs = next((r.epochs for r in line.results if r.epochs), ())
    verdicts = {None: "-", True: "equal", False: "NOT EQUAL"}
    return [
        [
            str(epoch.number),
            *map(digits, (epoch.train_loss, epoch.validation_loss, epoch.seconds)),
            verdicts[epoch.replicas_equal],
        ]
        for epoch in _some(epochs)
    ]


def _some(epochs: Sequence[Epoch]) -> list[Epoch]:
    """Choose all epochs, or the first, the last, ten between, and the first that differed."""
    count = len(epochs)
    if count <= EPOCHS:
        return list(epochs)
    between = {ENDS + round((count - 2 * ENDS - 1) * i / 11) for i in range(1, 11)}
    kept = {*range(ENDS), *between, *range(count - ENDS, count)}
    bad = [i for i, epoch in enumerate(epochs) if epoch.replicas_equal is False]
    return [epochs[i] for i in sorted(kept | set(bad[:ENDS]))]
