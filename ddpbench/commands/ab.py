"""Two variants of one measurement, launch by launch in turns, until the verdict is settled.

python -m ddpbench ab --a "OMP_NUM_THREADS=1" --b "OMP_NUM_THREADS=2" ddp --workload mlp
python -m ddpbench ab --a "" --b "--python /new/bin/python" collectives --sizes 4K,1M
python -m ddpbench ab --a "--bucket-cap-mb 25" --b "--bucket-cap-mb 100" ddp -n 4
python -m ddpbench ab --a "--backend gloo" --b "--backend mpi" ddp --workload mlp

A variant: NAME=VALUE words for its environment, --python PATH for another Python environment (this
ddpbench, its torch), and options of its own, for how the same thing is done. Variants that do
another thing (a dtype, a size, a number of ranks) are INCOMPARABLE.

Launches come in randomised blocks of one each; after 6, 12, 24 and 48 blocks the pairs are judged,
with intervals of 96.8, 99, 99.5 and 99.75 %, so that looking several times costs no more than 5 %
false verdicts in all. Stored in results/…-ab-…/a and /b, two ordinary runs. Exit codes as those of
`compare`, with a as BASE and b as NEW; where a side fails, 5, or its own 2, 4 or 130.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddpbench.commands import compare
from ddpbench.launch.placement import Refused
from ddpbench.nested import turns
from ddpbench.nested.turns import End, Failed, Variant
from ddpbench.records import store
from ddpbench.records.store import InvalidRun
from ddpbench.records.visible import tell
from ddpbench.session import options

if TYPE_CHECKING:
    from ddpbench.verdicts.comparison import Comparison

GROUP = "compare"
HELP = "measure two variants in turns until the verdict is clear"
# Blocks, and the confidence of the look after them: 3.2 + 1 + 0.5 + 0.25 % false verdicts at most.
# After the first only what cannot be compared is seen.
LOOKS = ((1, 0.95), (6, 0.968), (12, 0.99), (24, 0.995), (48, 0.9975))
ALWAYS = 6  # blocks
# How the same thing is done may be varied; not what is done, nor what a time means.
VARIED = (
    "backend", "provider", "form", "in_place", "async_op", "buffers",
    "bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "find_unused_parameters",
    "comm_hook", "amp", "threads",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command; imports no torch."""
    what = "NAME=VALUE …, --python PATH, and options of its own"
    parser.add_argument("--a", required=True, metavar="VARIANT", help=what)
    parser.add_argument("--b", required=True, metavar="VARIANT", help="likewise")
    parser.add_argument(
        "--budget",
        type=options.positive,
        default=900.0,
        metavar="SECONDS",
        help=f"blocks that would end later are not begun; {ALWAYS} always are; default 900",
    )
    compare.add_judging(parser)
    turns.add_measured(parser, "results/")


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Measure both, print the comparison, answer with its exit code.

    Where a side fails: print what was measured, then why it failed, and answer with 5, or with its
    own 2, 4 or 130. Raises Refused for a request that is wrong.
    """
    namespace.words = turns.measured_words(namespace, ["collectives"])
    variants = [turns.variant(name, getattr(namespace, name)) for name in ("a", "b")]
    folder = turns.prepared(namespace, variants, Path("results"), "ab")
    end, confidence = _measure(namespace, variants, folder)
    try:
        verdict = _judge(namespace, variants, folder, confidence)
    except (InvalidRun, Refused):
        if end is None:
            raise
        verdict = end.code  # a side that failed may leave nothing to compare
    if end is not None and end.sentence:
        tell(end.sentence)
    tell(f"stored in {folder}")
    return verdict if end is None else end.code


def _judge(
    namespace: argparse.Namespace, variants: Sequence[Variant], folder: Path, confidence: float
) -> int:
    """Compare what was measured, store and print it; the exit code."""
    from ddpbench.render import comparison as render

    found = _compared(namespace, variants, folder, confidence)
    store.replace_file(folder / "comparison.json", render.as_json(found).encode())
    store.replace_file(folder / "comparison.txt", render.table(found).encode())
    return compare.show(found, namespace)


def _measure(
    namespace: argparse.Namespace, variants: Sequence[Variant], folder: Path
) -> tuple[End | None, float]:
    """Blocks of launches until the verdicts are settled or the budget would be passed; how it ended
    if something went wrong, and the confidence that belongs to so many looks."""
    from ddpbench.verdicts.verdict import INCONCLUSIVE

    order, began, done = random.Random(namespace.seed), time.monotonic(), 0
    confidence = LOOKS[0][1]
    try:
        with turns.sides(variants, namespace, folder, LOOKS[-1][0]) as sides:
            for blocks, level in LOOKS:
                spent = time.monotonic() - began
                if done >= ALWAYS and spent * blocks / done > namespace.budget:
                    break
                for number in range(done, blocks):
                    turns.show_progress(f"block {number + 1}, judged after {blocks}")
                    turns.block(sides, order)
                done, confidence = blocks, level
                if INCONCLUSIVE not in _compared(namespace, variants, folder, confidence).counts:
                    break
    except KeyboardInterrupt:
        return End(130), confidence
    except Failed as error:
        return End(error.code, str(error)), confidence
    return turns.wrong(sides), confidence


def _compared(
    namespace: argparse.Namespace, variants: Sequence[Variant], folder: Path, confidence: float
) -> Comparison:
    """What has been measured so far, judged in pairs."""
    from ddpbench.verdicts.comparison import Rule
    from ddpbench.verdicts.matching import Source

    left, right = (
        Source(
            f"{variant.name}: {variant.shown(other) or '(no changes)'}",
            (store.read(folder / variant.name),),
        )
        for variant, other in zip(variants, reversed(variants), strict=True)
    )
    rule = Rule(
        namespace.margin / 100, compare.calibrated(right.runs),
        paired=True, confidence=confidence, varied=VARIED,
    )  # fmt: skip
    return compare.compared(left, right, rule, namespace.only)
